"""The torch functions that can bring a long skip into a decoder, cat, add and lerp, and their operands."""

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


def name_of(func: Any) -> str:
    """The plain name of a torch function, of a tensor method, or of a property that is a tensor; "__get__" of others."""
    name = str(getattr(func, "__name__", func))
    if name == "__get__" and func.__self__.__name__ in TENSOR_PROPERTIES:
        return str(func.__self__.__name__)
    return name


@dataclass(frozen=True)
class JoinCall:
    """One call of a joining function; `addmm(input, a, b)` joins input and a (times b)."""

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
        """Along which dimension `cat` concatenates, from 0."""
        if self.name == "hstack":
            dim = 1
        elif len(self.args) > 1:
            dim = self.args[1]
        else:
            dim = self.kwargs.get("dim", self.kwargs.get("axis", 0))
        first = next(operand for operand in self.operands() if isinstance(operand, Tensor))
        return int(dim) % first.ndim

    def with_operand(self, position: int, change: Callable[[Tensor], Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of the same call with one operand changed."""
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
class Which:
    """A call of a torch function: its name, its number among all calls and, of a joining one, among those."""

    name: str
    op: int
    join: int


class CountingMode(TorchFunctionMode):
    """Sees every torch function in order and numbers the joining calls and all calls, the same way in every run."""

    def __init__(self) -> None:
        super().__init__()
        self.ops = 0
        self.joins = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = name_of(func)
        if name == "__get__":
            return func(*args, **kwargs)
        op, join = self.ops, self.joins
        self.ops += 1
        self.joins += name in KINDS
        return self.seen(func, Which(name, op, join), args, kwargs)

    def seen(self, func: Any, which: Which, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        raise NotImplementedError


class ScaleSlices(CountingMode):
    """The oracle of placement="after_norm": scales some channels of what chosen calls give, or are given first."""

    def __init__(self, given: frozenset[int], taken: frozenset[int], start: int, size: int, factor: float) -> None:
        super().__init__()
        self.given, self.taken, self.start, self.size, self.factor = given, taken, start, size, factor
        self.hits = 0

    def seen(self, func: Any, which: Which, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if which.op in self.taken:
            args = (self._scaled(args[0]), *args[1:])
        result = func(*args, **kwargs)
        return self._scaled(result) if which.op in self.given else result

    def _scaled(self, tensor: Tensor) -> Tensor:
        self.hits += 1
        factors = torch.ones(tensor.shape[1], dtype=tensor.dtype, device=tensor.device)
        factors[self.start : self.start + self.size] = self.factor
        return tensor * factors.view(1, -1, *[1] * (tensor.ndim - 2))


class ScaleOperand(CountingMode):
    """The oracle: multiplies chosen operands (of joining calls, by number) by a factor; keeps what chosen calls give."""

    def __init__(self, operands: dict[int, int], factor: float, watched: frozenset[int] = frozenset()) -> None:
        super().__init__()
        self.operands, self.factor, self.watched = operands, factor, watched
        self.hits = 0
        self.outputs: dict[int, list[Tensor]] = {}

    def seen(self, func: Any, which: Which, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if which.name in KINDS and which.join in self.operands:
            self.hits += 1
            args, kwargs = JoinCall(which.name, args, kwargs).with_operand(
                self.operands[which.join], lambda t: t * self.factor
            )
        result = func(*args, **kwargs)
        if which.op in self.watched:
            given = result if isinstance(result, (list, tuple)) else [result]
            self.outputs[which.op] = [item.detach().clone() for item in given if isinstance(item, Tensor)]
        return result
