"""An example call of a model, and running it without leaving a trace: all that a forward may change comes back."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from scalelong.skips.long_skip import Call


def as_call(example: Any) -> Call:
    """An example as (args, kwargs): given as such a pair, as a tuple or list of arguments, a dict of them, or one tensor."""
    if isinstance(example, Tensor):
        return (example,), {}
    if isinstance(example, Mapping):
        return (), dict(example)
    if isinstance(example, tuple) and len(example) == 2 and isinstance(example[1], Mapping):
        first = example[0]
        if isinstance(first, (tuple, list)):
            return tuple(first), dict(example[1])
    if isinstance(example, (tuple, list)):
        return tuple(example), {}
    raise TypeError(
        f"example: must be a tensor, a tuple of arguments, a dict of them or a pair (args, kwargs), "
        f"got {type(example).__name__}"
    )


def map_tensors(change: Callable[[Tensor], Any], value: Any) -> Any:
    """The same nest of tuples, lists and dicts with every tensor changed."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, dict):
        return {key: map_tensors(change, item) for key, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(map_tensors(change, item) for item in value))
    if isinstance(value, (tuple, list)):
        return type(value)(map_tensors(change, item) for item in value)
    return value


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Every tensor in a nest of tuples, lists and mappings (output classes among them)."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from tensors_in(item)
    elif hasattr(value, "__dataclass_fields__"):
        for name in value.__dataclass_fields__:
            yield from tensors_in(getattr(value, name))


def is_meta(model: nn.Module) -> bool:
    """Whether the model has shapes but no values, so that nothing can be measured on it."""
    return any(parameter.is_meta for parameter in model.parameters())


def own_copy(call: Call, meta: bool = False) -> Call:
    """The same call with tensors that a forward may change in place, on the meta device if asked for."""
    args, kwargs = map_tensors(lambda tensor: tensor.to("meta") if meta else tensor.detach().clone(), call)
    return args, kwargs


def run_example(model: nn.Module, call: Call) -> Any:
    """model(*args, **kwargs), compiled parts run as they were written; its own error is chained under one of ours."""
    args, kwargs = call
    try:
        with uncompiled():
            return model(*args, **kwargs)
    except Exception as error:
        raise ValueError(
            f"example: the forward of {type(model).__name__} fails on it ({type(error).__name__}: {error}); "
            "give the arguments you would call the model with"
        ) from error


def uncompiled() -> AbstractContextManager[Any]:
    """What `torch.compile` or `module.compile()` compiled runs as it was written: hooks would compile it anew each time."""
    set_stance = getattr(torch.compiler, "set_stance", None)  # new in torch 2.6
    return set_stance("force_eager") if set_stance else nullcontext()


class _Assigned:
    """What the attributes and buffers of a module are; a counter beside a cache must come back with it."""

    def __init__(self, module: nn.Module) -> None:
        self.module, self.cls = module, type(module)
        self.attributes, self.buffers = dict(vars(module)), dict(module._buffers)

    def restore(self) -> None:
        if type(self.module) is not self.cls:
            return  # a lazy module that now has its weights
        now = vars(self.module)
        now.update({name: value for name, value in self.attributes.items() if name in now})
        self.module._buffers.update(self.buffers)


@contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """Inside, the model is in eval mode, torch not in inference mode; then all is as it was.

    Modes, buffers, what a forward assigns to attributes of its modules, and random states come back.
    """
    modes = [(module, module.training) for module in model.modules()]
    assigned = [_Assigned(module) for module in model.modules() if not isinstance(module, torch.jit.ScriptModule)]
    kept = [
        buffer for buffer in model.buffers() if not buffer.is_meta and not buffer.is_inference()
    ]  # those cannot change
    buffers = [(buffer, buffer._version, buffer.detach().clone()) for buffer in kept]
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    on_cuda = torch.cuda.is_available() and torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    cuda = torch.cuda.get_rng_state_all() if on_cuda else None
    model.eval()
    try:
        with torch.inference_mode(False):
            yield
    finally:
        for module, training in modes:
            module.training = training
        for each in assigned:
            each.restore()
        with torch.no_grad():
            for buffer, version, before in buffers:
                if buffer._version != version:
                    buffer.copy_(before)
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])
        if cuda is not None:
            torch.cuda.set_rng_state_all(cuda)
