"""Load checkpoints of the public U-ViT and ScaleLong code into `UViT`, with their scaling.

The public gates are named se.layer1 and se.layer2 (one gate for all skips) or se.{j}.layer1, ... (one per skip), where j
counts decoder blocks, so j = 0 is the INNERMOST skip; our gates count from the outermost.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from scalelong.backbones.uvit import UViT, UViTConfig
from scalelong.errors import unknown_name
from scalelong.scaling.registry import ScalingConfig
from scalelong.skips import apply

CODES = ("none", "rsqrt2", "cs", "ls", "ls_individual")  # the public code's numbers 0 .. 4
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
    """Load weights of the public U-ViT or ScaleLong code, with their scaling.

    scalelong: the public code's number of the method, or our name for it, see CODES. kappa: for "cs" only; it is not stored
    in the weights.

    >>> config = {"img_size": 8, "patch_size": 2, "embed_dim": 32, "depth": 2, "num_heads": 2}
    >>> state_dict = UViT(UViTConfig(image_size=8, patch_size=2, dim=32, depth=2, heads=2)).state_dict()
    >>> model = load_official_uvit(config, state_dict, scalelong="cs", kappa=0.5)
    """
    method = _method(scalelong)
    scaling = _scaling_config(method, kappa)
    prefix = "module." if all(name.startswith("module.") for name in state_dict) else ""  # of data-parallel training
    state = {name.removeprefix(prefix): value for name, value in state_dict.items()}
    gates = {name: state.pop(name) for name in list(state) if name.startswith("se.")}
    with torch.device("meta"):
        model = UViT(_uvit_config(config))
    stored = "ls" if "se.layer1.weight" in gates else "ls_individual" if gates else "none"
    if stored != (method if method in ("ls", "ls_individual") else "none"):
        raise ValueError(f"official.scalelong: {method!r} does not fit the weights, which have the gates of {stored!r}")
    _check_shapes(state, model)
    model.to_empty(device="cpu").load_state_dict(state)
    handle = apply(model, scaling.method, **scaling.options)
    if gates:
        renamed = {_our_gate_name(name, model.num_skips): value for name, value in gates.items()}
        try:
            handle.scaling.load_state_dict(renamed)
        except RuntimeError as error:
            raise ValueError(f"official.state_dict: the gates do not fit the settings ({error})") from error
    return model


def _method(scalelong: int | str) -> str:
    if type(scalelong) is int and 0 <= scalelong < len(CODES):
        return CODES[scalelong]
    if isinstance(scalelong, str) and scalelong in CODES:
        return scalelong
    choices = ", ".join(f"{code} ({name!r})" for code, name in enumerate(CODES))
    raise ValueError(f"official.scalelong: unknown {scalelong!r}; choose one of {choices}")


def _scaling_config(method: str, kappa: float | None) -> ScalingConfig:
    if method in ("ls", "ls_individual"):
        return ScalingConfig.create("ls", shared=method == "ls", reduction=16)
    if method == "cs" and kappa is None:
        raise ValueError("official.kappa: None with 'cs'; pass the kappa of the training, which is not in the weights")
    return ScalingConfig.create("cs", kappa=kappa) if method == "cs" else ScalingConfig.create(method)


def _uvit_config(config: Mapping[str, Any]) -> UViTConfig:
    for key, value in config.items():
        if key not in SETTINGS and key not in FIXED:
            raise unknown_name("official.config", key, [*SETTINGS, *FIXED])
        if key in FIXED and value is not FIXED[key]:
            raise ValueError(f"official.{key}: {value!r} is not supported; only {FIXED[key]!r} is")
    given = {ours: config.get(theirs, default) for theirs, (ours, default) in SETTINGS.items()}
    dim, tokens = given["text_dim"], given["text_tokens"]
    if (dim is None) != (tokens is None):
        raise ValueError(f"official.clip_dim: {dim!r} with num_clip_token {tokens!r}; a text model needs both")
    classes = 0 if given["num_classes"] == -1 else given["num_classes"]
    return UViTConfig(**{**given, "text_dim": dim or 0, "text_tokens": tokens or 0, "num_classes": classes})


def _our_gate_name(name: str, num_skips: int) -> str:
    """se.layer1.weight -> gates.0.zeta.0.weight; se.{j}.layer1.weight -> gates.{N - 1 - j}.zeta.0.weight."""
    *number, layer, kind = name.removeprefix("se.").split(".")
    gate = num_skips - 1 - int(number[0]) if number else 0
    return f"gates.{gate}.{LAYERS[layer]}.{kind}"


def _check_shapes(state: Mapping[str, Tensor], model: UViT) -> None:
    """Raise unless the names and shapes of the weights match the settings."""
    wanted, found = ({name: tuple(v.shape) for name, v in tensors.items()} for tensors in (model.state_dict(), state))
    wrong = [name for name in sorted({*wanted, *found}) if wanted.get(name) != found.get(name)]
    if wrong:
        name, more = wrong[0], f" (and {len(wrong) - 1} more differ)" if len(wrong) > 1 else ""
        shapes = f"{found.get(name, 'missing')}, the settings imply {wanted.get(name, 'none')}"
        raise ValueError(f"official.state_dict: {name} is {shapes}{more}; pass the settings of the training")
