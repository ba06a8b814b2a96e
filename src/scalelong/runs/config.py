"""Read and write config.yaml safely. No torch."""

from __future__ import annotations

import dataclasses
import json
import typing
from collections import Counter
from collections.abc import Mapping
from contextlib import redirect_stderr
from io import StringIO
from pathlib import Path
from typing import Any, Literal

import tyro
import yaml

from scalelong.errors import SettingError, did_you_mean, is_number, short
from scalelong.runs.settings import RunConfig, check_settings, dotted

LARGEST_YAML = 2**16  # bytes; the settings of a run take 3 KB


def to_yaml(config: RunConfig) -> str:
    """All settings as YAML; `from_yaml` reads them back.

    >>> print(to_yaml(RunConfig()))
    data:
      name: digits
    ...
    """
    return yaml.safe_dump(json.loads(json.dumps(dataclasses.asdict(config))), sort_keys=False)  # tuples as lists


def from_yaml(path: str | Path, base: RunConfig | None = None) -> RunConfig:
    """Read settings from a YAML file over the defaults in `base`. Errors name the key.

    >>> _ = Path("mine.yaml").write_text("training: {steps: 10}")
    >>> from_yaml("mine.yaml").training.steps
    10
    """
    return with_settings(base or RunConfig(), read_yaml(Path(path)), str(path))


def with_settings(base: RunConfig, content: Any, where: str) -> RunConfig:
    """Override `base` with nested settings, {"training": {"steps": 10}}; errors start with `where`.

    >>> with_settings(RunConfig(), {"training": {"steps": 10}}, "mine").training.steps
    10
    """
    known, parts, values = dotted(base), list(vars(base)), {}
    for part, settings in _mapping({} if content is None else content, where).items():
        if part not in parts:
            raise SettingError(f"{where}: unknown key {short(part)}; {did_you_mean(part, parts)}correct or remove it")
        for name, value in _mapping(settings, f"{where}: {part}").items():
            if (key := f"{part}.{name}") not in known:
                raise SettingError(f"{where}: unknown key {short(key)}; {did_you_mean(key, known)}correct or remove it")
            values[key] = value
    if not values:
        return base
    if (config := _parsed(base, values)) is not None:
        try:
            return check_settings(config)
        except SettingError as error:
            raise SettingError(f"{where}: {error}") from None
    key = next((key for key, value in values.items() if _parsed(base, {key: value}) is None), next(iter(values)))
    part, _, name = key.partition(".")
    hint = typing.get_type_hints(type(getattr(base, part)))[name]
    expected = hint.__name__ if isinstance(hint, type) else str(hint)
    if typing.get_origin(hint) is Literal:
        expected = f"one of {', '.join(typing.get_args(hint))}"
    raise SettingError(f"{where}: {key}: must be {expected}, got {short(values[key])}")


def _mapping(value: Any, where: str) -> dict[str, Any]:
    if isinstance(value, dict):
        return value
    raise SettingError(f"{where}: must hold keys and values, got {short(value)}")


def _parsed(base: RunConfig, values: Mapping[str, Any]) -> RunConfig | None:
    """Override dotted keys of `base`, converted by tyro; None if a value cannot be converted."""
    arguments, known = [], dotted(base)
    for key, value in values.items():
        if isinstance(known[key], str) and not isinstance(value, str):
            return None  # as text, null and numbers would pass for names
        if isinstance(known[key], tuple) != isinstance(value, list):
            return None  # a list of one number would pass for that number
        if isinstance(value, list) and not all(map(is_number, value)):
            return None  # text could pass for a flag
        numbers = value if isinstance(value, list) else [value]
        if any(isinstance(number, int) and abs(number) > 10**300 for number in numbers):
            return None  # may have more digits than Python prints
        arguments += [f"--{key}", *map(str, value)] if isinstance(value, (list, tuple)) else [f"--{key}={value}"]
    with redirect_stderr(StringIO()):  # console_outputs=False leaves tyro's box for a value of the wrong type
        try:
            return tyro.cli(tyro.conf.FlagConversionOff[RunConfig], default=base, args=arguments, console_outputs=False)
        except SystemExit:
            return None


class _PlainLoader(yaml.SafeLoader):
    """YAML loader for plain values; rejects aliases (billion laughs)."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            raise yaml.YAMLError("aliases (*name) are not allowed in settings")
        return super().compose_node(parent, index)

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        counts = Counter(key.value for key, _ in node.value if isinstance(key.value, str))
        if twice := [key for key, count in counts.items() if count > 1]:
            raise yaml.YAMLError(f"the key {short(twice[0])} is given twice")
        return super().construct_mapping(node, deep)


def read_yaml(path: Path) -> Any:
    """Read a small YAML file of plain values; raise a SettingError that names the file if it is invalid."""
    try:
        with path.open("rb") as file:
            text = file.read(LARGEST_YAML + 1)
        if len(text) > LARGEST_YAML:
            raise SettingError(f"{path}: more than {LARGEST_YAML:,} bytes, which no settings have; check the path")
        loader: Any = _PlainLoader(text.decode())
        try:
            return loader.get_single_data()
        finally:
            loader.dispose()
    except OSError as error:
        raise SettingError(f"config: {path} cannot be read ({error.strerror}); check the path") from None
    except SettingError:
        raise
    except RecursionError:
        raise SettingError(f"{path}: is nested too deeply to be settings; check the file") from None
    except (yaml.YAMLError, ValueError) as error:  # ValueError: not UTF-8, an impossible date
        raise SettingError(f"{path}: is not YAML of plain values: {short_lines(error)}") from None


def short_lines(error: Exception) -> str:
    """The message of an error as one truncated line."""
    return short(" ".join(str(error).split()), 200).strip("'\"")
