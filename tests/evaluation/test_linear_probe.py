"""Linear probes: the fit is scikit-learn's, the choice never sees the test images, bad input is refused."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from sklearn.linear_model import LogisticRegression
from torch import Tensor, nn
from torch.nn import functional as F

from scalelong import UViT, UViTConfig, load_run
from scalelong.cli.main import main
from scalelong.data import DataError, load_source
from scalelong.data.loader import augmented
from scalelong.diffusion import get_process
from scalelong.evaluation import linear_probe, probe_run
from scalelong.evaluation.block_features import times_at
from scalelong.evaluation.linear_probe import _standardized, fit_linear, labelled_data
from scalelong.report import read_run, read_runs, write_report
from scalelong.runs.presets import get_preset
from scalelong.runs.settings import ConditionSettings, DataSettings, RunConfig
from scalelong.stability.diagnosis import diagnose
from scalelong.training import train
from tests.training.tiny import tiny

SMALL = {"levels": [0.1, 1.0], "images": 400}


def digits() -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    return labelled_data(RunConfig())


def network(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return UViT(UViTConfig(image_size=8, patch_size=4, in_channels=1, dim=32, depth=2, heads=2)).eval()


def test_the_fit_is_that_of_scikit_learn() -> None:
    (images, labels), (tests, test_labels) = digits()
    fitted, tested = _standardized(images.flatten(1), tests.flatten(1))
    weight, bias = fit_linear(fitted, labels, 10)
    ours = float(((tested @ weight.T + bias).argmax(1) == test_labels).float().mean())
    theirs = LogisticRegression(C=1.0, max_iter=2000, tol=1e-6).fit(fitted.numpy(), labels.numpy())
    assert abs(ours - theirs.score(tested.numpy(), test_labels.numpy())) <= 0.005

    def objective(weight: Tensor, bias: Tensor) -> float:
        return float(F.cross_entropy(fitted @ weight.T + bias, labels, reduction="sum") + weight.square().sum() / 2)

    best = objective(torch.from_numpy(theirs.coef_).float(), torch.from_numpy(theirs.intercept_).float())
    assert objective(weight, bias) <= 1.001 * best


def test_finds_the_block_that_knows_the_class() -> None:
    """A network whose second block wipes out the image: the first is chosen, and beats chance by far."""

    class Forgets(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Conv2d(1, 16, 4, stride=2), nn.Conv2d(16, 4, 1)
            nn.init.zeros_(self.second.weight)

        def forward(self, x: Tensor, time: Tensor) -> Tensor:
            h = torch.relu(self.first(x))
            self.second(h)
            return x

    torch.manual_seed(0)
    train_part, test_part = digits()
    found = linear_probe(Forgets(), train_part, test_part, blocks=["first", "second"], pixels=True, **SMALL)
    assert found.block == "first"
    assert found.accuracy > 0.4 > max(found.held_out[1])
    assert found.level == found.noise[0]  # less noise, more to see
    assert found.pixels is not None and found.pixels > 0.9


def test_one_of_several_outputs_is_probed_by_its_number() -> None:
    class Streams(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return x.new_zeros(len(x), 2, 4), x

    class Network(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.block = nn.Linear(64, 64), Streams()

        def forward(self, x: Tensor, time: Tensor) -> Tensor:
            return self.block(self.embed(x.flatten(1))[:, None])[1]

    torch.manual_seed(0)
    train_part, test_part = ((images[:200], labels[:200]) for images, labels in digits())
    model = Network()
    assert linear_probe(model, train_part, test_part, blocks=["block[1]"], levels=[0.1]).accuracy > 0.6
    for name, message in (("block", r"blocks: block returns 2 tensors"), ("block[2]", "returns no tensor")):
        with pytest.raises(ValueError, match=message):
            linear_probe(model, train_part, test_part, blocks=[name], levels=[0.1])


def test_features_are_averaged_over_positions_not_channels() -> None:
    """A block of 1D convolutions: a channel's mean tells the class, a position's mean does not."""

    class Network(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = nn.Conv1d(4, 4, 1)
            nn.init.dirac_(self.block.weight)

        def forward(self, x: Tensor, time: Tensor) -> Tensor:
            return self.block(x.flatten(2))

    labels = torch.arange(80) % 4
    images = F.one_hot(labels, 4)[:, :, None, None].expand(-1, 4, 4, 4).float()
    found = linear_probe(Network(), (images, labels), (images, labels), blocks=["block"], levels=[0.1])
    assert found.accuracy == 1.0


def test_test_images_do_not_influence_the_choice() -> None:
    train_part, (images, labels) = digits()
    found = [linear_probe(network(), train_part, (images, y), **SMALL) for y in (labels, labels.flip(0))]
    assert found[0].held_out == found[1].held_out
    assert found[0].block == found[1].block
    assert found[0].accuracy > found[1].accuracy + 0.2


def test_features_are_cached(tmp_path: Path) -> None:
    train_part, test_part = digits()
    options: dict[str, Any] = {**SMALL, "cache": tmp_path}
    first = linear_probe(network(), train_part, test_part, **options)
    files = sorted(tmp_path.iterdir())
    assert len(files) == 4  # two levels for the choice, training and test images at the chosen one
    files[0].write_bytes(b"damaged")

    def never(*_args: Any, **_kwargs: Any) -> Tensor:
        raise AssertionError("features were computed again")

    again = linear_probe(network(), train_part, test_part, **options)
    assert (again.held_out, again.accuracy) == (first.held_out, first.accuracy)
    assert linear_probe(network(), train_part, test_part, **options, call=never).held_out == first.held_out
    with pytest.raises(AssertionError, match="computed again"):  # other weights, other features
        linear_probe(network(1), train_part, test_part, **options, call=never)
    other = UViT(dataclasses.replace(network().config, heads=4))
    other.load_state_dict(network().state_dict())
    with pytest.raises(AssertionError, match="computed again"):  # the same weights in another network
        linear_probe(other, train_part, test_part, **options, call=never)


def two_classes(n: int = 60) -> tuple[Tensor, Tensor]:
    labels = torch.arange(n) % 2
    return torch.randn(n, 1, 8, 8, generator=torch.Generator().manual_seed(0)) + labels[:, None, None, None], labels


@pytest.mark.parametrize("protocol", ["held-out", "ddae"])
@pytest.mark.parametrize("mode", ["no_grad", "inference_mode", "autocast"])
def test_the_callers_modes_do_not_change_the_fit(mode: str, protocol: Any) -> None:
    """The caller's data, made in the same mode, have integer labels of any kind; random states are left alone."""
    modes = {"autocast": torch.autocast("cpu", torch.bfloat16), "no_grad": torch.no_grad()}
    model, before = network(), torch.get_rng_state()
    with modes.get(mode) or torch.inference_mode():
        images, labels = two_classes()
        data = images, labels.int() if mode == "no_grad" else labels + 0
        found = linear_probe(model, data, data, levels=[0.1], protocol=protocol, pixels=True)
    assert found.accuracy == found.pixels == 1.0
    assert torch.equal(torch.get_rng_state(), before)


def test_images_that_require_gradients_are_probed() -> None:
    data = two_classes()
    data[0].requires_grad_()
    assert linear_probe(network(), data, data, levels=[0.1], pixels=True).pixels == 1.0


def test_networks_in_half_precision_are_probed(tmp_path: Path) -> None:
    data = two_classes()
    for dtype in (torch.bfloat16, torch.float16):
        model = network().to(dtype)
        assert linear_probe(model, data, data, levels=[0.1], cache=tmp_path).accuracy == 1.0
    files = len(list(tmp_path.iterdir()))
    linear_probe(model.float(), data, data, levels=[0.1], cache=tmp_path)  # the same weights in another precision
    assert len(list(tmp_path.iterdir())) == 1.5 * files


def test_one_image_is_enough_to_fit_on() -> None:
    data = two_classes(4)
    assert 0 <= linear_probe(network(), data, data, levels=[0.1], held_out=0.9).held_out[0][0] <= 1


class Doubled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Conv2d(1, 1, 1) for _ in range(2))

    def forward(self, x: Tensor, _time: Tensor) -> Tensor:
        return self.blocks[1](self.blocks[0](torch.cat([x, x]))[: len(x)])


def test_blocks_with_other_samples_than_the_images_are_refused() -> None:
    with pytest.raises(ValueError, match=r"blocks: blocks.0 returns .* samples for .* images"):
        linear_probe(Doubled(), *digits(), **SMALL)


@pytest.mark.parametrize("name", ["vp", "ddpm", "cosine", "edm"])
def test_noise_levels_are_the_same_for_every_process(name: str) -> None:
    noise, times = times_at(get_process(name), [0.1, 1.0])
    assert noise == pytest.approx([0.1, 1.0], rel=0.1)
    assert len(times) == 2


def test_augmentation_keeps_the_image_inside() -> None:
    images = torch.arange(64.0).view(1, 1, 8, 8).repeat(200, 1, 1, 1)
    changed = augmented(images, 0, torch.arange(200))
    assert changed.shape == images.shape
    assert len({tuple(image.flatten().tolist()) for image in changed}) == 2 * 3 * 3
    assert torch.equal(changed, augmented(images, 0, torch.arange(200)))


def test_published_protocol_says_how_it_selects() -> None:
    (images, labels), test_part = digits()
    options: dict[str, Any] = {"levels": [0.1], "protocol": "ddae"}
    untrained, found = (
        linear_probe(network(seed), (images[:256], labels[:256]), test_part, **options, random_network=other)
        for seed, other in ((1, None), (0, network(1)))
    )
    assert found.random_network == pytest.approx(untrained.accuracy, abs=0.01)
    assert found.protocol == "ddae, selected on test"
    assert found.accuracy == max(max(row) for row in found.held_out)


def test_bad_input_is_refused(tmp_path: Path) -> None:
    train_part, test_part = digits()
    few = train_part[1] < 3
    for options, message in (
        ({"train": (train_part[0][few], train_part[1][few])}, "3 of 10 classes"),
        ({"train": (train_part[0], None)}, "needs a label for each image, got none"),
        ({"blocks": ["middle_block"]}, "did you mean 'mid_block'?"),
        ({"levels": 0}, "levels: must be at least 1"),
        ({"levels": [-1.0]}, "levels: must be positive"),
        ({"protocol": "published"}, "protocol: unknown 'published'"),
        ({"held_out": 1.0}, "held_out: must be in"),
        ({"images": 3}, "images: must be at least 20, two for every class, got 3"),
        (
            {"train": (train_part[0], train_part[1].float())},
            "train: labels must be integers from 0 on, (n,), got torch.float32 (1438,)",
        ),
        ({"train": (train_part[0], train_part[1].tolist())}, "labels must be integers from 0 on, (n,), got list"),
        ({"train": (train_part[0], train_part[1] > 0)}, "(n,), got torch.bool (1438,)"),
        ({"train": (train_part[0], F.one_hot(train_part[1]))}, "(n,), got torch.int64 (1438, 10)"),
        (
            {"test": (test_part[0].to(torch.uint8), test_part[1])},
            "test: images must be a tensor of floats in [-1, 1], got torch.uint8",
        ),
        ({"random_network": network(), "call": lambda *_: 1 / 0}, "random_network: cannot be run by `call`"),
        ({"blocks": []}, "blocks: must be at least one module"),
        ({"batch_size": 0}, "batch_size: must be at least 1, got 0"),
        ({"test": (test_part[0], test_part[1] - 1)}, "test: labels must be integers from 0 on, got -1"),
    ):
        given = {"train": train_part, "test": test_part, **options}
        with pytest.raises(ValueError) as error:
            linear_probe(network(), **given)
        assert message in str(error.value)
    source = load_source("digits")
    for i in range(4):
        Image.fromarray(source.read(i)[0].numpy()).resize((16, 16)).save(tmp_path / f"{i}.png")
    config = RunConfig()
    with pytest.raises(ValueError, match="has no labels"):
        labelled_data(dataclasses.replace(config, data=dataclasses.replace(config.data, name=f"folder:{tmp_path}")))


def test_a_test_split_with_other_classes_is_refused(tmp_path: Path) -> None:
    for split, name in (("train", "ant"), ("train", "bee"), ("train", "cat"), ("test", "ant"), ("test", "cat")):
        (tmp_path / split / name).mkdir(parents=True)
        Image.effect_noise((8, 8), 50).save(tmp_path / split / name / "0.png")
    with pytest.raises(DataError, match=r"data\.split: 'test': class 1 is 'cat', in the training data 'bee'"):
        labelled_data(dataclasses.replace(RunConfig(), data=DataSettings(f"folder:{tmp_path}")))


def test_class_conditional_runs_are_probed_without_their_class(tmp_path: Path) -> None:
    preset = get_preset("digits-demo")
    short = dataclasses.replace(preset.training, steps=2, batch_size=16, sample_every=0)
    model = dataclasses.replace(preset.model, dim=16, depth=2, heads=2)
    for drop in (0.0, 0.1):
        condition = ConditionSettings("class", drop=drop)
        config = dataclasses.replace(preset, training=short, model=model, condition=condition)
        run = load_run(train(config, tmp_path / f"drop{drop}"))
        if drop:
            assert 0 <= probe_run(run, floors=False, cache=False, **SMALL).accuracy < 1
        else:
            with pytest.raises(ValueError, match=r"condition\.drop"):
                probe_run(run)


def test_data_without_some_classes_of_the_run_are_refused(tmp_path: Path) -> None:
    from PIL import Image

    for k in range(3):
        (tmp_path / "data" / f"class{k}").mkdir(parents=True)
        for i in range(8):
            Image.new("RGB", (8, 8), (80 * k, 20 * i, 0)).save(tmp_path / "data" / f"class{k}" / f"{i}.png")
    config = tiny(training_steps=1, data_name=f"folder:{tmp_path / 'data'}", data_image_size=8, condition_kind="class")
    run = load_run(train(config, tmp_path / "run"))
    shutil.rmtree(tmp_path / "data" / "class1")
    with pytest.raises(ValueError, match=r"has images of 2 classes, and the run was trained for 3"):
        probe_run(run, **SMALL)


@pytest.mark.slow
def test_probe_of_a_conditioned_run_in_report_and_diagnosis(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    preset = get_preset("digits-demo")
    training = dataclasses.replace(preset.training, steps=200, sample_every=0)
    model = dataclasses.replace(preset.model, dim=32, depth=2, heads=2)
    features = dataclasses.replace(preset.features, conditioning=True)
    folder = train(dataclasses.replace(preset, training=training, model=model, features=features), tmp_path / "run")
    assert float(load_run(folder).model.feature_conditioning.gate.abs()) > 0
    assert main(["probe", str(folder), "--levels", "2", "--images", "500"]) == 0
    printed = capsys.readouterr().out
    assert "test accuracy" in printed and "an untrained network" in printed
    record = read_run(folder).linear_probes[-1]
    assert record["accuracy"] > 0.6
    assert record["accuracy"] > record["random_network"]
    page = write_report(read_runs([folder])[0], tmp_path / "report.html").read_text()
    assert '<h2 id="probes">Linear probes' in page and record["block"] in page
    assert any(sentence.about == "semantics" for sentence in diagnose(folder))


def test_diagnosis_tells_unimodal_from_monotone(tmp_path: Path) -> None:
    from scalelong.runs.config import to_yaml

    (tmp_path / "config.yaml").write_text(to_yaml(RunConfig()))
    about = {"blocks": ["a"], "block": "a", "protocol": "held-out", "n_held_out": 2000, "accuracy": 0.9}
    for row, word in (
        ([0.7, 0.8, 0.6], "is unimodal"),
        ([0.9, 0.8, 0.6], "is monotone"),
        ([0.9, 0.901, 0.6], "undecided"),
        ([0.9, 0.899, 0.6], "undecided"),
        ([0.9, 0.8], "fewer than three levels"),
    ):
        probe = {
            "step": 10,
            "kind": "linear_probe",
            "noise": [0.1, 1.0, 3.0][: len(row)],
            "level": 1.0,
            "held_out": [row],
            **about,
        }
        lines = [{"step": 10, "kind": "train", "loss": 0.5, "seconds": 2}, probe, {**probe, "held_out": "damaged"}]
        (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
        assert read_run(tmp_path).damaged_lines == 1
        said = [sentence.text for sentence in diagnose(tmp_path) if sentence.about == "semantics"]
        assert len(said) == 1 and word in said[0]
