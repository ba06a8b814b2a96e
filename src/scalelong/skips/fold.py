"""Fold constant coefficients into the weights that read the skips, and remove the hooks.

Exact where a linear layer or convolution acts on the concatenated skip: its input columns are multiplied by kappa_i. A
GroupNorm over whole groups of skip channels cancels kappa_i up to its eps: then only the shortcut's columns change. The
hooked and the folded model are compared skip by skip, and a deviation raises an error.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from scalelong.scaling.constant import ConstantScaling
from scalelong.skips.attach import remove
from scalelong.skips.example import is_meta, merge_example, restored_on_error, unchanged_on_error, undisturbed
from scalelong.skips.families import generated_example
from scalelong.skips.hooks import scaling_of
from scalelong.skips.long_skip import Call, ChannelSlice, LongSkip, OutputChannels
from scalelong.skips.tracing.hook_points import CHANNELWISE_LINEAR
from scalelong.skips.tracing.paths import SkipPath
from scalelong.skips.tracing.trace import Node, Trace
from scalelong.skips.tracing.verify import Copies, run

# f(kappa x) = kappa f(x) for kappa > 0, and channels stay apart and in order
POSITIVELY_HOMOGENEOUS = CHANNELWISE_LINEAR.union(
    ("relu", "relu_", "leaky_relu", "leaky_relu_", "max_pool1d", "max_pool2d", "max_pool3d", "avg_pool1d"),
    ("avg_pool2d", "avg_pool3d", "permute", "transpose", "movedim", "reshape", "view", "flatten"),
)
CANCELS = frozenset({"group_norm", "instance_norm"})
INPUT_DIM = {  # dimension of a layer's weight that its input channels index
    **dict.fromkeys(("linear", "conv1d", "conv2d", "conv3d"), 1),
    **dict.fromkeys(("conv_transpose1d", "conv_transpose2d", "conv_transpose3d"), 0),
}


@dataclass(frozen=True)
class Columns:
    """Input columns of a weight."""

    weight: str
    dim: int
    start: int
    size: int

    def scale(self, model: nn.Module, factor: float, dtype: torch.dtype) -> None:
        part = model.get_parameter(self.weight).narrow(self.dim, self.start, self.size)
        with torch.no_grad():
            part.copy_(part.to(dtype) * factor)


@unchanged_on_error
def fold(model: nn.Module, *args: Any, example: Any = None, tolerance: float | None = None, **kwargs: Any) -> list[str]:
    """Multiply the weights that read the skips by the coefficients and remove the hooks; return the names of the weights.

    The example is given as `example=`, as for `apply`, or as plain arguments; the most common known classes need none. If
    the folded model deviates from the scaled one by more than `tolerance` (relative to the largest output; by default 1e-6
    or, if larger, the epsilon of the weights' dtype), nothing is changed and a ValueError is raised.

    >>> import scalelong
    >>> model = scalelong.UViT(scalelong.UViTConfig(image_size=8, patch_size=2, dim=16, depth=4, heads=2))
    >>> handle = scalelong.apply(model, "cs", kappa=0.7)
    >>> scalelong.fold(model)
    ['out_blocks.0.skip_linear.weight']
    """
    scaling = scaling_of(model)
    if not isinstance(scaling, ConstantScaling):
        raise ValueError(f"fold: {scaling.config} does not multiply each skip by a fixed number; keep the hooks")
    if is_meta(model):
        raise ValueError("fold: the model is on the meta device and has no weights to change; load them first")
    call = merge_example(example, args, kwargs) or generated_example(model)
    changes = list(folded_columns(model, scaling.values, call, tolerance))
    names = list(dict.fromkeys(columns.weight for columns, _ in changes))
    with restored_on_error(model, map(model.get_parameter, names)):
        for columns, factor in changes:
            columns.scale(model, factor, model.get_parameter(columns.weight).dtype)
        remove(model, "scaling")
    return names


def folded_columns(
    model: nn.Module, values: tuple[float, ...], call: Call, tolerance: float | None
) -> Iterator[tuple[Columns, float]]:
    """The columns to scale; folded and hooked copies are compared after each skip."""
    with undisturbed(model):
        copies, allowed = Copies(model, call), 1e-6 if tolerance is None else tolerance
        plain = copies.plain
        for (skip, path), kappa in zip(copies.skips, values, strict=True):
            if kappa == 1.0:
                continue
            columns = _columns_after_norm(plain, skip) if skip.after_norm else _columns(plain, copies.trace, path, skip)
            for each in columns:
                dtype = model.get_parameter(each.weight).dtype  # rounded as it will be stored
                each.scale(plain, kappa, dtype)
                allowed = max(allowed, torch.finfo(dtype).eps) if tolerance is None else tolerance
            copies.scaling.values = tuple(value if i <= skip.index else 1.0 for i, value in enumerate(values, start=1))
            expected, folded = (run(each, copies.call, gradients=False) for each in (copies.hooked, plain))
            _compare(expected["outputs"][0].cpu().double(), folded["outputs"][0].cpu().double(), skip, kappa, allowed)
            yield from ((each, kappa) for each in columns)


def _compare(expected: Tensor, folded: Tensor, skip: LongSkip, kappa: float, tolerance: float) -> None:
    deviation = float((folded - expected).abs().max() / expected.abs().max().clamp_min(1e-30))
    if deviation <= tolerance:
        return
    causes = {
        "shortcut": "the GroupNorm in between cancels kappa up to its eps",
        "partial": "the GroupNorm in between has groups of both hidden and skip channels",
    }
    nonlinear = "the layers in between are not linear in kappa, or compute their weights, as with weight_norm"
    cause = causes.get(skip.reach, nonlinear)
    exact = skip.reach in causes and not skip.after_norm  # with the other placement, which is another network
    remedy = "train with placement='after_norm', which folds exactly, " if exact else ""
    deviates = f"kappa {kappa:.4g} would deviate by {deviation:.1e}, more than tolerance={tolerance:.1e}: {cause}"
    raise _refusal(skip, f"{deviates}; {remedy}keep the hooks, or pass a larger tolerance")


def _refusal(skip: LongSkip, reason: str) -> ValueError:
    return ValueError(f"fold: skip {skip.index} ({skip.made_in} -> {skip.used_in}): {reason}")


def _columns(model: nn.Module, trace: Trace, path: SkipPath, skip: LongSkip) -> list[Columns]:
    paths = (path, *path.earlier)
    columns = dict.fromkeys(each for one in paths for each in _columns_behind(model, trace, one, skip, len(paths)))
    if not columns:
        raise _refusal(skip, "no weights are found behind it; keep the hooks")
    return list(columns)


def _columns_after_norm(model: nn.Module, skip: LongSkip) -> list[Columns]:
    """The norm's weights and biases of the skip's channels, and the shortcut's columns."""
    columns = []
    for name, slot in skip.hook_points:
        if isinstance(slot, OutputChannels):
            if getattr(model.get_submodule(name), "weight", None) is None:
                raise _refusal(skip, f"{name} has no weights to fold kappa into; keep the hooks")
            columns += [Columns(f"{name}.{key}", 0, slot.start, slot.channels) for key in ("weight", "bias")]
        elif isinstance(slot, ChannelSlice):
            columns.append(Columns(f"{name}.weight", 1, slot.start, slot.channels))
    return columns


def _columns_behind(model: nn.Module, trace: Trace, path: SkipPath, skip: LongSkip, times: int) -> Iterator[Columns]:
    """The columns that read one join; `times` is how often the consumer is called with this skip."""
    join = trace.nodes[path.join]
    if join.weight is not None:  # a fused layer: weights for [hidden, skip]
        width = model.get_parameter(join.weight).shape[1]
        yield Columns(join.weight, 1, width - skip.size.channels, skip.size.channels)
        return
    if path.op.kind != "cat":
        raise _refusal(skip, f"it is joined by {path.op.kind}, which mixes it with the hidden state; keep the hooks")
    seen = [path.join]
    for node in seen:
        for child in (trace.nodes[index] for index in trace.children[node]):
            if child.weight is not None:
                if trouble := _trouble_of_layer(model, trace, child, child.weight, times):
                    raise _refusal(skip, f"{child.weight} is {trouble}, so it cannot replace kappa; keep the hooks")
                yield Columns(child.weight, INPUT_DIM[child.name], *path.op.channels(path.position))
            elif child.name in POSITIVELY_HOMOGENEOUS:
                seen += [child.index] if child.index not in seen else []
            elif child.name not in CANCELS:
                raise _refusal(skip, f"it passes through {child.name} on the way to the weights; keep the hooks")


def _trouble_of_layer(model: nn.Module, trace: Trace, node: Node, weight: str, times: int) -> str | None:
    uses = sum(other.weight == weight for other in trace.nodes)
    if uses != times:
        return f"used {uses} times in one forward, not only on this skip"
    if getattr(model.get_submodule(weight.rpartition(".")[0]), "groups", 1) != 1:
        return "a grouped convolution"
    return None if node.name in INPUT_DIM else f"used by {node.name}, not by a linear layer or convolution"
