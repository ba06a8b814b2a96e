"""Verify hooks against an oracle, and measure the reach of kappa.

The oracle is a run without hooks in which the operand of the join op itself is scaled; `verify` compares outputs and
gradients with it. `measure_reach` scales the operand by 1, 1/2 and 0: the input of a next weighted layer is either linear in
kappa, or the same for 1 and 1/2 (a norm cancels kappa), or neither (a norm over both operands, an activation):

    full      linear for every next layer
    shortcut  linear for some (a ResNet block's shortcut, a residual stream), cancelled for the others
    partial   neither for some layer
    none      cancelled everywhere
"""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Iterable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook

from scalelong.errors import NoLongSkipsError, VerificationError
from scalelong.scaling.constant import ConstantScaling
from scalelong.skips.example import (
    independent_copy,
    is_meta,
    map_tensors,
    merge_example,
    own_copy,
    run_example,
    tensors_in,
    undisturbed,
)
from scalelong.skips.families import generated_example
from scalelong.skips.hooks import attached_skips, detach, replace_scaling, root_name, scaling_of
from scalelong.skips.long_skip import Call, LongSkip, Reach
from scalelong.skips.tracing.detect import detect_all
from scalelong.skips.tracing.paths import SkipPath
from scalelong.skips.tracing.trace import JOIN_OPS, CountingMode, Trace

FACTOR = 0.5
CHECKPOINTING = ("gradient_checkpointing", "use_checkpoint", "checkpointing", "use_checkpointing")
LINEAR = 1e-3  # largest deviation from a straight line, relative to the effect of kappa = 0
CANCELLED = 1e-2  # largest change, relative to the effect of kappa = 0; the eps of a norm is visible here


@dataclass(frozen=True)
class SkipCheck:
    """The result for one skip; errors are relative to what the scaling changes."""

    index: int
    made_in: str
    used_in: str
    output_error: float
    gradient_error: float | None  # None if the output has no gradient, or activations are recomputed
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
            errors = f"output {check.output_error:.1e}, {gradient}, effect {check.effect:.1e}"
            lines.append(f"  {check.index}: {check.made_in} -> {check.used_in}: {errors}")
        return "\n".join(lines)


def verify(model: nn.Module, *args: Any, example: Any = None, **kwargs: Any) -> VerificationReport:
    """Check the scaling of `model` against the oracle; raise a `VerificationError` that names the wrong skip.

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
        raise ValueError("model: it is on the meta device and has no values to check; verify a small copy of it")
    call = merge_example(example, args, kwargs) or generated_example(model)
    with undisturbed(model):
        copies = Copies(model, call)
        unscaled = run(copies.plain, copies.call)
        checks = []
        for skip, path in copies.skips:
            copies.scaling.values = tuple(FACTOR if i == skip.index else 1.0 for i in range(1, len(copies.skips) + 1))
            oracle = _ScaleSlices(copies.trace, path, FACTOR) if skip.after_norm else _ScaleOperand(path, FACTOR)
            results = run(copies.hooked, copies.call), run(copies.plain, copies.call, oracle), unscaled
            checks.append(_check(skip, *results, copies.dtype))
    return VerificationReport(type(model).__name__, copies.dtype, tuple(checks))


class Copies:
    """Copies of a scaled model with and without hooks, with the same noise; in float64 if the model supports it.

    `scaling` replaces the coefficients of the hooked copy; `skips` pairs its skips with the paths traced in the plain one.
    """

    def __init__(self, model: nn.Module, call: Call) -> None:
        skips = attached_skips(model)
        self.hooked, self.call, self.scaling = independent_copy(model), call, ConstantScaling([1.0] * len(skips))
        for module, name in itertools.product(self.hooked.modules(), CHECKPOINTING):
            if getattr(module, name, False) is True:
                setattr(module, name, False)  # the oracle does not see what the backward pass recomputes
        add_noise(self.hooked)
        self.plain = copy.deepcopy(self.hooked)
        detach(self.plain)
        self.dtype = next((p.dtype for p in self.plain.parameters() if p.is_floating_point()), torch.float32)
        with suppress(Exception):  # a forward that fixes its own precision is checked in that
            doubled = copy.deepcopy(self.plain).double()
            args, kwargs = map_tensors(lambda t: t.double() if t.is_floating_point() else t, own_copy(call))
            with undisturbed(doubled), torch.no_grad():
                run_example(doubled, own_copy((args, kwargs)))
            self.hooked, self.plain, self.call = self.hooked.double(), doubled, (args, kwargs)
            self.dtype = torch.float64
        replace_scaling(self.hooked, self.scaling)
        try:
            found = detect_all(self.plain, skips, self.call)
        except NoLongSkipsError as error:
            raise VerificationError(f"verify: its skips cannot be checked: traced without hooks, {error}") from None
        self.trace, self.skips = found.trace, list(zip(skips, found.paths, strict=True))


def add_noise(model: nn.Module) -> None:
    """Add the same noise to all-zero parameters of every copy, since zero weights would hide mistakes."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.startswith(f"{root_name(model)}.") or parameter.is_meta or not parameter.is_floating_point():
                continue
            if not parameter.any():
                fan_in = max(1, parameter[0].numel()) if parameter.ndim >= 2 else 100
                noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float32) / fan_in**0.5
                parameter.add_(noise.to(parameter.device, parameter.dtype))


class _ScaleOperand(CountingMode):
    """Scale the operand of a path's joins by a factor; keep the outputs of the `watched` ops."""

    def __init__(self, path: SkipPath, factor: float, watched: frozenset[int] = frozenset()) -> None:
        super().__init__()
        self.positions = {each.op.ordinal: each.position for each in (path, *path.earlier)}
        self.factor, self.watched = factor, watched
        self.expected, self.hits = len(self.positions), 0
        self.outputs: dict[int, Tensor] = {}

    def on_call(self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if name in JOIN_OPS and self.join in self.positions:
            self.hits += 1
            operands = list(args[0] if JOIN_OPS[name] == "cat" else args)
            operands[self.positions[self.join]] = operands[self.positions[self.join]] * self.factor
            args = (operands, *args[1:]) if JOIN_OPS[name] == "cat" else tuple(operands)
        result = func(*args, **kwargs)
        if self.op in self.watched:
            self.outputs[self.op] = torch.cat(
                [tensor.detach().cpu().double().flatten() for tensor in tensors_in(result)]
            )
        return result


class _ScaleSlices(CountingMode):
    """Scale the skip's channels after its concatenation: in the output of norms, in the input of other ops."""

    def __init__(self, trace: Trace, path: SkipPath, factor: float) -> None:
        super().__init__()
        self.uses = {trace.nodes[child].op for child in trace.children[path.join]}
        self.channels, self.factor = path.op.channels(path.position), factor
        self.expected, self.hits = len(trace.children[path.join]), 0

    def on_call(self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.op not in self.uses:
            return func(*args, **kwargs)
        if name == "group_norm":
            return self._scale(func(*args, **kwargs))
        return func(self._scale(args[0]), *args[1:], **kwargs)

    def _scale(self, tensor: Tensor) -> Tensor:
        self.hits += 1
        factors = torch.ones(tensor.shape[1], dtype=tensor.dtype, device=tensor.device)
        factors.narrow(0, *self.channels).fill_(self.factor)
        return tensor * factors.view(1, -1, *[1] * (tensor.ndim - 2))


Outputs = dict[str, list[Tensor]]  # outputs, and gradients if there are any
_Oracle = _ScaleOperand | _ScaleSlices


def run(model: nn.Module, call: Call, oracle: _Oracle | None = None, gradients: bool = True) -> Outputs:
    """Outputs, and gradients of a fixed weighted sum of them w.r.t. all weights and inputs."""
    with undisturbed(model), torch.set_grad_enabled(gradients):
        leaves = map_tensors(lambda t: t.requires_grad_(gradients and t.is_floating_point()), own_copy(call))
        inputs = map_tensors(torch.clone, leaves)  # leaves cannot be modified in place
        torch.manual_seed(0)  # the same noise in every run
        with oracle or nullcontext():
            result = run_example(model, inputs)
        if oracle and oracle.hits != oracle.expected:
            raise VerificationError("verify: two runs of the model on the same example do not take the same path")
        parts = [t.flatten() for t in tensors_in(result) if t.is_floating_point()]
        output = torch.cat([part.to(parts[0].dtype) for part in parts])
    if not output.requires_grad:
        return {"outputs": [output]}
    named = model.named_parameters()
    wanted: list[Tensor] = [p for name, p in named if not name.startswith(f"{root_name(model)}.") and p.requires_grad]
    wanted += [t for t in tensors_in(leaves) if t.requires_grad]
    weights = torch.linspace(-1, 1, output.numel(), dtype=output.dtype, device=output.device).cos()
    model.zero_grad()
    recomputed: list[str] = []
    with register_module_forward_pre_hook(lambda module, _: recomputed.append(type(module).__name__)):
        (output * weights).sum().backward()  # type: ignore[no-untyped-call]
    found = [torch.zeros_like(t) if t.grad is None else t.grad for t in wanted]
    model.zero_grad()
    if recomputed:  # activation checkpointing: an oracle does not see what the backward pass computes again
        return {"outputs": [output.detach()]}
    return {"outputs": [output.detach()], "gradients": found}


def _check(skip: LongSkip, hooked: Outputs, oracle: Outputs, unscaled: Outputs, dtype: torch.dtype) -> SkipCheck:
    tolerance = 1e-6 if dtype == torch.float64 else (1e-2 if dtype == torch.float32 else 1e-1)
    shared = [what for what in hooked if what in oracle and what in unscaled]
    errors = {what: _relative_error(hooked[what], oracle[what], unscaled[what]) for what in shared}
    for what, error in errors.items():
        if not error <= tolerance:
            where = f"skip {skip.index} ({skip.made_in} -> {skip.used_in}, at {skip.consumer or 'the model itself'})"
            wrong = f"{what} differ from the oracle's by {error:.1e} of the effect"
            raise VerificationError(f"verify: {where}: {wrong}; the hook scales something else than the skip")
    (scaled,), (plain,) = oracle["outputs"], unscaled["outputs"]
    effect = float((scaled - plain).norm() / plain.norm().clamp_min(1e-30))
    return SkipCheck(skip.index, skip.made_in, skip.used_in, errors["outputs"], errors.get("gradients"), effect)


def _relative_error(got: Sequence[Tensor], expected: Sequence[Tensor], unscaled: Sequence[Tensor]) -> float:
    """The largest deviation relative to the largest effect; 0 within rounding errors of the outputs."""
    if not all(bool(torch.isfinite(tensor).all()) for tensor in (*got, *expected)):
        return math.inf
    deviation = _largest(a - b for a, b in zip(got, expected, strict=True))
    effect = _largest(a - b for a, b in zip(expected, unscaled, strict=True))
    rounding = 100 * torch.finfo(got[0].dtype).eps * _largest(unscaled)
    return 0.0 if deviation <= rounding else deviation / max(effect, rounding)


def _largest(tensors: Iterable[Tensor]) -> float:
    return max(float(tensor.abs().max()) if tensor.numel() else 0.0 for tensor in tensors)


def measure_reach(model: nn.Module, skips: Sequence[LongSkip], example: Call) -> list[Reach]:
    """Measure the reach of each skip on this example; unchanged if that is impossible (meta device, invisible joins)."""
    if is_meta(model):
        return [skip.reach for skip in skips]
    copied = independent_copy(model)
    add_noise(copied)
    try:
        found = detect_all(copied, skips, example)
    except NoLongSkipsError:
        return [skip.reach for skip in skips]
    return [_reach(copied, found.trace, path, example) for path in found.paths]


def _reach(model: nn.Module, trace: Trace, path: SkipPath, example: Call) -> Reach:
    seen: set[str] = set()
    for each in (path, *path.earlier):
        ops = frozenset(trace.nodes[node].op for node in _inputs_of_next_layers(trace, each.join)) - {-1}
        modes = [_ScaleOperand(replace(each, earlier=()), factor, ops) for factor in (1.0, 0.5, 0.0)]
        for mode in modes:
            with undisturbed(model), torch.no_grad():
                torch.manual_seed(0)
                call = own_copy(example)
                with mode:
                    run_example(model, call)
        seen |= {_effect(*(mode.outputs[op] for mode in modes)) for op in ops}
    if seen == {"full"}:
        return "full"
    if seen <= {"cancelled"}:
        return "none"
    return "shortcut" if seen == {"full", "cancelled"} else "partial"


def _inputs_of_next_layers(trace: Trace, join: int) -> list[int]:
    """The nodes after a join that enter a weighted layer or another join (residual stream), or the output."""
    if trace.nodes[join].weight:  # addmm of a fused layer
        return [join]
    seen, last = [join], set()
    for node in seen:
        for child in trace.children[node]:
            if trace.nodes[child].weight or trace.nodes[child].join is not None:
                last.add(node)
            elif child not in seen:
                seen.append(child)
    return sorted(last) or [seen[-1]]


def _effect(whole: Tensor, half: Tensor, zero: Tensor) -> str:
    effect = (whole - zero).norm()
    if (half - (whole + zero) / 2).norm() <= LINEAR * effect:
        return "full" if effect > 0 else "cancelled"
    return "cancelled" if (half - whole).norm() <= CANCELLED * effect else "bent"
