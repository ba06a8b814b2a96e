"""Checkpoints of the public U-ViT and ScaleLong code, loaded into our U-ViT with the scaling they were trained with.

The public gates are named se.layer1 and se.layer2 (one for all skips), or se.{j}.layer1 and so on (one for each skip),
j counting decoder blocks from the first, so j = 0 is the INNERMOST skip; our gates count from the outermost.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from scalelong.backbones.uvit import UViT, UViTConfig
from scalelong.scaling.registry import ScalingConfig
from scalelong.skips import apply

CODES = ("none", "rsqrt2", "cs", "ls", "ls_individual")  # the public code's numbers 0 .. 4
REDUCTION = 16
LAYERS = {"layer1": "zeta.0", "layer2": "zeta.2"}  # a gate's layers there and here

# The public code's settings and their defaults there; None stands for one that may be absent.
DEFAULTS: Mapping[str, Any] = {
    "img_size": 224,
    "patch_size": 16,
    "in_chans": 3,
    "embed_dim": 768,
    "depth": 12,
    "num_heads": 12,
    "mlp_ratio": 4.0,
    "qkv_bias": False,
    "qk_scale": None,
    "mlp_time_embed": False,
    "num_classes": -1,
    "use_checkpoint": False,
    "conv": True,
    "skip": True,
    "clip_dim": None,
    "num_clip_token": None,
}


def load_official_uvit(
    config: Mapping[str, Any],
    state_dict: Mapping[str, Tensor],
    scalelong: int | str = "none",
    kappa: float | None = None,
) -> UViT:
    """The public code's network with these weights, scaled as it was there.

    scalelong: the public code's number or our name for it, see CODES. kappa: what "cs" was trained with; it does not
    stand in the weights, and as in the public code the other methods do not look at it.
    """
    method = _method(scalelong)
    scaling = _scaling_config(method, kappa)
    uvit = _uvit_config(config)
    state = _without_prefix(state_dict)
    with torch.device("meta"):
        model = UViT(uvit)
    gate_shapes = _gate_shapes(method, model.num_tokens, model.num_skips)
    _check_state(state, {name: tuple(value.shape) for name, value in model.state_dict().items()}, gate_shapes, method)

    model.to_empty(device="cpu")  # every tensor of it is in the state dict
    model.load_state_dict({name: value for name, value in state.items() if name not in gate_shapes})
    handle = apply(model, scaling.method, **scaling.options)
    if gate_shapes:
        gates = {_our_gate_name(name, model.num_skips): state[name] for name in gate_shapes}
        handle.scaling.load_state_dict(gates)
    return model


# --------------------------------------------------------------------------------------------------- settings to settings


def _method(scalelong: int | str) -> str:
    if isinstance(scalelong, int) and not isinstance(scalelong, bool) and 0 <= scalelong < len(CODES):
        return CODES[scalelong]
    if isinstance(scalelong, str) and scalelong in CODES:
        return scalelong
    choices = ", ".join(f"{code} ({name!r})" for code, name in enumerate(CODES))
    raise ValueError(f"official.scalelong: unknown {scalelong!r}; choose one of {choices}")


def _scaling_config(method: str, kappa: float | None) -> ScalingConfig:
    if method in ("ls", "ls_individual"):
        return ScalingConfig.create("ls", shared=method == "ls", reduction=REDUCTION)
    if method != "cs":
        return ScalingConfig.create(method)
    if kappa is None:
        raise ValueError("official.kappa: None with 'cs'; pass the kappa of the training, the weights do not hold it")
    return ScalingConfig.create("cs", kappa=kappa)


def _uvit_config(config: Mapping[str, Any]) -> UViTConfig:
    for key in config:
        if key not in DEFAULTS:
            near = difflib.get_close_matches(str(key), DEFAULTS, n=1)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise ValueError(
                f"official.{key}: unknown setting (got {config[key]!r}); {hint}known: {', '.join(DEFAULTS)}"
            )
    full = {**DEFAULTS, **config}
    if full["qk_scale"] is not None:
        raise ValueError(f"official.qk_scale: {full['qk_scale']!r} is not supported; only None, 1 / sqrt(head size)")
    if full["skip"] is not True:
        raise ValueError(
            f"official.skip: {full['skip']!r}: a network without long skips has nothing to scale; use True"
        )
    if (full["clip_dim"] is None) != (full["num_clip_token"] is None):
        raise ValueError(
            f"official.clip_dim: {full['clip_dim']!r} with num_clip_token {full['num_clip_token']!r}; "
            "a text model needs both, any other neither"
        )
    return UViTConfig(
        image_size=full["img_size"],
        patch_size=full["patch_size"],
        in_channels=full["in_chans"],
        dim=full["embed_dim"],
        depth=full["depth"],
        heads=full["num_heads"],
        mlp_ratio=full["mlp_ratio"],
        qkv_bias=full["qkv_bias"],
        mlp_time_embed=full["mlp_time_embed"],
        num_classes=0 if full["num_classes"] == -1 else full["num_classes"],
        text_dim=full["clip_dim"] or 0,
        text_tokens=full["num_clip_token"] or 0,
        final_conv=full["conv"],
        checkpointing=full["use_checkpoint"],
    )


# ------------------------------------------------------------------------------------------------------ weights to weights


def _without_prefix(state_dict: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The weights by name, without the "module." that data-parallel training puts before every one."""
    prefixed = all(name.startswith("module.") for name in state_dict)
    return {name.removeprefix("module.") if prefixed else name: value for name, value in state_dict.items()}


def _gate_shapes(method: str, tokens: int, num_skips: int) -> dict[str, tuple[int, ...]]:
    """The public names and shapes of the gates a method has."""
    places = {"ls": ["se"], "ls_individual": [f"se.{j}" for j in range(num_skips)]}.get(method, [])
    hidden = max(1, tokens // REDUCTION)
    shapes: dict[str, tuple[int, ...]] = {}
    for place in places:
        shapes |= {f"{place}.layer1.weight": (hidden, tokens), f"{place}.layer1.bias": (hidden,)}
        shapes |= {f"{place}.layer2.weight": (tokens, hidden), f"{place}.layer2.bias": (tokens,)}
    return shapes


def _our_gate_name(name: str, num_skips: int) -> str:
    """se.layer1.weight -> gates.0.zeta.0.weight; se.{j}.layer1.weight -> gates.{N - 1 - j}.zeta.0.weight."""
    *place, layer, kind = name.removeprefix("se.").split(".")
    gate = num_skips - 1 - int(place[0]) if place else 0
    return f"gates.{gate}.{LAYERS[layer]}.{kind}"


def _check_state(
    state: Mapping[str, Tensor],
    backbone: Mapping[str, tuple[int, ...]],
    gates: Mapping[str, tuple[int, ...]],
    method: str,
) -> None:
    """Every tensor is there, none is left over, all have the shapes the settings say."""
    wanted = {**backbone, **gates}
    missing = [name for name in wanted if name not in state]
    extra = [name for name in state if name not in wanted]
    if any(name.startswith("se.") for name in (*missing, *extra)):
        found = sorted(name for name in state if name.startswith("se."))
        raise ValueError(
            f"official.scalelong: {method!r} does not fit the gates in the weights, {_some(found)}; se.layer1 and "
            "se.layer2 belong to 3 ('ls'), se.0.layer1 and so on to 4 ('ls_individual'), no gates to 0, 1 and 2"
        )
    if missing or extra:
        raise ValueError(
            f"official.state_dict: missing {_some(missing)}; unexpected {_some(extra)}; give the settings (depth, "
            "num_classes, mlp_time_embed, conv, clip_dim, ...) these weights were trained with"
        )
    for name, shape in wanted.items():
        if tuple(state[name].shape) != shape:
            raise ValueError(
                f"official.state_dict: {name} is {tuple(state[name].shape)}, the settings say {shape}; "
                "give the settings these weights were trained with"
            )


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:4]) or "none"
    return f"{shown} and {len(names) - 4} more" if len(names) > 4 else shown
