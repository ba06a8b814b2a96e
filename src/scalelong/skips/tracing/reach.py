"""How far kappa reaches, measured: what the layers right behind a join see of it.

Scale the operand of the join by 1, 1/2 and 0 and look at the input of every layer with weights that comes next:

    it moves in proportion to kappa     the layer sees kappa in full
    it is the same for 1 and 1/2        a normalisation in between cancels kappa, unless it is exactly 0
    anything else                       a normalisation over hidden and skip channels, or an activation, bends kappa

    full      every next layer sees kappa in full
    shortcut  some do (a ResNet block's shortcut, a residual stream), for the others kappa is cancelled
    partial   some layer sees a bent kappa
    none      kappa is cancelled everywhere
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from scalelong.skips.example import is_meta, own_copy, run_example, undisturbed
from scalelong.skips.long_skip import Call, LongSkip, Reach
from scalelong.skips.tracing.detect import Detection, detect
from scalelong.skips.tracing.nesting import Loop, NoLongSkipsError
from scalelong.skips.tracing.trace import Trace
from scalelong.skips.tracing.verify import add_noise, oracle_mode

IN_PROPORTION = 1e-3  # the largest deviation from a straight line, as a part of the whole effect
CANCELLED = 1e-2  # the largest change, as a part of the whole effect; the eps of a norm is seen here


def measure_reach(model: nn.Module, skips: Sequence[LongSkip], example: Call) -> list[Reach]:
    """The reach of each skip on this example; the value it had where a run cannot tell (no values, joins out of sight)."""
    if is_meta(model):
        return [skip.reach for skip in skips]
    copied = copy.deepcopy(model)
    add_noise(copied)
    try:
        found = detect(copied, example)
    except NoLongSkipsError:
        return [skip.reach for skip in skips]
    if len(found.loops) != len(skips):
        return [skip.reach for skip in skips]
    return [_reach(copied, found, loop, example) for loop in found.loops]


def _reach(model: nn.Module, found: Detection, loop: Loop, example: Call) -> Reach:
    seen: set[str] = set()
    for each in (loop, *loop.again):
        alone = replace(each, again=())
        ops = frozenset(found.trace.nodes[node].op for node in before_next_layers(found.trace, each.join)) - {-1}
        whole, half, zero = (_values(model, found, alone, example, factor, ops) for factor in (1.0, 0.5, 0.0))
        seen |= {_seen(whole[op], half[op], zero[op]) for op in ops}
    if seen == {"full"}:
        return "full"
    if seen <= {"cancelled"}:
        return "none"
    return "shortcut" if seen == {"full", "cancelled"} else "partial"


def before_next_layers(trace: Trace, join: int) -> list[int]:
    """The nodes behind a join that a layer with weights is handed; a further join (of a residual stream) is such a layer.

    A join that weighs the skip itself, as a fused layer does, is its own.
    """
    if trace.nodes[join].weighted:
        return [join]
    seen, last = [join], []
    for node in seen:
        for child in trace.children[node]:
            if trace.nodes[child].weighted or trace.nodes[child].join is not None:
                last.append(node)
            elif child not in seen:
                seen.append(child)
    return sorted(set(last))


def _values(
    model: nn.Module, found: Detection, loop: Loop, example: Call, factor: float, ops: frozenset[int]
) -> dict[int, Tensor]:
    """What the calls `ops` give with the operand scaled by `factor`."""
    with undisturbed(model), torch.no_grad():
        torch.manual_seed(0)
        call = own_copy(example)
        with oracle_mode(found, loop, factor, ops) as mode:
            run_example(model, call)
    return {op: torch.cat([t.double().flatten() for t in given]) for op, given in mode.outputs.items()}


def _seen(whole: Tensor, half: Tensor, zero: Tensor) -> str:
    effect = (whole - zero).norm()
    if (half - (whole + zero) / 2).norm() <= IN_PROPORTION * effect:
        return "full" if effect > 0 else "cancelled"
    return "cancelled" if (half - whole).norm() <= CANCELLED * effect else "bent"
