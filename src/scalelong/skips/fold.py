"""Bake constant coefficients into the weights behind the skips, so that the scaling costs nothing and leaves nothing behind.

Exact where a linear layer or convolution acts directly on the concatenated skip: its input columns are multiplied by kappa_i.
A GroupNorm on whole groups of skip channels cancels kappa_i up to its eps, so then only the shortcut's columns change. What a
model does with its hooks and what it would do folded, its weights rounded as they will be stored, is compared skip after
skip, and a deviation is refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from scalelong.scaling.base import ConstantScaling
from scalelong.skips.attach import remove
from scalelong.skips.example import is_meta, own_copy, run_example, tensors_in, undisturbed
from scalelong.skips.example_inputs import generated_example
from scalelong.skips.hooks import attached_skips, replace_scaling, scaling_of
from scalelong.skips.long_skip import Call, ChannelSlice, LongSkip, OutputChannels
from scalelong.skips.tracing.detect import Detection
from scalelong.skips.tracing.nesting import Loop
from scalelong.skips.tracing.trace import Node, Trace
from scalelong.skips.tracing.verify import comparable_copies, oracle_loops

POSITIVELY_HOMOGENEOUS = frozenset(  # f(kappa x) = kappa f(x) for kappa > 0, channels stay apart and in order
    {
        *("mul", "__mul__", "__rmul__", "div", "__truediv__", "clone", "contiguous", "to", "type", "type_as", "float"),
        *("half", "bfloat16", "double", "interpolate", "pad", "relu", "relu_", "leaky_relu", "leaky_relu_"),
        *("max_pool1d", "max_pool2d", "max_pool3d", "avg_pool1d", "avg_pool2d", "avg_pool3d", "permute", "transpose"),
        *("dropout", "dropout1d", "dropout2d", "dropout3d"),
        *("movedim", "reshape", "view", "flatten", "neg", "detach"),
    }
)
CANCELS = frozenset({"group_norm", "instance_norm"})
LAYERS = frozenset({"linear", "conv1d", "conv2d", "conv3d"})
TRANSPOSED = frozenset({"conv_transpose1d", "conv_transpose2d", "conv_transpose3d"})


@dataclass(frozen=True)
class Columns:
    """Input columns of one weight."""

    weight: str
    dim: int
    start: int
    size: int

    def scale(self, model: nn.Module, factor: float, dtype: torch.dtype) -> None:
        """Multiply them by the factor, rounded to `dtype`."""
        part = model.get_parameter(self.weight).narrow(self.dim, self.start, self.size)
        with torch.no_grad():
            part.copy_(part.to(dtype) * factor)


def fold(model: nn.Module, *args: Any, tolerance: float | None = None, **kwargs: Any) -> list[str]:
    """Multiply the weights behind the skips by the coefficients and take the hooks off; returns the weights changed.

    args, kwargs: an example call; models of the commonest known families need none. A folded model that deviates from the
    scaled one by more than `tolerance` (relative to its largest output) is refused, and then nothing is changed. Both run in
    double precision where their forward can, so what is compared are the weights as the model stores them; computing in
    less adds its own rounding. The default is 1e-6, or the spacing of the weights' own precision where that is more: 0.001
    for float16, 0.008 for bfloat16.
    """
    scaling = scaling_of(model)
    if not isinstance(scaling, ConstantScaling):
        raise ValueError(
            f"fold: what {scaling.config} does is no fixed number per skip, so no weights can stand for it; only the "
            "constant methods can be folded"
        )
    if is_meta(model):
        raise ValueError("fold: the model is on the meta device and has no weights to change; load them first")
    call = (args, kwargs) if args or kwargs else generated_example(model)
    changes = list(_checked_changes(model, scaling.values, call, tolerance))
    for columns, factor in changes:
        columns.scale(model, factor, _stored_in(model, columns))
    remove(model)
    return list(dict.fromkeys(columns.weight for columns, _ in changes))


def _checked_changes(
    model: nn.Module, values: tuple[float, ...], call: Call, tolerance: float | None
) -> Iterator[tuple[Columns, float]]:
    """The columns to scale, compared on copies: with each further skip folded into one, and its hook at work in the other."""
    skips = attached_skips(model)
    with undisturbed(model):
        hooked, plain, call, _ = comparable_copies(model, call)
        test = ConstantScaling([1.0] * len(skips))
        replace_scaling(hooked, test)
        found = oracle_loops(plain, skips, call)
        allowed = 1e-6 if tolerance is None else tolerance
        for skip, loop, kappa in zip(skips, found.loops, values, strict=True):
            if kappa == 1.0:
                continue
            columns = _columns_after_norm(plain, skip) if skip.after_norm else _columns(plain, found, loop, skip)
            for each in columns:
                dtype = _stored_in(model, each)
                each.scale(plain, kappa, dtype)
                allowed = max(allowed, torch.finfo(dtype).eps) if tolerance is None else tolerance
            test.values = tuple(value if i <= skip.index else 1.0 for i, value in enumerate(values, start=1))
            _compare(_output(hooked, call), _output(plain, call), skip, kappa, allowed)
            yield from ((each, kappa) for each in columns)


def _stored_in(model: nn.Module, columns: Columns) -> torch.dtype:
    return model.get_parameter(columns.weight).dtype


def _compare(expected: Tensor, folded: Tensor, skip: LongSkip, kappa: float, tolerance: float) -> None:
    deviation = float((folded - expected).abs().max() / expected.abs().max().clamp_min(1e-30))
    if not deviation <= tolerance:
        raise ValueError(
            f"fold: skip {skip.index} ({skip.made_in} -> {skip.used_in}) with kappa {kappa:.4g} would deviate by "
            f"{deviation:.1e}, more than tolerance={tolerance:.1e}: {_why(skip)}; {_remedy(skip)}keep the hooks, or pass a "
            "larger tolerance"
        )


def _why(skip: LongSkip) -> str:
    if skip.reach == "shortcut":
        return "the GroupNorm in between cancels kappa but for its eps"
    if skip.reach == "partial":
        return "the GroupNorm in between has groups of both hidden and skip channels, which do not cancel kappa"
    return "the layers in between do not just pass kappa on"


def _remedy(skip: LongSkip) -> str:
    """Behind a norm kappa can be folded exactly, but it is another network."""
    if skip.reach not in ("shortcut", "partial") or skip.after_norm:
        return ""
    return "train with placement='after_norm', which folds exactly, "


def _output(model: nn.Module, call: Call) -> Tensor:
    with undisturbed(model), torch.no_grad():
        torch.manual_seed(0)
        result = run_example(model, own_copy(call))
        return torch.cat([t.double().flatten() for t in tensors_in(result) if t.is_floating_point()])


# ----------------------------------------------------------------------------------------- which columns a skip goes into


def _columns(model: nn.Module, found: Detection, loop: Loop, skip: LongSkip) -> list[Columns]:
    where = f"fold: skip {skip.index} ({skip.made_in} -> {skip.used_in})"
    columns: dict[Columns, None] = {}
    for each in (loop, *loop.again):
        try:
            columns.update(dict.fromkeys(_behind(model, found.trace, each, skip, 1 + len(loop.again))))
        except _NotExact as reason:
            raise ValueError(f"{where}: {reason}, so no weights can take kappa over; keep the hooks") from None
    if not columns:
        raise ValueError(f"{where}: no weights are found behind it; keep the hooks")
    return list(columns)


def _columns_after_norm(model: nn.Module, skip: LongSkip) -> list[Columns]:
    """The norm's own weights and biases of the skip's channels, and the shortcut's columns."""
    columns = []
    for name, place in skip.places:
        if isinstance(place, OutputChannels):
            if getattr(model.get_submodule(name), "weight", None) is None:
                raise ValueError(
                    f"fold: skip {skip.index}: {name} has no weights that could take kappa over; keep the hooks"
                )
            columns += [Columns(f"{name}.{key}", 0, place.start, place.channels) for key in ("weight", "bias")]
        elif isinstance(place, ChannelSlice):
            columns.append(Columns(f"{name}.weight", 1, place.start, place.channels))
    return columns


class _NotExact(Exception):  # noqa: N818
    """Why no weights can stand for a coefficient."""


def _behind(model: nn.Module, trace: Trace, loop: Loop, skip: LongSkip, times: int) -> Iterator[Columns]:
    """The columns behind one join; `times` is how often the consumer is called with this skip."""
    join = trace.nodes[loop.join]
    assert join.join is not None
    if join.weighted and join.weight is not None:  # a fused layer: weights for [hidden, skip]
        yield Columns(
            join.weight, 1, model.get_parameter(join.weight).shape[1] - skip.size.channels, skip.size.channels
        )
        return
    if join.join.kind != "cat":
        raise _NotExact(f"it is joined by {join.join.kind}, and the layers behind see it mixed with the hidden state")
    start, size = sum(join.join.sizes[: loop.position]), join.join.sizes[loop.position]
    seen = [loop.join]
    for node in seen:
        for child in (trace.nodes[index] for index in trace.children[node]):
            if child.weighted:
                yield _columns_of(model, trace, child, start, size, times)
            elif child.name in POSITIVELY_HOMOGENEOUS:
                seen += [child.index] if child.index not in seen else []
            elif child.name not in CANCELS:
                raise _NotExact(f"it passes through {child.name} on the way to the weights")


def _columns_of(model: nn.Module, trace: Trace, node: Node, start: int, size: int, times: int) -> Columns:
    assert node.weight is not None
    module = model.get_submodule(node.weight.rpartition(".")[0])
    uses = sum(other.weight == node.weight for other in trace.nodes)
    if uses != times:
        raise _NotExact(f"{node.weight} is used {uses} times in one forward, not only on this skip")
    if getattr(module, "groups", 1) != 1:
        raise _NotExact(f"{node.weight} is a grouped convolution")
    if node.name not in LAYERS | TRANSPOSED:
        raise _NotExact(f"{node.weight} is used by {node.name}, not by a linear layer or convolution")
    return Columns(node.weight, 0 if node.name in TRANSPOSED else 1, start, size)
