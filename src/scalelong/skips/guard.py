"""Refusals: what must not happen to a scaled model unnoticed."""

from __future__ import annotations

import warnings
from collections.abc import MutableMapping
from typing import Any

import torch
from torch import Tensor, nn

from scalelong.scaling import Scaling


def check_unwrapped(model: nn.Module) -> None:
    """Hooks put on a module after it was compiled or wrapped are not run or not seen: refuse wrappers."""
    wrappers = {
        "OptimizedModule": "torch.compile",
        "DistributedDataParallel": "DDP",
        "FullyShardedDataParallel": "FSDP",
        "PeftModel": "get_peft_model",
    }
    wrapper = next((wrappers[cls.__name__] for cls in type(model).__mro__ if cls.__name__ in wrappers), None)
    if wrapper is not None:
        raise TypeError(
            f"model: apply scalelong before {wrapper}, to the module that it wraps, got {type(model).__name__}"
        )


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
    for key in _constants(scaling):
        if not _close(given[key], expected[key]):
            raise ValueError(
                f"state_dict.{here}{key}: the weights were trained with {_rounded(given[key])}, the model applies "
                f"{_rounded(expected[key])}; apply the same method and options first"
            )


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
        own = scaling.state_dict()
        state_dict.update({f"{prefix}scalelong.{key}": own[key] for key in _constants(scaling)})


def _constants(scaling: Scaling) -> list[str]:
    """The numbers of a scaling that are fixed, by their keys in its state dict."""
    fixed = dict(scaling.named_buffers())
    return [key for key in scaling.state_dict() if key in fixed]


def _rounded(values: Tensor) -> list[float]:
    return [round(float(value), 4) for value in values.flatten()]


def _close(given: Tensor, own: Tensor) -> bool:
    """Equal up to what half precision rounds."""
    if given.is_meta or own.is_meta:
        return True
    return torch.allclose(given.detach().double().cpu(), own.detach().double().cpu(), rtol=1e-2, atol=1e-6)
