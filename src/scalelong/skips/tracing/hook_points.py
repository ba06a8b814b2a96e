"""Find the module call to hook for each skip of a traced model, such that nothing else is scaled.

Either a module receives the skip (an argument, or an item of one) and joins it, or one or several modules (a block and its
shortcut) receive the concatenation, of which the skip is a slice. placement="after_norm" hooks a GroupNorm and the shortcut.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from scalelong.skips.long_skip import Argument, ChannelSlice, HookPoints, LongSkip, OutputChannels, Slot
from scalelong.skips.tracing.paths import SkipPath, refusal
from scalelong.skips.tracing.trace import ModuleCall, Trace

CHANNELWISE_LINEAR = frozenset({  # linear and channelwise: a scaled slice stays a scaled slice
    *("mul", "__mul__", "__rmul__", "div", "__truediv__", "neg", "__neg__", "clone", "contiguous", "to", "type"),
    *("type_as", "float", "half", "double", "bfloat16", "detach", "interpolate", "pad"),
    *("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout"),
})  # fmt: skip
LAYOUT = frozenset({
    *("view", "reshape", "flatten", "unflatten", "permute", "transpose", "movedim", "squeeze", "unsqueeze"),
    *("__getitem__", "narrow", "chunk", "split", "unbind", "rearrange", "pixel_shuffle", "pixel_unshuffle"),
    *("avg_pool1d", "avg_pool2d", "avg_pool3d", "adaptive_avg_pool2d", "moveaxis", "swapaxes", "mean"),
})  # fmt: skip


class HookPoint(NamedTuple):
    """A module call, the slot that carries the skip, its traced tensor, and other modules that receive the same tensor."""

    call: ModuleCall
    slot: Slot
    node: int
    also: HookPoints = ()


def find_hook_point(trace: Trace, path: SkipPath) -> HookPoint:
    """Find where to scale a skip; raise a `NoLongSkipsError` with the reason if that is impossible."""
    reasons: list[str] = []
    for found in (*_argument_points(trace, path, reasons), *_slice_points(trace, path, reasons)):
        if all(_same_point(trace, other, found) for other in path.earlier):
            return found
        reasons.append(f"{found.call.name} is called several times, not always with this skip")
    where = f"made in {trace.module_name(path.source)} and joined by {path.op.kind} in {trace.module_name(path.join)}"
    detail = "; ".join(dict.fromkeys(reasons)) or "no module receives the skip by itself"
    remedy = "let a module of its own take the skip as an argument and join it"
    raise refusal(trace, f"the skip {where} cannot be scaled without touching anything else: {detail}; {remedy}")


def _same_point(trace: Trace, earlier: SkipPath, last: HookPoint) -> bool:
    """True if an earlier call of the same module receives the skip in the same slot."""
    repeated = replace(earlier, earlier=(earlier,) * (trace.times_called(last.call) - 1))
    found = next(_argument_points(trace, repeated, []), None)
    return found is not None and found.call.module is last.call.module and found.slot == last.slot


def _argument_points(trace: Trace, path: SkipPath, reasons: list[str]) -> Iterator[HookPoint]:
    """The innermost call around the join that receives the skip."""
    for index in reversed(trace.stack(trace.nodes[path.join].call)):
        call = trace.calls[index]
        for slot, node in call.inputs:
            if node not in path.nodes:
                continue
            trouble = _trouble_inside(trace, path, call, node)
            if not trouble and (slot if isinstance(slot, Argument) else slot.argument) in call.drained:
                trouble = f"{call.name} takes its skips out of the list it shares with its caller"
            if not trouble and sum(other == node for _, other in call.inputs) > 1:
                trouble = f"{call.name} receives the same tensor twice"
            if not trouble:
                yield HookPoint(call, slot, node)
                return
            reasons.append(trouble)


def _trouble_inside(trace: Trace, path: SkipPath, call: ModuleCall, node: int) -> str | None:
    """Reason why scaling `node` at the call differs from scaling the operand of the join; None if it does not."""
    times = trace.times_called(call)
    if times not in (1, 1 + len(path.earlier)):
        return f"{call.name or 'the model'} is called {times} times in one forward"
    steps = (*path.nodes[path.nodes.index(node) :], path.join)
    for at, (step, following) in enumerate(itertools.pairwise(steps)):
        others = [child for child in trace.children[step] if call.holds(child) and child != following]
        if others or (at == 0 and step in call.returned):
            return f"{call.name} uses it elsewhere too"
        op = trace.nodes[step].name
        if at and op not in CHANNELWISE_LINEAR | LAYOUT:
            return f"{call.name} passes it through {op} before the join"
    return None


def _slice_points(trace: Trace, path: SkipPath, reasons: list[str]) -> Iterator[HookPoint]:
    """The first call after the join that is the only user of the concatenation, or else all calls that use it."""
    if path.op.dim is None:
        return
    start, size = path.op.channels(path.position)
    node = path.join
    while True:
        receiving = [call for call in trace.calls if call.start > node and node in [n for _, n in call.inputs]]
        outer = [call for call in receiving if not {other.index for other in receiving} & {*trace.stack(call.parent)}]
        for calls in [[call] for call in receiving] + [outer] * (len(outer) > 1):
            trouble = _trouble_of_slice(trace, calls, node)
            if trouble is None:
                where = (start, size, path.op.dim, sum(path.op.sizes))
                given = [(call.name, slot) for call in calls for slot, n in call.inputs if n == node]
                slots = [(name, ChannelSlice(slot, *where)) for name, slot in given if isinstance(slot, Argument)]
                yield HookPoint(calls[0], slots[0][1], path.nodes[-1], tuple(slots[1:]))
                return
            reasons.append(trouble)
        children = trace.children[node]
        if len(children) != 1 or trace.nodes[children[0]].name not in CHANNELWISE_LINEAR:
            return
        node = children[0]


def _trouble_of_slice(trace: Trace, calls: Sequence[ModuleCall], node: int) -> str | None:
    for call in calls:
        if (times := trace.times_called(call)) > 1:
            return f"{call.name} is called {times} times in one forward"
        slots = [slot for slot, given in call.inputs if given == node]
        if len(slots) > 1:
            return f"{call.name} receives the same tensor twice"
        if not isinstance(slots[0], Argument):
            return f"{call.name} receives the concatenation in a list"
    if not all(any(call.holds(child) for call in calls) for child in trace.children[node]):
        return f"the concatenation is used by {' and '.join(call.name for call in calls)} and elsewhere"
    return None


def holding_both(trace: Trace, path: SkipPath, skip: LongSkip, method: str) -> LongSkip:
    """The skip with hook points that receive the whole concatenation; raises if there are none."""
    point, reasons = None, [f"it is joined by {path.op.kind}, with {len(path.op.operands)} operands"]
    if path.op.kind == "cat" and len(path.op.operands) == 2 and not path.earlier:
        reasons = []
        point = next(_slice_points(trace, path, reasons), None)
    if point is None:
        where = f"skip {skip.index} ({skip.made_in} -> {skip.used_in}) has no module that receives both operands alone"
        detail = f": {'; '.join(reasons)}" if reasons else ""
        raise ValueError(f"scaling.method: {method!r} scales both operands, but {where}{detail}; choose another method")
    return replace(skip, consumer=point.call.name, slot=point.slot, also=point.also)


def after_norm(trace: Trace, paths: Sequence[SkipPath], skips: Sequence[LongSkip]) -> list[LongSkip]:
    """placement="after_norm": hook the output of a GroupNorm that would cancel kappa, and the input of the shortcut."""
    moved = list(skips)
    for at, (path, skip) in enumerate(zip(paths, skips, strict=True)):
        uses = [trace.nodes[child].name for child in trace.children[path.join]]
        if "group_norm" not in uses:
            continue
        points = tuple(_points_behind_norm(trace, path)) if path.op.dim == 1 and not path.earlier else ()
        if len(points) != len(uses):
            where = f"skip {skip.index} ({skip.made_in} -> {skip.used_in}) is used by {uses}"
            needs = "'after_norm' needs a GroupNorm module and a shortcut module, each called once"
            raise ValueError(f"placement: {where}; {needs}; use placement='before'")
        moved[at] = replace(skip, reach="full", after_norm=points)
    if moved == list(skips):
        raise ValueError(f"placement: no skip of this {trace.model} is followed by a GroupNorm; use placement='before'")
    return moved


def _points_behind_norm(trace: Trace, path: SkipPath) -> Iterator[tuple[str, Slot | OutputChannels]]:
    """One hook point for each use of the concatenation by a module that receives only it and is called once."""
    start, size = path.op.channels(path.position)
    for use in (trace.nodes[child] for child in trace.children[path.join]):
        call = trace.calls[use.call]
        if [node for _, node in call.inputs] != [path.join] or trace.times_called(call) != 1:
            continue
        slot = call.inputs[0][0]
        if use.name == "group_norm" and call.returned == {use.index}:
            yield call.name, OutputChannels(start, size)
        elif use.weight and isinstance(slot, Argument):
            yield call.name, ChannelSlice(slot, start, size, 1, sum(path.op.sizes))
