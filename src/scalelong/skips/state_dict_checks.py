"""Refusals: what must not happen to a scaled model unnoticed."""

from __future__ import annotations

import sys
import warnings
from collections.abc import MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from scalelong.scaling.base import ConstantScaling, Scaling
from scalelong.scaling.baselines import BlockScaling, FreeU, MagnitudePreserving, SkipLayerNorm

_WRAPPERS = {
    "OptimizedModule": "torch.compile",
    "DataParallel": "DataParallel",
    "DistributedDataParallel": "DDP",
    "FullyShardedDataParallel": "FSDP",
    "PeftModel": "get_peft_model",
}


def wrapper_of(model: nn.Module) -> str | None:
    """What made this module around another one, if it is such a module."""
    return next((_WRAPPERS[cls.__name__] for cls in type(model).__mro__ if cls.__name__ in _WRAPPERS), None)


def check_unwrapped(model: nn.Module) -> None:
    """Hooks put on a module after it was compiled or wrapped are not run or not seen: refuse wrappers."""
    wrapper = wrapper_of(model)
    if wrapper is not None:
        raise TypeError(
            f"model: apply scalelong before {wrapper}, to the module that it wraps, got {type(model).__name__}"
        )


def forget_compiled() -> None:
    """Compiled code does not look for hooks: drop what was compiled so far, so that the next call compiles it anew."""
    if "torch._dynamo" in sys.modules:  # else nothing was compiled yet
        torch.compiler.reset()


def check_state_dict(
    model: nn.Module,
    state_dict: MutableMapping[str, Tensor],
    prefix: str,
    *_: Any,
) -> None:
    """Before a scaled model loads weights: were they trained with the same scaling? Nothing is loaded if not."""
    scaling = model._modules["scalelong"]
    if not isinstance(scaling, Scaling):
        return
    here = f"{prefix}scalelong."
    given = {key.removeprefix(here): value for key, value in state_dict.items() if key.startswith(here)}
    expected = scaling.state_dict()
    if not given:
        _handle_missing(model, scaling, state_dict, prefix)
        return
    if given.keys() != expected.keys():
        raise ValueError(
            f"state_dict.{here}*: the weights were saved with another scaling than {scaling.config}: they hold "
            f"{sorted(given)}, the model {sorted(expected)}; apply the scaling they were trained with first"
        )
    for key, value in expected.items():
        if given[key].shape != value.shape:
            raise ValueError(
                f"state_dict.{here}{key}: shape {tuple(given[key].shape)} does not fit {tuple(value.shape)} of "
                f"{scaling.config} on {scaling.num_skips} skips; the weights belong to another number or size of skips"
            )
    for key, value in _constants(scaling).items():
        if not _close(given[key], value):
            raise ValueError(
                f"state_dict.{here}{key}: the weights were trained with {_rounded(given[key])}, the model applies "
                f"{_rounded(value)}; apply the same method and options first"
            )


def renew_constants(model: nn.Module, *_: Any) -> None:
    """Before a state dict is made: a buffer whose memory was given anew (`to_empty`) gets its numbers back."""
    scaling = model._modules["scalelong"]
    if not isinstance(scaling, Scaling):
        return
    for key, value in _constants(scaling).items():
        buffer = scaling.get_buffer(key)
        if type(buffer) is Tensor and not buffer.is_inference():
            buffer.copy_(value)


def _handle_missing(model: nn.Module, scaling: Scaling, state_dict: MutableMapping[str, Tensor], prefix: str) -> None:
    """Weights without a scaling: complete ones are refused for gates and warned of for constants, parts of a model pass."""
    complete = all(prefix + key in state_dict for key in model.state_dict() if not key.startswith("scalelong."))
    has_gates = any(True for _ in scaling.parameters())
    if complete and has_gates:
        raise ValueError(
            f"state_dict.{prefix}scalelong.*: the weights hold no gates for {scaling.config}; "
            "to start from weights trained without them, load the weights before scalelong.apply"
        )
    if complete:
        warnings.warn(
            f"the weights being loaded say nothing of a scaling (no {prefix}scalelong.*): they were trained without one, "
            f"the model goes on with {scaling.config}",
            stacklevel=5,
        )
    if not has_gates:
        for key, value in _constants(scaling).items():
            own = scaling.get_buffer(key)
            state_dict[f"{prefix}scalelong.{key}"] = value if own.is_meta else value.to(own)


def _constants(scaling: Scaling) -> dict[str, Tensor]:
    """The fixed numbers of a scaling by their keys in its state dict: those it computes with, whatever its buffers hold."""
    fixed: dict[str, Sequence[Any]] = {}
    if isinstance(scaling, ConstantScaling):
        fixed["kappa"] = scaling.values
    elif isinstance(scaling, MagnitudePreserving):
        fixed["factors"] = scaling.values
    elif isinstance(scaling, FreeU):
        fixed["factors"] = [*scaling.skip_factors.values(), *scaling.main_factors.values(), scaling.threshold]
    elif isinstance(scaling, SkipLayerNorm):
        fixed["eps"] = [scaling.value]
    elif isinstance(scaling, BlockScaling) and scaling.alpha is None:
        fixed["tau"] = [scaling.value] * scaling.get_buffer("tau").numel()
    return {key: torch.tensor(values, dtype=torch.float32, device="cpu") for key, values in fixed.items()}


def _rounded(values: Tensor) -> list[float]:
    return [round(float(value), 4) for value in values.flatten()]


def _close(given: Tensor, own: Tensor) -> bool:
    """Equal up to what half precision rounds."""
    if given.is_meta:
        return True
    return torch.allclose(given.detach().double().cpu(), own.double(), rtol=1e-2, atol=1e-6)
