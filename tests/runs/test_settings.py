"""Configuration: the round trip, and refusals that name the key."""

from __future__ import annotations

import math

import pytest

from scalelong.errors import SettingError
from scalelong.runs.config import from_yaml
from scalelong.runs.settings import RunConfig, TrainingSettings, differences, dotted
from scalelong.training import PRESETS, get_preset, to_yaml
from scalelong.training.build import build_model, check_config
from tests.training.tiny import TINY, tiny


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_is_sound_and_survives_yaml(name: str, tmp_path) -> None:
    config = get_preset(name)
    (tmp_path / "config.yaml").write_text(to_yaml(config))
    assert from_yaml(tmp_path / "config.yaml") == check_config(config, on_gpu=True)


@pytest.mark.parametrize("name", [name for name in PRESETS if name.startswith(("cifar10", "celeba"))])
def test_presets_are_the_columns_of_table_6(name: str) -> None:
    config = get_preset(name)
    assert (config.training.steps, config.training.batch_size) == (500_000, 128)
    assert (config.optimizer.lr, config.optimizer.weight_decay) == (2e-4, 0.03)
    assert config.optimizer.betas == ((0.99, 0.999) if "cifar10" in name else (0.99, 0.99))
    assert config.optimizer.warmup_steps == (2500 if "cifar10" in name else 4000)
    assert config.scaling.kappa == 0.5


def test_every_kind_of_value_survives_yaml(tmp_path) -> None:
    changes = {"data_image_size": 8, "data_root": "--odd name", "training_wandb_project": "off", "scaling_start": 0.25,
               "model_channels": (8,), "sampling_guidance_interval": (0.5, 3.0)}  # fmt: skip
    (tmp_path / "config.yaml").write_text(to_yaml(tiny(**changes)))
    assert from_yaml(tmp_path / "config.yaml") == tiny(**changes)


def test_a_yaml_file_changes_only_what_it_names(tmp_path) -> None:
    (tmp_path / "mine.yaml").write_text("training: {steps: 7}\noptimizer: {lr: 1e-4, betas: [0.9, 0.95]}\n")
    config = from_yaml(tmp_path / "mine.yaml", TINY)
    assert differences(TINY, config) == {
        "training.steps": (12, 7),
        "optimizer.lr": (1e-3, 1e-4),
        "optimizer.betas": ((0.99, 0.999), (0.9, 0.95)),
    }


@pytest.mark.parametrize(
    ("text", "changed"),
    [
        ("training: {compile: auto, wandb_project: off}", {"training.compile": "auto", "training.wandb_project": "off"}),
        ("data: {flip: false}  # no flips", {"data.flip": False}),
        ("optimizer: {lr: 1e-4, betas: [9e-1, 0.95]}", {"optimizer.lr": 1e-4, "optimizer.betas": (0.9, 0.95)}),
        ("sampling: {guidance_interval: [0.5, inf]}", {"sampling.guidance_interval": (0.5, math.inf)}),
        ("training: {steps: 1_000, seed: 010, wandb_project: 2024-01-01}",
         {"training.steps": 1000, "training.seed": 10, "training.wandb_project": "2024-01-01"}),
        ("\ufeffdata:\r\n  # flip: false\r\nmodel:\r\n  channels:\r\n  - 8\r\n", {"model.channels": (8,)}),
    ],
)  # fmt: skip
def test_handwritten_values_mean_what_they_say(text: str, changed: dict, tmp_path) -> None:
    """`off` is text, 1e-4 a number anywhere, 010 ten; a part whose keys are commented out changes nothing."""
    (tmp_path / "mine.yaml").write_bytes(text.encode())
    base = RunConfig(training=TrainingSettings(compile="step"))
    assert {key: new for key, (_, new) in differences(base, from_yaml(tmp_path / "mine.yaml", base)).items()} == changed
    (tmp_path / "mine.yaml").write_text("training: {compile: off}")
    assert from_yaml(tmp_path / "mine.yaml", base).training.compile == "off"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("trainig: {steps: 7}", r"unknown key 'trainig'; did you mean 'training'\?"),
        ("training: {step: 7}", r"unknown key 'training\.step'; did you mean 'training\.steps'\?"),
        ("training: {steps: many}", r"training\.steps: must be a whole number, got 'many'"),
        ("training: {steps: 1.5}", r"training\.steps: must be a whole number, got 1\.5"),
        ("training: {steps: true}", r"training\.steps: must be a whole number, got True"),
        ("training: {precision: fp8}", r"training\.precision: must be one of auto, fp32, bf16, fp16, got 'fp8'"),
        ("optimizer: {betas: [0.9]}", r"optimizer\.betas: must be a list of 2 numbers, got \[0\.9\]"),
        ("data: {flip: 'no'}", r"data\.flip: must be true or false, got 'no'"),
        ("data: {name: null}", r"data\.name: must be text, got None"),
        ("data: {image_size: big}", r"data\.image_size: must be a whole number or null, got 'big'"),
        ("training: 7", r"training: must hold keys and values"),
        ("data: {flip: off}", r"data\.flip: must be true or false, got 'off'"),
        ("training: {steps: 1:30}", r"training\.steps: must be a whole number, got '1:30'"),
        ("training.steps: 7", r"unknown key 'training\.steps'; it belongs inside its part, training: {steps: \.\.\.};"),
        ("lr: 1e-4", r"unknown key 'lr'; it belongs inside its part, optimizer: {lr: \.\.\.};"),
        ("training: {steps: [", r"is not YAML of plain values: line 1, column 20: "),
        ("training:\n\tsteps: 5", r"is not YAML of plain values: line 2, column 1: found character '\\t'"),
    ],
)
def test_a_wrong_file_is_refused_by_its_key(text: str, message: str, tmp_path) -> None:
    (tmp_path / "mine.yaml").write_text(text)
    with pytest.raises(ValueError, match=message):
        from_yaml(tmp_path / "mine.yaml")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"training_steps": 0}, r"training\.steps: must be at least 1, got 0"),
        ({"training_keep": 1}, r"training\.keep: must be at least 2"),
        ({"training_precision": "fp16"}, r"training\.precision: fp16 needs a GPU"),
        (
            {"training_accumulate": 2, "training_compile": "reduce-overhead"},
            r"training\.compile: reduce-overhead .* training\.accumulate = 2",
        ),
        ({"training_ema_decay": 1.0}, r"training\.ema_decay"),
        ({"optimizer_lr": 0.0}, r"optimizer\.lr: must be positive"),
        ({"optimizer_betas": (0.9, 1.0)}, r"optimizer\.betas"),
        ({"scaling_method": "lss"}, r"scaling\.method: unknown 'lss'"),
        ({"scaling_method": "cs", "scaling_kappa": 2.0}, r"scaling\.kappa"),
        ({"diffusion_process": "vpp"}, r"diffusion\.process: unknown 'vpp'"),
        ({"diffusion_prediction": "x1"}, r"diffusion\.prediction"),
        ({"sampling_sampler": "euler"}, r"sampling\.sampler: unknown 'euler'"),
    ],
)
def test_a_wrong_value_is_refused_by_its_key(changes, message) -> None:
    with pytest.raises(ValueError, match=message):
        check_config(tiny(**changes))


def test_a_batch_must_divide_among_ranks_and_micro_batches() -> None:
    with pytest.raises(ValueError, match=r"training\.batch_size: must be a multiple of 3 \(3 ranks x 1 .*, got 8"):
        check_config(tiny(), world_size=3)
    with pytest.raises(ValueError, match=r"training\.batch_size: .*2 ranks x 8 micro-batches"):
        check_config(tiny(training_accumulate=8), world_size=2)


@pytest.mark.parametrize(
    ("changes", "shape", "message"),
    [
        ({"model_patch_size": 3}, (1, 8, 8), r"model\.patch_size: 3 does not divide"),
        ({"model_heads": 3}, (1, 8, 8), r"model\.heads"),
        ({"model_backbone": "unet"}, (1, 12, 12), r"model\.channels: 4 levels .* 12 is not divisible by 8"),
        ({}, (3, 8, 16), r"data\.image_size: images must be square"),
    ],
)
def test_a_model_that_does_not_fit_the_images_is_refused(changes, shape, message) -> None:
    with pytest.raises(ValueError, match=message):
        build_model(tiny(**changes), shape)


def test_an_unknown_preset_gets_the_nearest_name() -> None:
    with pytest.raises(ValueError, match=r"unknown 'cifar-uvit-s2'; did you mean 'cifar10-uvit-s2'\?"):
        get_preset("cifar-uvit-s2")


def test_every_setting_has_one_dotted_key() -> None:
    assert len(dotted(RunConfig())) == len(set(dotted(RunConfig()))) > 35


def test_a_key_that_is_given_twice_and_a_value_of_the_wrong_type_are_one_line(tmp_path, capsys) -> None:
    file = tmp_path / "mine.yaml"
    for text, message in (
        ("training: {steps: 1, steps: 2}", "the key 'steps' is given twice"),
        ("training: {steps: many}", "training.steps: must be a whole number, got 'many'"),
    ):
        file.write_text(text)
        with pytest.raises(SettingError, match=message):
            from_yaml(file)
        assert capsys.readouterr() == ("", "")
