"""Trace one forward pass as a graph of tensors and module calls.

Nodes are tensors that depend on the input, in the order they were computed. A node has a `weight` if its op mixes the data
with a weight matrix or kernel of the model. A module call is an interval of nodes.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from scalelong.skips.example import is_meta, own_copy, run_example, tensors_in, undisturbed
from scalelong.skips.long_skip import Argument, Call, Item

INPUT = "input"  # name of the nodes that are inputs of the model

Kind = Literal["cat", "add", "lerp"]
JOIN_OPS: dict[str, Kind] = {  # the torch functions that can bring a long skip into a decoder
    **dict.fromkeys(("cat", "concat", "concatenate", "hstack"), "cat"),
    **dict.fromkeys(("add", "add_", "__add__", "__radd__", "__iadd__", "addmm"), "add"),
    **dict.fromkeys(("lerp", "lerp_"), "lerp"),
}
TENSOR_PROPERTIES = frozenset({"T", "mT", "H", "mH", "data", "real", "imag"})
ELEMENTWISE = frozenset(JOIN_OPS) - {"addmm"} | {
    *("mul", "mul_", "__mul__", "__rmul__", "__imul__", "sub", "sub_", "__sub__", "__rsub__", "div", "div_"),
    *("__truediv__", "addcmul", "addcmul_", "where", "layer_norm", "group_norm", "batch_norm", "rms_norm"),
    *("instance_norm", "expand", "expand_as", "prelu", "__setitem__", "copy_"),
}
ONLY_SHAPE = frozenset({  # their outputs depend on the shape and dtype of the input, not on its values
    *("new_zeros", "new_ones", "new_empty", "new_full", "new_tensor", "zeros_like", "ones_like", "empty_like"),
    *("full_like", "rand_like", "randn_like", "randint_like"),
})  # fmt: skip


@dataclass(frozen=True)
class Join:
    """The join op that created a node; operands are nodes, or None if they do not depend on the input."""

    ordinal: int  # its number among the join ops
    kind: Kind
    operands: tuple[int | None, ...]
    dim: int | None  # of `cat`
    sizes: tuple[int, ...]  # of `cat`: width of each operand along `dim`

    def channels(self, position: int) -> tuple[int, int]:
        """Start and width of an operand in the concatenation."""
        return sum(self.sizes[:position]), self.sizes[position]


@dataclass(frozen=True)
class Node:
    """A tensor that depends on the input."""

    index: int
    parents: tuple[int, ...]
    name: str  # of the op that made it
    op: int  # number of the op
    call: int  # innermost module call around it
    shape: tuple[int, ...]
    weight: str | None = None  # name of the weight matrix or kernel that the data was mixed with
    join: Join | None = None


@dataclass
class ModuleCall:
    """One call of a module, which created the nodes start <= index < end."""

    index: int
    name: str
    module: nn.Module
    parent: int  # -1: the model itself
    start: int
    end: int = -1
    inputs: list[tuple[Argument | Item, int]] = field(default_factory=list)  # slots that carried nodes
    lists: list[tuple[list[Any], int, Argument]] = field(default_factory=list)  # list arguments and their lengths
    drained: set[Argument] = field(default_factory=set)  # list arguments whose length it changed
    returned: set[int] = field(default_factory=set)

    def holds(self, node: int) -> bool:
        return self.start <= node < self.end


@dataclass
class Trace:
    """The graph of one forward pass."""

    model: str  # its class
    nodes: list[Node]
    calls: list[ModuleCall]

    def __post_init__(self) -> None:
        self.children: list[list[int]] = [[] for _ in self.nodes]
        self.ancestors: list[int] = []  # one bit per node, itself included
        weighted = 0
        self.depth: list[int] = []  # number of weighted ops that a node depends on
        for node in self.nodes:
            bits = 1 << node.index
            weighted |= bits if node.weight else 0
            for parent in node.parents:
                bits |= self.ancestors[parent]
                self.children[parent].append(node.index)
            self.ancestors.append(bits)
            self.depth.append((bits & weighted).bit_count())

    def leads_to(self, first: int, last: int) -> bool:
        return bool(self.ancestors[last] >> first & 1)

    def weights_between(self, first: int, last: int, at_most: int) -> int:
        """Number of weighted ops on the paths from `first` to `last`, capped at `at_most`."""
        weighted = (node.index for node in self.nodes[first + 1 : last + 1] if node.weight)
        between = (node for node in weighted if self.leads_to(first, node) and self.leads_to(node, last))
        return sum(1 for _ in itertools.islice(between, at_most))

    def stack(self, call: int) -> list[int]:
        """A module call and those around it, outermost first."""
        calls = []
        while call >= 0:
            calls.append(call)
            call = self.calls[call].parent
        return calls[::-1]

    def times_called(self, call: ModuleCall) -> int:
        return sum(other.module is call.module for other in self.calls)

    def module_name(self, node: int) -> str:
        call = self.nodes[node].call
        return (self.calls[call].name if call >= 0 else "") or "the model itself"


class CountingMode(TorchFunctionMode):
    """Intercept and number every torch function call deterministically; subclasses implement `on_call`."""

    op = join = -1  # numbers of the current call among all calls, and among the join ops

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = str(getattr(func, "__name__", func))
        if name == "__get__":
            name = func.__self__.__name__
            if name not in TENSOR_PROPERTIES:
                return func(*args, **kwargs)
        self.op += 1
        if name in JOIN_OPS:
            self.join += 1
            args, kwargs = _positional_operands(args, kwargs)
        return self.on_call(func, name, args, kwargs)

    def on_call(self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        raise NotImplementedError


def _positional_operands(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
    """A call of a join op: ([a, b, ...], dim) for cat, (a, b, ...) for the others; addmm joins a and b (times c)."""
    for keys in (("tensors", "input"), ("other", "end", "mat1"))[len(args) :]:
        args += tuple(kwargs[key] for key in keys if key in kwargs)
        kwargs = {key: value for key, value in kwargs.items() if key not in keys}
    return args, kwargs


class _Recorder(CountingMode):
    """Record nodes; `enter` and `leave` are hooks on every module."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.nodes: list[Node] = []
        self.calls: list[ModuleCall] = []
        self.open: list[int] = []
        self.node_of = WeakTensorKeyDictionary()
        self.weight_of = WeakTensorKeyDictionary()  # parameters, and tensors computed from parameters alone
        self.constants = WeakTensorKeyDictionary()  # tensors computed from neither parameters nor inputs
        self.module_names = {module: name for name, module in model.named_modules()}
        for name, parameter in model.named_parameters():
            self.weight_of[parameter] = name

    def add(self, tensor: Tensor, parents: list[int], name: str, op: int = -1, **more: Any) -> None:
        call = self.open[-1] if self.open else -1
        node = Node(len(self.nodes), tuple(dict.fromkeys(parents)), name, op, call, tuple(tensor.shape), **more)
        self.nodes.append(node)
        self.node_of[tensor] = node.index

    def on_call(self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given = list(tensors_in([args, kwargs]))
        parents = [self.node_of[tensor] for tensor in given if tensor in self.node_of and name not in ONLY_SHAPE]
        weights = [(tensor, self.weight_of[tensor]) for tensor in given if tensor in self.weight_of]
        join = self._join(name, args, kwargs) if name in JOIN_OPS and parents else None
        result = func(*args, **kwargs)
        if name in ("__setitem__", "copy_"):
            self.add(args[0], parents, name, self.op)
            return result
        in_place = name.endswith("_") and (not name.endswith("__") or name.startswith("__i"))
        matrices = [key for tensor, key in weights if tensor.ndim >= 2 and name not in ELEMENTWISE]
        for tensor in tensors_in(result):
            if not in_place and any(tensor is other for other in given):
                continue  # contiguous(), to() and others may return their input
            if parents:
                self.add(tensor, parents, name, self.op, weight=next(iter(matrices), None), join=join)
            elif weights and tensor not in self.weight_of:
                self.weight_of[tensor] = weights[0][1]
            else:
                self.constants[tensor] = True
        return result

    def _join(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Join:
        operands = args[0] if JOIN_OPS[name] == "cat" else args[:2]
        nodes = tuple(self.node_of[o] if isinstance(o, Tensor) and o in self.node_of else None for o in operands)
        if JOIN_OPS[name] != "cat":
            return Join(self.join, JOIN_OPS[name], nodes, None, ())
        dim = 1 if name == "hstack" else args[1] if len(args) > 1 else kwargs.get("dim", kwargs.get("axis", 0))
        dim = int(dim) % operands[0].ndim
        return Join(self.join, "cat", nodes, dim, tuple(int(operand.shape[dim]) for operand in operands))

    def enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        parent = self.open[-1] if self.open else -1
        call = ModuleCall(len(self.calls), self.module_names[module], module, parent, len(self.nodes))
        for argument, value in _named_arguments(module, (args, kwargs)):
            if isinstance(value, Tensor) and value in self.node_of:
                call.inputs.append((argument, self.node_of[value]))
            elif isinstance(value, (tuple, list)):
                for at, item in enumerate(value):
                    if isinstance(item, Tensor) and item in self.node_of:
                        call.inputs.append((Item(argument, at - len(value)), self.node_of[item]))
                if isinstance(value, list):
                    call.lists.append((value, len(value), argument))
        self.calls.append(call)
        self.open.append(call.index)

    def leave(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        call = self.calls[self.open[-1]]
        with torch._C.DisableTorchFunction():
            sources = [self.node_of[t] for t in tensors_in([args, kwargs]) if t in self.node_of]
            for tensor in tensors_in(result):  # a tensor from outside torch functions, e.g. a custom op
                if sources and not any(tensor in known for known in (self.node_of, self.weight_of, self.constants)):
                    weight = next((self.weight_of[p] for p in module.parameters() if p in self.weight_of), None)
                    self.add(tensor, sources, "module", weight=weight)
                if tensor in self.node_of:
                    call.returned.add(self.node_of[tensor])
        call.end = len(self.nodes)
        call.drained = {argument for items, length, argument in call.lists if len(items) != length}
        call.lists.clear()
        self.open.pop()


def _named_arguments(module: nn.Module, call: Call) -> Iterator[tuple[Argument, Any]]:
    args, kwargs = call
    try:
        signature = inspect.signature(module.forward).parameters.values()
    except (TypeError, ValueError):  # a builtin or scripted forward
        signature = ()  # type: ignore[assignment]
    names = [p.name for p in signature if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    for position, value in enumerate(args):
        yield Argument(position, names[position] if position < len(names) else ""), value
    for key, value in kwargs.items():
        yield Argument(names.index(key) if key in names else len(names) + len(args), key), value


def trace(model: nn.Module, call: Call) -> Trace:
    """Run the model once on the example, without gradients and without side effects, and return the graph."""
    recorder = _Recorder(model)
    with undisturbed(model), torch.no_grad(), ExitStack() as hooks:
        call = own_copy(call, is_meta(model))
        for tensor in tensors_in(call):
            if tensor not in recorder.node_of:
                recorder.add(tensor, [], INPUT)
        for module in model.modules():
            if isinstance(module, torch.jit.ScriptModule) or type(module).__name__ == "OptimizedModule":
                continue  # cannot be hooked; the module inside an OptimizedModule can
            hooks.enter_context(module.register_forward_pre_hook(recorder.enter, with_kwargs=True))
            hooks.enter_context(module.register_forward_hook(recorder.leave, with_kwargs=True))
        with recorder:
            result = run_example(model, call)
    if not any(tensor in recorder.node_of for tensor in tensors_in(result)):
        scripted = any(isinstance(module, torch.jit.ScriptModule) for module in model.modules())
        hint = " (it has scripted parts, which cannot be traced: script it after scaling)" if scripted else ""
        raise ValueError(f"example: the output of {type(model).__name__} does not depend on it{hint}")
    return Trace(type(model).__name__, recorder.nodes, recorder.calls)
