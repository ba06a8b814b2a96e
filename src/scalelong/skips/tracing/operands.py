"""For methods that look at both operands of a join: how wide they are, at which resolution, and where both can be held.

A module that is handed the joined tensor whole holds both operands; so does a layer of ours that takes them side by side.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import nn

from scalelong.skips.example_inputs import generated_example
from scalelong.skips.long_skip import Call, Fused, LongSkip
from scalelong.skips.tracing.detect import Detection, detect
from scalelong.skips.tracing.hook_points import slice_of_joined
from scalelong.skips.tracing.nesting import Loop, NoLongSkipsError


def with_operands(model: nn.Module, skips: Sequence[LongSkip], call: Call | None) -> list[LongSkip]:
    """The same skips with the width of what each is joined with and the stage of the decoder it belongs to."""
    if all(skip.size.main is not None for skip in skips):
        return list(skips)
    found = detect(model, call if call is not None else generated_example(model))
    if len(found.loops) != len(skips):
        raise ValueError(
            f"scaling.method: {len(skips)} skips are known, {len(found.loops)} are seen in a forward pass; "
            "this method needs to see all of them"
        )
    images = [_resolution(found, loop) for loop in found.loops]
    stages = {size: at for at, size in enumerate(sorted({size for size in images if size is not None}), start=1)}
    return [
        replace(skip, size=replace(skip.size, main=_main_width(found, loop), stage=stages.get(size or (0, 0))))
        for skip, loop, size in zip(skips, found.loops, images, strict=True)
    ]


def skip_shapes(model: nn.Module, skips: Sequence[LongSkip], call: Call) -> list[tuple[int, ...] | None]:
    """The shape of each skip on this example, as it is joined; None where it is not seen."""
    try:
        found = detect(model, call)
    except NoLongSkipsError:
        return [None] * len(skips)
    if len(found.loops) != len(skips):
        return [None] * len(skips)
    return [found.trace.nodes[loop.operand].shape for loop in found.loops]


def holding_both(model: nn.Module, skips: Sequence[LongSkip], call: Call | None, method: str) -> list[LongSkip]:
    """The same skips, held where the main path can be changed too; a ValueError where there is no such place."""
    if all(isinstance(skip.take, Fused) and skip.take.main is not None for skip in skips):
        return list(skips)
    found = detect(model, call if call is not None else generated_example(model))
    return [_held(found, loop, skip, method) for loop, skip in zip(found.loops, skips, strict=True)]


def _held(found: Detection, loop: Loop, skip: LongSkip, method: str) -> LongSkip:
    where = (
        f"scaling.method: {method!r} changes both operands of a concatenation; skip {skip.index} ({skip.made_in} -> "
    )
    where += f"{skip.used_in})"
    join = found.trace.nodes[loop.join].join
    if join is None or join.kind != "cat":
        raise ValueError(f"{where} is joined by {loop.kind}; choose another method")
    if len(join.operands) != 2 or loop.again:
        raise ValueError(f"{where} is joined with several tensors, or several times; choose another method")
    reasons: list[str] = []
    held = slice_of_joined(found.trace, loop, reasons)
    if held is None:
        detail = "; ".join(reasons) or "no module is handed what was joined"
        raise ValueError(f"{where} cannot be held with what it is joined with: {detail}; choose another method")
    return replace(skip, consumer=held.call.name, take=held.take, also=held.also)


def _resolution(found: Detection, loop: Loop) -> tuple[int, ...] | None:
    shape = found.trace.nodes[loop.operand].shape
    return shape[2:] if len(shape) == 4 else None


def _main_width(found: Detection, loop: Loop) -> int | None:
    join = found.trace.nodes[loop.join].join
    if join is None or join.kind != "cat" or len(join.sizes) != 2:
        return None
    return join.sizes[1 - loop.position]
