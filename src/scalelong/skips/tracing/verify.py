"""Check hooks against an oracle, and measure which layers see kappa.

The oracle is a run without hooks in which the operand of the join op itself is scaled. `verify` compares outputs and
gradients of the hooked model with it, one skip at a time, on a copy with noise on its zero weights (behind a zero weight
every mistake is invisible). `measure_reach` scales the operand by 1, 1/2 and 0. The input of a next weighted layer is either
linear in kappa, or the same for 1 and 1/2 (a norm cancels kappa), or neither (a norm over both operands, an activation):

    full      linear for every next layer
    shortcut  linear for some (a ResNet block's shortcut, a residual stream), cancelled for the others
    partial   neither for some layer
    none      cancelled everywhere
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from scalelong.scaling.constant import ConstantScaling
from scalelong.skips.example import is_meta, map_tensors, merge_example, own_copy, run_example, tensors_in, undisturbed
from scalelong.skips.families import generated_example
from scalelong.skips.hooks import ROOT_NAME, attached_skips, detach, replace_scaling, scaling_of
from scalelong.skips.long_skip import Call, LongSkip, Reach
from scalelong.skips.tracing.hook_points import Detection, detect
from scalelong.skips.tracing.join_ops import ScaleOperand, ScaleSlices
from scalelong.skips.tracing.nesting import NoLongSkipsError, SkipPath
from scalelong.skips.tracing.trace import Trace

FACTOR = 0.5
CHECKPOINTING = ("gradient_checkpointing", "use_checkpoint", "checkpointing", "use_checkpointing")
LINEAR = 1e-3  # largest deviation from a straight line, relative to the effect of kappa = 0
CANCELLED = 1e-2  # largest change, relative to the effect of kappa = 0; the eps of a norm is visible here


class VerificationError(ValueError):
    """The hooks on a model do not scale its long skips, or not only them."""


@dataclass(frozen=True)
class SkipCheck:
    """The result for one skip; errors are relative to what the scaling changes."""

    index: int
    made_in: str
    used_in: str
    output_error: float
    gradient_error: float | None  # None if the output has no gradient
    effect: float  # relative change of the output


@dataclass(frozen=True)
class VerificationReport:
    """All skips agree with the oracle."""

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


def verify(model: nn.Module, *args: Any, example: Any = None, **kwargs: Any) -> VerificationReport:
    """Check the scaling on `model` against the oracle; `VerificationError` names the skip that is wrong.

    The example is given as `example=`, as for `apply`, or as plain arguments; the most common known classes need none.
    Copies of the model are run, in double precision if its forward supports it.

    >>> import scalelong
    >>> model = scalelong.UViT(scalelong.UViTConfig(image_size=8, patch_size=2, dim=16, depth=4, heads=2))
    >>> handle = scalelong.apply(model, "cs", kappa=0.7)
    >>> print(scalelong.verify(model))
    UViT: 2 long skips scaled as intended (checked in torch.float64)
      1: in_blocks.0 -> out_blocks.1.skip_linear: output ..., gradient ..., effect ...
      2: in_blocks.1 -> out_blocks.0.skip_linear: output ..., gradient ..., effect ...
    """
    scaling_of(model)
    if is_meta(model):
        raise ValueError(
            "model: it is on the meta device and has no values to check; verify a small copy of it instead"
        )
    call = merge_example(example, args, kwargs) or generated_example(model)
    skips = attached_skips(model)
    with undisturbed(model):
        hooked, plain, call, dtype = comparable_copies(model, call)
        found = detect_unhooked(plain, skips, call)
        test = ConstantScaling([1.0] * len(skips))
        replace_scaling(hooked, test)
        unscaled = _run(plain, call)
        checks = []
        for skip, path in zip(skips, found.paths, strict=True):
            test.values = tuple(FACTOR if i == skip.index else 1.0 for i in range(1, len(skips) + 1))
            oracle = _run(plain, call, *_oracle(found.trace, path, skip))
            checks.append(_check(skip, _run(hooked, call), oracle, unscaled, dtype))
    return VerificationReport(type(model).__name__, dtype, tuple(checks))


def detect_unhooked(plain: nn.Module, skips: Sequence[LongSkip], call: Call) -> Detection:
    """Find the skips in a copy without hooks; `VerificationError` if they are not those that are scaled."""
    try:
        found = detect(plain, call)
    except NoLongSkipsError as error:
        raise VerificationError(f"verify: the model is scaled, but without its hooks {error}") from None
    if len(found.paths) != len(skips):
        raise VerificationError(
            f"verify: {len(skips)} skips are scaled, {len(found.paths)} were found in a run without hooks; "
            "call scalelong.remove(model) and see scalelong.find_skips(model, example=...)"
        )
    return found


def comparable_copies(model: nn.Module, call: Call) -> tuple[nn.Module, nn.Module, Call, torch.dtype]:
    """The model with and without its hooks, with the same noise; in double precision if its forward supports it."""
    hooked = copy.deepcopy(model)
    for module in hooked.modules():
        for name in CHECKPOINTING:
            if getattr(module, name, False) is True:
                setattr(module, name, False)  # the oracle does not see what the backward pass recomputes
    add_noise(hooked)
    plain = copy.deepcopy(hooked)
    detach(plain)
    try:
        doubled = copy.deepcopy(plain).double()
        args, kwargs = map_tensors(lambda t: t.double() if t.is_floating_point() else t, own_copy(call))
        with undisturbed(doubled), torch.no_grad():
            run_example(doubled, own_copy((args, kwargs)))
    except Exception:  # noqa: BLE001 - a forward that fixes its own precision is checked in that
        dtype = next((p.dtype for p in plain.parameters() if p.is_floating_point()), torch.float32)
        return hooked, plain, call, dtype
    return hooked.double(), doubled, (args, kwargs), torch.float64


def add_noise(model: nn.Module) -> None:
    """Add noise to every all-zero parameter but the gates', the same for every copy of a model."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.startswith(f"{ROOT_NAME}.") or parameter.is_meta or not parameter.is_floating_point():
                continue
            if not parameter.any():
                fan_in = max(1, parameter[0].numel()) if parameter.ndim >= 2 else 100
                noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float32) / fan_in**0.5
                parameter.add_(noise.to(parameter.device, parameter.dtype))


# -------------------------------------------------------------------------------------------------- runs and comparison


@dataclass(frozen=True)
class _Result:
    output: Tensor
    gradients: list[Tensor] | None


def _run(model: nn.Module, call: Call, oracle: ScaleOperand | ScaleSlices | None = None, hits: int = 0) -> _Result:
    """Outputs, and gradients of all weights and inputs; an oracle must act `hits` times."""
    with undisturbed(model), torch.enable_grad():
        leaves = map_tensors(lambda t: t.requires_grad_(t.is_floating_point()), own_copy(call))
        inputs = map_tensors(torch.clone, leaves)  # leaves cannot be modified in place
        torch.manual_seed(0)  # the same noise in every run
        if oracle is None:
            result = run_example(model, inputs)
        else:
            with oracle:
                result = run_example(model, inputs)
            if oracle.hits != hits:
                raise VerificationError("verify: two runs of the model on the same example do not take the same path")
        parts = [t.flatten() for t in tensors_in(result) if t.is_floating_point()]
        output = torch.cat([part.to(parts[0].dtype) for part in parts])
    return _Result(output.detach(), _gradients(model, output, list(tensors_in(leaves))))


def _gradients(model: nn.Module, output: Tensor, inputs: list[Tensor]) -> list[Tensor] | None:
    """Gradients of a fixed weighted sum of the outputs."""
    if not output.requires_grad:
        return None
    named = model.named_parameters()
    wanted: list[Tensor] = [p for name, p in named if not name.startswith(f"{ROOT_NAME}.") and p.requires_grad]
    wanted += [t for t in inputs if t.requires_grad]
    weights = torch.linspace(-1, 1, output.numel(), dtype=output.dtype, device=output.device).cos()
    found = torch.autograd.grad((output * weights).sum(), wanted, allow_unused=True)
    return [torch.zeros_like(t) if g is None else g for t, g in zip(wanted, found, strict=True)]


def _oracle(trace: Trace, path: SkipPath, skip: LongSkip) -> tuple[ScaleOperand | ScaleSlices, int]:
    """The mode that scales what the hooks of this skip should scale, and how often it acts."""
    if not skip.after_norm:
        return _scale_operand(path, FACTOR), 1 + len(path.earlier)
    uses = [trace.nodes[child] for child in trace.children[path.join]]
    norms = frozenset(use.op for use in uses if use.name == "group_norm")
    others = frozenset(use.op for use in uses if use.name != "group_norm")
    return ScaleSlices(norms, others, *path.op.channels(path.position), FACTOR), len(uses)


def _scale_operand(path: SkipPath, factor: float, watched: frozenset[int] = frozenset()) -> ScaleOperand:
    return ScaleOperand({each.op.ordinal: each.position for each in (path, *path.earlier)}, factor, watched)


def _check(skip: LongSkip, hooked: _Result, oracle: _Result, unscaled: _Result, dtype: torch.dtype) -> SkipCheck:
    tolerance = 1e-6 if dtype == torch.float64 else (1e-2 if dtype == torch.float32 else 1e-1)
    pairs = {"outputs": ([hooked.output], [oracle.output], [unscaled.output])}
    if hooked.gradients is not None and oracle.gradients is not None and unscaled.gradients is not None:
        pairs["gradients"] = (hooked.gradients, oracle.gradients, unscaled.gradients)
    errors = {what: _relative_error(*tensors) for what, tensors in pairs.items()}
    for what, error in errors.items():
        if not error <= tolerance:
            raise VerificationError(
                f"verify: skip {skip.index} ({skip.made_in} -> {skip.used_in}, at {skip.consumer or 'the model itself'}): "
                f"{what} differ from the oracle's by {error:.1e} of the effect; the hook scales something else than the "
                "skip; nothing is scaled now if this came from scalelong.apply"
            )
    effect = float((oracle.output - unscaled.output).norm() / unscaled.output.norm().clamp_min(1e-30))
    return SkipCheck(skip.index, skip.made_in, skip.used_in, errors["outputs"], errors.get("gradients"), effect)


def _relative_error(got: Sequence[Tensor], expected: Sequence[Tensor], unscaled: Sequence[Tensor]) -> float:
    """The largest deviation relative to the largest effect; 0 within rounding errors of the outputs."""
    if not all(bool(torch.isfinite(tensor).all()) for tensor in (*got, *expected)):
        return math.inf
    deviation = max(_largest(a - b) for a, b in zip(got, expected, strict=True))
    effect = max(_largest(a - b) for a, b in zip(expected, unscaled, strict=True))
    rounding = 100 * torch.finfo(got[0].dtype).eps * max(_largest(a) for a in unscaled)
    return 0.0 if deviation <= rounding else deviation / max(effect, rounding)


def _largest(tensor: Tensor) -> float:
    return float(tensor.abs().max()) if tensor.numel() else 0.0


# --------------------------------------------------------------------------------------------------------------- reach


def measure_reach(model: nn.Module, skips: Sequence[LongSkip], example: Call) -> list[Reach]:
    """The reach of each skip on this example; unchanged if it cannot be measured (no values, joins not visible)."""
    unchanged = [skip.reach for skip in skips]
    if is_meta(model):
        return unchanged
    copied = copy.deepcopy(model)
    add_noise(copied)
    try:
        found = detect(copied, example)
    except NoLongSkipsError:
        return unchanged
    if len(found.paths) != len(skips):
        return unchanged
    return [_reach(copied, found.trace, path, example) for path in found.paths]


def _reach(model: nn.Module, trace: Trace, path: SkipPath, example: Call) -> Reach:
    seen: set[str] = set()
    for each in (path, *path.earlier):
        alone = replace(each, earlier=())
        ops = frozenset(trace.nodes[node].op for node in _inputs_of_next_layers(trace, each.join)) - {-1}
        whole, half, zero = (_values(model, alone, example, factor, ops) for factor in (1.0, 0.5, 0.0))
        seen |= {_effect(whole[op], half[op], zero[op]) for op in ops}
    if seen == {"full"}:
        return "full"
    if seen <= {"cancelled"}:
        return "none"
    return "shortcut" if seen == {"full", "cancelled"} else "partial"


def _inputs_of_next_layers(trace: Trace, join: int) -> list[int]:
    """The nodes behind a join that a weighted layer or a further join (of a residual stream) receives.

    A join that is itself weighted (addmm of a fused layer) counts as its own next layer.
    """
    if trace.nodes[join].weighted:
        return [join]
    seen, last = [join], set()
    for node in seen:
        for child in trace.children[node]:
            if trace.nodes[child].weighted or trace.nodes[child].join is not None:
                last.add(node)
            elif child not in seen:
                seen.append(child)
    return sorted(last)


def _values(model: nn.Module, path: SkipPath, example: Call, factor: float, ops: frozenset[int]) -> dict[int, Tensor]:
    """The outputs of `ops` with the operand scaled by `factor`."""
    with undisturbed(model), torch.no_grad():
        torch.manual_seed(0)
        call = own_copy(example)
        with _scale_operand(path, factor, ops) as mode:
            run_example(model, call)
    return {op: torch.cat([t.double().flatten() for t in outputs]) for op, outputs in mode.outputs.items()}


def _effect(whole: Tensor, half: Tensor, zero: Tensor) -> str:
    effect = (whole - zero).norm()
    if (half - (whole + zero) / 2).norm() <= LINEAR * effect:
        return "full" if effect > 0 else "cancelled"
    return "cancelled" if (half - whole).norm() <= CANCELLED * effect else "bent"
