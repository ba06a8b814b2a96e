"""Read and write config.yaml safely. No torch."""

from __future__ import annotations

import dataclasses
import json
import re
import typing
from collections import Counter
from collections.abc import Mapping
from contextlib import redirect_stderr
from io import StringIO
from pathlib import Path
from types import UnionType
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
    for part, settings in _mapping(content, where).items():
        if part not in parts:
            inside = [key for key in known if part == key or part == key.partition(".")[2]]
            hint = f"it belongs inside its part, {_nested(*inside)}; " if inside else did_you_mean(part, parts)
            raise SettingError(f"{where}: unknown key {short(part)}; {hint}correct or remove it")
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
    raise SettingError(f"{where}: {key}: must be {_expected(hint)}, got {short(values[key])}")


def _nested(*keys: str) -> str:
    return " or ".join("{}: {{{}: ...}}".format(*key.split(".")) for key in keys)


def _expected(hint: Any) -> str:
    """Describe a type as in `validation`: `int | None` is "a whole number or null"."""
    kinds = typing.get_args(hint)
    if isinstance(hint, UnionType):
        return f"{_expected(kinds[0])} or null"
    if typing.get_origin(hint) is Literal:
        return f"one of {', '.join(kinds)}"
    if typing.get_origin(hint) is tuple:
        return "a list of numbers" if kinds[-1] is Ellipsis else f"a list of {len(kinds)} numbers"
    return {bool: "true or false", int: "a whole number", float: "a number", str: "text"}[hint]


def _mapping(value: Any, where: str) -> dict[str, Any]:
    if value is None:  # an empty file, or a part whose settings are all commented out
        return {}
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
        if isinstance(value, list) and not all(map(_is_numeric, value)):
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


def _is_numeric(value: Any) -> bool:
    """True for numbers and for text that YAML 1.1 does not read as one: 1e-4, inf."""
    return is_number(value) or (isinstance(value, str) and _NUMBER.fullmatch(value) is not None)


_NUMBER = re.compile(r"[-+]?(\d[\d_]*\.?\d*(e[-+]?\d+)?|inf)", re.IGNORECASE)


class _PlainLoader(yaml.SafeLoader):
    """YAML loader for plain values; rejects aliases (billion laughs).

    As in YAML 1.2, only true and false are booleans (not off or yes), 010 is ten, and 1:30 and dates are text.
    """

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            raise yaml.YAMLError("aliases (*name) are not allowed in settings")
        return super().compose_node(parent, index)

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        counts = Counter(key.value for key, _ in node.value if isinstance(key.value, str))
        if twice := [key for key, count in counts.items() if count > 1]:
            raise yaml.YAMLError(f"the key {short(twice[0])} is given twice")
        return super().construct_mapping(node, deep)


_PlainLoader.yaml_implicit_resolvers = {}
for _tag, _pattern, _first in (
    ("bool", "true|True|TRUE|false|False|FALSE", "tTfF"),
    ("int", r"[-+]?(0|[1-9][0-9_]*|0x[0-9a-fA-F_]+)", "-+0123456789"),
    ("float", r"[-+]?([0-9][0-9_]*\.[0-9_]*|\.[0-9][0-9_]*)([eE][-+][0-9]+)?|[-+]?\.inf|\.nan", "-+0123456789."),
    ("null", "~|null|Null|NULL|", ["~", "n", "N", ""]),
):
    _PlainLoader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(f"^(?:{_pattern})$"), list(_first))


def parse_yaml(text: str) -> Any:
    """Parse YAML of plain values.

    >>> parse_yaml("{compile: off, flip: true}")
    {'compile': 'off', 'flip': True}
    """
    loader: Any = _PlainLoader(text)
    try:
        return loader.get_single_data()
    finally:
        loader.dispose()


def read_yaml(path: Path) -> Any:
    """Read a small YAML file of plain values; raise a SettingError that names the file if it is invalid."""
    try:
        with path.open("rb") as file:
            text = file.read(LARGEST_YAML + 1)
        if len(text) > LARGEST_YAML:
            raise SettingError(f"{path}: more than {LARGEST_YAML:,} bytes, which no settings have; check the path")
        return parse_yaml(text.decode())
    except OSError as error:
        raise SettingError(f"config: {path} cannot be read ({error.strerror}); check the path") from None
    except SettingError:
        raise
    except RecursionError:
        raise SettingError(f"{path}: is nested too deeply to be settings; check the file") from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        problem = str(error.problem).removeprefix("but ")
        raise SettingError(f"{path}: is not YAML of plain values: {where}{problem}; correct the line") from None
    except (yaml.YAMLError, ValueError) as error:  # ValueError: not UTF-8
        raise SettingError(f"{path}: is not YAML of plain values: {short_lines(error)}; correct the file") from None


def short_lines(error: Exception) -> str:
    """The message of an error as one truncated line."""
    line = " ".join(str(error).split())
    return line if len(line) <= 200 else f"{line[:197]}..."
