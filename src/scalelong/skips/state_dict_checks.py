"""Checks of wrapped models and state dicts: what must not happen to a scaled model unnoticed."""

from __future__ import annotations

import sys
import warnings
from collections.abc import MutableMapping
from typing import Any

import torch
from torch import Tensor, nn

from scalelong.scaling.constant import Scaling

ROOT_NAME = "scalelong"  # attribute of the model that holds the scaling, and its prefix in the state dict

_WRAPPERS = {
    "OptimizedModule": "torch.compile",
    "DataParallel": "DataParallel",
    "DistributedDataParallel": "DDP",
    "FullyShardedDataParallel": "FSDP",
    "PeftModel": "get_peft_model",
}


def wrapper_of(model: nn.Module) -> str | None:
    """The function or class that wrapped a model, or None."""
    return next((_WRAPPERS[cls.__name__] for cls in type(model).__mro__ if cls.__name__ in _WRAPPERS), None)


def check_unwrapped(model: nn.Module) -> None:
    """Refuse wrappers: hooks added after compiling or wrapping do not run or are not seen."""
    if wrapper := wrapper_of(model):
        raise TypeError(f"model: apply scalelong before {wrapper}, to the module inside it, got {type(model).__name__}")


def reset_compiled() -> None:
    """Drop compiled code, which ignores hooks that are added later; the next call compiles anew."""
    if "torch._dynamo" in sys.modules:  # otherwise nothing has been compiled
        torch.compiler.reset()


def check_state_dict(model: nn.Module, state_dict: MutableMapping[str, Tensor], prefix: str, *_: Any) -> None:
    """Load-state-dict pre-hook: refuse weights that were trained with another scaling, before anything is loaded."""
    scaling = model._modules[ROOT_NAME]
    if not isinstance(scaling, Scaling):
        return
    here = f"{prefix}{ROOT_NAME}."
    given = {key.removeprefix(here): value for key, value in state_dict.items() if key.startswith(here)}
    expected = scaling.state_dict()
    if not given:
        _handle_missing(model, scaling, state_dict, prefix)
        return
    if given.keys() != expected.keys():
        raise ValueError(
            f"state_dict.{here}*: the weights were saved with another scaling than {scaling.config}: they contain "
            f"{sorted(given)}, the model {sorted(expected)}; apply the scaling they were trained with first"
        )
    for key, value in expected.items():
        if given[key].shape != value.shape:
            raise ValueError(
                f"state_dict.{here}{key}: shape {tuple(given[key].shape)} does not fit {tuple(value.shape)} of "
                f"{scaling.config} on {scaling.num_skips} skips; the weights belong to another number or size of skips"
            )
    for key, value in _constants(scaling).items():
        # equal up to half-precision rounding
        if not given[key].is_meta and not torch.allclose(
            given[key].double().cpu(), value.double(), rtol=1e-2, atol=1e-6
        ):
            theirs, ours = ([round(float(number), 4) for number in tensor.flatten()] for tensor in (given[key], value))
            raise ValueError(
                f"state_dict.{here}{key}: the weights were trained with {theirs}, the model applies {ours}; apply the same "
                "method and options first"
            )


def restore_constants(model: nn.Module, *_: Any) -> None:
    """State-dict pre-hook: refill buffers that `to_empty` left uninitialized."""
    scaling = model._modules[ROOT_NAME]
    if not isinstance(scaling, Scaling):
        return
    for key, value in _constants(scaling).items():
        buffer = scaling.get_buffer(key)
        if type(buffer) is Tensor and not buffer.is_inference():
            buffer.copy_(value)


def _handle_missing(model: nn.Module, scaling: Scaling, state_dict: MutableMapping[str, Tensor], prefix: str) -> None:
    """Weights without a scaling: whole models raise for gates and warn for constants, parts of a model pass."""
    complete = all(prefix + key in state_dict for key in model.state_dict() if not key.startswith(f"{ROOT_NAME}."))
    has_gates = any(True for _ in scaling.parameters())
    if complete and has_gates:
        raise ValueError(
            f"state_dict.{prefix}{ROOT_NAME}.*: the weights contain no gates for {scaling.config}; "
            "to start from weights trained without them, load the weights before scalelong.apply"
        )
    if complete:
        warnings.warn(
            f"the loaded weights have no scaling (no {prefix}{ROOT_NAME}.*), so they were trained without one; "
            f"the model keeps {scaling.config}",
            stacklevel=5,
        )
    if not has_gates:
        for key, value in _constants(scaling).items():
            own = scaling.get_buffer(key)
            state_dict[f"{prefix}{ROOT_NAME}.{key}"] = value if own.is_meta else value.to(own)


def _constants(scaling: Scaling) -> dict[str, Tensor]:
    """The numbers a scaling computes with, whatever its buffers contain."""
    return {key: torch.tensor(v, dtype=torch.float32, device="cpu") for key, v in scaling.constants.items()}
