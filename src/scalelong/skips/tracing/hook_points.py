"""Where to take hold of a long skip: the module call whose arguments hold it, so that nothing else is touched.

Either the join is inside a module that was handed the skip (an argument, or an item of one), or the joined tensor is handed
to a module whole, or to several (a block and its shortcut), and the skip is a slice of its channels. Every other place would
scale more than the skip.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from scalelong.skips.long_skip import Argument, ChannelSlice, Take
from scalelong.skips.tracing.nesting import Loop, NoLongSkipsError
from scalelong.skips.tracing.trace import ModuleCall, Trace

LINEAR_WITHOUT_WEIGHTS = frozenset(
    {
        *("mul", "__mul__", "__rmul__", "div", "__truediv__", "neg", "__neg__", "clone", "contiguous", "to", "type"),
        *("type_as", "float", "half", "double", "bfloat16", "detach", "interpolate", "pad"),
        *("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout"),
    }
)  # one by one, they keep the channels apart: a scaled slice stays a scaled slice
LAYOUT = frozenset(
    {
        *("view", "reshape", "flatten", "unflatten", "permute", "transpose", "movedim", "squeeze", "unsqueeze"),
        *("__getitem__", "narrow", "chunk", "split", "unbind", "rearrange", "pixel_shuffle", "pixel_unshuffle"),
        *("avg_pool1d", "avg_pool2d", "avg_pool3d", "adaptive_avg_pool2d", "moveaxis", "swapaxes", "mean"),
    }
)


@dataclass(frozen=True)
class Grip:
    """The call to take hold of, where in it the skip stands, and the node that stands there."""

    call: ModuleCall
    take: Take
    node: int
    also: tuple[tuple[str, Take], ...] = ()  # further modules that are handed the same joined tensor


def grip(trace: Trace, loop: Loop) -> Grip:
    """Where to take hold of a skip; `NoLongSkipsError` says why it cannot be done."""
    reasons: list[str] = []
    for found in (*_as_argument(trace, loop, reasons), *_as_slice(trace, loop, reasons)):
        if all(_held_alike(trace, other, found) for other in loop.again):
            return found
        reasons.append(f"{found.call.name} is called several times, not always with this skip")
    join, made = trace.nodes[loop.join], trace.nodes[loop.source]
    frame = _name(trace, join.call)
    detail = "; ".join(dict.fromkeys(reasons)) or "no module is handed the skip by itself"
    raise NoLongSkipsError(
        f"the skip made in {_name(trace, made.call)} and joined by {loop.kind} in {frame} cannot be scaled without touching "
        f"anything else: {detail}; let a module of its own take the skip as an argument and join it"
    )


def _held_alike(trace: Trace, loop: Loop, last: Grip) -> bool:
    """Whether an earlier call of the same module stands in the same way to an earlier join of the same skip."""
    found = next(_as_argument(trace, replace(loop, again=(loop,) * (_calls(trace, last.call) - 1)), []), None)
    return found is not None and found.call.module is last.call.module and found.take == last.take


def _as_argument(trace: Trace, loop: Loop, reasons: list[str]) -> Iterator[Grip]:
    """The innermost call around the join that was handed the skip."""
    for index in reversed(trace.stack(loop.join)):
        call = trace.calls[index]
        for spot, node in call.given:
            if node not in loop.line:
                continue
            trouble = _trouble_inside(trace, loop, call, node)
            argument = spot if isinstance(spot, Argument) else spot.argument
            if trouble is None and argument in call.drained:
                trouble = f"{call.name} takes its skips out of the list it shares with its caller"
            if trouble is None and sum(other == node for _, other in call.given) > 1:
                trouble = f"{call.name} is handed the same tensor twice"
            if trouble is None:
                yield Grip(call, spot, node)
                return
            reasons.append(trouble)


def _trouble_inside(trace: Trace, loop: Loop, call: ModuleCall, node: int) -> str | None:
    """Why scaling `node` on its way into the call would do more, or other, than scaling the operand of the join."""
    if _calls(trace, call) not in (1, 1 + len(loop.again)):
        return f"{call.name or 'the model'} is called {_calls(trace, call)} times in one forward"
    way = loop.line[loop.line.index(node) :]
    for at, step in enumerate(way):
        wanted = way[at + 1] if at + 1 < len(way) else loop.join
        uses = [child for child in trace.children[step] if call.holds(child) and child != wanted]
        if uses or (at == 0 and step in call.returned):
            return f"{call.name} uses it elsewhere too"
        made_by = trace.nodes[step]
        if at and made_by.name not in LINEAR_WITHOUT_WEIGHTS | LAYOUT:
            return f"{call.name} passes it through {made_by.name} before the join"
    return None


def _as_slice(trace: Trace, loop: Loop, reasons: list[str]) -> Iterator[Grip]:
    """The first call after the join that is handed all that was joined, and alone uses it; else the calls that share it."""
    join = trace.nodes[loop.join].join
    if join is None or join.kind != "cat" or join.dim is None:
        return
    start, size = sum(join.sizes[: loop.position]), join.sizes[loop.position]
    node = loop.join
    while True:
        handed = [call for call in trace.calls if call.start > node and node in [given for _, given in call.given]]
        outer = [call for call in handed if not any(other in handed for other in _around(trace, call))]
        for calls in [[call] for call in handed] + [outer] * (len(outer) > 1):
            trouble = _trouble_of_slice(trace, calls, node)
            if trouble is None:
                spots = [spot for call in calls for spot, given in call.given if given == node]
                takes = [
                    ChannelSlice(s, start, size, join.dim, sum(join.sizes)) for s in spots if isinstance(s, Argument)
                ]
                names = [call.name for call in calls]
                yield Grip(calls[0], takes[0], loop.operand, tuple(zip(names[1:], takes[1:], strict=True)))
                return
            reasons.append(trouble)
        children = trace.children[node]
        if len(children) != 1 or trace.nodes[children[0]].name not in LINEAR_WITHOUT_WEIGHTS:
            return
        node = children[0]


def slice_of_joined(trace: Trace, loop: Loop, reasons: list[str]) -> Grip | None:
    """Where to take hold of all that was joined."""
    return next(_as_slice(trace, loop, reasons), None)


def _trouble_of_slice(trace: Trace, calls: Sequence[ModuleCall], node: int) -> str | None:
    for call in calls:
        if _calls(trace, call) > 1:
            return f"{call.name} is called {_calls(trace, call)} times in one forward"
        spots = [spot for spot, given in call.given if given == node]
        if len(spots) > 1:
            return f"{call.name} is handed the same tensor twice"
        if not isinstance(spots[0], Argument):
            return f"{call.name} is handed the joined tensor in a list"
    if not all(any(call.holds(child) for call in calls) for child in trace.children[node]):
        return f"what is joined is used by {' and '.join(call.name for call in calls)} and elsewhere"
    return None


def _around(trace: Trace, call: ModuleCall) -> Iterator[ModuleCall]:
    """The calls that a call was made in, the nearest first."""
    while call.parent >= 0:
        call = trace.calls[call.parent]
        yield call


def _calls(trace: Trace, call: ModuleCall) -> int:
    return trace.times_called(call.module)


def _name(trace: Trace, call: int) -> str:
    return (trace.calls[call].name if call >= 0 else "") or "the model itself"
