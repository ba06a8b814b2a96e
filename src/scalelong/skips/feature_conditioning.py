"""Condition later blocks of a denoiser on its own pooled features: c' = c + gate * W norm(pool(h)).

Inspired by DDAE++ (arXiv 2505.10999), whose public text says no more than that intermediate features are aggregated and
rerouted to guide later layers: this is a reconstruction. The gate starts at 0, so the model starts as it was.

`feature_routes.py` finds the route in a model. Hooks are module-level functions and their data an attribute of the hooked
module, as for a scaling (`long_skip.py`).
"""

from __future__ import annotations

import inspect
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from scalelong.errors import unknown_name
from scalelong.skips import hooks
from scalelong.skips.feature_layout import as_tokens, split_item
from scalelong.skips.hooks import FEATURES_KEY
from scalelong.skips.long_skip import Argument, Call, same_type

Pool = Literal["mean", "attention"]
FEATURES_NAME = "feature_conditioning"  # attribute of the model, and prefix in its state dict
OUTPUT = "output"
_HOOK = "_scalelong_features"  # attribute of a hooked module


@dataclass(frozen=True)
class Route:
    """Where features are taken and where they are added; stored next to the weights."""

    tap: str  # the module whose output is pooled; "blocks.3[1]" is the second of several
    targets: tuple[str, ...]  # the modules whose condition is changed
    argument: str = OUTPUT  # the condition: this argument of a target's call, or its output
    token: int | None = None  # of a condition (B, T, D): this token; None: all
    first: int = 0  # tokens of the tap before this one are not pooled
    pool: Pool = "mean"
    detach: bool = False  # no gradient from the condition into the tap
    widths: tuple[int, int] = (0, 0)  # channels of the tap and of the condition
    channels: tuple[int, int] = (0, 0)  # their dimension; 0: the last of tokens (B, T, D), else the first, (B, D, ...)

    @classmethod
    def from_json(cls, stored: dict[str, Any]) -> Route:
        given: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in stored.items()}
        return cls(**given)


class FeatureConditioning(nn.Module):
    """gate * W norm(pool(h)): (B, T, D) tokens or (B, D, ...) maps -> (B, condition).

    >>> route = Route("mid", ("mid",), widths=(8, 4))
    >>> float(FeatureConditioning(route)(torch.randn(2, 16, 8)).detach().abs().max())
    0.0
    """

    def __init__(self, route: Route) -> None:
        super().__init__()
        self.route, self.enabled, self.passing = route, True, Passing()
        width, condition = route.widths
        self.query = nn.Parameter(torch.zeros(width)) if route.pool == "attention" else None  # 0: starts as the mean
        self.norm = nn.LayerNorm(width, elementwise_affine=False)
        self.proj = nn.Linear(width, condition, bias=False)
        self.gate = nn.Parameter(torch.zeros(1))

    def forward(self, features: Tensor) -> Tensor:
        features = features.detach() if self.route.detach else features
        tokens = as_tokens(features, self.route.channels[0])[:, self.route.first :]
        if self.query is None:
            pooled = tokens.mean(dim=1)
        else:
            scores = tokens @ self.query.to(tokens.dtype) / tokens.shape[-1] ** 0.5
            pooled = (scores.softmax(dim=1)[..., None].to(tokens.dtype) * tokens).sum(dim=1)
        change: Tensor = self.gate * self.proj(self.norm(pooled.to(self.gate.dtype)))
        return change

    def extra_repr(self) -> str:
        return f"{self.route.tap} -> {', '.join(self.route.targets)}, pool={self.route.pool}"


def attach_features(model: nn.Module, conditioning: FeatureConditioning) -> None:
    """Hook the tap and the targets, and register the conditioning on the model."""
    hooks.match(conditioning, model)
    route = conditioning.route
    tap, item = split_item(route.tap)
    points = {name: _Hooked(conditioning) for name in (tap, *route.targets)}
    points[tap] = replace(points[tap], tap=True, item=item)
    for name in route.targets:
        slot = None if route.argument == OUTPUT else find_argument(model.get_submodule(name), name, route.argument)
        points[name] = replace(points[name], output=slot is None, argument=slot)
    # Dynamo shares code among blocks and does not guard on missing hooks: blocks' other modules of this kind get idle ones
    kinds = {_kind(name, model.get_submodule(name)) for name in points}
    for name, module in [item for item in model.named_modules() if _kind(*item) in kinds]:
        object.__setattr__(module, _HOOK, points.get(name, _Hooked(conditioning)))
        module.register_forward_hook(tap_or_change_output)
        if route.argument != OUTPUT:
            module.register_forward_pre_hook(change_argument, with_kwargs=True)
    model.register_forward_pre_hook(start_forward)
    model.register_forward_hook(end_forward)
    model.add_module(FEATURES_NAME, conditioning)
    hooks.reset_compiled()
    hooks.write_config(model, to_json(conditioning), FEATURES_KEY)


def _kind(name: str, module: nn.Module) -> tuple[type, str]:
    return type(module), name.rstrip(".0123456789").rpartition(".")[2]


def detach_features(model: nn.Module) -> None:
    """The inverse of `attach_features`."""
    conditioning_of(model)
    functions = (change_argument, tap_or_change_output, start_forward, end_forward)
    for module in [part for part in model.modules() if part is model or _HOOK in vars(part)]:
        vars(module).pop(_HOOK, None)
        for function in functions:
            for key in hooks.drop_hook(module._forward_pre_hooks, function):
                module._forward_pre_hooks_with_kwargs.pop(key, None)
            hooks.drop_hook(module._forward_hooks, function)
    delattr(model, FEATURES_NAME)
    hooks.reset_compiled()
    hooks.write_config(model, None, FEATURES_KEY)


def is_conditioned(model: nn.Module) -> bool:
    return hooks.unwrapped(model._modules.get(FEATURES_NAME), FeatureConditioning) is not None


def has_hooks(model: nn.Module) -> bool:
    """Whether the model, a part of it or a model around it is conditioned."""
    return any(_HOOK in vars(module) for module in model.modules())


def conditioning_of(model: nn.Module) -> FeatureConditioning:
    """The conditioning of a model; ValueError if it has none."""
    found = hooks.unwrapped(model._modules.get(FEATURES_NAME), FeatureConditioning)
    if found is None:
        name = type(model).__name__
        raise ValueError(f"model: this {name} is not conditioned; call scalelong.condition_on_features(model) first")
    return found


def to_json(conditioning: FeatureConditioning) -> dict[str, Any]:
    route = conditioning.route
    return {key: list(value) if isinstance(value, tuple) else value for key, value in asdict(route).items()}


@contextmanager
def features_off(model: nn.Module) -> Iterator[None]:
    """Run without the conditioning inside the block: what is traced is the plain model."""
    conditioning = hooks.unwrapped(getattr(model, "_modules", {}).get(FEATURES_NAME), FeatureConditioning)
    if conditioning is None:
        yield
        return
    conditioning.enabled = False
    try:
        yield
    finally:
        conditioning.enabled = True


# ---------------------------------------------------------------------------------------------- hooks


class Passing:
    """The change of the current forward, on its way from the tap to the targets; copies and pickles start empty."""

    change: Tensor | None = None
    sequence: int | None = None  # autograd's number of the node that made the change
    before: tuple[Tensor | None, int | None] | None = None  # a forward without gradients puts these back at its end
    thread: int | None = None  # None: compiled
    recomputes_all: bool = False  # the whole model is inside an activation checkpoint

    def __deepcopy__(self, _memo: object) -> Passing:
        return Passing()

    def __reduce__(self) -> tuple[type[Passing], tuple[()]]:
        return Passing, ()


@dataclass(frozen=True)
class _Hooked:
    conditioning: FeatureConditioning
    tap: bool = False
    item: int = 0  # of the tap's outputs
    output: bool = False
    argument: Argument | None = None


def start_forward(model: nn.Module, _args: Any) -> None:
    """Forward-pre-hook of the model."""
    if hooks.adapted(model, FEATURES_NAME, FeatureConditioning):
        _follow_adapter(model)
    passing, kept = conditioning_of(model).passing, torch.is_grad_enabled() or torch.compiler.is_compiling()
    passing.before = None if kept else (passing.change, passing.sequence)
    passing.change, passing.recomputes_all, passing.thread = None, _recomputing(), _thread()


def end_forward(model: nn.Module, _args: Any, _output: Any) -> None:
    """Forward hook of the model. Eager activation checkpoints read the change again in the backward pass."""
    passing = conditioning_of(model).passing
    if torch.compiler.is_compiling() and passing.thread is None:  # the tap was compiled: its graph owns the change
        passing.change = None
    elif passing.before is not None and passing.thread == _thread():
        (passing.change, passing.sequence), passing.before = passing.before, None


def _follow_adapter(model: nn.Module) -> None:
    """If peft wrapped the conditioning (modules_to_save), use the copy of the active adapter."""
    active = conditioning_of(model)
    for module in [part for part in model.modules() if _HOOK in vars(part)]:
        if (here := getattr(module, _HOOK)).conditioning is not active:
            object.__setattr__(module, _HOOK, replace(here, conditioning=active))


def tap_or_change_output(module: nn.Module, _args: Any, output: Any) -> Any:
    here: _Hooked = getattr(module, _HOOK)
    conditioning = here.conditioning
    if not conditioning.enabled:
        return output
    change = None
    if here.tap:
        change = conditioning(_tensor_at(output, here.item))
        passing = conditioning.passing
        if not here.output and (passing.recomputes_all or not _recomputing()):
            passing.change, passing.thread = change, _thread()
            if not torch.compiler.is_compiling():
                passing.sequence = change.grad_fn._sequence_nr() if change.grad_fn is not None else None
    if not here.output:
        return output
    change = _received(conditioning, module) if change is None else change
    if isinstance(output, Tensor):
        return _add(output, change, conditioning.route)
    first = _add(_tensor_at(output), change, conditioning.route)
    return same_type(output, [first, *output[1:]])


def change_argument(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call | None:
    here: _Hooked = getattr(module, _HOOK)
    if here.argument is None or not here.conditioning.enabled:
        return None
    condition = here.argument.get((args, kwargs))
    if condition is None:
        return None
    change = _received(here.conditioning, module)
    return here.argument.put((args, kwargs), _add(condition, change, here.conditioning.route))


def _received(conditioning: FeatureConditioning, module: nn.Module) -> Tensor:
    """The change that the tap has passed on in this forward, also where a checkpoint recomputes a target."""
    passing, tap = conditioning.passing, conditioning.route.tap
    if not (torch.compiler.is_compiling() or _recomputing()) and passing.thread not in (None, _thread()):
        raise RuntimeError(
            "feature_conditioning: another thread is running this model; use a copy of it in each thread"
        )
    if passing.change is None:
        raise RuntimeError(f"tap: {tap} has not run before {type(module).__name__}, which it conditions")
    if torch.compiler.is_compiling() or passing.recomputes_all or not _recomputing():
        return passing.change
    if passing.sequence is None and conditioning.gate.requires_grad:
        cut = "activation checkpointing with use_reentrant=True cuts the gradient of the features"
        raise RuntimeError(f"feature_conditioning: {cut}; use use_reentrant=False")
    if passing.sequence is not None and torch._C._current_autograd_node()._sequence_nr() < passing.sequence:
        twice = "with activation checkpointing, another forward ran between a forward and its backward"
        raise RuntimeError(f"feature_conditioning: {twice}; call backward after each forward")
    return passing.change


def _recomputing() -> bool:
    """True inside a backward pass: an activation checkpoint runs a block again."""
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1


def _thread() -> int | None:
    return None if torch.compiler.is_compiling() else threading.get_ident()


def _tensor_at(output: Any, item: int = 0) -> Tensor:
    found: Tensor = output if isinstance(output, Tensor) else output[item]
    return found


def _add(condition: Tensor, change: Tensor, route: Route) -> Tensor:
    change = change.to(condition.dtype)
    if condition.ndim == 2:
        return condition + change
    if route.token is None:
        shape = [len(change), *[1] * (condition.ndim - 1)]
        shape[route.channels[1] or (2 if condition.ndim == 3 else 1)] = -1
        return condition + change.reshape(shape)
    condition = condition.expand(len(change), -1, -1)
    before, one, after = condition.tensor_split([route.token, route.token + 1], dim=1)
    return torch.cat([before, one + change[:, None], after], dim=1)


def find_argument(module: nn.Module, name: str, argument: str) -> Argument:
    signature = inspect.signature(module.forward).parameters
    kinds = {parameter.kind for parameter in signature.values()}
    parameters = list(signature)
    if argument not in parameters and inspect.Parameter.VAR_KEYWORD not in kinds:
        raise unknown_name(f"argument of {name}", argument, [*parameters, OUTPUT])
    if argument not in parameters or signature[argument].kind is inspect.Parameter.KEYWORD_ONLY:
        return Argument(sys.maxsize, argument)  # has no position
    return Argument(parameters.index(argument), argument)
