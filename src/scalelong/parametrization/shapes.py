"""The role of every tensor, found by comparing its shape with that at base width.

Dimensions that differ are infinite. With m the ratio of the two widths (of the fan-in, for matrices), under Adam:

    role     infinite dimensions         initial size   forward   learning rate   weight decay
    finite   none                        as at base     1         1               1
    vector   its only one                as at base     1         1               1
    input    the fan-out                 as at base     1         1               1
    hidden   fan-in and fan-out          / sqrt(m)      1         / m             x m
    output   the fan-in                  as at base     1 / m     1               1

Attention whose head size d differs from the base's d0 multiplies its logits by sqrt(d0) / d rather than 1 / sqrt(d).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrize import ParametrizationList

from scalelong.parametrization.attention import attentions, normalizes_weight, query_layers, transposed, uses_scale
from scalelong.skips import is_scaled
from scalelong.skips.hooks import root_name

Role = Literal["finite", "vector", "input", "hidden", "output"]
Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class TensorRole:
    """The role of a tensor: its shape at base width, factors on its initial values and its learning rate, the multiplier of
    the layer it belongs to.

    >>> TensorRole("hidden", (64, 64), initial=0.5, lr=0.25).decay  # decoupled: lr * decay stays the same
    4.0
    """

    role: Role
    base: tuple[int, ...]
    initial: float = 1.0
    multiplier: float = 1.0
    lr: float = 1.0

    @property
    def decay(self) -> float:
        return 1 / self.lr


@dataclass(frozen=True)
class Plan:
    """All that is done to a model, by the names of its tensors and modules."""

    roles: dict[str, TensorRole] = field(default_factory=dict)
    inputs: dict[str, float] = field(default_factory=dict)  # modules whose input is multiplied: readouts
    outputs: dict[str, float] = field(default_factory=dict)  # modules whose output is multiplied: queries of attention
    scales: dict[str, float] = field(default_factory=dict)  # attention of our U-ViT: its scale
    heads: dict[str, int] = field(default_factory=dict)  # head sizes at base width
    joined: list[str] = field(default_factory=list)  # modules whose weight is joined from two: `skip_weights`
    stamp: tuple[int, ...] = ()  # the shapes of all tensors and the head sizes at base width; empty: not muP


def base_shapes(model: nn.Module, base: nn.Module) -> dict[str, tuple[int, ...]]:
    """The shape at base width of every parameter; gates of a scaling that the base lacks are finite.

    Gates are matched in order: LS names those it shares after their width.
    """
    if not isinstance(base, nn.Module) or type(model) is not type(base):
        given = type(base).__name__
        raise ValueError(f"base: is a {given}, the model a {type(model).__name__}; give the same class at base width")
    for which, each in (("model", model), ("base", base)):
        if lazy := [name for name, parameter in each.named_parameters() if is_lazy(parameter)]:
            raise ValueError(f"{which}: {lazy[0]} has no shape yet; run the {which} once, for its lazy modules")
    theirs = {name: tuple(parameter.shape) for name, parameter in base.named_parameters()}
    ours = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    if is_scaled(model):
        gates = [name for name in ours if name.startswith(f"{root_name(model)}.")]
        others = [name for name in theirs if name.startswith(f"{root_name(base)}.")] if is_scaled(base) else []
        known = [theirs.pop(name) for name in others]
        theirs |= dict(zip(gates, known if len(known) == len(gates) else [ours[name] for name in gates], strict=True))
    shapes = {name: theirs.pop(name, None) for name in ours}
    for name in [*(name for name, shape in shapes.items() if shape is None), *theirs]:
        where = "the model" if name in theirs else "the base"
        raise ValueError(
            f"base: {where} has no {name}; base and model must differ in width only, not in depth or options"
        )
    for name, shape in shapes.items():
        if len(shape or ()) != len(ours[name]):
            raise ValueError(
                f"base: {name} is {shape} there and {ours[name]} in the model; they must differ in width only"
            )
    return {name: shape for name, shape in shapes.items() if shape is not None}


def make_plan(
    model: nn.Module,
    shapes: Shapes,
    heads: Mapping[str, int] | None = None,
    initialize: bool = True,
    sizes: Mapping[str, float] | None = None,
) -> Plan:
    """Roles and multipliers from the shapes, head sizes and, if they are known, root mean squares at base width."""
    found_heads, heads = [*attentions(model)], heads or {}
    plan = Plan(heads={path: heads[path] for path, _, _ in found_heads if path in heads})  # files may sort them
    names, tried = {id(parameter): name for name, parameter in model.named_parameters()}, set[type]()
    for path, module in model.named_modules():
        swapped = transposed(module)
        for own, parameter in module.named_parameters(recurse=False):
            name = names[id(parameter)]
            found = _role(name, module, own, tuple(parameter.shape), shapes[name], swapped)
            if own == "weight" and found.role in ("hidden", "output") and type(module) not in tried:
                tried.add(type(module))
                if normalizes_weight(module):
                    kind = type(module).__name__
                    raise ValueError(f"model: {name} is normalized in the forward pass of {kind}, for which muP's rules "
                                     "differ; train it in the standard parametrization")  # fmt: skip
            if found.multiplier != 1:
                plan.inputs[path] = found.multiplier
            if name not in plan.roles or found.role == "input":  # tied to a readout, an embedding stays one
                law = _law(module, own, parameter, shapes, names, sizes or {}, swapped) if initialize else 1.0
                initial = found.initial * law if initialize else 1.0
                if initial != 1 and not (parameter.is_floating_point() or parameter.is_complex()):
                    kind = f"is {parameter.dtype} and cannot be rescaled; quantize after training and mup.fold"
                    raise ValueError(f"model: {name} {kind}, or pass initialize=False")
                multiplier = plan.roles[name].multiplier if name in plan.roles else found.multiplier
                plan.roles[name] = TensorRole(found.role, found.base, initial, multiplier, found.lr)
    for path, module, size in found_heads:
        factor = math.sqrt(plan.heads.get(path, size) / size)
        if factor == 1:
            continue
        queries = [f"{path}.{query}".lstrip(".") for query in query_layers(module)]  # the model itself has no name
        settings = vars(module)
        own = settings.get("scaling", settings.get("scale"))  # of transformers: T5 has 1, Gemma a setting
        known = isinstance(own, bool) or not isinstance(own, float | int) or math.isclose(own, size**-0.5, rel_tol=1e-3)
        if queries and known:
            plan.outputs.update(dict.fromkeys(queries, factor))
        elif known and uses_scale(module):
            plan.scales[path] = factor / math.sqrt(size)
        else:
            scale = "a fixed scale of 1 / sqrt(d)" if known else f"a scale of {own:g}, which is not 1 / sqrt(d)"
            where = path or type(model).__name__
            raise ValueError(f"model: {where} has heads of {size}, of {plan.heads[path]} at base width, and {scale}; "
                             "keep the head size and grow the number of heads")  # fmt: skip
    in_order = {name: plan.roles[name] for name in names.values()}
    return replace(plan, roles=in_order, stamp=stamp_of(in_order, plan.heads))


def stamp_of(roles: Mapping[str, TensorRole], heads: Mapping[str, int]) -> tuple[int, ...]:
    """The base shapes of all tensors and the head sizes, as one list of numbers."""
    return (*(size for role in roles.values() for size in role.base), *heads.values())


def _role(
    name: str, module: nn.Module, own: str, shape: tuple[int, ...], base: tuple[int, ...], swapped: bool
) -> TensorRole:
    infinite = [at for at, (here, there) in enumerate(zip(shape, base, strict=True)) if here != there]
    if len(infinite) > 2 or (isinstance(module, nn.Bilinear) and 2 in infinite):
        known = "muP has rules for a fan-in and a fan-out that grow; keep the other dimensions fixed"
        raise ValueError(f"model: {name} is {shape}, {base} at base width: {known}")
    if not infinite:
        return TensorRole("finite", base)
    linear = isinstance(module, nn.Linear | _ConvNd)
    if isinstance(module, ParametrizationList) or (linear and module._parameters.get("weight") is None):
        computed = f"{name} belongs to a layer whose weight is computed from other tensors, as by weight_norm"
        raise ValueError(f"model: {computed}; build model and base without it")
    if len(shape) == 1:
        return TensorRole("vector", base)
    if isinstance(module, _ConvTransposeNd) and infinite == [0] and _groups_grow(module, base[0]):
        return TensorRole("input", base)
    elementwise = isinstance(module, nn.LayerNorm | nn.RMSNorm | nn.Embedding | nn.EmbeddingBag)
    elementwise |= "embed" in type(module).__name__.lower() or (len(shape) > 2 and math.prod(shape) == max(shape))
    layer = own == "weight" and (linear or not elementwise)
    fan_in = (0 if swapped or isinstance(module, _ConvTransposeNd) else 1) if layer else infinite[-1]
    ratio = shape[fan_in] / base[fan_in]
    if len(infinite) == 2:
        return TensorRole("hidden", base, initial=ratio**-0.5, lr=1 / ratio)
    if layer and infinite == [fan_in]:
        return TensorRole("output", base, multiplier=1 / ratio)
    if isinstance(module, _RAW_MATRICES) and "weight" in own and infinite == [1]:
        return TensorRole("output", base, initial=1 / ratio, lr=1 / ratio)  # no layer to multiply; equal under Adam
    return TensorRole("input", base)


_RAW_MATRICES = nn.RNNBase | nn.RNNCellBase | nn.MultiheadAttention  # their weights have no layers of their own


def _groups_grow(layer: _ConvTransposeNd, base_channels: int) -> bool:
    """Whether the number of groups grows with the channels, as in depthwise convolutions: then the fan-in is finite."""
    return layer.groups > 1 and (layer.groups == layer.in_channels or base_channels % layer.groups != 0)


def _law(
    module: nn.Module,
    own: str,
    values: Tensor,
    shapes: Shapes,
    names: Mapping[int, str],
    sizes: Mapping[str, float],
    swapped: bool,
) -> float:
    """Standard initial size at base width, divided by that at this width: of a known law, else as measured at both."""
    size = root_mean_square(values)
    weight = module._parameters.get("weight") if own == "bias" else values
    if not size or weight is None:
        return 1.0
    found, base = _real(values).double(), shapes[names[id(values)]]
    count = found.numel()
    if count > 1 and float(found.std(correction=0)) < 1e-3 * size:  # ones
        return 1.0
    measured = sizes.get(names[id(values)], 0.0) / size if tuple(values.shape) != base else 0.0
    noise = 3 / math.sqrt(count) + 0.005
    of_both = noise + 3 / math.sqrt(math.prod(base)) + 0.005
    largest = float(found.abs().max())
    normal = (
        abs(size / 0.02 - 1) < noise and largest > 1.01 * math.sqrt(3) * size and abs((measured or 1) - 1) < of_both
    )
    fans = [tuple(weight.shape), shapes[names[id(weight)]]]
    for here, there, uniform in _laws(own, *(fan[::-1] if swapped else fan for fan in fans)):
        if normal and not uniform:
            return 1.0  # normal with 0.02, as in transformers: constant, also where a law gives nearly the same
        within = largest <= 1.01 * math.sqrt(3) * here  # the bound of a uniform law
        agrees = not measured or abs(measured * here / there - 1) < of_both
        if abs(size / here - 1) < noise and (within or not uniform) and agrees:
            return there / here
    return measured if measured and abs(measured - 1) >= of_both else 1.0


def root_mean_square(values: Tensor) -> float:
    """0 where there are no values: on the meta device, or integers."""
    if values.is_meta or not (values.is_floating_point() or values.is_complex()) or not values.numel():
        return 0.0
    return float(_real(values).double().pow(2).mean().sqrt())


def _real(values: Tensor) -> Tensor:
    """Complex values as pairs of real ones."""
    return torch.view_as_real(values.detach()) if values.is_complex() else values.detach()


def _laws(own: str, shape: tuple[int, ...], base: tuple[int, ...]) -> Iterator[tuple[float, float, bool]]:
    """Root mean squares of the usual initializations at this and at base width, and whether they are uniform."""
    if len(shape) < 2:
        if shape and own != "bias":
            yield shape[0] ** -0.5, base[0] ** -0.5, False
        return
    fans = [(math.prod(sizes[1:]), sizes[0] * math.prod(sizes[2:])) for sizes in (shape, base)]
    (here_in, here_out), (there_in, there_out) = fans
    if "weight" not in own and own != "bias":  # tables and tokens
        yield shape[-1] ** -0.5, base[-1] ** -0.5, False
        return
    yield (3 * here_in) ** -0.5, (3 * there_in) ** -0.5, True  # of torch: within 1 / sqrt(fan_in)
    if own == "bias":
        return
    yield (2 / (here_in + here_out)) ** 0.5, (2 / (there_in + there_out)) ** 0.5, False
    yield here_in**-0.5, there_in**-0.5, False
    yield (2 / here_in) ** 0.5, (2 / there_in) ** 0.5, False
