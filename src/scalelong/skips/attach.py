"""Put a scaling on a model in place, and take it off again."""

from __future__ import annotations

import copy
from collections import Counter
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import nn

from scalelong.scaling.base import Description, Scaling
from scalelong.scaling.registry import ScalingConfig
from scalelong.skips.branches import residual_branches
from scalelong.skips.example import as_call, is_meta
from scalelong.skips.example_inputs import generated_example
from scalelong.skips.families import known_families, known_skips
from scalelong.skips.hooks import ROOT_NAME, attach, attached_skips, check_unscaled, detach, is_scaled, scaling_of
from scalelong.skips.long_skip import Call, LongSkip, skip_table
from scalelong.skips.state_dict_checks import check_unwrapped, forget_compiled
from scalelong.skips.tracing.detect import detect
from scalelong.skips.tracing.operands import holding_both, with_operands
from scalelong.skips.tracing.placement import after_norm
from scalelong.skips.tracing.reach import measure_reach
from scalelong.skips.tracing.verify import verify

__all__ = [
    "CONFIG_KEY",
    "ROOT_NAME",
    "Handle",
    "apply",
    "coefficients",
    "find_skips",
    "is_scaled",
    "remove",
    "scaling_of",
]

Placement = Literal["before", "after_norm"]
CONFIG_KEY = "long_skip_scaling"  # the scaling's place in a diffusers config.json


@dataclass(frozen=True)
class Handle:
    """A scaled model: what was found and what was put on it."""

    model: nn.Module
    skips: list[LongSkip]
    config: ScalingConfig

    @property
    def scaling(self) -> Scaling:
        """The module that holds the coefficients or gates."""
        return scaling_of(self.model)

    def coefficients(self) -> list[float]:
        """kappa_i now, outermost first."""
        return self.scaling.current()

    def remove(self) -> None:
        """Undo `apply`."""
        remove(self.model)

    def __str__(self) -> str:
        return f"{self.config} on {type(self.model).__name__}\n{skip_table(self.skips, self.coefficients())}"


def find_skips(model: nn.Module, *example_args: Any, **example_kwargs: Any) -> list[LongSkip]:
    """The long skips of a model, index 1 = outermost: where each is made and used, its size, how far kappa reaches.

    Models of known families need no example. Any other model is run once on the example to find its N skips. With an
    example, how far kappa reaches is measured: a deep copy of the model is run 3N + 1 times. The model, the example and all
    random states are left as they were.
    """
    call = (example_args, example_kwargs) if example_args or example_kwargs else None
    return _find(model, call)[0]


def _find(model: nn.Module, call: Call | None) -> tuple[list[LongSkip], bool]:
    """The skips, and whether they were detected rather than known."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: must be a torch.nn.Module, got {type(model).__name__}")
    check_unwrapped(model)
    skips, name = known_skips(model), type(model).__name__
    if skips is None and call is None:
        raise ValueError(
            f"model: the skips of this {name} are not known by name, and there is no example input to look at; pass one, "
            f"find_skips(model, x, t) or apply(model, ..., example=(x, t)); known are {', '.join(known_families())}"
        )
    if skips is not None and not skips:
        raise ValueError(f"model: this {name} has no long skip connections, so there is nothing to scale")
    if call is None:
        return skips or [], False
    plain = _without_scaling(model)
    found = skips if skips is not None else detect(plain, call).skips()
    reaches = measure_reach(plain, found, call)
    return [replace(skip, reach=reach) for skip, reach in zip(found, reaches, strict=True)], skips is None


def _without_scaling(model: nn.Module) -> nn.Module:
    if not is_scaled(model):
        return model
    plain = copy.deepcopy(model)
    detach(plain)
    return plain


def apply(
    model: nn.Module,
    method: str = "cs",
    *,
    example: Any = None,
    placement: Placement = "before",
    **options: Any,
) -> Handle:
    """Scale the long skips of `model` in place.

    method: "none", "universal", "rsqrt2", "cs", "cs_reversed" or "ls"; options: kappa and allow_amplify for the constant
    ones; shared, reduction, module, activation, axis and start for "ls". Peers: "mp_cat" (t), "layernorm" (affine, eps),
    "freeu" (s1, s2, b1, b2, threshold), "rezero", "stable_tau" (tau). On any error the model is left as it was.
    example: what the model is called with, a tensor, a tuple, a dict or (args, kwargs); needed where the class is not known.
    Skips found this way are checked by `verify` before `apply` returns: 2N + 3 more runs of deep copies, most with gradients.
    placement: "before", the paper's: the skip itself is scaled. "after_norm": where a GroupNorm would cancel kappa, it acts
    on the skip's channels behind the norm, and on the shortcut's input; for constant methods.
    """
    call = None if example is None else as_call(example)
    config = ScalingConfig.create(method, **options)
    if isinstance(model, nn.Module):
        check_unwrapped(model)
        check_unscaled(model)
    skips, detected = _find(model, call)
    if placement != "before":
        skips = _placed(model, skips, config, placement, call)
    if config.needs == "operands":
        skips = with_operands(model, skips, call)
    branches = residual_branches(model) if config.needs == "blocks" else []
    with torch.inference_mode(False):  # gates made in inference mode could never be trained
        scaling = config.build([skip.size for skip in skips], len(branches))
        _match(scaling, model)
    if scaling.changes_main:
        skips = holding_both(model, skips, call, method)
    attach(model, skips, scaling, branches)
    if call is not None and (detected or placement != "before") and not is_meta(model):
        _verify_or_undo(model, call)
    forget_compiled()
    write_config(model, config, len(skips), placement)
    return Handle(model, skips, config)


def _placed(
    model: nn.Module, skips: list[LongSkip], config: ScalingConfig, placement: str, call: Call | None
) -> list[LongSkip]:
    if placement != "after_norm":
        raise ValueError(f"placement: unknown {placement!r}; choose one of before, after_norm")
    if not config.is_constant:
        raise ValueError(
            f"placement: 'after_norm' is for constant methods; what {config.method!r} does to a skip behind the norm is "
            "another thing than at the shortcut, use placement='before'"
        )
    return after_norm(model, skips, call if call is not None else generated_example(model))


def placement_of(model: nn.Module) -> Placement:
    """Where the scaling on a model acts."""
    return "after_norm" if any(skip.after_norm for skip in attached_skips(model)) else "before"


def _verify_or_undo(model: nn.Module, call: Call) -> None:
    args, kwargs = call
    try:
        verify(model, *args, **kwargs)
    except BaseException:
        detach(model)
        raise


def remove(model: nn.Module) -> None:
    """Take a scaling off: afterwards the model, its state dict and its config are as before `apply`."""
    scaling_of(model)
    detach(model)
    forget_compiled()
    write_config(model, None)


def coefficients(model: nn.Module) -> list[float]:
    """kappa_i now, outermost first: constants, or the mean the gates gave on the last forward (nan before the first)."""
    return scaling_of(model).current()


def describe(config: Description, num_skips: int, placement: Placement) -> dict[str, Any]:
    """What is stored beside weights; the usual placement goes without saying."""
    stored = config.to_json(num_skips)
    return stored if placement == "before" else {**stored, "placement": placement}


def _match(scaling: Scaling, model: nn.Module) -> None:
    """The mode of the model, and the device and dtype of most of its weights."""
    scaling.train(model.training)
    weights: Counter[tuple[torch.device, torch.dtype]] = Counter()
    for parameter in model.parameters():
        if parameter.is_floating_point():
            weights[parameter.device, parameter.dtype] += parameter.numel()
    if weights:
        (device, dtype), _ = weights.most_common(1)[0]
        scaling.to(device=device, dtype=dtype)


def write_config(model: Any, config: Description | None, num_skips: int = 0, placement: Placement = "before") -> None:
    """Write the scaling into a diffusers model's config, which `save_pretrained` stores, or take it out again."""
    if not hasattr(model, "register_to_config"):
        return
    if config is not None:
        model.register_to_config(**{CONFIG_KEY: describe(config, num_skips, placement)})
        return
    entries = model._internal_dict
    model._internal_dict = type(entries)({key: value for key, value in entries.items() if key != CONFIG_KEY})
