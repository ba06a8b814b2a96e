"""Find the long skips of a network nobody told us about, from one forward pass on an example."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from scalelong.scaling.base import SkipSize
from scalelong.skips.long_skip import Call, LongSkip
from scalelong.skips.tracing.hook_points import grip
from scalelong.skips.tracing.nesting import Loop, NoLongSkipsError, long_loops
from scalelong.skips.tracing.trace import INPUT, ModuleCall, Trace, trace


@dataclass(frozen=True)
class Detection:
    """What was found: the graph of the forward pass, its long loops (outermost first) and how to take hold of them."""

    model: str  # its class
    trace: Trace
    loops: list[Loop]

    def skips(self) -> list[LongSkip]:
        """The loops as skips that can be scaled; `NoLongSkipsError` where one cannot be taken hold of."""
        return [self._skip(index, loop) for index, loop in enumerate(self.loops, start=1)]

    def _skip(self, index: int, loop: Loop) -> LongSkip:
        try:
            held = grip(self.trace, loop)
        except NoLongSkipsError as error:
            raise NoLongSkipsError(f"model: this {self.model} cannot be scaled: {error}") from None
        size = _size(self.trace, loop, held.node)
        made_in, used_in = _maker(self.trace, loop.source), _user(self.trace, loop, held.call)
        return LongSkip(index, made_in, used_in, size, "unknown", held.call.name, held.take, held.also)


def detect(model: nn.Module, call: Call) -> Detection:
    """Run the model once on the example and find its long skips; the model and all random states are left as they were."""
    found, name = trace(model, call), type(model).__name__
    try:
        return Detection(name, found, long_loops(found))
    except NoLongSkipsError as error:
        raise NoLongSkipsError(f"model: this {name} cannot be scaled: {error}") from None


def _maker(trace: Trace, node: int) -> str:
    """The outermost module whose one output is the node, else the one whose forward computes it."""
    around = trace.stack(node)
    giving = [index for index in around if trace.calls[index].returned == {node} and trace.calls[index].parent >= 0]
    chosen = giving[0] if giving else (around[-1] if around else -1)
    return trace.calls[chosen].name if chosen >= 0 else ""


def _user(trace: Trace, loop: Loop, consumer: ModuleCall) -> str:
    """The module inside the consumer that is handed what was joined, else the consumer."""
    for call in trace.calls[consumer.index + 1 :]:
        if call.start < consumer.end and any(node == loop.join for _, node in call.given):
            return call.name
    return consumer.name


def _size(trace: Trace, loop: Loop, node: int) -> SkipSize:
    """Channels first or last, as the join says where it concatenates, else as the layers around the skip have it."""
    shape = trace.nodes[node].shape
    last = _channels_last(trace, loop, len(shape))
    if not last or len(shape) != 3:
        return SkipSize(shape[-1] if last else shape[1], channels_last=last)
    batch_dim = int(shape[0] != shape[1] == _batch(trace))
    return SkipSize(shape[-1], shape[1 - batch_dim], channels_last=True, batch_dim=batch_dim)


def _batch(trace: Trace) -> int:
    """As many as there are times or labels in the example; without any, its first dimension."""
    shapes = [node.shape for node in trace.nodes if node.name == INPUT and node.shape]
    one_each = [shape[0] for shape in shapes if len(shape) == 1 and shape[0] > 1]
    return next(iter(one_each), shapes[0][0] if shapes else 0)


def _channels_last(trace: Trace, loop: Loop, ndim: int) -> bool:
    join = trace.nodes[loop.join].join
    if ndim == 2:
        return False  # (B, C): the channels are both
    if join is not None and join.dim is not None and (join.dim != 1 or ndim > 3):
        return join.dim == ndim - 1
    for node in [loop.join, *_walk_down(trace, loop.join)]:
        if trace.nodes[node].weighted:
            return not trace.nodes[node].name.startswith("conv")
    return False


def _walk_down(trace: Trace, node: int) -> list[int]:
    """What depends on a node, nearest first."""
    seen = [node]
    for current in seen:
        seen += [child for child in trace.children[current] if child not in seen]
        if trace.nodes[current].weighted:
            break
    return seen[1:]
