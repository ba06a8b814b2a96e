"""Condition later blocks of a denoiser on its own pooled features: c' = c + gate * W norm(pool(h)).

Inspired by DDAE++ (arXiv 2505.10999), whose public text says no more than that intermediate features are aggregated and
rerouted to guide later layers: this is a reconstruction. The gate starts at 0, so the model starts as it was.

Hooks are module-level functions and their data an attribute of the hooked module, as for a scaling (`long_skip.py`).
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from scalelong.errors import did_you_mean, unknown_name
from scalelong.skips import hooks
from scalelong.skips.example import as_call, run_example, undisturbed
from scalelong.skips.families import generated_example, known_family, stages
from scalelong.skips.long_skip import Argument, Call

Pool = Literal["mean", "attention"]
FEATURES_NAME = "feature_conditioning"  # attribute of the model, and prefix in its state dict
FEATURES_KEY = "condition_on_features"  # key in a diffusers config.json and next to saved weights
OUTPUT = "output"
_HOOK = "_scalelong_features"  # attribute of a hooked module


@dataclass(frozen=True)
class Route:
    """Where features are taken and where they are added; stored next to the weights."""

    tap: str  # the module whose output is pooled
    targets: tuple[str, ...]  # the modules whose condition is changed
    argument: str = OUTPUT  # the condition: this argument of a target's call, or its output
    token: int | None = None  # of a condition (B, T, D): this token; None: all
    first: int = 0  # tokens of the tap before this one are not pooled
    pool: Pool = "mean"
    detach: bool = False  # no gradient from the condition into the tap
    widths: tuple[int, int] = (0, 0)  # channels of the tap and of the condition

    @classmethod
    def from_json(cls, stored: dict[str, Any]) -> Route:
        return cls(**{**stored, "targets": tuple(stored["targets"]), "widths": tuple(stored["widths"])})


class FeatureConditioning(nn.Module):
    """gate * W norm(pool(h)): (B, T, D) tokens or (B, D, ...) maps -> (B, condition).

    >>> route = Route("mid", ("mid",), widths=(8, 4))
    >>> FeatureConditioning(route)(torch.randn(2, 16, 8))
    tensor([[0., 0., 0., 0.],
            [0., 0., 0., 0.]], grad_fn=<MulBackward0>)
    """

    def __init__(self, route: Route) -> None:
        super().__init__()
        self.route, self.enabled, self.passing = route, True, _Passing()
        width, condition = route.widths
        self.query = nn.Parameter(torch.zeros(width)) if route.pool == "attention" else None  # 0: starts as the mean
        self.norm = nn.LayerNorm(width, elementwise_affine=False)
        self.proj = nn.Linear(width, condition, bias=False)
        self.gate = nn.Parameter(torch.zeros(1))

    def forward(self, features: Tensor) -> Tensor:
        tokens = _as_tokens(features.detach() if self.route.detach else features)[:, self.route.first :]
        if self.query is None:
            pooled = tokens.mean(dim=1)
        else:
            scores = tokens @ self.query.to(tokens.dtype) / tokens.shape[-1] ** 0.5
            pooled = (scores.softmax(dim=1)[..., None].to(tokens.dtype) * tokens).sum(dim=1)
        change: Tensor = self.gate * self.proj(self.norm(pooled.to(self.proj.weight.dtype)))
        return change

    def extra_repr(self) -> str:
        return f"{self.route.tap} -> {', '.join(self.route.targets)}, pool={self.route.pool}"


def condition_on_features(
    model: nn.Module,
    tap: str | None = None,
    *,
    targets: Sequence[str] | None = None,
    argument: str | None = None,
    token: int | Literal["all"] | None = None,
    pool: Pool = "mean",
    detach: bool = False,
    example: Any = None,
) -> FeatureConditioning:
    """Condition the blocks of `model` after `tap` on the tap's pooled output, in place; on any error nothing is changed.

    The plain model is the start: its output is the same until the gate has been trained. `scalelong.remove` undoes it.

    tap: a module, by default the middle block (U-ViT, UNets of diffusers) or the block at half depth (DiT).
    targets, argument: modules that run after the tap, and the argument of their calls that holds the condition, or "output"
    for their output; the defaults are the time token (U-ViT), the time embedding of the later blocks (UNets), and the
    embedding inside the later blocks (DiT). For other models name them and pass an `example`, as for `apply`.
    token: of a condition with tokens, change only this one, or "all".
    pool: "mean", or "attention" with a learned query. detach: do not backpropagate from the condition into the tap.

    >>> from scalelong import UViT, UViTConfig
    >>> model = UViT(UViTConfig(image_size=8, patch_size=4, dim=16, depth=2, heads=2))
    >>> condition_on_features(model).gate
    Parameter containing:
    tensor([0.], requires_grad=True)
    """
    hooks.check_unwrapped(model)
    if isinstance(model, nn.Sequential):
        raise TypeError("model: a Sequential would run the conditioning as a layer; make it an attribute of a module")
    if is_conditioned(model):
        twice = f"this {type(model).__name__} is conditioned on its features already"
        raise ValueError(f"model: {twice}; call scalelong.remove(model, 'features') first")
    if hasattr(model, FEATURES_NAME):
        raise ValueError(f"model: this {type(model).__name__} has an attribute {FEATURES_NAME!r} of its own")
    if pool not in ("mean", "attention"):
        raise unknown_name("pool", pool, ("mean", "attention"))
    known, candidates = _defaults(model)
    if known is None and (tap is None or not targets):
        unknown = f"where a {type(model).__name__} takes its condition is not known"
        raise ValueError(f"targets: {unknown}; name the tap, the targets, the argument, and pass example=")
    route = known or Route("", ())
    if targets is not None:
        route, candidates = replace(route, argument=OUTPUT, token=None), list(targets)
    changes = {"tap": tap or route.tap, "argument": argument or route.argument, "pool": pool, "detach": detach}
    route = replace(route, **changes, token=route.token if token is None else None if token == "all" else token)
    chosen = targets is not None or not candidates
    route = _measure(model, route, candidates or [route.tap], chosen, example)
    with torch.inference_mode(False):
        conditioning = FeatureConditioning(route)
    attach_features(model, conditioning)
    return conditioning


def attach_features(model: nn.Module, conditioning: FeatureConditioning) -> None:
    """Hook the tap and the targets, and register the conditioning on the model."""
    hooks.match(conditioning, model)
    route = conditioning.route
    points = {name: _Hooked(conditioning) for name in (route.tap, *route.targets)}
    points[route.tap] = replace(points[route.tap], tap=True)
    for name in route.targets:
        slot = None if route.argument == OUTPUT else _argument(model.get_submodule(name), name, route.argument)
        points[name] = replace(points[name], output=slot is None, argument=slot)
    for name, point in points.items():
        module = model.get_submodule(name)
        object.__setattr__(module, _HOOK, point)
        if point.argument is not None:
            module.register_forward_pre_hook(change_argument, with_kwargs=True)
        if point.tap or point.output:
            module.register_forward_hook(tap_or_change_output)
    if route.targets != (route.tap,):
        model.register_forward_pre_hook(start_forward)
        model.register_forward_hook(end_forward)
    model.add_module(FEATURES_NAME, conditioning)
    hooks.reset_compiled()
    hooks.write_config(model, to_json(conditioning), FEATURES_KEY)


def detach_features(model: nn.Module) -> None:
    """The inverse of `attach_features`."""
    conditioning_of(model)
    functions = (change_argument, tap_or_change_output, start_forward, end_forward)
    for module in [part for part in model.modules() if part is model or _HOOK in vars(part)]:
        vars(module).pop(_HOOK, None)
        for function in functions:
            for key in hooks.drop(module._forward_pre_hooks, function):
                module._forward_pre_hooks_with_kwargs.pop(key, None)
            hooks.drop(module._forward_hooks, function)
    delattr(model, FEATURES_NAME)
    hooks.reset_compiled()
    hooks.write_config(model, None, FEATURES_KEY)


def is_conditioned(model: nn.Module) -> bool:
    return isinstance(model._modules.get(FEATURES_NAME), FeatureConditioning)


def conditioning_of(model: nn.Module) -> FeatureConditioning:
    """The conditioning of a model; ValueError if it has none."""
    found = model._modules.get(FEATURES_NAME)
    if not isinstance(found, FeatureConditioning):
        name = type(model).__name__
        raise ValueError(f"model: this {name} is not conditioned; call scalelong.condition_on_features(model) first")
    return found


def to_json(conditioning: FeatureConditioning) -> dict[str, Any]:
    route = conditioning.route
    return {**asdict(route), "targets": list(route.targets), "widths": list(route.widths)}


@contextmanager
def features_off(model: nn.Module) -> Iterator[None]:
    """Run without the conditioning inside the block: what is traced is the plain model."""
    conditioning = getattr(model, "_modules", {}).get(FEATURES_NAME)
    if not isinstance(conditioning, FeatureConditioning):
        yield
        return
    conditioning.enabled = False
    try:
        yield
    finally:
        conditioning.enabled = True


# ---------------------------------------------------------------------------------------------- hooks


class _Passing:
    """The change of the current forward, on its way from the tap to the targets; copies and pickles start empty."""

    change: Tensor | None = None
    sequence: int | None = None  # autograd's number of the node that made the change
    recomputes_all: bool = False  # the whole model is inside an activation checkpoint

    def __deepcopy__(self, _memo: object) -> _Passing:
        return _Passing()

    def __reduce__(self) -> tuple[type[_Passing], tuple[()]]:
        return _Passing, ()


@dataclass(frozen=True)
class _Hooked:
    conditioning: FeatureConditioning
    tap: bool = False
    output: bool = False
    argument: Argument | None = None


def start_forward(model: nn.Module, _args: Any) -> None:
    """Forward-pre-hook of the model."""
    passing: _Passing = getattr(model, FEATURES_NAME).passing
    passing.change, passing.recomputes_all = None, _recomputing()


def end_forward(model: nn.Module, _args: Any, _output: Any) -> None:
    """Forward hook of the model. Eager activation checkpoints read the change again in the backward pass."""
    if torch.compiler.is_compiling():
        getattr(model, FEATURES_NAME).passing.change = None


def tap_or_change_output(module: nn.Module, _args: Any, output: Any) -> Any:
    here: _Hooked = getattr(module, _HOOK)
    conditioning = here.conditioning
    if not conditioning.enabled:
        return output
    change = None
    if here.tap:
        change = conditioning(_first_tensor(output))
        passing = conditioning.passing
        if not here.output and (passing.recomputes_all or not _recomputing()):
            passing.change = change
            if not torch.compiler.is_compiling():
                passing.sequence = change.grad_fn._sequence_nr() if change.grad_fn is not None else None
    if not here.output:
        return output
    change = _received(conditioning, module) if change is None else change
    if isinstance(output, Tensor):
        return _add(output, change, conditioning.route.token)
    first = _add(_first_tensor(output), change, conditioning.route.token)
    return type(output)([first, *output[1:]])


def change_argument(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call | None:
    here: _Hooked = getattr(module, _HOOK)
    assert here.argument is not None
    condition = here.argument.get((args, kwargs))
    if not here.conditioning.enabled or condition is None:
        return None
    change = _received(here.conditioning, module)
    return here.argument.put((args, kwargs), _add(condition, change, here.conditioning.route.token))


def _received(conditioning: FeatureConditioning, module: nn.Module) -> Tensor:
    """The change that the tap has passed on in this forward, also where a checkpoint recomputes a target."""
    passing, tap = conditioning.passing, conditioning.route.tap
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


def _first_tensor(output: Any) -> Tensor:
    found: Tensor = output if isinstance(output, Tensor) else output[0]
    return found


def _as_tokens(features: Tensor) -> Tensor:
    """(B, D), (B, T, D) or (B, D, ...) -> (B, T, D)."""
    if features.ndim == 2:
        return features[:, None]
    return features if features.ndim == 3 else features.flatten(2).transpose(1, 2)


def _add(condition: Tensor, change: Tensor, token: int | None) -> Tensor:
    change = change.to(condition.dtype)
    if condition.ndim == 2:
        return condition + change
    if condition.ndim > 3:
        return condition + change.reshape(*change.shape, *[1] * (condition.ndim - 2))
    if token is None:
        return condition + change[:, None]
    before, one, after = condition.tensor_split([token, token + 1], dim=1)
    return torch.cat([before, one + change[:, None], after], dim=1)


# ----------------------------------------------------------------------------------- known models, and checks


def _defaults(model: nn.Module) -> tuple[Route | None, list[str]]:
    """The route of a known class, and the modules that can be its targets in the order of their calls; [] is the tap."""
    names = {f"{cls.__module__.partition('.')[0]}.{cls.__name__}" for cls in type(model).__mro__}
    module: Any = model
    if "scalelong.UViT" in names:
        time = 1 if module.config.num_classes else 0
        return Route("mid_block", (), token=time, first=module.num_extras), []
    if names & {"diffusers.UNet2DModel", "diffusers.UNet2DConditionModel"}:
        tap = "mid_block" if getattr(module, "mid_block", None) is not None else f"down_blocks.{len(module.down_blocks) - 1}"
        return Route(tap, (), "temb"), stages(model)
    if "diffusers.DiTTransformer2DModel" in names:
        depth = len(module.transformer_blocks)
        embeddings = [f"transformer_blocks.{i}.norm1.emb" for i in range(depth)]
        return Route(f"transformer_blocks.{max(depth // 2 - 1, 0)}", ()), embeddings
    return None, []


def _example(model: Any, example: Any) -> Call:
    if example is not None:
        return as_call(example)
    if known_family(model) is not None or not hasattr(model, "transformer_blocks"):
        return generated_example(model)
    weight, config = next(model.parameters()), model.config
    image = torch.zeros(1, config.in_channels, config.sample_size, config.sample_size).to(weight)
    label = torch.zeros(1, dtype=torch.int64, device=weight.device)
    return (), {"hidden_states": image, "timestep": label, "class_labels": label}


def _measure(model: nn.Module, route: Route, names: Sequence[str], chosen: bool, example: Any) -> Route:
    """The route with its targets and widths, from one run of the model; `chosen` targets must run after the tap."""
    modules = dict(model.named_modules())
    for key, name in (("tap", route.tap), *(("targets", name) for name in names)):
        if not name or name not in modules:
            raise ValueError(f"{key}: no module {name!r}; {did_you_mean(name, modules)}see model.named_modules()")
    slots = {n: None if route.argument == OUTPUT else _argument(modules[n], n, route.argument) for n in names}
    events: list[tuple[str, str]] = []
    seen: dict[str, Tensor | None] = {}  # by role and name

    def enter(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        events.append(("start", name))
        if (slot := slots.get(name)) is not None:
            seen.setdefault(f"condition {name}", _tensor(slot.get((args, kwargs))))

    def leave(name: str, output: Any) -> None:
        events.append(("end", name))
        tensor = _tensor(output[0] if isinstance(output, (tuple, list)) and output else output)
        seen.setdefault(f"output {name}", tensor)

    handles = []
    for name in dict.fromkeys([route.tap, *names]):
        module = modules[name]
        handles += [
            module.register_forward_pre_hook(lambda _m, a, k, name=name: enter(name, a, k), with_kwargs=True),
            module.register_forward_hook(lambda _m, _a, output, name=name: leave(name, output)),
        ]
    try:
        with undisturbed(model), torch.no_grad():
            run_example(model, _example(model, example))
    finally:
        for handle in handles:
            handle.remove()
    if ("end", route.tap) not in events:
        raise ValueError(f"tap: {route.tap} does not run in this model's forward; choose a module that does")
    after = events[events.index(("end", route.tap)) :]
    late = [name for name in names if ("start", name) not in events[: -len(after)] and ("start", name) in after]
    if names == [route.tap] and route.argument == OUTPUT:
        late = list(names)
    if chosen and (early := [name for name in names if name not in late]):
        raise ValueError(f"targets: {early[0]} does not run after the tap {route.tap}; choose modules behind it")
    if not late:
        raise ValueError(f"tap: no block of this {type(model).__name__} runs after {route.tap}; choose an earlier one")
    role = "output" if route.argument == OUTPUT else "condition"
    late = [name for name in late if chosen or seen.get(f"{role} {name}") is not None]
    features = _as_features(seen[f"output {route.tap}"], f"tap: the output of {route.tap}")
    widths = {}
    for name in late:
        condition = _as_features(seen.get(f"{role} {name}"), f"targets: the {route.argument} of {name}")
        widths[name] = _width(condition)
        if condition.shape[0] not in (1, features.shape[0]):
            sizes = f"{condition.shape[0]} samples, the tap has {features.shape[0]}"
            raise ValueError(f"targets: the {route.argument} of {name} has {sizes}; choose others")
        if route.token is not None and (condition.ndim != 3 or not 0 <= route.token < condition.shape[1]):
            raise ValueError(f"token: the {route.argument} of {name} is {tuple(condition.shape)}, got {route.token}")
    if len(set(widths.values())) > 1:
        raise ValueError(f"targets: their conditions differ in width, {widths}; choose targets of one width")
    return replace(route, targets=tuple(late), widths=(_width(features), next(iter(widths.values()))))


def _tensor(value: Any) -> Tensor | None:
    return value if isinstance(value, Tensor) else None


def _as_features(found: Tensor | None, what: str) -> Tensor:
    if found is None or not found.is_floating_point() or found.ndim < 2:
        shape = "not a tensor" if found is None else f"{found.dtype} {tuple(found.shape)}"
        raise ValueError(f"{what} must be floats (B, D), (B, T, D) or (B, D, ...), got {shape}; choose another")
    return found


def _width(tensor: Tensor) -> int:
    return tensor.shape[-1] if tensor.ndim == 3 else tensor.shape[1]


def _argument(module: nn.Module, name: str, argument: str) -> Argument:
    parameters = list(inspect.signature(module.forward).parameters)
    if argument not in parameters:
        raise unknown_name(f"argument of {name}", argument, [*parameters, OUTPUT])
    return Argument(parameters.index(argument), argument)
