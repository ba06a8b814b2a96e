"""muP: an initial size, a forward multiplier and a learning rate for every tensor of a model; `shapes` has the rules.

Multipliers are plain floats on modules, their hooks module-level functions: deep copies, pickles and wrappers keep them.
"""

from __future__ import annotations

import gc
import json
from collections import Counter
from collections.abc import Mapping, MutableMapping
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.nn.utils import parametrize as torch_parametrize

from scalelong import skips
from scalelong.parametrization.shapes import Plan, TensorRole, attentions, base_shapes, make_plan
from scalelong.skips.hooks import CONFIG_KEY, ROOT_NAME, check_unwrapped, drop_hook, reset_compiled
from scalelong.skips.persistence import local_folder, quiet_diffusers, read_tensors

Model = TypeVar("Model", bound=nn.Module)
PLAN = "_scalelong_parametrization"  # attribute of a parametrized model
STAMP = (
    "mup_base_shapes"  # buffer of a parametrized model: its weights do not load unnoticed into another parametrization
)
INPUT, OUTPUT = "mup_input_multiplier", "mup_output_multiplier"  # attributes of hooked modules
_WRAPPED = ("_fsdp_wrapped_module.", "_checkpoint_wrapped_module.", "_orig_mod.")  # in the names of wrapped modules


def parametrize(model: nn.Module, base: nn.Module, *, initialize: bool = True, same_width: bool = False) -> nn.Module:
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
    plan = plan_for(model, base, initialize, same_width)
    _check_no_optimizer(model)
    apply_plan(model, plan)
    return model


def plan_for(model: nn.Module, base: nn.Module, initialize: bool = True, same_width: bool = False) -> Plan:
    """What `parametrize` would do."""
    shapes = base_shapes(model, base)
    if not same_width and all(tuple(p.shape) == shapes[name] for name, p in model.named_parameters()):
        same = "no dimension of any tensor differs from the model's, so none is found to be infinite"
        raise ValueError(f"base: {same}; give a base of another width, or pass same_width=True if that is meant")
    return make_plan(model, shapes, {name: size for name, _, size in attentions(base)}, initialize)


def apply_plan(model: nn.Module, plan: Plan) -> None:
    """Attach the plan to the model and rescale its weights."""
    attach(model, plan)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if plan.roles[name].initial != 1 and not parameter.is_meta:
                parameter.mul_(plan.roles[name].initial)


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
    if lost := {name for name in known if not name.startswith(f"{ROOT_NAME}.")} - {
        *names.values()
    }:  # gates may be removed
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


def fold(model: nn.Module) -> nn.Module:
    """Multiply the multipliers into the weights, in place: the same function as a plain network, for export.

    >>> net = lambda width: nn.Sequential(nn.Linear(3, width), nn.ReLU(), nn.Linear(width, 1))
    >>> model, x = parametrize(net(64), net(16)), torch.ones(2, 3)
    >>> expected = model(x)
    >>> torch.allclose(fold(model)(x), expected), len(roles(model))
    (True, 0)
    """
    plan, owners = plan_of(model), Counter(id(p) for m in model.modules() for p in m.parameters(recurse=False))
    changes: list[tuple[Tensor, float]] = []
    for path, factor in (*plan.inputs.items(), *plan.outputs.items()):
        module = model.get_submodule(path)
        if getattr(module, "weight", None) is None or owners[id(module.weight)] > 1:
            raise ValueError(f"fold: {path} has no weight of its own to take its multiplier; keep the model as it is")
        changes.append((module.get_parameter("weight"), factor))
        if path in plan.outputs and getattr(module, "bias", None) is not None:
            changes.append((module.get_parameter("bias"), factor))
    for path, factor in plan.scales.items():
        qkv = model.get_submodule(f"{path}.qkv")
        part = slice(qkv.get_parameter("weight").shape[0] // 3)
        changes += [(parameter[part], (factor * plan.heads[path] ** 0.5) ** 0.5) for parameter in qkv.parameters()]
    with torch.no_grad():
        for values, factor in changes:
            values.mul_(factor)
    for path in plan.joined:
        torch_parametrize.remove_parametrizations(model.get_submodule(path), "weight")
    if PLAN in model.__dict__:
        _detach(model)
    return model


def load(model: Model, folder: str | Path, example: Any = None) -> Model:
    """`scalelong.skips.load` that also restores the parametrization of the saved weights.

    >>> from scalelong import UViT, UViTConfig, apply, save
    >>> make = lambda dim: UViT(UViTConfig(image_size=8, patch_size=4, dim=dim, depth=2, heads=2))
    >>> folder = save(parametrize(apply(make(32), "cs").model, make(16)), "narrow")
    >>> roles(load(make(32), folder))["decoder_pred.weight"].multiplier
    0.5
    """
    already = PLAN in model.__dict__
    try:
        return skips.load(model, folder, example, prepare=None if already else _attach_saved)
    except BaseException:
        if not already and PLAN in model.__dict__:
            _detach(model)
        raise


def _attach_saved(model: nn.Module, weights: Path) -> None:
    with safe_open(str(weights), framework="pt") as tensors:
        if STAMP in tensors.keys():  # noqa: SIM118
            _attach_stamp(model, tensors.get_tensor(STAMP))


def from_pretrained(cls: type[Model], folder: str | Path, example: Any = None, **options: Any) -> Model:
    """`cls.from_pretrained(folder)` of diffusers for a model saved by `save_pretrained`, with its scaling and in muP.

    folder: on disk or on the hub; options: those of `cls.from_pretrained`; example: as for `scalelong.apply`.

    >>> from diffusers import UNet1DModel
    >>> import scalelong
    >>> scalelong.apply(UNet1DModel(), "cs", kappa=0.6).model.save_pretrained("unet")
    >>> scalelong.coefficients(scalelong.from_pretrained(UNet1DModel, "unet"))
    [1.0, 0.6, 0.36]
    """
    source = local_folder(folder, options)
    stamp = read_tensors(source, options.get("variant"), STAMP).get("")
    if stamp is None or CONFIG_KEY in json.loads((source / "config.json").read_text()):
        model = skips.from_pretrained(cls, source, example, **options)
    else:
        with quiet_diffusers():
            model = cls.from_pretrained(source, **options)  # type: ignore[attr-defined]
    if stamp is not None:
        _attach_stamp(model, stamp)
    return model


def _attach_stamp(model: nn.Module, stamp: Tensor) -> None:
    """Restore the parametrization of weights from the base shapes that were saved with them."""
    sizes, shapes = iter(stamp.tolist()), {}
    for name, parameter in model.named_parameters():
        shapes[name] = tuple(next(sizes, 0) for _ in parameter.shape)
    heads = {name: next(sizes, 0) for name, _, _ in attentions(model)}
    if next(sizes, None) is not None or 0 in (*heads.values(), *(s for shape in shapes.values() for s in shape)):
        raise ValueError(f"{STAMP}: was saved of another network than this {type(model).__name__}; build it as it was")
    attach(model, make_plan(model, shapes, heads, initialize=False))


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


def attach(model: nn.Module, plan: Plan) -> None:
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
    reset_compiled()
    if not plan.stamp:
        return
    device = next(model.parameters()).device
    model.register_buffer(STAMP, torch.tensor(plan.stamp, dtype=torch.int64, device=device))
    model._register_load_state_dict_pre_hook(partial(check_stamp, plan))  # type: ignore[no-untyped-call]
    model.register_state_dict_pre_hook(restore_stamp)  # type: ignore[no-untyped-call]


def _detach(model: nn.Module) -> None:
    plan = plan_of(model)
    for path in plan.inputs:
        drop_hook(model.get_submodule(path)._forward_pre_hooks, scale_input)
        delattr(model.get_submodule(path), INPUT)
    for path in plan.outputs:
        drop_hook(model.get_submodule(path)._forward_hooks, scale_output)
        delattr(model.get_submodule(path), OUTPUT)
    for path, factor in plan.scales.items():  # sqrt(d0) / d, where 1 / sqrt(d) was
        attention: Any = model.get_submodule(path)
        attention.scale = None if hasattr(type(attention), "scale") else (factor / plan.heads[path] ** 0.5) ** 0.5
    delattr(model, PLAN)
    if plan.stamp:
        delattr(model, STAMP)
    drop_hook(model._load_state_dict_pre_hooks, check_stamp)
    drop_hook(model._state_dict_pre_hooks, restore_stamp)
    reset_compiled()


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
    there = None if given.is_meta else tuple(given.flatten().tolist())
    if there not in (None, plan.stamp):
        differs = "they were trained relative to another base than the model's"
        if len(there) == len(plan.stamp):
            at = next(i for i, sizes in enumerate(zip(plan.stamp, there, strict=True)) if sizes[0] != sizes[1])
            names = [name for name, role in plan.roles.items() for _ in role.base]
            names += [f"the head size of {name}" for name in plan.heads]
            differs = f"{names[at]}: {there[at]} at the base width of the weights, {plan.stamp[at]} at the model's"
        raise ValueError(f"state_dict.{prefix}{STAMP}: {differs}; give mup.parametrize the base they were trained with")


def restore_stamp(model: nn.Module, *_: Any) -> None:
    """State-dict pre-hook: refill the buffer, which `to_empty` leaves uninitialized."""
    stamp, plan = model._buffers.get(STAMP), getattr(model, PLAN, None)
    if type(stamp) is Tensor and plan is not None and not stamp.is_meta and not stamp.is_inference():
        stamp.copy_(torch.tensor(plan.stamp))


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
