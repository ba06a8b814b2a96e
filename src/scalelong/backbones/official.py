"""Load checkpoints of the public U-ViT and ScaleLong code into our U-ViT, scaled as they were trained.

The public gates are named se.layer1 and se.layer2 (one gate for all skips) or se.{j}.layer1, ... (one per skip), where j
counts decoder blocks, so j = 0 is the INNERMOST skip; our gates count from the outermost.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from scalelong.backbones.uvit import UViT, UViTConfig
from scalelong.errors import did_you_mean
from scalelong.scaling.registry import ScalingConfig
from scalelong.skips import apply

CODES = ("none", "rsqrt2", "cs", "ls", "ls_individual")  # the public code's numbers 0 .. 4
REDUCTION = 16
LAYERS = {"layer1": "zeta.0", "layer2": "zeta.2"}  # layers of a gate: public name -> ours

# The public code's settings: our name for each, and its default there.
SETTINGS: Mapping[str, tuple[str, Any]] = {
    "img_size": ("image_size", 224),
    "patch_size": ("patch_size", 16),
    "in_chans": ("in_channels", 3),
    "embed_dim": ("dim", 768),
    "depth": ("depth", 12),
    "num_heads": ("heads", 12),
    "mlp_ratio": ("mlp_ratio", 4.0),
    "qkv_bias": ("qkv_bias", False),
    "mlp_time_embed": ("mlp_time_embed", False),
    "num_classes": ("num_classes", -1),  # -1: none
    "use_checkpoint": ("checkpointing", False),
    "conv": ("final_conv", True),
    "clip_dim": ("text_dim", None),
    "num_clip_token": ("text_tokens", None),
}
FIXED: Mapping[str, Any] = {"qk_scale": None, "skip": True}  # settings of which one value is supported


def load_official_uvit(
    config: Mapping[str, Any],
    state_dict: Mapping[str, Tensor],
    scalelong: int | str = "none",
    kappa: float | None = None,
) -> UViT:
    """The public code's network with these weights and its scaling.

    scalelong: the public code's number for the method, or our name for it, see CODES. kappa: of "cs"; it is not stored in
    the weights, and the other methods ignore it.

    >>> config = {"img_size": 8, "patch_size": 2, "embed_dim": 32, "depth": 2, "num_heads": 2}
    >>> state_dict = UViT(UViTConfig(image_size=8, patch_size=2, dim=32, depth=2, heads=2)).state_dict()
    >>> model = load_official_uvit(config, state_dict, scalelong="cs", kappa=0.5)
    """
    method = _method(scalelong)
    scaling = _scaling_config(method, kappa)
    uvit = _uvit_config(config)
    state = _without_prefix(state_dict)
    with torch.device("meta"):
        model = UViT(uvit)
    gate_shapes = _gate_shapes(method, model.num_tokens, model.num_skips)
    _check_state(state, {name: tuple(value.shape) for name, value in model.state_dict().items()}, gate_shapes, method)

    model.to_empty(device="cpu")
    model.load_state_dict({name: value for name, value in state.items() if name not in gate_shapes})
    handle = apply(model, scaling.method, **scaling.options)
    if gate_shapes:
        gates = {_our_gate_name(name, model.num_skips): state[name] for name in gate_shapes}
        handle.scaling.load_state_dict(gates)
    return model


# --------------------------------------------------------------------------------------------------- settings to settings


def _method(scalelong: int | str) -> str:
    if type(scalelong) is int and 0 <= scalelong < len(CODES):
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
        raise ValueError(
            "official.kappa: None with 'cs'; pass the kappa it was trained with, which the weights do not store"
        )
    return ScalingConfig.create("cs", kappa=kappa)


def _uvit_config(config: Mapping[str, Any]) -> UViTConfig:
    known = [*SETTINGS, *FIXED]
    for key, value in config.items():
        if key not in known:
            hint = f"{did_you_mean(key, known)}known: {', '.join(known)}"
            raise ValueError(f"official.{key}: unknown setting (got {value!r}); {hint}")
        if key in FIXED and value is not FIXED[key]:
            raise ValueError(f"official.{key}: {value!r} is not supported; only {FIXED[key]!r} is")
    given = {ours: config.get(theirs, default) for theirs, (ours, default) in SETTINGS.items()}
    if (given["text_dim"] is None) != (given["text_tokens"] is None):
        raise ValueError(
            f"official.clip_dim: {given['text_dim']!r} with num_clip_token {given['text_tokens']!r}; "
            "a text model needs both, any other neither"
        )
    classes = 0 if given["num_classes"] == -1 else given["num_classes"]
    text = {"text_dim": given["text_dim"] or 0, "text_tokens": given["text_tokens"] or 0}
    return UViTConfig(**{**given, **text, "num_classes": classes})


# ------------------------------------------------------------------------------------------------------ weights to weights


def _without_prefix(state_dict: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The weights without the "module." prefix of data-parallel training."""
    prefixed = all(name.startswith("module.") for name in state_dict)
    return {name.removeprefix("module.") if prefixed else name: value for name, value in state_dict.items()}


def _gate_shapes(method: str, tokens: int, num_skips: int) -> dict[str, tuple[int, ...]]:
    """Public names and shapes of a method's gates."""
    gates = {"ls": ["se"], "ls_individual": [f"se.{j}" for j in range(num_skips)]}.get(method, [])
    hidden = max(1, tokens // REDUCTION)
    shapes: dict[str, tuple[int, ...]] = {}
    for gate in gates:
        shapes |= {f"{gate}.layer1.weight": (hidden, tokens), f"{gate}.layer1.bias": (hidden,)}
        shapes |= {f"{gate}.layer2.weight": (tokens, hidden), f"{gate}.layer2.bias": (tokens,)}
    return shapes


def _our_gate_name(name: str, num_skips: int) -> str:
    """se.layer1.weight -> gates.0.zeta.0.weight; se.{j}.layer1.weight -> gates.{N - 1 - j}.zeta.0.weight."""
    *number, layer, kind = name.removeprefix("se.").split(".")
    gate = num_skips - 1 - int(number[0]) if number else 0
    return f"gates.{gate}.{LAYERS[layer]}.{kind}"


def _check_state(
    state: Mapping[str, Tensor],
    backbone: Mapping[str, tuple[int, ...]],
    gates: Mapping[str, tuple[int, ...]],
    method: str,
) -> None:
    """Raise unless the names and shapes are those that the settings imply."""
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
            f"official.state_dict: missing {_some(missing)}; unexpected {_some(extra)}; pass the settings (depth, "
            "num_classes, mlp_time_embed, conv, clip_dim, ...) of the training"
        )
    for name, shape in wanted.items():
        if tuple(state[name].shape) != shape:
            raise ValueError(
                f"official.state_dict: {name} is {tuple(state[name].shape)}, the settings say {shape}; "
                "pass the settings of the training"
            )


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:4]) or "none"
    return f"{shown} and {len(names) - 4} more" if len(names) > 4 else shown
