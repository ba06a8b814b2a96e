"""Every value of every setting is checked in one place."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import pytest

from scalelong.errors import SettingError
from scalelong.runs.config import LARGEST_YAML, from_yaml, read_yaml
from scalelong.runs.settings import Conditioning, RunConfig, check_settings, dotted
from scalelong.runs.validation import BOUNDS
from scalelong.training.autoencoder import AutoencoderSettings


def changed(key: str, value: object) -> RunConfig:
    config = RunConfig()
    part, _, name = key.partition(".")
    return dataclasses.replace(config, **{part: dataclasses.replace(getattr(config, part), **{name: value})})


def is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


NUMBERS = [key for key, value in dotted(RunConfig()).items() if is_number(value)]


def test_every_number_has_bounds_and_the_defaults_are_within() -> None:
    assert set(NUMBERS) <= BOUNDS.keys()
    assert check_settings(RunConfig()) == RunConfig()
    AutoencoderSettings()


@pytest.mark.parametrize("key", NUMBERS)
def test_no_number_may_be_nan_infinite_or_text(key: str) -> None:
    for bad in (math.nan, math.inf, -math.inf, "1", None, True, [1], 10**400):
        with pytest.raises(SettingError, match=key.replace(".", r"\.")):
            check_settings(changed(key, bad))


@pytest.mark.parametrize("key", [key for key, value in dotted(RunConfig()).items() if isinstance(value, tuple)])
def test_numbers_in_lists_are_checked_too(key: str) -> None:
    for bad in ((), (math.nan, 1.0), ("1", "2"), [32, 32], (1.0,) * 3, 5):
        with pytest.raises(SettingError, match=key.replace(".", r"\.")):
            check_settings(changed(key, bad))


@pytest.mark.parametrize("key", ["model.backbone", "training.precision", "data.name", "data.flip", "scaling.placement"])
def test_names_and_switches_are_checked_too(key: str) -> None:
    for bad in (7, None, "\0"):
        with pytest.raises(SettingError, match=key.replace(".", r"\.")):
            check_settings(changed(key, bad))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: &a [1]\nb: [*a, *a]", "aliases"),
        ("a: " + "[" * 5000, "nested too deeply"),
        ("a: !!python/object/apply:os.system ['true']", "not YAML of plain values"),
        ("# " + "x" * LARGEST_YAML, "more than 65,536 bytes"),
        ("a: \x00", "not YAML of plain values"),
    ],
)
def test_yaml_is_small_and_plain(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "bad.yaml").write_text(text)
    with pytest.raises(SettingError, match=message) as caught:
        read_yaml(tmp_path / "bad.yaml")
    assert len(str(caught.value)) < 500


def test_a_bad_number_in_a_file_is_named_with_the_file(tmp_path: Path) -> None:
    (tmp_path / "bad.yaml").write_text("optimizer: {clip_norm: .nan}")
    with pytest.raises(SettingError, match=r"bad\.yaml: optimizer\.clip_norm: must be a finite number, got nan"):
        from_yaml(tmp_path / "bad.yaml")


@pytest.mark.parametrize(
    "state", [{"num_classes": 10**12}, {"num_classes": -1}, {"evil": 1}, [], {"class_names": "abc"}]
)
def test_conditions_of_checkpoints_are_checked(state: object) -> None:
    with pytest.raises(SettingError, match="conditioning"):
        Conditioning.from_state(state)  # type: ignore[arg-type]
