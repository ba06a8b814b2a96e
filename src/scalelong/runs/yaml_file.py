"""A configuration as YAML: written whole, read over a base, refused by key."""

from __future__ import annotations

import dataclasses
import difflib
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import yaml

from scalelong.runs.settings import RunConfig


def to_yaml(config: RunConfig) -> str:
    """The whole configuration, readable and readable back."""
    plain = {
        part: {key: list(value) if isinstance(value, tuple) else value for key, value in settings.items()}
        for part, settings in dataclasses.asdict(config).items()
    }
    return yaml.safe_dump(plain, sort_keys=False)


def from_yaml(path: str | Path, base: RunConfig | None = None) -> RunConfig:
    """The settings of a YAML file over those of `base`; an unknown key or a wrong type is refused by name."""
    try:
        content = yaml.safe_load(Path(path).read_text())
    except OSError as error:
        raise ValueError(f"config: {path} cannot be read ({error.strerror}); check the path") from None
    except yaml.YAMLError as error:
        raise ValueError(f"{path}: is not YAML: {error}") from None
    return merged(base or RunConfig(), content or {}, str(path))


def merged(base: RunConfig, changes: Any, where: str) -> RunConfig:
    """`base` with nested changes such as {"training": {"steps": 10}}."""
    parts = {part.name: getattr(base, part.name) for part in dataclasses.fields(base)}
    for name, settings in _mapping(changes, where).items():
        if name not in parts:
            raise ValueError(f"{where}: unknown key {name!r}{_nearest(name, parts)}")
        parts[name] = _merged_part(parts[name], _mapping(settings, f"{where}: {name}"), name, where)
    return RunConfig(**parts)


def _merged_part(part: Any, changes: Mapping[str, Any], name: str, where: str) -> Any:
    hints = typing.get_type_hints(type(part))
    values = {}
    for key, value in changes.items():
        if key not in hints:
            raise ValueError(f"{where}: unknown key '{name}.{key}'{_nearest(key, hints, name)}")
        values[key] = _converted(value, hints[key], f"{where}: {name}.{key}")
    return dataclasses.replace(part, **values)


def _mapping(value: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ValueError(f"{where}: must hold keys and values, got {value!r}")
    return value


def _nearest(key: str, known: typing.Iterable[str], prefix: str = "") -> str:
    near = difflib.get_close_matches(str(key), list(known), n=1)
    return f"; did you mean '{prefix + '.' if prefix else ''}{near[0]}'?" if near else ""


def _converted(value: Any, hint: Any, where: str) -> Any:
    """The value as the setting's type, where YAML's own type stands for it without loss."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        words = [word for argument in arguments[1:] for word in typing.get_args(argument)]  # of a Literal beside a type
        return value if value is None or value in words else _converted(value, arguments[0], where)
    if origin is Literal:
        if value not in arguments:
            raise ValueError(f"{where}: must be one of {', '.join(arguments)}, got {value!r}")
        return value
    if origin is tuple and isinstance(value, (list, tuple)):
        if arguments[-1] is not Ellipsis and len(value) != len(arguments):
            raise ValueError(f"{where}: must hold {len(arguments)} numbers, got {value!r}")
        return tuple(_converted(item, arguments[0], where) for item in value)
    if hint is float and isinstance(value, (int, str)) and not isinstance(value, bool):
        try:
            return float(value)  # YAML reads 1e-4 as text
        except ValueError:
            pass
    if not isinstance(hint, type) or not isinstance(value, hint) or (isinstance(value, bool) and hint is not bool):
        raise ValueError(f"{where}: must be {getattr(hint, '__name__', hint)}, got {value!r}")
    return value
