"""Apply or compare the changes stored with saved weights: scaling, conditioning, muP."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from torch import nn

from scalelong.errors import did_you_mean, short
from scalelong.scaling.registry import ScalingConfig
from scalelong.skips.attach import apply, find_skips
from scalelong.skips.families import known_skips
from scalelong.skips.feature_conditioning import (
    FeatureConditioning,
    Route,
    attach_features,
    conditioning_of,
    is_conditioned,
)
from scalelong.skips.feature_conditioning import to_json as features_to_json
from scalelong.skips.feature_layout import split_item
from scalelong.skips.hooks import (
    CONFIG_KEY,
    DIFFUSERS,
    FEATURES_KEY,
    STORED_KEYS,
    is_scaled,
    scaling_of,
    stored_scaling,
)

HASHES = "sha256"  # key in scalelong.json: of the weights, and of the rest of that file


@dataclass(frozen=True)
class Part:
    """How a package stores its change of a model under a key of `STORED_KEYS`, and restores it."""

    stored: Callable[[nn.Module], dict[str, Any] | None]  # None: not applied
    restore: Callable[[nn.Module, Any, str | Path, bool], None]  # with what is stored or None, its file, and `fresh`


def stored_of(model: nn.Module) -> dict[str, Any]:
    """All changes of a model in their stored form; ValueError if there are none."""
    stored = stored_scaling(model) if is_scaled(model) else {}
    parts = {key: part.stored(model) for key, part in PARTS.items()}
    stored |= {key: found for key, found in parts.items() if found is not None}
    return stored or stored_scaling(model)


def stored_in(config: Mapping[str, Any]) -> dict[str, Any]:
    """The stored changes in a diffusers config; empty if there are none."""
    parts = {key: config[key] for key in STORED_KEYS if config.get(key) is not None}
    return {**parts.pop(CONFIG_KEY, {}), **parts}


def restore_as(model: nn.Module, stored: Any, where: str | Path, example: Any = None, fresh: bool = False) -> None:
    """Apply stored changes that the model lacks; reject different ones. fresh: the weights are newly initialized."""
    extras = {key for key in STORED_KEYS if isinstance(stored, Mapping) and key in stored}
    if extras - PARTS.keys():
        import_module(DIFFUSERS)  # registers all parts
    if not extras or stored.keys() - {*extras, HASHES}:
        _scale_as(model, stored, where, example)
    elif is_scaled(model):
        raise ValueError(f"{where}: was saved without a scaling; call scalelong.remove(model, 'scaling') first")
    for key, part in PARTS.items():
        part.restore(model, stored.get(key), where, fresh)


def _stored_features(model: nn.Module) -> dict[str, Any] | None:
    return features_to_json(conditioning_of(model)) if is_conditioned(model) else None


def _condition_as(model: nn.Module, stored: dict[str, Any] | None, where: str | Path, _fresh: bool) -> None:
    if stored is None:
        if is_conditioned(model):
            raise ValueError(f"{where}: was saved without conditioning; call scalelong.remove(model, 'features') first")
        return
    try:
        route = Route.from_json(stored)
    except (TypeError, KeyError) as error:
        raise ValueError(f"{where}: {FEATURES_KEY} is damaged ({error}); save the model again") from None
    if is_conditioned(model):
        if conditioning_of(model).route != route:
            both = f"the model has {conditioning_of(model).route}, the saved one is {route}"
            raise ValueError(f"{FEATURES_KEY}: {both}; call scalelong.remove(model, 'features') first")
        return
    modules = dict(model.named_modules())
    for name in (split_item(route.tap)[0], *route.targets):
        if name not in modules:
            hint = did_you_mean(name, modules)
            raise ValueError(f"{where}: the model has no module {name!r}; {hint}build it as it was")
    attach_features(model, FeatureConditioning(route))


PARTS = {FEATURES_KEY: Part(_stored_features, _condition_as)}  # by key; `parametrization` adds muP


def _scale_as(model: nn.Module, stored: Mapping[str, Any], where: str | Path, example: Any = None) -> None:
    """Apply the stored scaling if the model has none; reject a different one."""
    if not isinstance(stored, Mapping) or not {"method", "options", "num_skips"} <= stored.keys():
        raise ValueError(f"{where}: must contain method, options and num_skips, got {short(stored)}")
    config, placement = ScalingConfig.from_json(stored), stored.get("placement", "before")
    if example is None and not is_scaled(model) and known_skips(model) is None:
        unknown = (
            f"model: the skips of this {type(model).__name__} are not known, and there is no example to trace it with"
        )
        remedy = "use scalelong.load(..., example=(x, t)), or scalelong.from_pretrained(..., example=(x, t))"
        raise ValueError(f"{unknown}; {remedy}")
    given = stored.get("skips")  # named by the user
    found = scaling_of(model).num_skips if is_scaled(model) else stored["num_skips"]
    if given is None and not is_scaled(model):
        found = len(find_skips(model, example=example))
    if found != stored["num_skips"]:
        own = f"this {type(model).__name__} has {found}"
        raise ValueError(f"num_skips: the saved scaling has {stored['num_skips']} skips, {own}")
    if is_scaled(model):
        mine = stored_scaling(model)
        pairs = (("placement", mine.get("placement", "before"), placement), ("skips", mine.get("skips"), given))
        for key, here, saved in (("scaling", scaling_of(model).config, config), *pairs):
            if here != saved:
                both = f"the model has {here}, the saved one is {saved}"
                raise ValueError(f"{key}: {both}; call scalelong.remove(model) first")
        return
    apply(model, config.method, example=example, placement=placement, skips=given, **config.options)
