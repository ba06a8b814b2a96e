"""Where to take hold of a long skip: the module call whose arguments hold it, so that nothing else is touched.

Either the join is inside a module that was handed the skip (an argument, or an item of one), or the joined tensor is handed
to a module whole, and the skip is a slice of its channels. Every other place would scale more than the skip.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from scalelong.skips.loops import Loop, NoLongSkipsError
from scalelong.skips.sites import Argument, ChannelSlice, Take
from scalelong.skips.trace import ModuleCall, Trace

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


def grip(trace: Trace, loop: Loop) -> tuple[ModuleCall, Take, int]:
    """The call to take hold of, where in it the skip stands, and the node that stands there."""
    reasons: list[str] = []
    for call, take, node in (*_as_argument(trace, loop, reasons), *_as_slice(trace, loop, reasons)):
        if all(_held_alike(trace, other, call, take) for other in loop.again):
            return call, take, node
        reasons.append(f"{call.name} is called several times, not always with this skip")
    join, made = trace.nodes[loop.join], trace.nodes[loop.source]
    frame = _name(trace, join.call)
    detail = "; ".join(dict.fromkeys(reasons)) or "no module is handed the skip by itself"
    raise NoLongSkipsError(
        f"the skip made in {_name(trace, made.call)} and joined by {loop.kind} in {frame} cannot be scaled without touching "
        f"anything else: {detail}; let a module of its own take the skip as an argument and join it"
    )


def _held_alike(trace: Trace, loop: Loop, call: ModuleCall, take: Take) -> bool:
    """Whether an earlier call of the same module stands in the same way to an earlier join of the same skip."""
    found = next(_as_argument(trace, replace(loop, again=(loop,) * (_calls(trace, call) - 1)), []), None)
    return found is not None and found[0].module is call.module and found[1] == take


def _as_argument(trace: Trace, loop: Loop, reasons: list[str]) -> Iterator[tuple[ModuleCall, Take, int]]:
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
                yield call, spot, node
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


def _as_slice(trace: Trace, loop: Loop, reasons: list[str]) -> Iterator[tuple[ModuleCall, Take, int]]:
    """The first call after the join that is handed all that was joined, and alone uses it."""
    join = trace.nodes[loop.join].join
    if join is None or join.kind != "cat" or join.dim is None:
        return
    node = loop.join
    while True:
        for call in trace.calls:
            if call.start <= node or node not in [given for _, given in call.given]:
                continue
            trouble = _trouble_of_slice(trace, call, node)
            if trouble is None:
                spot = next(spot for spot, given in call.given if given == node)
                if isinstance(spot, Argument):
                    start, size = sum(join.sizes[: loop.position]), join.sizes[loop.position]
                    yield call, ChannelSlice(spot, start, size, join.dim, sum(join.sizes)), loop.operand
                    return
                trouble = f"{call.name} is handed the joined tensor in a list"
            reasons.append(trouble)
        children = trace.children[node]
        if len(children) != 1 or trace.nodes[children[0]].name not in LINEAR_WITHOUT_WEIGHTS:
            return
        node = children[0]


def slice_of_joined(trace: Trace, loop: Loop, reasons: list[str]) -> tuple[ModuleCall, ChannelSlice] | None:
    """The call that alone is handed all that was joined, and the skip's channels in it."""
    for call, take, _ in _as_slice(trace, loop, reasons):
        if isinstance(take, ChannelSlice):
            return call, take
    return None


def _trouble_of_slice(trace: Trace, call: ModuleCall, node: int) -> str | None:
    if _calls(trace, call) > 1:
        return f"{call.name} is called {_calls(trace, call)} times in one forward"
    if not all(call.holds(child) for child in trace.children[node]):
        return f"what is joined is used by {call.name} and elsewhere"
    if sum(given == node for _, given in call.given) > 1:
        return f"{call.name} is handed the same tensor twice"
    return None


def _calls(trace: Trace, call: ModuleCall) -> int:
    return trace.times_called(call.module)


def _name(trace: Trace, call: int) -> str:
    return (trace.calls[call].name if call >= 0 else "") or "the model itself"
