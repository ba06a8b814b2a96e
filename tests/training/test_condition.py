"""Conditions: of training samples and of images to sample, what is dropped, and what is refused."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import replace

import pytest
import torch

from scalelong.data import MemorySource, load_source, make_loader
from scalelong.runs.presets import EXPECTED
from scalelong.runs.settings import Conditioning, ConditionSettings, RunConfig, SamplingSettings
from scalelong.training import get_preset, load_run, train
from scalelong.training.build import build_model, build_objective, check_config
from scalelong.training.checkpoint import CheckpointError
from scalelong.training.condition import choose_classes, choose_prompts, make_condition
from scalelong.training.step import Stepper
from tests.data.encoders import make_bert
from tests.training.tiny import assert_same_run, newest, tiny

CPU = torch.device("cpu")
CAPTIONS = ["red apple", "green flag", "a face", "a red flag"]


def picture_source(captions: list[str] | None = CAPTIONS, size: int = 8) -> MemorySource:
    images = torch.arange(4 * 3 * size * size).remainder(256).to(torch.uint8).view(4, 3, size, size)
    return MemorySource("pictures", images, torch.tensor([0, 1, 1, 2]), ["x", "y", "z"], captions)


@pytest.fixture
def text_run(tmp_path) -> RunConfig:
    encoder = make_bert(tmp_path / "bert")
    return tiny(condition_kind="text", condition_encoder=str(encoder), condition_max_tokens=6, data_root=str(tmp_path))


def test_what_is_dropped_depends_on_seed_and_index_alone() -> None:
    source = load_source("digits")
    condition = make_condition(tiny(condition_kind="class", condition_drop=0.25), source, CPU)
    loader = make_loader(source, 0)
    index = torch.arange(1000)
    whole = condition.for_batch(loader.batch(index))["class_labels"]
    parts = [condition.for_batch(loader.batch(part))["class_labels"] for part in index.split(77)]
    assert torch.equal(whole, torch.cat(parts))
    dropped = whole == 10
    assert 0.2 < dropped.float().mean() < 0.3
    assert torch.equal(whole[~dropped], loader.batch(index).labels[~dropped])
    other = make_condition(tiny(condition_kind="class", condition_drop=0.25, training_seed=1), source, CPU)
    assert not torch.equal(whole == 10, other.for_batch(loader.batch(index))["class_labels"] == 10)


def test_classes_are_sampled_in_turn_or_as_in_the_data() -> None:
    condition = make_condition(tiny(condition_kind="class"), picture_source(), CPU)
    assert condition.for_samples(torch.arange(5))["class_labels"].tolist() == [0, 1, 2, 0, 1]
    assert sorted(condition.from_data(torch.arange(4))["class_labels"].tolist()) == [0, 1, 1, 2]
    assert condition.null_condition(SamplingSettings(guidance=2.0))["class_labels"].tolist() == [3]
    assert condition.null_condition(SamplingSettings()) is None


def test_without_drop_there_is_no_null_class_and_no_guidance() -> None:
    condition = make_condition(tiny(condition_kind="class", condition_drop=0.0), picture_source(), CPU)
    assert condition.conditioning.label_rows == 3
    with pytest.raises(ValueError, match=r"guidance: 2\.0, but the run was trained with condition\.drop 0"):
        condition.null_condition(SamplingSettings(guidance=2.0))
    with pytest.raises(ValueError, match="has no condition"):
        make_condition(tiny(), picture_source(), CPU).null_condition(SamplingSettings(guidance=2.0))


def test_captions_become_rows_and_the_null_is_the_empty_prompt(text_run) -> None:
    source = picture_source()
    condition = make_condition(text_run, source, CPU)
    batch = make_loader(source, 0, flip=False).batch(torch.arange(200))
    rows_of_batch = condition.for_batch(batch)["context"]
    null = choose_prompts(text_run, condition.conditioning, [""], CPU).for_samples(torch.arange(1))["context"][0]
    torch.testing.assert_close(condition.null, null, rtol=0, atol=2e-3)
    dropped = (rows_of_batch == condition.null).flatten(1).all(1)
    assert 0 < dropped.sum() < 50
    rows = choose_prompts(text_run, condition.conditioning, CAPTIONS, CPU).for_samples(batch.items)["context"]
    torch.testing.assert_close(rows_of_batch[~dropped], rows[~dropped], rtol=0, atol=2e-3)


def test_an_item_of_several_captions_gets_its_own(text_run) -> None:
    source = picture_source()
    source.captions = [*CAPTIONS, "green apple", "red face"]
    source.caption_counts = torch.tensor([3, 1, 1, 1])
    condition = make_condition(text_run, source, CPU)
    batch = make_loader(source, 0, flip=False).batch(torch.arange(100))
    rows_of_batch = condition.for_batch(batch)["context"]
    rows = choose_prompts(text_run, condition.conditioning, ["", *source.captions], CPU).choices
    nearest = torch.cdist(rows_of_batch.flatten(1), rows.flatten(1)).argmin(
        dim=1
    )  # 0: dropped, else the caption's number + 1
    assert {int(caption) for caption in nearest[batch.items == 0]} - {0} == {1, 2, 3}
    assert {int(caption) for caption in nearest[batch.items == 3]} - {0} == {6}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (ConditionSettings("text"), r"condition\.encoder: text needs one"),
        (ConditionSettings("class", drop=1.0), r"condition\.drop: must be in \[0, 1\), got 1\.0"),
        (ConditionSettings("class", max_tokens=0), r"condition\.max_tokens: must be at least 1"),
    ],
)
def test_wrong_settings_are_refused(settings, message) -> None:
    with pytest.raises(ValueError, match=message):
        check_config(RunConfig(condition=settings))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sampling_guidance": 2.0}, r"sampling\.guidance: 2\.0 with no condition"),
        ({"sampling_guidance": 2.0, "condition_kind": "class", "condition_drop": 0.0}, r"with condition\.drop 0"),
        ({"sampling_guidance": -1.0, "condition_kind": "class"}, r"sampling\.guidance: must be at least 0"),
        ({"sampling_guidance_interval": (2.0, 1.0)}, r"sampling\.guidance_interval"),
    ],
)
def test_impossible_guidance_is_refused(changes, message) -> None:
    with pytest.raises(ValueError, match=message):
        check_config(tiny(**changes))


def test_data_that_lacks_the_condition_is_refused(text_run) -> None:
    source = picture_source(captions=None)
    source.labels, source.num_classes = None, 0
    with pytest.raises(ValueError, match=r"condition\.kind: class, but pictures has no labels"):
        make_condition(tiny(condition_kind="class"), source, CPU)
    with pytest.raises(ValueError, match=r"condition\.kind: text, but pictures has no captions"):
        make_condition(text_run, source, CPU)


def test_a_class_is_chosen_by_number_or_name_and_none_beyond_the_table() -> None:
    config, sizes = tiny(condition_kind="class"), Conditioning(3, True, ("x", "y", "z"))
    assert choose_classes(config, sizes, ["z", " 1"], CPU).choices.tolist() == [2, 1]
    for wrong in ("3", "-1", "w", ""):
        with pytest.raises(ValueError, match=r"classes: there is no .*give 0 \.\. 2, or a name such as 'x'"):
            choose_classes(config, sizes, [wrong], CPU)
    with pytest.raises(ValueError, match="classes: the run's condition is none"):
        choose_classes(tiny(), Conditioning(), ["0"], CPU)


def test_an_encoder_of_another_width_or_with_other_weights_is_refused(text_run, tmp_path) -> None:
    sizes = make_condition(text_run, picture_source(), CPU).conditioning
    wide, other = make_bert(tmp_path / "wide", width=32), make_bert(tmp_path / "other", seed=3)
    with pytest.raises(ValueError, match=r"condition\.encoder: .*wide has width 32, the run was trained with 16"):
        choose_prompts(text_run, sizes, ["red apple"], CPU, str(wide))
    with pytest.raises(ValueError, match=r"condition\.encoder: .*other has sha256 .*, the run was trained with"):
        choose_prompts(text_run, sizes, ["red apple"], CPU, str(other))
    with pytest.raises(ValueError, match=r"prompt: the run's condition is class, not text"):
        choose_prompts(tiny(condition_kind="class"), sizes, ["red apple"], CPU)


@pytest.mark.parametrize("method", ["none", "cs", "ls"])
@pytest.mark.parametrize("backbone", ["uvit", "unet"])
@pytest.mark.parametrize("kind", ["class", "text"])
def test_every_setting_trains_and_uses_its_condition(kind, backbone, method, text_run) -> None:
    """One step moves the weights, and the condition changes the prediction."""
    config = text_run if kind == "text" else tiny(condition_kind="class")
    changes = {"model_backbone": backbone, "model_channels": (32, 32), "model_layers_per_block": 1}
    model_settings = tiny(**changes, scaling_method=method)
    config = replace(config, model=model_settings.model, scaling=model_settings.scaling)
    source = picture_source()
    condition = make_condition(config, source, CPU)
    model = build_model(config, source.shape, condition.conditioning)
    stepper = Stepper(config, model, build_objective(config), CPU, 1, condition)
    batch = make_loader(source, 0).batch(torch.arange(8))
    pending = stepper.compute(5, [batch])
    stepper.update(pending)
    assert pending.read().finite
    given = condition.for_samples(torch.arange(2))
    ((name, value),) = given.items()
    x, time = torch.randn(1, 3, 8, 8).expand(2, -1, -1, -1), torch.tensor([500.0, 500.0])
    one, other = stepper.net(x, time, **{name: value})
    assert not torch.allclose(one, other, rtol=0, atol=1e-7)


PUBLISHED = {
    "imagenet64-uvit-m4": 130_940_292,
    "imagenet64-uvit-l4": 286_827_652,
    "imagenet64-unet": 144_394_083,
    "coco-uvit-s2": 44_692_644,
    "coco-uvit-s2-deep": 58_345_636,
    "coco-unet": 260_919_012,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_presets_have_the_published_sizes_and_one_row_for_the_null_class(name: str) -> None:
    config = get_preset(name)
    shape, sizes = EXPECTED[config.data.name]
    with torch.device("meta"):
        model = build_model(config, shape, sizes)
    row = {"imagenet64-uvit-m4": 768, "imagenet64-uvit-l4": 1024, "imagenet64-unet": 640}.get(name, 0)
    assert sum(p.numel() for p in model.parameters()) == PUBLISHED[name] + row


@pytest.mark.parametrize("name", PUBLISHED)
def test_presets_are_the_other_columns_of_table_6(name: str) -> None:
    config = get_preset(name)
    imagenet = name.startswith("imagenet")
    assert (config.training.steps, config.training.batch_size) == ((300_000, 1024) if imagenet else (1_000_000, 256))
    assert config.optimizer.lr == (3e-4 if imagenet else 2e-4)
    assert config.optimizer.betas == ((0.99, 0.99) if imagenet else (0.9, 0.9))
    assert (config.optimizer.warmup_steps, config.optimizer.weight_decay) == (5000, 0.03)
    assert config.scaling.kappa == (0.7 if imagenet else 0.8)


def test_older_runs_without_conditions_load(tmp_path) -> None:
    """Their config.yaml and checkpoints lack these fields."""
    folder = train(tiny(training_steps=4), tmp_path / "run")
    assert load_run(folder).conditioning == Conditioning()
    config = (folder / "config.yaml").read_text()
    start, end = config.index("condition:"), config.index("diffusion:")
    (folder / "config.yaml").write_text(config[:start] + config[end:])
    state = json.loads((newest(folder) / "state.json").read_text())
    assert state.pop("condition") == {**state_of(Conditioning())}
    assert Conditioning.from_state(state.get("condition")) == Conditioning()
    assert load_run(folder).config.condition.kind == "none"


def state_of(sizes: Conditioning) -> dict[str, object]:
    return {**vars(sizes), "class_names": list(sizes.class_names)}


def test_checkpoints_hold_the_classes(tmp_path) -> None:
    folder = train(tiny(training_steps=4, condition_kind="class", training_sample_every=4), tmp_path / "run")
    assert load_run(folder).conditioning == Conditioning(10, True, tuple("0123456789"))
    state = json.loads((newest(folder) / "state.json").read_text())
    assert state["condition"]["num_classes"] == 10


@pytest.fixture
def emoji_run(tmp_path) -> RunConfig:
    """On real captions, whose features are made by a small encoder."""
    return tiny(
        data_name="emoji32",
        data_split="unseen",
        data_root=str(tmp_path / "cache"),
        model_patch_size=16,
        condition_kind="text",
        condition_encoder=str(make_bert(tmp_path / "bert")),
        condition_max_tokens=4,
        condition_drop=0.3,
        training_steps=8,
    )


def test_resuming_a_text_run_is_bit_identical(emoji_run, tmp_path) -> None:
    whole = train(emoji_run, tmp_path / "whole")
    half = dataclasses.replace(emoji_run, training=dataclasses.replace(emoji_run.training, steps=4))
    train(half, tmp_path / "parts")
    assert_same_run(whole, train(emoji_run, tmp_path / "parts"))


def test_a_run_is_not_resumed_with_another_encoder_of_the_same_name(emoji_run, tmp_path) -> None:
    """The features were made again with other weights; the network would not notice, the run does."""
    folder = train(emoji_run, tmp_path / "run")
    make_bert(tmp_path / "bert", seed=1)
    with pytest.raises(CheckpointError, match="another text encoder"):
        train(emoji_run, folder)
