"""Attach and detach a scaling; checks for wrappers and state dicts.

A forward pre-hook on each consumer scales the skip. The scaling is registered once, as `model.scalelong`.
No hook refers to the model itself: classes that copy by pickling their state (EDM's `persistence`) cannot copy a cycle.
"""

from __future__ import annotations

import sys
import warnings
from collections import Counter
from collections.abc import Iterator, MutableMapping, Sequence
from dataclasses import replace
from functools import partial
from importlib import import_module
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from scalelong.errors import short
from scalelong.scaling.constant import Scaling
from scalelong.skips.long_skip import (
    ATTACHMENT,
    Attachment,
    LongSkip,
    OutputChannels,
    as_nests,
    scale_inputs,
    scale_output,
)

ROOT_NAME = "scalelong"  # attribute of the model that holds the scaling, and its prefix in the state dict: `root_name`
CONFIG_KEY = "long_skip_scaling"  # key of the scaling in a diffusers config.json
FEATURES_KEY = "condition_on_features"  # likewise for `condition_on_features`
MUP_KEY = "mup"  # likewise for muP
STORED_KEYS = (CONFIG_KEY, FEATURES_KEY, MUP_KEY)
DIFFUSERS = "scalelong.diffusers"  # the library that pipelines record for a scaled model
LORA_TAG = "_scalelong"  # attribute of LoRA tensors in a state dict: the scaling they were trained with
_SKIPS = "_scalelong_skips"
_ADAPTED = "_scalelong_adapted"
Module = TypeVar("Module", bound=nn.Module)
_WRAPPERS = {
    "OptimizedModule": "torch.compile",
    "DataParallel": "DataParallel",
    "DistributedDataParallel": "DDP",
    "FullyShardedDataParallel": "FSDP",
    "PeftModel": "get_peft_model",
}


def attach(
    model: nn.Module, skips: Sequence[LongSkip], scaling: Scaling, branches: Sequence[tuple[str, ...]] = ()
) -> None:
    """Hook all consumers and residual branches (module names per block), and register the scaling at the root."""
    attachments = {name: Attachment(scaling, block=block) for block, names in enumerate(branches) for name in names}
    for skip, (name, slot) in ((each, point) for each in skips for point in each.hook_points):
        here = attachments.get(name, Attachment(scaling))
        if isinstance(slot, OutputChannels):
            attachments[name] = replace(here, outputs=(*here.outputs, (skip.index, slot)))
        else:
            attachments[name] = replace(here, inputs=(*here.inputs, (skip.index, slot)))
    for name, here in attachments.items():
        module = model.get_submodule(name)
        object.__setattr__(module, ATTACHMENT, here)
        if here.inputs:
            module.register_forward_pre_hook(scale_inputs, with_kwargs=True)
        if here.outputs or here.block is not None:
            module.register_forward_hook(scale_output)
    model.add_module(root_name(model), scaling)
    object.__setattr__(model, _SKIPS, tuple(skips))
    model._register_load_state_dict_pre_hook(partial(check_state_dict, _tensors_of(model)))  # type: ignore[no-untyped-call]
    model.register_state_dict_pre_hook(restore_constants)  # type: ignore[no-untyped-call]
    model._register_state_dict_hook(tag_lora)  # type: ignore[no-untyped-call]
    model.register_forward_pre_hook(partial(follow_adapter, root_name(model)))


def detach(model: nn.Module) -> None:
    for module in _hooked(model):
        delattr(module, ATTACHMENT)
        for key in drop_hook(module._forward_pre_hooks, scale_inputs):
            module._forward_pre_hooks_with_kwargs.pop(key, None)
        drop_hook(module._forward_hooks, scale_output)
    drop_hook(model._forward_pre_hooks, follow_adapter)
    delattr(model, root_name(model))
    delattr(model, _SKIPS)
    drop_hook(model._load_state_dict_pre_hooks, check_state_dict)
    drop_hook(model._state_dict_pre_hooks, restore_constants)
    drop_hook(model._state_dict_hooks, tag_lora)


def _tensors_of(model: nn.Module) -> nn.Module:
    """A module that shares the model's parameters, buffers and submodules, also after a deep copy of both."""
    tables = nn.Module()
    for name in ("_parameters", "_buffers", "_modules"):
        object.__setattr__(tables, name, getattr(model, name))
    return tables


def drop_hook(hooks: dict[int, Any], function: Any) -> list[int]:
    """Remove a hook function from a module's registry; it may be wrapped by torch, and by `partial`."""
    inner = {key: getattr(hook, "hook", hook) for key, hook in hooks.items()}
    keys = [key for key, hook in inner.items() if getattr(hook, "func", hook) is function]
    for key in keys:
        del hooks[key]
    return keys


def _hooked(model: nn.Module) -> Iterator[nn.Module]:
    return (module for module in list(model.modules()) if ATTACHMENT in module.__dict__)


def replace_scaling(model: nn.Module, scaling: Scaling) -> None:
    """Replace the scaling that the hooks use; for verifying hooks on copies."""
    _point_at(model, scaling)
    model.add_module(root_name(model), scaling)


def _point_at(model: nn.Module, scaling: Scaling) -> None:
    for module in _hooked(model):
        object.__setattr__(module, ATTACHMENT, replace(getattr(module, ATTACHMENT), scaling=scaling))


def follow_adapter(name: str, model: nn.Module, _args: Any) -> None:
    """Forward pre-hook: if peft wrapped the scaling (modules_to_save), use the copy of the active adapter."""
    if adapted(model, name, Scaling):
        active = scaling_of(model)
        if any(getattr(module, ATTACHMENT).scaling is not active for module in _hooked(model)):
            _point_at(model, active)


def adapted(model: nn.Module, name: str, kind: type[nn.Module]) -> bool:
    """Whether peft wraps this module of the model, or has done so: hooks may hold another copy than the one in use."""
    if not isinstance(getattr(model, name), kind) and not hasattr(model, _ADAPTED):
        object.__setattr__(model, _ADAPTED, True)
    return hasattr(model, _ADAPTED)


def unwrapped(child: Any, kind: type[Module]) -> Module | None:
    """A module of this kind, or the one in use inside peft's wrapper of it."""
    if isinstance(child, kind) or not isinstance(getattr(child, "original_module", None), kind):
        return child if isinstance(child, kind) else None
    names = [name for name in child.active_adapters if name in child.modules_to_save]
    found: Module = child.modules_to_save[names[0]] if names and not child.disable_adapters else child.original_module
    return found


def tag_lora(model: nn.Module, state_dict: MutableMapping[str, Any], prefix: str, *_: Any) -> None:
    """State-dict hook: tag LoRA tensors with the scaling, so LoRA files can record it."""
    lora = [tensor for key, tensor in state_dict.items() if key.startswith(prefix) and "lora_" in key]
    for tensor in lora:
        setattr(tensor, LORA_TAG, stored_scaling(model))


def stored_scaling(model: nn.Module) -> dict[str, Any]:
    """The scaling of a model in its stored form; default placement and automatically found skips are omitted."""
    scaling, skips = scaling_of(model), attached_skips(model)
    placement = {"placement": "after_norm"} if any(skip.after_norm for skip in skips) else {}
    given = {"skips": [[list(names) for names in nest] for nest in as_nests(skips)]} if skips[0].given else {}
    return {**scaling.config.to_json(), "num_skips": scaling.num_skips, **placement, **given}


def root_name(model: nn.Module) -> str:
    """The attribute name of the scaling; an alternative if the model already uses `scalelong`."""
    found = (name for name, child in model._modules.items() if unwrapped(child, Scaling) is not None)
    return next(found, f"{ROOT_NAME}_module" if hasattr(model, ROOT_NAME) else ROOT_NAME)


def attached_skips(model: nn.Module) -> list[LongSkip]:
    return list(getattr(model, _SKIPS))


def is_scaled(model: nn.Module) -> bool:
    """Whether a scaling is applied to this model.

    >>> is_scaled(nn.Linear(2, 2))
    False
    """
    return root_name(model) in model._modules


def scaling_of(model: nn.Module) -> Scaling:
    """The scaling of a model; ValueError if it has none.

    >>> import scalelong, diffusers
    >>> print(scaling_of(scalelong.apply(diffusers.UNet1DModel(), "cs").model).config)
    cs(kappa=0.7)
    """
    scaling = unwrapped(model._modules.get(root_name(model)), Scaling)
    if scaling is None:
        wrapper = wrapper_of(model)
        remedy = f"pass the model inside {wrapper}" if wrapper else "call scalelong.apply(model, ...) first"
        raise ValueError(f"model: this {type(model).__name__} is not scaled; {remedy}")
    return scaling


def check_unscaled(model: nn.Module) -> None:
    """Raise if the model is already scaled or cannot be scaled."""
    check_unwrapped(model)
    if any(True for _ in _hooked(model)):
        raise ValueError(f"model: this {type(model).__name__} is scaled already; call scalelong.remove(model) first")
    if isinstance(own := getattr(model, ROOT_NAME, 0), (int, str)) and own:
        twice = f"this {type(model).__name__} scales its skips itself (its attribute {ROOT_NAME!r} is {own!r})"
        remedy = (
            "build it without (scalelong=0), or use scalelong.load_official_uvit for weights of the public U-ViT code"
        )
        raise ValueError(f"model: {twice}; {remedy}")
    check_no_container(model, "the gates")


def check_no_container(model: nn.Module, added: str) -> None:
    """Raise if the model runs or hands out its children one by one, and so would what is added to it."""
    if isinstance(model, (nn.Sequential, nn.ModuleList, nn.ModuleDict)):
        kind = next(cls.__name__ for cls in type(model).__mro__ if cls.__module__.startswith("torch."))
        raise TypeError(f"model: a {kind} would run {added} as a layer; make it an attribute of a module and pass that")


def wrapper_of(model: nn.Module) -> str | None:
    return next((_WRAPPERS[cls.__name__] for cls in type(model).__mro__ if cls.__name__ in _WRAPPERS), None)


def check_unwrapped(model: nn.Module) -> None:
    """Reject wrapped models: hooks added after compiling or wrapping may not run."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: must be a torch.nn.Module, got {type(model).__name__}")
    if wrapper := wrapper_of(model):
        raise TypeError(f"model: apply scalelong before {wrapper}, to the module inside it, got {type(model).__name__}")


def reset_compiled() -> None:
    """Reset torch.compile, since compiled code ignores hooks added later."""
    if "torch._dynamo" in sys.modules:  # otherwise nothing has been compiled
        torch.compiler.reset()


def match(added: nn.Module, model: nn.Module) -> None:
    """Match the mode of the model and the device and dtype of most of its weights."""
    added.train(model.training)
    weights: Counter[tuple[torch.device, torch.dtype]] = Counter()
    for parameter in (p for p in model.parameters() if p.is_floating_point()):
        weights[parameter.device, parameter.dtype] += parameter.numel()
    for (device, dtype), _ in weights.most_common(1):
        added.to(device=device, dtype=dtype)


def write_config(model: Any, stored: dict[str, Any] | None, key: str = CONFIG_KEY) -> None:
    """Write an entry to a diffusers model's config, which `save_pretrained` stores; None removes it.

    A pipeline names `scalelong.diffusers` as the library of a model with such an entry.
    """
    if not hasattr(model, "register_to_config"):
        return
    if stored is not None:
        import_module(DIFFUSERS)
        model.register_to_config(**{key: stored})
        object.__setattr__(model, "__module__", DIFFUSERS)
        return
    entries = {name: value for name, value in model._internal_dict.items() if name != key}
    model._internal_dict = type(model._internal_dict)(entries)
    if entries.keys().isdisjoint(STORED_KEYS):
        vars(model).pop("__module__", None)


def check_state_dict(model: nn.Module, state_dict: MutableMapping[str, Tensor], prefix: str, *_: Any) -> None:
    """Load-state-dict pre-hook: reject weights trained with a different scaling before loading anything."""
    scaling = model._modules.get(root_name(model))
    if not isinstance(scaling, Scaling):
        return
    here = f"{prefix}{root_name(model)}."
    given = {key.removeprefix(here): value for key, value in state_dict.items() if key.startswith(here)}
    expected, remedy = scaling.state_dict(), "apply the scaling they were trained with first"
    if not given:
        _handle_missing(model, scaling, state_dict, prefix)
        return
    if given.keys() != expected.keys():
        saved = f"{short(sorted(given))} rather than {short(sorted(expected))}"
        raise ValueError(f"state_dict.{here}*: saved with another scaling than {scaling.config}: {saved}; {remedy}")
    for key, value in expected.items():
        if given[key].shape != value.shape:
            fit = f"shape {tuple(given[key].shape)} does not fit {tuple(value.shape)} of {scaling.config}"
            raise ValueError(f"state_dict.{here}{key}: {fit} on {scaling.num_skips} skips; {remedy}")
    for key, value in _constants(scaling).items():
        theirs = value if given[key].is_meta else given[key].float().cpu()
        if not torch.allclose(theirs, value, rtol=1e-2, atol=1e-6):  # may be rounded to half precision
            trained, applied = ([round(number, 4) for number in each.flatten().tolist()] for each in (theirs, value))
            numbers = f"the weights were trained with {trained}, the model applies {applied}"
            raise ValueError(f"state_dict.{here}{key}: {numbers}; {remedy}")


def restore_constants(model: nn.Module, *_: Any) -> None:
    """State-dict pre-hook: refill buffers that `to_empty` left uninitialized."""
    scaling = model._modules.get(root_name(model))
    if not isinstance(scaling, Scaling):
        return
    for key, value in _constants(scaling).items():
        buffer = scaling.get_buffer(key)
        if type(buffer) is Tensor and not buffer.is_inference():
            buffer.copy_(value)


def _handle_missing(model: nn.Module, scaling: Scaling, state_dict: MutableMapping[str, Tensor], prefix: str) -> None:
    """Handle weights without scaling: raise for missing gates, warn for missing constants, ignore partial state dicts."""
    name = root_name(model)
    complete = all(prefix + key in state_dict for key in model.state_dict() if not key.startswith(f"{name}."))
    has_gates = any(True for _ in scaling.parameters())
    if complete and has_gates:
        lacking = f"state_dict.{prefix}{name}.*: the weights contain no gates for {scaling.config}"
        raise ValueError(f"{lacking}; to start from them, load the weights before scalelong.apply")
    if complete:
        lacking = f"the loaded weights have no scaling (no {name}.*), they were trained without"
        warnings.warn(f"{lacking}; the model keeps {scaling.config}", stacklevel=7)  # at load_state_dict of the model
    if not has_gates:
        for key, value in _constants(scaling).items():
            own = scaling.get_buffer(key)
            state_dict[f"{prefix}{name}.{key}"] = value if own.is_meta else value.to(own)


def _constants(scaling: Scaling) -> dict[str, Tensor]:
    """The constants of a scaling, independent of its buffers."""
    return {key: torch.tensor(v, dtype=torch.float32, device="cpu") for key, v in scaling.constants.items()}
