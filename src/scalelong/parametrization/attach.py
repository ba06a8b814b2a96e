"""Attach a parametrization to a model: multipliers, a stamp in its weights, and what is stored beside them.

Multipliers are plain floats on modules, their hooks module-level functions: deep copies, pickles and wrappers keep them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from scalelong.parametrization.shapes import Plan, make_plan, stamp_of
from scalelong.skips.example import Snapshot
from scalelong.skips.hooks import MUP_KEY, check_unwrapped, drop_hook, reset_compiled, write_config
from scalelong.skips.long_skip import Call
from scalelong.skips.restore import PARTS, Part

PLAN = "_scalelong_parametrization"  # attribute of a parametrized model
STAMP = "mup_base_shapes"  # buffer of a parametrized model: its weights do not load unnoticed into another one
INPUT, OUTPUT = "mup_input_multiplier", "mup_output_multiplier"  # attributes of hooked modules
_WRAPPED = ("_fsdp_wrapped_module.", "_checkpoint_wrapped_module.", "_orig_mod.")  # in the names of wrapped modules


def attach(model: nn.Module, plan: Plan) -> None:
    """Set the multipliers and hooks, the plan and the stamp; the values of the weights stay."""
    for path, factor in plan.inputs.items():
        setattr(model.get_submodule(path), INPUT, factor)
        model.get_submodule(path).register_forward_pre_hook(scale_input, with_kwargs=True)
    for path, factor in plan.outputs.items():
        setattr(model.get_submodule(path), OUTPUT, factor)
        model.get_submodule(path).register_forward_hook(scale_output)
    for path, factor in plan.scales.items():
        model.get_submodule(path).scale = factor  # type: ignore[assignment]
    object.__setattr__(model, PLAN, plan)
    reset_compiled()
    write_config(model, stored_plan(model), MUP_KEY)
    if not plan.stamp:
        return
    device = next(model.parameters()).device
    model.register_buffer(STAMP, torch.tensor(plan.stamp, dtype=torch.int64, device=device))
    model._register_load_state_dict_pre_hook(partial(check_stamp, plan))  # type: ignore[no-untyped-call]
    model.register_state_dict_pre_hook(restore_stamp)  # type: ignore[no-untyped-call]


def detach(model: nn.Module) -> None:
    """The inverse of `attach`."""
    plan = plan_of(model)
    for path in plan.inputs:
        readout = model.get_submodule(path)
        for key in drop_hook(readout._forward_pre_hooks, scale_input):
            readout._forward_pre_hooks_with_kwargs.pop(key, None)
        delattr(readout, INPUT)
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
    write_config(model, None, MUP_KEY)


def multiply(model: nn.Module, changes: Iterable[tuple[Tensor, float]]) -> None:
    """Multiply weights of a model in place; on an error their values are as before."""
    changes = [(values, factor) for values, factor in changes if factor != 1 and not values.is_meta]
    before = Snapshot(model)
    before.keep_values(values for values, _ in changes)
    try:
        with torch.no_grad():
            for values, factor in changes:
                values.mul_(factor)
    except BaseException:
        before.restore()
        raise


def scale_input(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
    """Forward-pre-hook of a readout: 1 / m on its input leaves its bias alone."""
    factor = getattr(module, INPUT)
    if args:
        return (args[0] * factor, *args[1:]), kwargs
    return args, {name: value * factor if at == 0 else value for at, (name, value) in enumerate(kwargs.items())}


def scale_output(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:  # noqa: ARG001
    """Forward hook of the queries of attention."""
    return output * getattr(module, OUTPUT)  # type: ignore[no-any-return]


# ------------------------------------------------------------------------------------------ the plan of a model


def plan_of(model: nn.Module) -> Plan:
    """What was done to a model, which may be wrapped; an empty plan if it is not parametrized."""
    return getattr(holder(model), PLAN, None) or Plan()


def check_unparametrized(model: nn.Module) -> None:
    check_unwrapped(model)
    for module in holders(model):
        part = "this" if module is model else "a part of it, this"
        raise ValueError(
            f"model: {part} {type(module).__name__} is parametrized already; build a new one to do it again"
        )


def holders(model: nn.Module) -> Iterator[nn.Module]:
    """The parametrized modules: the model itself, one inside wrappers, or several of its parts."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: must be a torch.nn.Module, got {type(model).__name__}")
    return (module for module in model.modules() if PLAN in module.__dict__)


def holder(model: nn.Module) -> nn.Module:
    """The parametrized module inside wrappers."""
    return next(holders(model), model)


def plain_name(name: str) -> str:
    """The name of a tensor without those of wrappers."""
    for part in _WRAPPED:
        name = name.replace(part, "")
    return name


# ------------------------------------------------------------------------------- beside weights, and in them


def stored_plan(model: nn.Module) -> dict[str, Any] | None:
    """The base shapes of all tensors and the head sizes, as they are stored beside weights; None: not parametrized."""
    if PLAN not in model.__dict__:
        return None
    plan = plan_of(model)
    tensors = {name: " ".join(map(str, role.base)) for name, role in plan.roles.items()}
    return {"tensors": tensors, "heads": dict(plan.heads), **({"joined": list(plan.joined)} if plan.joined else {})}


def restore_plan(model: nn.Module, stored: Mapping[str, Any] | None, where: str | Path, fresh: bool) -> None:
    """Parametrize a model as it was when it was saved, if it is not; refuse another one."""
    if stored is None:
        if plan_of(model).stamp:
            standard = "was saved in the standard parametrization, the model is in muP"
            raise ValueError(
                f"{where}: {standard} ({MUP_KEY} is missing); load it into a model without mup.parametrize"
            )
        return
    _check_whole(stored, where)
    shapes = {name: tuple(map(int, text.split())) for name, text in stored["tensors"].items()}
    own = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    for name, shape in shapes.items():
        if len(own.get(name, ())) != len(shape):
            raise ValueError(f"{where}: {name} was {shape} at base width, in this {type(model).__name__} it is "
                             f"{own.get(name, 'missing')}; build it as it was")  # fmt: skip
    if PLAN in model.__dict__:
        mine = (stored_plan(model) or {})["tensors"]
        for name in [name for name in {**mine, **stored["tensors"]} if mine.get(name) != stored["tensors"].get(name)]:
            both = f"{stored['tensors'].get(name)} at the base width of the weights, {mine.get(name)} at the model's"
            raise ValueError(f"{where}: {name}: {both}; give mup.parametrize the base they were trained with")
        return
    plan = make_plan(model, {**own, **shapes}, stored["heads"], initialize=fresh)
    roles = {name: role for name, role in plan.roles.items() if name in shapes}  # gates may have been added later
    attach(model, replace(plan, roles=roles, stamp=stamp_of(roles, plan.heads)))
    if fresh:
        multiply(model, ((model.get_parameter(name), role.initial) for name, role in roles.items()))


def saved_plan(model: nn.Module) -> dict[str, Any] | None:
    stored = stored_plan(model)
    if stored is not None:
        _check_whole(stored, "model")
    return stored


def _check_whole(stored: Mapping[str, Any], where: str | Path) -> None:
    if stored.get("joined"):
        split = f"the weight of {stored['joined'][0]} is in two parts, of mup.scale_skip_weights"
        raise ValueError(f"{where}: {split}; call mup.fold(model) before saving, or save the state dict")


PARTS[MUP_KEY] = Part(saved_plan, restore_plan)


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
