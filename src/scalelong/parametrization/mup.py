"""muP: an initial size, a forward multiplier and a learning rate for every tensor of a model; `shapes` has the rules.

Multipliers are plain floats on modules, their hooks module-level functions: deep copies, pickles and wrappers keep them.
"""

from __future__ import annotations

import gc
from collections.abc import Mapping, MutableMapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from scalelong.parametrization.shapes import Plan, TensorRole, attentions, base_shapes, make_plan
from scalelong.skips.hooks import check_unwrapped, reset_compiled

PLAN = "_scalelong_parametrization"  # attribute of a parametrized model
STAMP = (
    "mup_base_shapes"  # buffer of a parametrized model: its weights do not load unnoticed into another parametrization
)
INPUT, OUTPUT = "mup_input_multiplier", "mup_output_multiplier"  # attributes of hooked modules
_WRAPPED = ("_fsdp_wrapped_module.", "_checkpoint_wrapped_module.", "_orig_mod.")  # in the names of wrapped modules


def parametrize(
    model: nn.Module, base: nn.Module, *, initialize: bool = True, same_width: bool = False, check_optimizers=True
) -> nn.Module:
    """Put `model` into muP relative to `base`, in place, and return it; on any error it is left unchanged.

    base: the same class at base width, best built under `torch.device("meta")`; only its shapes are read.
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
    check_unparametrized(model)
    shapes = base_shapes(model, base)
    if not same_width and all(tuple(p.shape) == shapes[name] for name, p in model.named_parameters()):
        same = "no dimension of any tensor differs from the model's, so none is found to be infinite"
        raise ValueError(f"base: {same}; give a base of another width, or pass same_width=True if that is meant")
    plan = make_plan(model, shapes, {name: size for name, _, size in attentions(base)}, initialize)
    if check_optimizers:
        _check_no_optimizer(model)
    _attach(model, plan)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if plan.roles[name].initial != 1 and not parameter.is_meta:
                parameter.mul_(plan.roles[name].initial)
    return model


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
    known, names = roles(model), {id(p): _plain(name) for name, p in _holder(model).named_parameters()}
    if lost := set(known) - {*names.values()}:
        merged = f"{min(lost)} is not among the parameters of this {type(model).__name__}"
        raise ValueError(f"model: {merged}; with FSDP pass use_orig_params=True")
    groups: dict[float, dict[str, Any]] = {}
    for parameter in model.parameters():
        role = known.get(names.get(id(parameter), ""))
        factor = 1.0 if role is None else role.lr
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
    shapes = {_plain(name): tuple(p.shape) for name, p in _holder(model).named_parameters()}
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


def plan_of(model: nn.Module) -> Plan:
    """What was done to a model, which may be wrapped; an empty plan if it is not parametrized."""
    return getattr(_holder(model), PLAN, None) or Plan()


def check_unparametrized(model: nn.Module) -> None:
    check_unwrapped(model)
    if PLAN in model.__dict__:
        raise ValueError(f"model: this {type(model).__name__} is parametrized already; build a new one to do it again")


def _holder(model: nn.Module) -> nn.Module:
    """The parametrized module inside wrappers."""
    return next((module for module in model.modules() if PLAN in module.__dict__), model)


def _plain(name: str) -> str:
    for part in _WRAPPED:
        name = name.replace(part, "")
    return name


def _attach(model: nn.Module, plan: Plan) -> None:
    """Set the multipliers and hooks, the plan and the stamp; the values of the weights stay."""
    for path, factor in plan.inputs.items():
        setattr(model.get_submodule(path), INPUT, factor)
        model.get_submodule(path).register_forward_pre_hook(scale_input)
    for path, factor in plan.outputs.items():
        setattr(model.get_submodule(path), OUTPUT, factor)
        model.get_submodule(path).register_forward_hook(scale_output)
    for path, factor in plan.scales.items():
        model.get_submodule(path).scale = factor  # type: ignore[assignment]
    object.__setattr__(model, PLAN, plan)
    model.register_buffer(STAMP, _stamp(plan).to(next(model.parameters()).device))
    model._register_load_state_dict_pre_hook(partial(check_stamp, plan))  # type: ignore[no-untyped-call]
    model.register_state_dict_pre_hook(restore_stamp)  # type: ignore[no-untyped-call]
    reset_compiled()


def _stamp(plan: Plan) -> Tensor:
    """The shapes of all tensors and the head sizes at base width, in order."""
    sizes = [size for role in plan.roles.values() for size in role.base]
    return torch.tensor([*sizes, *plan.heads.values()], dtype=torch.int64, device="cpu")


def scale_input(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Forward-pre-hook of a readout: 1 / m on its input leaves its bias alone."""
    return (args[0] * getattr(module, INPUT), *args[1:])


def scale_output(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:  # noqa: ARG001
    """Forward hook of the queries of attention."""
    return output * getattr(module, OUTPUT)  # type: ignore[no-any-return]


def check_stamp(plan: Plan, state_dict: MutableMapping[str, Tensor], prefix: str, *_: Any) -> None:
    """Load-state-dict pre-hook: refuse weights of another parametrization, before anything is loaded."""
    marked = [name for name, role in plan.roles.items() if role.role != "finite" and prefix + name in state_dict]
    given = state_dict.get(prefix + STAMP)
    if given is None:
        if marked:
            standard = (
                f"missing: {marked[0]} and others were trained in the standard parametrization, the model is in muP"
            )
            raise ValueError(f"state_dict.{prefix}{STAMP}: {standard}; load them into a model without mup.parametrize")
        return
    here, there = _stamp(plan), given
    if not given.is_meta and (here.shape != there.shape or not torch.equal(here, there.cpu())):
        differs = "they were trained relative to another base width than the model's"
        if here.shape == there.shape:
            sizes, at = (
                [name for name, role in plan.roles.items() for _ in role.base],
                int((here != there.cpu()).nonzero()[0]),
            )
            name = sizes[at] if at < len(sizes) else "the head size"
            differs = f"{name} has {int(there[at])} at the base width of the weights, {int(here[at])} at the model's"
        raise ValueError(f"state_dict.{prefix}{STAMP}: {differs}; give mup.parametrize the base they were trained with")


def restore_stamp(model: nn.Module, *_: Any) -> None:
    """State-dict pre-hook: refill the buffer, which `to_empty` leaves uninitialized."""
    stamp, plan = model._buffers.get(STAMP), getattr(model, PLAN, None)
    if type(stamp) is Tensor and plan is not None and not stamp.is_meta and not stamp.is_inference():
        stamp.copy_(_stamp(plan))


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
