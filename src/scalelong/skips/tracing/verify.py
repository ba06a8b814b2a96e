"""Proof that the hooks scale what they should: an independent run scales the operand of the join itself.

On a copy with noise on its zero weights (behind a zero weight every mistake is invisible), for each skip alone: outputs and
gradients of the hooked model must equal those of a model without hooks in which that operand is multiplied by 1/2.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from scalelong.scaling.base import ConstantScaling
from scalelong.skips.example import is_meta, map_tensors, own_copy, run_example, tensors_in, undisturbed
from scalelong.skips.hooks import ROOT_NAME, attached_skips, detach, replace_scaling, scaling_of
from scalelong.skips.long_skip import Call, LongSkip
from scalelong.skips.tracing.detect import Detection, detect
from scalelong.skips.tracing.join_ops import ScaleOperand, ScaleSlices
from scalelong.skips.tracing.nesting import Loop, NoLongSkipsError

FACTOR = 0.5
CHECKPOINTING = ("gradient_checkpointing", "use_checkpoint", "checkpointing", "use_checkpointing")


class VerificationError(ValueError):
    """The hooks on a model do not do what scaling its long skips would do."""


@dataclass(frozen=True)
class SkipCheck:
    """How one skip fared; errors are relative to what the scaling changes."""

    index: int
    made_in: str
    used_in: str
    output_error: float
    gradient_error: float | None  # None where the output has no gradient
    effect: float  # how much of the output the factor changes


@dataclass(frozen=True)
class VerificationReport:
    """All skips agreed with the oracle."""

    model: str
    dtype: torch.dtype
    checks: tuple[SkipCheck, ...]

    def __str__(self) -> str:
        lines = [f"{self.model}: {len(self.checks)} long skips scaled as intended (checked in {self.dtype})"]
        for check in self.checks:
            gradient = "no gradient" if check.gradient_error is None else f"gradient {check.gradient_error:.1e}"
            lines.append(
                f"  {check.index}: {check.made_in} -> {check.used_in}: output {check.output_error:.1e}, {gradient}, "
                f"effect {check.effect:.1e}"
            )
        return "\n".join(lines)


def verify(model: nn.Module, *args: Any, **kwargs: Any) -> VerificationReport:
    """Check the scaling on `model` against the oracle on this example; `VerificationError` names the skip that is wrong.

    The model itself is not run: copies of it are, in double precision where it can.
    """
    scaling_of(model)
    if is_meta(model):
        raise ValueError(
            "model: it is on the meta device and has no values to check; verify a small copy of it instead"
        )
    skips = attached_skips(model)
    with undisturbed(model):
        hooked, plain, call, dtype = comparable_copies(model, (args, kwargs))
        loops = oracle_loops(plain, skips, call)
        test = ConstantScaling([1.0] * len(skips))
        replace_scaling(hooked, test)
        untouched = _run(plain, call)
        checks = []
        for skip, loop in zip(skips, loops.loops, strict=True):
            test.values = tuple(FACTOR if i == skip.index else 1.0 for i in range(1, len(skips) + 1))
            checks.append(
                _check(skip, _run(hooked, call), _run(plain, call, _oracle(loops, loop, skip)), untouched, dtype)
            )
    return VerificationReport(type(model).__name__, dtype, tuple(checks))


def oracle_loops(plain: nn.Module, skips: Sequence[LongSkip], call: Call) -> Detection:
    try:
        found = detect(plain, call)
    except NoLongSkipsError as error:
        raise VerificationError(f"verify: the model is scaled, but without its hooks {error}") from None
    if len(found.loops) != len(skips):
        raise VerificationError(
            f"verify: {len(skips)} skips are scaled, {len(found.loops)} were found in a run without hooks; "
            "call scalelong.remove(model) and look at scalelong.find_skips(model, *example)"
        )
    return found


# ------------------------------------------------------------------------------------------------------------- copies


def comparable_copies(model: nn.Module, call: Call) -> tuple[nn.Module, nn.Module, Call, torch.dtype]:
    """The model with its hooks and without, both with the same noise, in double precision where its forward can."""
    hooked = copy.deepcopy(model)
    for module in hooked.modules():
        for name in CHECKPOINTING:
            if getattr(module, name, False) is True:
                setattr(module, name, False)  # what is recomputed in the backward pass is out of the oracle's sight
    add_noise(hooked)
    plain = copy.deepcopy(hooked)
    detach(plain)
    try:
        doubled = copy.deepcopy(plain).double()
        args, kwargs = map_tensors(lambda t: t.double() if t.is_floating_point() else t, own_copy(call))
        with undisturbed(doubled), torch.no_grad():
            run_example(doubled, own_copy((args, kwargs)))
    except Exception:  # noqa: BLE001 - a forward that fixes its own precision: it is checked in that
        dtype = next((p.dtype for p in plain.parameters() if p.is_floating_point()), torch.float32)
        return hooked, plain, call, dtype
    return hooked.double(), doubled, (args, kwargs), torch.float64


def add_noise(model: nn.Module) -> None:
    """Noise on every parameter that is zero throughout, the same for every copy of a model; gates are left alone."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.startswith(f"{ROOT_NAME}.") or parameter.is_meta or not parameter.is_floating_point():
                continue
            if not parameter.any():
                fan_in = max(1, parameter[0].numel()) if parameter.ndim >= 2 else 100
                noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float32) / fan_in**0.5
                parameter.add_(noise.to(parameter.device, parameter.dtype))


# --------------------------------------------------------------------------------------------------------------- runs


@dataclass(frozen=True)
class _Result:
    output: Tensor
    gradients: list[Tensor] | None


def _run(model: nn.Module, call: Call, oracle: tuple[ScaleOperand | ScaleSlices, int] | None = None) -> _Result:
    """Outputs, and gradients of all weights and inputs; under an oracle, which must act as often as is said."""
    with undisturbed(model), torch.enable_grad():
        leaves = map_tensors(lambda t: t.requires_grad_(t.is_floating_point()), own_copy(call))
        args, kwargs = map_tensors(torch.clone, leaves)  # a leaf could not be changed in place
        torch.manual_seed(0)  # noise that a forward draws is the same in every run
        if oracle is None:
            result = run_example(model, (args, kwargs))
        else:
            mode, times = oracle
            with mode:
                result = run_example(model, (args, kwargs))
            if mode.hits != times:
                raise VerificationError("verify: two runs of the model on the same example do not take the same path")
        parts = [t.flatten() for t in tensors_in(result) if t.is_floating_point()]
        output = torch.cat([part.to(parts[0].dtype) for part in parts])
    return _Result(output.detach(), _gradients(model, output, list(tensors_in(leaves))))


def _gradients(model: nn.Module, output: Tensor, inputs: list[Tensor]) -> list[Tensor] | None:
    """Of all weights and inputs, for one fixed weighting of the outputs."""
    named = model.named_parameters()
    wanted: list[Tensor] = [p for name, p in named if not name.startswith(f"{ROOT_NAME}.") and p.requires_grad]
    wanted += [t for t in inputs if t.requires_grad]
    if not output.requires_grad:
        return None
    probe = torch.linspace(-1, 1, output.numel(), dtype=output.dtype, device=output.device).cos()
    found = torch.autograd.grad((output * probe).sum(), wanted, allow_unused=True)
    return [torch.zeros_like(t) if g is None else g for t, g in zip(wanted, found, strict=True)]


def _oracle(found: Detection, loop: Loop, skip: LongSkip) -> tuple[ScaleOperand | ScaleSlices, int]:
    """The mode that does by itself what the hooks of this skip should do, and how often it acts."""
    if not skip.after_norm:
        return oracle_mode(found, loop, FACTOR), 1 + len(loop.again)
    nodes = found.trace.nodes
    join, uses = nodes[loop.join].join, [nodes[child] for child in found.trace.children[loop.join]]
    assert join is not None
    given = frozenset(use.op for use in uses if use.name == "group_norm")
    taken = frozenset(use.op for use in uses if use.name != "group_norm")
    start, size = sum(join.sizes[: loop.position]), join.sizes[loop.position]
    return ScaleSlices(given, taken, start, size, FACTOR), len(uses)


def oracle_mode(found: Detection, loop: Loop, factor: float, watched: frozenset[int] = frozenset()) -> ScaleOperand:
    """Scales the operand by which `loop` joins the main path, in a run of the model that `found` traced."""
    operands = {}
    for each in (loop, *loop.again):
        join = found.trace.nodes[each.join].join
        assert join is not None
        operands[join.ordinal] = each.position
    return ScaleOperand(operands, factor, watched)


# ---------------------------------------------------------------------------------------------------------- comparison


def _check(skip: LongSkip, hooked: _Result, oracle: _Result, plain: _Result, dtype: torch.dtype) -> SkipCheck:
    tolerance = 1e-6 if dtype == torch.float64 else (1e-2 if dtype == torch.float32 else 1e-1)
    where = f"verify: skip {skip.index} ({skip.made_in} -> {skip.used_in}, at {skip.consumer or 'the model itself'})"
    remedy = "the hook scales something else than the skip; nothing is scaled now if this came from scalelong.apply"
    output = _relative([hooked.output], [oracle.output], [plain.output])
    if not output <= tolerance:
        raise VerificationError(f"{where}: outputs differ from the oracle's by {output:.1e} of the effect; {remedy}")
    gradient = None
    if hooked.gradients is not None and oracle.gradients is not None and plain.gradients is not None:
        gradient = _relative(hooked.gradients, oracle.gradients, plain.gradients)
        if not gradient <= tolerance:
            raise VerificationError(
                f"{where}: gradients differ from the oracle's by {gradient:.1e} of the effect; {remedy}"
            )
    effect = float((oracle.output - plain.output).norm() / plain.output.norm().clamp_min(1e-30))
    return SkipCheck(skip.index, skip.made_in, skip.used_in, output, gradient, effect)


def _relative(got: Sequence[Tensor], expected: Sequence[Tensor], plain: Sequence[Tensor]) -> float:
    """The largest deviation relative to the largest effect; rounding errors of the whole count as no deviation."""
    if not all(bool(torch.isfinite(tensor).all()) for tensor in (*got, *expected)):
        return math.inf
    deviation = max(_largest(a - b) for a, b in zip(got, expected, strict=True))
    effect = max(_largest(a - b) for a, b in zip(expected, plain, strict=True))
    whole = max(_largest(a) for a in plain)
    rounding = 100 * torch.finfo(got[0].dtype).eps * whole
    if deviation <= rounding:
        return 0.0
    return deviation / max(effect, rounding)


def _largest(tensor: Tensor) -> float:
    return float(tensor.abs().max()) if tensor.numel() else 0.0
