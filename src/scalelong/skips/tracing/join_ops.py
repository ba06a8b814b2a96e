"""Join ops, the torch functions that can bring a long skip into a decoder (cat, add, lerp), and modes that act on them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

Kind = Literal["cat", "add", "lerp"]

KINDS: dict[str, Kind] = {
    **dict.fromkeys(("cat", "concat", "concatenate", "hstack"), "cat"),
    **dict.fromkeys(("add", "add_", "__add__", "__radd__", "__iadd__", "addmm"), "add"),
    **dict.fromkeys(("lerp", "lerp_"), "lerp"),
}
TENSOR_PROPERTIES = frozenset({"T", "mT", "H", "mH", "data", "real", "imag"})


def _name(func: Any) -> str:
    """Name of a torch function, tensor method, or property that returns a tensor; "__get__" for other properties."""
    name = str(getattr(func, "__name__", func))
    if name == "__get__" and func.__self__.__name__ in TENSOR_PROPERTIES:
        return str(func.__self__.__name__)
    return name


@dataclass(frozen=True)
class JoinCall:
    """One call of a join op; `addmm(input, a, b)` joins input and a (times b)."""

    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @property
    def kind(self) -> Kind:
        return KINDS[self.name]

    def operands(self) -> list[Any]:
        if self.kind == "cat":
            return list(self.args[0] if self.args else self.kwargs["tensors"])
        given = list(self.args[:2])
        for key in ("input", "other", "end", "mat1"):
            if len(given) < 2 and key in self.kwargs:
                given.append(self.kwargs[key])
        return given

    def dim(self) -> int:
        """The dimension that `cat` concatenates along, counted from 0."""
        if self.name == "hstack":
            dim = 1
        elif len(self.args) > 1:
            dim = self.args[1]
        else:
            dim = self.kwargs.get("dim", self.kwargs.get("axis", 0))
        first = next(operand for operand in self.operands() if isinstance(operand, Tensor))
        return int(dim) % first.ndim

    def with_operand(self, position: int, change: Callable[[Tensor], Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of the call with one operand changed."""
        if self.kind == "cat":
            operands = self.operands()
            operands[position] = change(operands[position])
            if self.args:
                return (operands, *self.args[1:]), self.kwargs
            return (), {**self.kwargs, "tensors": operands}
        if position < len(self.args):
            changed = change(self.args[position])
            return (*self.args[:position], changed, *self.args[position + 1 :]), self.kwargs
        key = next(k for k in ("other", "end", "mat1") if k in self.kwargs)
        return self.args, {**self.kwargs, key: change(self.kwargs[key])}


@dataclass(frozen=True)
class OpCall:
    """A call of a torch function: its name, its number among all calls, and its number among the join ops."""

    name: str
    op: int
    join: int


class CountingMode(TorchFunctionMode):
    """Intercept every torch function and number the calls, the same way in every run; subclasses implement `on_call`."""

    def __init__(self) -> None:
        super().__init__()
        self.ops = 0
        self.joins = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = _name(func)
        if name == "__get__":
            return func(*args, **kwargs)
        op, join = self.ops, self.joins
        self.ops += 1
        self.joins += name in KINDS
        return self.on_call(func, OpCall(name, op, join), args, kwargs)

    def on_call(self, func: Any, call: OpCall, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        raise NotImplementedError


class ScaleOperand(CountingMode):
    """Multiply chosen operands (join number: operand position) by a factor; keep the outputs of the `watched` ops."""

    def __init__(self, operands: dict[int, int], factor: float, watched: frozenset[int] = frozenset()) -> None:
        super().__init__()
        self.operands, self.factor, self.watched = operands, factor, watched
        self.hits = 0
        self.outputs: dict[int, list[Tensor]] = {}

    def on_call(self, func: Any, call: OpCall, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if call.name in KINDS and call.join in self.operands:
            self.hits += 1
            position = self.operands[call.join]
            args, kwargs = JoinCall(call.name, args, kwargs).with_operand(position, lambda t: t * self.factor)
        result = func(*args, **kwargs)
        if call.op in self.watched:
            outputs = result if isinstance(result, (list, tuple)) else [result]
            self.outputs[call.op] = [item.detach().clone() for item in outputs if isinstance(item, Tensor)]
        return result


class ScaleSlices(CountingMode):
    """Multiply a slice of channels by a factor: in the output of some ops, in the first input of others."""

    def __init__(self, outputs: frozenset[int], inputs: frozenset[int], start: int, size: int, factor: float) -> None:
        super().__init__()
        self.outputs_of, self.inputs_of, self.start, self.size, self.factor = outputs, inputs, start, size, factor
        self.hits = 0

    def on_call(self, func: Any, call: OpCall, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if call.op in self.inputs_of:
            args = (self._scale(args[0]), *args[1:])
        result = func(*args, **kwargs)
        return self._scale(result) if call.op in self.outputs_of else result

    def _scale(self, tensor: Tensor) -> Tensor:
        self.hits += 1
        factors = torch.ones(tensor.shape[1], dtype=tensor.dtype, device=tensor.device)
        factors[self.start : self.start + self.size] = self.factor
        return tensor * factors.view(1, -1, *[1] * (tensor.ndim - 2))
