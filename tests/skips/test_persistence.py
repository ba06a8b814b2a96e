"""Saving and loading: files that do not fit raise and leave the model unchanged."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import scalelong
from scalelong.errors import CheckpointError, DamagedFileError
from scalelong.files import file_digest
from tests.families import FAMILIES, assert_close, assert_same_weights, build, output
from tests.standins import TutorialUNet, image

UNET = FAMILIES[0]


@pytest.fixture
def saved(tmp_path):
    model = build(UNET)
    scalelong.apply(model, "cs", kappa=0.6)
    return scalelong.save(model, tmp_path / "model")


def as_before_hashes(folder: Path) -> None:
    """Make it a folder of an older version, without hashes."""
    stored = json.loads((folder / "scalelong.json").read_text())
    del stored["sha256"]
    (folder / "scalelong.json").write_text(json.dumps(stored))


def test_nothing_but_the_two_files_is_written(saved) -> None:
    assert sorted(file.name for file in saved.iterdir()) == ["model.safetensors", "scalelong.json"]
    stored = json.loads((saved / "scalelong.json").read_text())
    hashes = stored.pop("sha256")
    assert stored == {"method": "cs", "options": {"kappa": 0.6, "allow_amplify": False}, "num_skips": 6}
    assert hashes["model.safetensors"] == file_digest(saved / "model.safetensors")


def test_another_number_of_skips_is_refused(saved) -> None:
    other = build(FAMILIES[1])
    with pytest.raises(ValueError, match="num_skips: the saved scaling has 6 skips, this UNet2DModel has 4"):
        scalelong.load(other, saved)
    assert "scalelong" not in other._modules


def test_another_scaling_is_refused(saved) -> None:
    other = build(UNET)
    scalelong.apply(other, "cs", kappa=0.5)
    with pytest.raises(ValueError, match=r"has cs\(kappa=0\.5\), the saved one is cs\(kappa=0\.6\)"):
        scalelong.load(other, saved)
    assert scalelong.coefficients(other)[1] == 0.5


def test_damaged_weights_leave_the_model_unscaled(saved) -> None:
    other = build(UNET, seed=2)
    before = output(other, UNET.inputs())
    (saved / "model.safetensors").write_bytes(b"not a tensor file")
    with pytest.raises(CheckpointError, match=r"model\.safetensors: has another sha256"):
        scalelong.load(other, saved)
    as_before_hashes(saved)
    with pytest.raises(DamagedFileError, match=r"model\.safetensors: is not a whole safetensors file"):
        scalelong.load(other, saved)
    assert "scalelong" not in other._modules
    assert torch.equal(output(other, UNET.inputs()), before)


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda w: {**w, "conv_in.bias": torch.zeros(3)},
            r"1 of the weights do not fit.*conv_in\.bias has shape \(3,\)",
        ),
        (lambda w: {**w, "extra": torch.zeros(3)}, "1 of the weights do not fit.*extra is not in the model"),
        (
            lambda w: {k: v for k, v in w.items() if k != "conv_in.bias"},
            r"conv_in\.bias is missing; build the model as",
        ),
    ],
)
def test_weights_that_do_not_fit_change_nothing(saved, change, message: str, scaled: bool) -> None:
    other = build(UNET, seed=2)
    if scaled:
        scalelong.apply(other, "cs", kappa=0.6)
    before = copy.deepcopy(other.state_dict())
    save_file(change(load_file(saved / "model.safetensors")), saved / "model.safetensors")
    as_before_hashes(saved)
    with pytest.raises(ValueError, match=message):
        scalelong.load(other, saved)
    assert list(other.state_dict()) == list(before)
    assert all(torch.equal(value, before[key]) for key, value in other.state_dict().items())


def test_weights_that_share_their_memory_are_saved_once_and_loaded(tmp_path) -> None:
    class Tied(TutorialUNet):
        def __init__(self) -> None:
            super().__init__()
            self.again = self.attention

    torch.manual_seed(0)
    model, other = Tied().eval(), Tied().eval()
    scalelong.apply(model, "cs", example=image())
    scalelong.save(model, tmp_path)
    scalelong.load(other, tmp_path, example=image())
    assert_same_weights(other, model)
    assert_close(other(*image()), model(*image()))


def test_from_pretrained_hands_the_hub_what_is_meant_for_it(tmp_path, monkeypatch) -> None:
    import huggingface_hub

    model, asked = build(UNET), {}
    scalelong.apply(model, "cs", kappa=0.6)
    model.save_pretrained(tmp_path)

    def download(name: str, allow_patterns: list[str], **options: object) -> str:
        asked.update({"name": name, **options})
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    hub = {"revision": "v2", "token": "secret", "cache_dir": str(tmp_path / "cache"), "local_files_only": True}
    loaded = scalelong.from_pretrained(type(model), "someone/model", **hub)
    assert asked == {"name": "someone/model", **hub}
    assert scalelong.coefficients(loaded)[1] == 0.6


@pytest.mark.parametrize("missing", ["model.safetensors", "scalelong.json"])
def test_a_missing_file_is_named(saved, missing: str) -> None:
    (saved / missing).unlink()
    with pytest.raises(FileNotFoundError, match=missing):
        scalelong.load(build(UNET), saved)


def test_a_model_on_the_meta_device_is_refused_until_it_has_memory(saved) -> None:
    with torch.device("meta"):
        model = UNET.build()
    with pytest.raises(ValueError, match=r"meta device, which holds no weights; call model\.to_empty"):
        scalelong.load(model, saved)
    expected = scalelong.load(build(UNET, seed=1), saved)
    assert_same_weights(scalelong.load(model.to_empty(device="cpu"), saved), expected)


def test_a_description_without_its_keys_is_refused(saved) -> None:
    (saved / "scalelong.json").write_text('{"method": "cs"}')
    with pytest.raises(ValueError, match="must contain method, options and num_skips"):
        scalelong.load(build(UNET), saved)


def test_saving_a_model_without_scaling_is_refused(tmp_path) -> None:
    with pytest.raises(ValueError, match="not scaled"):
        scalelong.save(build(UNET), tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_from_pretrained_of_an_unscaled_folder_says_what_to_do(tmp_path) -> None:
    model = build(UNET)
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"saved without a scaling, use UNet2DModel\.from_pretrained"):
        scalelong.from_pretrained(type(model), tmp_path)


def test_a_detected_model_is_saved_and_loaded_with_an_example(tmp_path) -> None:
    from tests.standins import AdditiveUNet

    model, other = AdditiveUNet(), AdditiveUNet()
    scalelong.apply(model, "ls", module="ie", example=image())
    scalelong.save(model, tmp_path)
    with pytest.raises(ValueError, match=r"AdditiveUNet are not known.*scalelong\.load\(\.\.\., example="):
        scalelong.load(other, tmp_path)
    scalelong.load(other, tmp_path, example=image())
    assert_same_weights(other, model)
    assert_close(other(*image()), model(*image()))
    scalelong.load(other, tmp_path)  # scaled already: no example needed


def test_gates_are_those_of_the_variant(tmp_path) -> None:
    model = build(UNET)
    scalelong.apply(model, "ls")
    kept = {}
    for variant in (None, "non_ema"):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.01)
        model.save_pretrained(tmp_path, variant=variant)
        kept[variant] = copy.deepcopy(model.state_dict())
    for variant, expected in kept.items():
        found = scalelong.from_pretrained(type(model), tmp_path, variant=variant).state_dict()
        assert all(torch.equal(value, found[key]) for key, value in expected.items())


def test_a_folder_without_its_gates_is_refused_with_the_reason(tmp_path) -> None:
    model = build(UNET)
    scalelong.apply(model, "ls")
    model.save_pretrained(tmp_path)
    path = tmp_path / "diffusion_pytorch_model.safetensors"
    save_file({k: v for k, v in load_file(path).items() if not k.startswith("scalelong.")}, path, {"format": "pt"})
    with pytest.raises(
        ValueError, match=r"contain no scalelong\.gates\..* for ls.*; write the folder with save_pretrained"
    ):
        scalelong.from_pretrained(type(model), tmp_path)
