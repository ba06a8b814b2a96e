"""Change a model as it was when its weights were saved: what is stored beside weights, applied or compared."""

from __future__ import annotations

from collections.abc import Mapping
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
from scalelong.skips.hooks import CONFIG_KEY, FEATURES_KEY, is_scaled, scaling_of, stored_scaling

HASHES = "sha256"  # key in scalelong.json: of the weights, and of the rest of that file


def stored_in(config: Mapping[str, Any]) -> dict[str, Any]:
    """The scaling and the conditioning on features that a config of diffusers names; empty if none."""
    features = config.get(FEATURES_KEY)
    return {**(config.get(CONFIG_KEY) or {}), **({} if features is None else {FEATURES_KEY: features})}


def restore_as(model: nn.Module, stored: Any, where: str | Path, example: Any = None) -> None:
    """Apply the stored scaling and conditioning where the model has none; refuse others."""
    features = stored.get(FEATURES_KEY) if isinstance(stored, Mapping) else None
    if features is not None:
        _condition_as(model, features, where)
    elif is_conditioned(model):
        raise ValueError(f"{where}: was saved without conditioning; call scalelong.remove(model, 'features') first")
    if features is None or stored.keys() - {FEATURES_KEY, HASHES}:
        _scale_as(model, stored, where, example)


def _condition_as(model: nn.Module, stored: dict[str, Any], where: str | Path) -> None:
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
    for name in (route.tap, *route.targets):
        if name not in modules:
            raise ValueError(
                f"{where}: the model has no module {name!r}; {did_you_mean(name, modules)}build it as it was"
            )
    attach_features(model, FeatureConditioning(route))


def _scale_as(model: nn.Module, stored: Mapping[str, Any], where: str | Path, example: Any = None) -> None:
    """Apply the stored scaling if the model has none; refuse another one."""
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
