"""Hooks that scale: a forward-pre-hook on each consumer scales the skip on its way in.

Hooks are module-level functions and their data is an attribute of the hooked module, so deep copies, pickles and compiled
graphs are independent of the original. The scaling itself is registered once, at the root, as `model.scalelong`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from scalelong.scaling.constant import Scaling
from scalelong.skips.long_skip import Call, LongSkip, OutputChannels, Slot
from scalelong.skips.state_dict_checks import ROOT_NAME, check_state_dict, restore_constants, wrapper_of

_ATTACHMENT = "_scalelong_attachment"
_SKIPS = "_scalelong_skips"


@dataclass(frozen=True)
class Attachment:
    """Data of a hooked module: the scaling of the whole model, and the skips that pass through this module."""

    scaling: Scaling
    inputs: tuple[tuple[int, Slot], ...] = ()
    outputs: tuple[tuple[int, OutputChannels], ...] = ()
    block: int | None = None  # the residual block that this module is a branch of


def scale_inputs(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
    """Forward-pre-hook of a consumer."""
    attachment: Attachment = getattr(module, _ATTACHMENT)
    call = (args, kwargs)
    for index, slot in attachment.inputs:
        call = slot.scale(call, index, attachment.scaling)
    return call


def scale_output(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:  # noqa: ARG001
    """Forward hook of a normalization (placement="after_norm") or of a residual branch."""
    attachment: Attachment = getattr(module, _ATTACHMENT)
    for index, channels in attachment.outputs:
        output = channels.scale_output(output, index, attachment.scaling)
    return output if attachment.block is None else attachment.scaling.scale_branch(attachment.block, output)


def attach(
    model: nn.Module, skips: Sequence[LongSkip], scaling: Scaling, branches: Sequence[tuple[str, ...]] = ()
) -> None:
    """Hook all consumers and residual branches (module names per block), and register the scaling at the root."""
    points = [(name, skip.index, slot) for skip in skips for name, slot in skip.hook_points]
    for name in dict.fromkeys(name for name, _, _ in points):
        here = [(index, slot) for other, index, slot in points if other == name]
        inputs = tuple((index, slot) for index, slot in here if not isinstance(slot, OutputChannels))
        outputs = tuple((index, slot) for index, slot in here if isinstance(slot, OutputChannels))
        _hook(model.get_submodule(name), Attachment(scaling, inputs, outputs))
    for block, names in enumerate(branches):
        for name in names:
            _hook(model.get_submodule(name), Attachment(scaling, block=block))
    model.add_module(ROOT_NAME, scaling)
    object.__setattr__(model, _SKIPS, tuple(skips))
    model.register_load_state_dict_pre_hook(check_state_dict)  # type: ignore[no-untyped-call]
    model.register_state_dict_pre_hook(restore_constants)  # type: ignore[no-untyped-call]


def _hook(module: nn.Module, attachment: Attachment) -> None:
    object.__setattr__(module, _ATTACHMENT, attachment)
    if attachment.inputs:
        module.register_forward_pre_hook(scale_inputs, with_kwargs=True)
    if attachment.outputs or attachment.block is not None:
        module.register_forward_hook(scale_output)


def detach(model: nn.Module) -> None:
    """Undo `attach`."""
    for module in _hooked(model):
        delattr(module, _ATTACHMENT)
        for key in _drop(module._forward_pre_hooks, scale_inputs):
            module._forward_pre_hooks_with_kwargs.pop(key, None)
        _drop(module._forward_hooks, scale_output)
    delattr(model, ROOT_NAME)
    delattr(model, _SKIPS)
    _drop(model._load_state_dict_pre_hooks, check_state_dict)
    _drop(model._state_dict_pre_hooks, restore_constants)


def _drop(hooks: dict[int, Any], function: Any) -> list[int]:
    """Remove a hook function from a module's registry; torch wraps some hooks."""
    keys = [key for key, hook in hooks.items() if getattr(hook, "hook", hook) is function]
    for key in keys:
        del hooks[key]
    return keys


def _hooked(model: nn.Module) -> Iterator[nn.Module]:
    return (module for module in list(model.modules()) if _ATTACHMENT in module.__dict__)


def replace_scaling(model: nn.Module, scaling: Scaling) -> None:
    """Exchange the scaling behind the hooks of a model; used on copies, to check the hooks themselves."""
    for module in _hooked(model):
        object.__setattr__(module, _ATTACHMENT, replace(getattr(module, _ATTACHMENT), scaling=scaling))
    model.add_module(ROOT_NAME, scaling)


def attached_skips(model: nn.Module) -> list[LongSkip]:
    """The skips that are scaled."""
    return list(getattr(model, _SKIPS))


def is_scaled(model: nn.Module) -> bool:
    """Whether a scaling is applied to this model.

    >>> is_scaled(nn.Linear(2, 2))
    False
    """
    return isinstance(model._modules.get(ROOT_NAME), Scaling)


def scaling_of(model: nn.Module) -> Scaling:
    """The scaling of a model; ValueError if it has none.

    >>> import scalelong, diffusers
    >>> print(scaling_of(scalelong.apply(diffusers.UNet1DModel(), "cs").model).config)
    cs(kappa=0.7)
    """
    scaling = model._modules.get(ROOT_NAME)
    if not isinstance(scaling, Scaling):
        wrapper = wrapper_of(model)
        remedy = f"pass the model inside {wrapper}" if wrapper else "call scalelong.apply(model, ...) first"
        raise ValueError(f"model: this {type(model).__name__} is not scaled; {remedy}")
    return scaling


def check_unscaled(model: nn.Module) -> None:
    """Raise if the model is scaled already or cannot hold a scaling."""
    if any(True for _ in _hooked(model)):
        raise ValueError(
            f"model: this {type(model).__name__} is scaled already; call scalelong.remove(model) before applying another"
        )
    if hasattr(model, ROOT_NAME):
        raise ValueError(f"model: it has an attribute {ROOT_NAME!r} of its own, where the gates would be stored")
    if isinstance(model, nn.Sequential):
        raise TypeError(
            f"model: a {type(model).__name__} runs all its children as layers, including the gates stored in it; make it an "
            "attribute of a module whose forward calls it, and scale that module"
        )
