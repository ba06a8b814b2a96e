"""Parse example inputs, run a model on them without side effects, and roll back changes on error."""

from __future__ import annotations

import copy
import functools
import random
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import fields, is_dataclass
from typing import Any, TypeVar, cast

import numpy as np
import torch
from torch import Tensor, nn

from scalelong.skips.long_skip import Call, same_type

Function = TypeVar("Function", bound=Callable[..., Any])


def as_call(example: Any) -> Call:
    """Convert an example (a tensor, tuple, list, dict or pair (args, kwargs)) to (args, kwargs)."""
    if isinstance(example, Tensor):
        return (example,), {}
    if isinstance(example, Mapping):
        return (), dict(example)
    if isinstance(example, (tuple, list)):
        if len(example) == 2 and isinstance(example[0], (tuple, list)) and isinstance(example[1], Mapping):
            return tuple(example[0]), dict(example[1])
        return tuple(example), {}
    raise TypeError(
        f"example: must be a tensor, a tuple, a dict or a pair (args, kwargs), got {type(example).__name__}"
    )


def merge_example(example: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call | None:
    """The call given as `example=` or as plain arguments, or None."""
    if example is None:
        return (args, kwargs) if args or kwargs else None
    if args or kwargs:
        raise TypeError("example: pass either example= or the arguments of the model themselves, got both")
    return as_call(example)


def map_tensors(change: Callable[[Tensor], Any], value: Any) -> Any:
    """Apply a function to every tensor in nested tuples, lists, mappings and dataclasses; returns copies of these."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, (tuple, list)):
        return same_type(value, (map_tensors(change, item) for item in value))
    mapped: Any = value
    if isinstance(value, MutableMapping):
        mapped = copy.copy(value)
        for key, item in value.items():
            mapped[key] = map_tensors(change, item)
    elif is_dataclass(value) and not isinstance(value, type):
        mapped = copy.copy(value)
        for field in fields(value):
            object.__setattr__(mapped, field.name, map_tensors(change, getattr(value, field.name)))
    return mapped


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Every tensor in nested tuples, lists, mappings and dataclasses (such as output classes)."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (Mapping, tuple, list)):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from tensors_in(item)
    elif hasattr(value, "__dataclass_fields__"):
        yield from tensors_in([getattr(value, name) for name in value.__dataclass_fields__])


def is_meta(model: nn.Module) -> bool:
    """Whether the model is on the meta device: shapes without values."""
    return any(parameter.is_meta for parameter in model.parameters())


def independent_copy(model: nn.Module) -> nn.Module:
    """Deep-copy the model; raise a ValueError if the copy shares weights or modules with it."""
    attributes = [value for module in model.modules() for value in vars(module).values() if isinstance(value, Tensor)]
    computed = [value for value in attributes if not value.is_leaf]  # as torch.nn.utils.weight_norm keeps them
    copied = copy.deepcopy(model, {id(value): value.detach().clone() for value in computed})
    own = {id(parameter) for parameter in model.parameters()}
    shared = next((name for name, parameter in copied.named_parameters() if id(parameter) in own), None)
    if shared is not None or copied.state_dict().keys() != model.state_dict().keys():
        how = f"shares its {shared}" if shared is not None else "has other tensors than it"
        reason = (
            f"a copy.deepcopy of this {type(model).__name__} {how}, so it cannot be tried without changing the model"
        )
        raise ValueError(f"model: {reason}; let its __deepcopy__ copy everything")
    return copied


def own_copy(call: Call, meta: bool = False) -> Call:
    """The call with copies of its tensors, which a forward may modify in place; on the meta device if `meta`."""
    args, kwargs = map_tensors(lambda tensor: tensor.to("meta") if meta else tensor.detach().clone(), call)
    return args, kwargs


def run_example(model: nn.Module, call: Call) -> Any:
    """Run model(*args, **kwargs) in eager mode; errors are re-raised as a ValueError about the example."""
    args, kwargs = call
    try:
        with uncompiled():
            return model(*args, **kwargs)
    except Exception as error:
        failed = f"the forward of {type(model).__name__} fails on it ({type(error).__name__}: {error})"
        raise ValueError(f"example: {failed}; pass the arguments you would call the model with") from error


def uncompiled() -> AbstractContextManager[Any]:
    """Run compiled modules in eager mode; temporary hooks would make them recompile."""
    set_stance = getattr(torch.compiler, "set_stance", None)  # new in torch 2.6
    return set_stance("force_eager") if set_stance else nullcontext()


class Snapshot:
    """Snapshot of the modules, attributes, hooks, config and modes of a model, and of all random states.

    Weights are kept by reference; `keep_values` copies those about to be modified in place.
    """

    def __init__(self, model: nn.Module) -> None:
        plain = [module for module in model.modules() if not isinstance(module, torch.jit.ScriptModule)]
        self._modules = [(module, type(module), dict(vars(module)), _tables(module)) for module in plain]
        self._values: list[tuple[Tensor, Tensor]] = []
        self._random = random.getstate(), np.random.get_state(), torch.get_rng_state()
        used = torch.cuda.is_available() and torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        self._cuda = torch.cuda.get_rng_state_all() if used else []

    def keep_values(self, tensors: Iterable[Tensor]) -> None:
        self._values += [(tensor, tensor.detach().cpu().clone()) for tensor in tensors if not tensor.is_meta]

    def restore(self) -> None:
        """Restore the snapshot."""
        for module, cls, attributes, tables in self._modules:
            if type(module) is not cls:
                continue  # a lazy module that has been initialized
            for name in vars(module).keys() - attributes.keys():
                del vars(module)[name]
            vars(module).update(attributes)
            for table, content in tables:
                table.clear()
                table.update(content)
        with torch.no_grad():
            for tensor, value in self._values:
                tensor.copy_(value)
        random.setstate(self._random[0])
        np.random.set_state(self._random[1])
        torch.set_rng_state(self._random[2])
        torch.cuda.set_rng_state_all(self._cuda)


def _tables(module: nn.Module) -> list[tuple[Any, Any]]:
    """The module's dicts and sets (parameters, submodules, hooks) with copies of their content."""
    return [(table, table.copy()) for table in vars(module).values() if type(table) in (dict, OrderedDict, set)]


@contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """Switch to eval mode outside inference mode; restore modes, attributes, buffers and random states afterwards."""
    before, modes = Snapshot(model), [(module, module.training) for module in model.modules()]
    mutable = [buffer for buffer in model.buffers() if not buffer.is_meta and not buffer.is_inference()]
    buffers = [(buffer, buffer._version, buffer.detach().clone()) for buffer in mutable]
    try:
        for module, _ in modes:
            if type(module).train is nn.Module.train:  # a custom train() may merge weights: keep the mode
                module.training = False
        with torch.inference_mode(False):
            yield
    finally:
        before.restore()
        for module, training in modes:  # also of scripted and lazy modules
            module.training = training
        with torch.no_grad():
            for buffer, version, value in buffers:
                if buffer._version != version:
                    buffer.copy_(value)


@contextmanager
def restored_on_error(model: nn.Module, values: Iterable[Tensor] = ()) -> Iterator[None]:
    """Restore the model, these tensors' values and all random states on an error or Ctrl-C."""
    before = Snapshot(model)
    before.keep_values(values)
    try:
        yield
    except BaseException:
        before.restore()
        raise


def unchanged_on_error(function: Function) -> Function:
    """Decorate a function of a model with `restored_on_error`."""

    @functools.wraps(function)
    def guarded(model: Any, *args: Any, **kwargs: Any) -> Any:
        with restored_on_error(model) if isinstance(model, nn.Module) else nullcontext():
            return function(model, *args, **kwargs)

    return cast(Function, guarded)
