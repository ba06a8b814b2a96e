"""The hooks that scale: a forward-pre-hook on each consumer scales the skip on its way in.

The hook is a plain function of this module and what it needs stands on the consumer, so deep copies, pickles and compiled
graphs are independent of the original. The gates are registered once, at the root, as `model.scalelong`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from scalelong.scaling.base import Scaling
from scalelong.skips.branches import Branches
from scalelong.skips.long_skip import Call, LongSkip, OutputChannels, Take
from scalelong.skips.state_dict_checks import check_state_dict, renew_constants, wrapper_of

ROOT_NAME = "scalelong"  # the gates' place in the model and in its state dict
_ATTACHMENT = "_scalelong_attachment"
_SKIPS = "_scalelong_skips"


@dataclass(frozen=True)
class Attachment:
    """What stands on a consumer: the scaling of the whole model and which skips this consumer is handed, and where."""

    scaling: Scaling
    takes: tuple[tuple[int, Take], ...] = ()
    gives: tuple[tuple[int, OutputChannels], ...] = ()
    block: int | None = None  # the residual block whose branch this module is


def scale_incoming_skips(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
    """The forward-pre-hook of every consumer."""
    attachment: Attachment = getattr(module, _ATTACHMENT)
    call = (args, kwargs)
    for index, take in attachment.takes:
        call = take.scaled(call, index, attachment.scaling)
    return call


def scale_outgoing_skips(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:  # noqa: ARG001
    """The forward hook of a normalisation behind which kappa acts."""
    attachment: Attachment = getattr(module, _ATTACHMENT)
    for index, give in attachment.gives:
        output = give.scaled_output(output, index, attachment.scaling)
    return output


def scale_branch(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:  # noqa: ARG001
    """The forward hook of a residual branch."""
    attachment: Attachment = getattr(module, _ATTACHMENT)
    assert attachment.block is not None
    return attachment.scaling.branch(attachment.block, output)


def attach(model: nn.Module, skips: Sequence[LongSkip], scaling: Scaling, branches: Branches | None = None) -> None:
    """Hook every consumer, and every residual branch where they are given, and register the scaling at the root."""
    places = [(name, skip.index, place) for skip in skips for name, place in skip.places]
    for name in dict.fromkeys(name for name, _, _ in places):
        here = [(index, place) for other, index, place in places if other == name]
        takes = tuple((index, place) for index, place in here if not isinstance(place, OutputChannels))
        gives = tuple((index, place) for index, place in here if isinstance(place, OutputChannels))
        module = model.get_submodule(name)
        object.__setattr__(module, _ATTACHMENT, Attachment(scaling, takes, gives))
        if takes:
            module.register_forward_pre_hook(scale_incoming_skips, with_kwargs=True)
        if gives:
            module.register_forward_hook(scale_outgoing_skips)
    for block, names in enumerate(branches or []):
        for module in map(model.get_submodule, names):
            object.__setattr__(module, _ATTACHMENT, Attachment(scaling, block=block))
            module.register_forward_hook(scale_branch)
    model.add_module(ROOT_NAME, scaling)
    object.__setattr__(model, _SKIPS, tuple(skips))
    model.register_load_state_dict_pre_hook(check_state_dict)  # type: ignore[no-untyped-call]
    model.register_state_dict_pre_hook(renew_constants)  # type: ignore[no-untyped-call]


def detach(model: nn.Module) -> None:
    """Undo `attach`."""
    for module in consumers(model):
        delattr(module, _ATTACHMENT)
        _drop_hooks(module)
    delattr(model, ROOT_NAME)
    delattr(model, _SKIPS)
    hooks = model._load_state_dict_pre_hooks
    for key in [key for key, hook in hooks.items() if getattr(hook, "hook", None) is check_state_dict]:
        del hooks[key]
    savers = model._state_dict_pre_hooks
    for key in [key for key, hook in savers.items() if hook is renew_constants]:
        del savers[key]


def consumers(model: nn.Module) -> Iterator[nn.Module]:
    """The modules that carry a hook of ours."""
    return (module for module in list(model.modules()) if _ATTACHMENT in module.__dict__)


def replace_scaling(model: nn.Module, scaling: Scaling) -> None:
    """Let the hooks that are on the model apply another scaling (used on copies, to check the hooks themselves)."""
    for module in consumers(model):
        before: Attachment = getattr(module, _ATTACHMENT)
        object.__setattr__(module, _ATTACHMENT, replace(before, scaling=scaling))
    model.add_module(ROOT_NAME, scaling)


def attached_skips(model: nn.Module) -> list[LongSkip]:
    """The skips that `attach` was given."""
    return list(getattr(model, _SKIPS))


def is_scaled(model: nn.Module) -> bool:
    """Whether `apply` was called on this model."""
    return isinstance(model._modules.get(ROOT_NAME), Scaling)


def scaling_of(model: nn.Module) -> Scaling:
    """The scaling on a model; a ValueError where there is none."""
    scaling = model._modules.get(ROOT_NAME)
    if not isinstance(scaling, Scaling):
        wrapper = wrapper_of(model)
        remedy = f"pass the model that {wrapper} wraps" if wrapper else "call scalelong.apply(model, ...) first"
        raise ValueError(f"model: this {type(model).__name__} is not scaled; {remedy}")
    return scaling


def check_unscaled(model: nn.Module) -> None:
    """A second scaling on top of a first is refused."""
    if any(True for _ in consumers(model)):
        raise ValueError(
            f"model: this {type(model).__name__} is scaled already; call scalelong.remove(model) before applying another"
        )
    if hasattr(model, ROOT_NAME):
        raise ValueError(f"model: it has an attribute {ROOT_NAME!r} of its own, where the gates would be stored")
    if isinstance(model, nn.Sequential):
        raise TypeError(
            f"model: a {type(model).__name__} runs all its children as layers, the gates stored in it too; make it an "
            "attribute of a module whose forward calls it, and scale that module"
        )


def _drop_hooks(consumer: nn.Module) -> None:
    for key in [key for key, hook in consumer._forward_pre_hooks.items() if hook is scale_incoming_skips]:
        del consumer._forward_pre_hooks[key]
        consumer._forward_pre_hooks_with_kwargs.pop(key, None)
    for key in [key for key, hook in consumer._forward_hooks.items() if hook in (scale_outgoing_skips, scale_branch)]:
        del consumer._forward_hooks[key]
