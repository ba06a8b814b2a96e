"""placement="after_norm": let kappa act behind a GroupNorm, which would cancel it in front.

A ResNet block of a UNet normalises [hidden, skip] and adds a shortcut of it. Here kappa multiplies the skip's channels of
what the norm gives, and of what the shortcut is given, so that both branches see it in full.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from torch import nn

from scalelong.skips.long_skip import Argument, Call, ChannelSlice, LongSkip, OutputChannels, Take
from scalelong.skips.tracing.detect import Detection, detect
from scalelong.skips.tracing.nesting import Loop
from scalelong.skips.tracing.trace import ModuleCall, Trace

Place = tuple[str, Take | OutputChannels]


def after_norm(model: nn.Module, skips: Sequence[LongSkip], call: Call) -> list[LongSkip]:
    """The same skips, those in front of a GroupNorm held behind it; a ValueError where that cannot be done cleanly."""
    found = detect(model, call)
    if len(found.loops) != len(skips):
        raise ValueError(
            f"placement: {len(skips)} skips are known, {len(found.loops)} are seen in a forward pass; "
            "'after_norm' needs to see all of them, use placement='before'"
        )
    moved = [_moved(found, loop, skip) for loop, skip in zip(found.loops, skips, strict=True)]
    if moved == list(skips):
        raise ValueError(
            f"placement: no skip of this {type(model).__name__} stands in front of a GroupNorm, "
            "kappa acts in full already; use placement='before'"
        )
    return moved


def _moved(found: Detection, loop: Loop, skip: LongSkip) -> LongSkip:
    trace = found.trace
    uses = [trace.nodes[child] for child in trace.children[loop.join]]
    if not any(use.name == "group_norm" for use in uses):
        return skip
    join = trace.nodes[loop.join].join
    places = list(_places(trace, loop)) if join is not None and join.dim == 1 and not loop.again else []
    if len(places) != len(uses):
        raise ValueError(
            f"placement: skip {skip.index} ({skip.made_in} -> {skip.used_in}) is used by {[use.name for use in uses]}; "
            "'after_norm' needs a GroupNorm module and a shortcut module, each called once; use placement='before'"
        )
    return replace(skip, reach="full", after_norm=tuple(places))


def _places(trace: Trace, loop: Loop) -> Iterator[Place]:
    """For each use of what was joined, the module to hook; fewer than the uses where a module cannot be told."""
    join = trace.nodes[loop.join].join
    assert join is not None
    start, size = sum(join.sizes[: loop.position]), join.sizes[loop.position]
    for child in trace.children[loop.join]:
        call = _whole_module(trace, loop.join, child)
        if call is None:
            continue
        if trace.nodes[child].name == "group_norm" and call.returned == {child}:
            yield call.name, OutputChannels(start, size)
        elif trace.nodes[child].weighted:
            spot = next(spot for spot, node in call.given if node == loop.join)
            if isinstance(spot, Argument):
                yield call.name, ChannelSlice(spot, start, size, 1, sum(join.sizes))


def _whole_module(trace: Trace, joined: int, use: int) -> ModuleCall | None:
    """The innermost call around a use, if it was handed what was joined and its module is called once."""
    call = trace.calls[trace.nodes[use].call]
    handed = [node for _, node in call.given] == [joined]
    return call if handed and trace.times_called(call.module) == 1 else None
