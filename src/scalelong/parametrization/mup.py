"""muP: an initial size, a forward multiplier and a learning rate for every tensor of a model; `shapes` has the rules."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize as torch_parametrize

from scalelong.parametrization.attach import (
    attach,
    check_unparametrized,
    detach,
    holder,
    holders,
    multiply,
    plain_name,
    plan_of,
)
from scalelong.parametrization.attention import attentions, query_weights
from scalelong.parametrization.shapes import Plan, TensorRole, base_shapes, make_plan, root_mean_square
from scalelong.skips.example import unchanged_on_error
from scalelong.skips.hooks import ROOT_NAME, wrapper_of


@unchanged_on_error
def parametrize(model: nn.Module, base: nn.Module, *, initialize: bool = True, same_width: bool = False) -> nn.Module:
    """Put `model` into muP relative to `base`, in place, and return it; on any error it is left unchanged.

    base: the same class at base width. Built under `torch.device("meta")` it needs no memory, and only its shapes are read;
    with values, its initial sizes are measured, for initializations other than those below.
    initialize: False keeps the values, for weights that were trained in this parametrization.
    same_width: allow a base of the model's own width, where muP is the standard parametrization.

    Initial values are rescaled, not drawn again. How their size depends on width is recognized from the values: torch's
    default, Kaiming's, Xavier's, 1 / sqrt(width); anything else is taken to be constant.

    >>> from scalelong import UViT, UViTConfig
    >>> sizes = {"image_size": 8, "patch_size": 4, "depth": 2, "heads": 2}
    >>> with torch.device("meta"):
    ...     base = UViT(UViTConfig(dim=16, **sizes))
    >>> model = parametrize(UViT(UViTConfig(dim=64, **sizes)), base)
    >>> roles(model)["mid_block.mlp.fc1.weight"]
    TensorRole(role='hidden', base=(64, 16), initial=0.5, multiplier=1.0, lr=0.25)
    """
    plan = plan_for(model, base, initialize, same_width)
    _check_no_optimizer(model)
    apply_plan(model, plan)
    return model


def plan_for(model: nn.Module, base: nn.Module, initialize: bool = True, same_width: bool = False) -> Plan:
    """What `parametrize` would do."""
    check_unparametrized(model)
    planned = not initialize or torch.get_default_device().type == "meta"  # nothing is to have values
    for name in (name for name, parameter in model.named_parameters() if parameter.is_meta and not planned):
        empty = f"{name} is on the meta device and has no values to rescale; build the model on a device"
        raise ValueError(f"model: {empty}, or pass initialize=False to load weights that were trained in muP")
    shapes = base_shapes(model, base)
    if not same_width and all(tuple(p.shape) == shapes[name] for name, p in model.named_parameters()):
        same = "no dimension of any tensor differs from the model's, so none is found to be infinite"
        raise ValueError(f"base: {same}; give a base of another width, or pass same_width=True if that is meant")
    heads = {name: size for name, _, size in attentions(base)}
    return make_plan(model, shapes, heads, initialize, {n: root_mean_square(p) for n, p in base.named_parameters()})


def apply_plan(model: nn.Module, plan: Plan) -> None:
    """Attach the plan to the model and rescale its weights."""
    attach(model, plan)
    multiply(model, ((parameter, plan.roles[name].initial) for name, parameter in model.named_parameters()))


def roles(model: nn.Module) -> Mapping[str, TensorRole]:
    """The role of every parameter of a parametrized model, by name; also if the model is wrapped.

    >>> net = lambda width: nn.Sequential(nn.Linear(3, width), nn.ReLU(), nn.Linear(width, 1))
    >>> {name: found.role for name, found in roles(parametrize(net(64), net(16))).items()}
    {'0.weight': 'input', '0.bias': 'vector', '2.weight': 'output', '2.bias': 'finite'}
    """
    return plan_of(model).roles


def param_groups(model: nn.Module, lr: float, weight_decay: float = 0.0) -> list[dict[str, Any]]:
    """Parameter groups for Adam or AdamW, one per learning-rate multiplier, which is their entry "lr_multiplier".

    Decoupled weight decay is divided by the multiplier, so that every tensor decays alike. Schedulers that multiply rates
    keep the ratios; those that set rates need one per group: `[rate * group["lr_multiplier"] for group in groups]`. A model
    that is not parametrized gives one group.

    >>> net = lambda width: nn.Sequential(nn.Linear(3, width), nn.Linear(width, width), nn.Linear(width, 1))
    >>> groups = param_groups(parametrize(net(64), net(16)), lr=1e-3, weight_decay=0.1)
    >>> [(group["lr"], group["weight_decay"], len(group["params"])) for group in groups]
    [(0.001, 0.1, 5), (0.00025, 0.4, 1)]
    """
    factors: dict[int, float] = {}
    for part in holders(model):
        known, own = roles(part), {plain_name(name): parameter for name, parameter in part.named_parameters()}
        lost = {name for name in known if not name.startswith(f"{ROOT_NAME}.")} - {*own}  # gates may be removed
        if lost:
            merged = f"{min(lost)} is not among the parameters of this {type(model).__name__}"
            remedy = "with FSDP pass use_orig_params=True, with adapters (LoRA) give the optimizer theirs only"
            raise ValueError(f"model: {merged}; {remedy}")
        factors |= {id(own[name]): role.lr for name, role in known.items() if name in own}
    groups: dict[float, dict[str, Any]] = {}
    for parameter in model.parameters():
        factor = factors.get(id(parameter), 1.0)
        new = {"params": [], "lr": lr * factor, "weight_decay": weight_decay / factor, "lr_multiplier": factor}
        groups.setdefault(factor, new)["params"].append(parameter)
    return list(groups.values())


def role_table(model: nn.Module) -> str:
    """The roles of a parametrized model as text; tensors of repeated blocks that agree share a line.

    >>> net = lambda width: nn.Sequential(nn.Linear(3, width), nn.Linear(width, 1, bias=False))
    >>> print(role_table(parametrize(net(64), net(16))))
    tensor    role    shape   base    initial  forward  lr
    0.weight  input   64 x 3  16 x 3  1        1        1
    0.bias    vector  64      16      1        1        1
    1.weight  output  1 x 64  1 x 16  2        0.25     1
    """
    shapes = {plain_name(name): tuple(p.shape) for name, p in holder(model).named_parameters()}
    rows: dict[tuple[str, ...], int] = {}
    for name, found in roles(model).items():
        parts = name.split(".")
        general = ".".join("*" if part.isdigit() and len(parts) > 2 else part for part in parts)
        sizes = [" x ".join(map(str, shape)) or "scalar" for shape in (shapes[name], found.base)]
        numbers = [f"{value:.4g}" for value in (found.initial, found.multiplier, found.lr)]
        row = (general, found.role, *sizes, *numbers)
        rows[row] = rows.get(row, 0) + 1
    header = ("tensor", "role", "shape", "base", "initial", "forward", "lr")
    table = [header, *((f"{row[0]} ({count})" if count > 1 else row[0], *row[1:]) for row, count in rows.items())]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return "\n".join("  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in table)


@unchanged_on_error
def fold(model: nn.Module) -> nn.Module:
    """Multiply the multipliers into the weights, in place: the same function as a plain network, for export.

    >>> net = lambda width: nn.Sequential(nn.Linear(3, width), nn.ReLU(), nn.Linear(width, 1))
    >>> model, x = parametrize(net(64), net(16)), torch.ones(2, 3)
    >>> expected = model(x)
    >>> torch.allclose(fold(model)(x), expected), len(roles(model))
    (True, 0)
    """
    if wrapper := wrapper_of(model):
        raise ValueError(f"model: this {type(model).__name__} is not folded; pass the model inside {wrapper}")
    parts = [*holders(model)]
    owners = Counter(id(p) for m in model.modules() for p in m.parameters(recurse=False))
    multiply(model, [change for part in parts for change in _folded(part, owners)])
    for part in parts:
        for path in plan_of(part).joined:
            torch_parametrize.remove_parametrizations(part.get_submodule(path), "weight")
        detach(part)
    return model


def _folded(model: nn.Module, owners: Mapping[int, int]) -> list[tuple[Tensor, float]]:
    """Weights and the factors that take the place of the multipliers."""
    plan = plan_of(model)
    changes: list[tuple[Tensor, float]] = []
    queries = {path: (factor * plan.heads[path] ** 0.5) ** 0.5 for path, factor in plan.scales.items()}
    for path, factor in (*plan.inputs.items(), *plan.outputs.items()):
        module = model.get_submodule(path)
        if isinstance(module, nn.Identity):  # timm's q_norm
            queries[path.rpartition(".")[0]] = factor
            continue
        weight = module._parameters.get("weight")
        if weight is None or owners[id(weight)] > 1:
            raise ValueError(f"fold: {path} has no weight of its own to take its multiplier; keep the model as it is")
        changes.append((weight, factor))
        if path in plan.outputs and getattr(module, "bias", None) is not None:
            changes.append((module.get_parameter("bias"), factor))
    for path, factor in queries.items():
        changes += [(values, factor) for values in query_weights(model.get_submodule(path))]
    return changes


def _check_no_optimizer(model: nn.Module) -> None:
    """Raise if an optimizer of the model's parameters exists: its rates would be those of the standard parametrization."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for attempt in range(2):
        optimizers = [found for found in gc.get_objects() if issubclass(type(found), torch.optim.Optimizer)]
        held = (
            p for o in optimizers for group in getattr(o, "param_groups", ()) for p in group["params"] if id(p) in names
        )
        parameter = next(held, None)
        if parameter is None:
            return
        if attempt == 0:
            del optimizers, held
            gc.collect()  # it may be garbage that is not collected yet
    made = f"an optimizer of {names[id(parameter)]} was made before parametrize, with the rates of the standard one"
    raise ValueError(f"optimizer: {made}; delete it, and make it after, from scalelong.mup.param_groups(model, lr)")
