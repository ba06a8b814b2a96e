"""Find where a model's features are taken and added: known classes in one table, others by name; checked by a run."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from scalelong.errors import did_you_mean, unknown_name
from scalelong.skips import hooks
from scalelong.skips.example import as_call, run_example, unchanged_on_error, undisturbed
from scalelong.skips.families import generated_example, known_family, stages
from scalelong.skips.feature_conditioning import (
    FEATURES_NAME,
    OUTPUT,
    FeatureConditioning,
    Pool,
    Route,
    attach_features,
    find_argument,
    has_hooks,
)
from scalelong.skips.feature_layout import as_tokens, channels_of, extra_tokens, named_output, split_item
from scalelong.skips.long_skip import Call


@unchanged_on_error
def condition_on_features(
    model: nn.Module,
    tap: str | None = None,
    *,
    targets: str | Sequence[str] | None = None,
    argument: str | None = None,
    token: int | Literal["all"] | None = None,
    pool: Pool = "mean",
    detach: bool = False,
    example: Any = None,
) -> FeatureConditioning:
    """Condition the blocks of `model` after `tap` on the tap's pooled output, in place; on any error nothing is changed.

    The plain model is the start: its output is the same until the gate has been trained. `scalelong.remove` undoes it.

    tap: a module, by default the middle block (U-ViT, UNets of diffusers) or the block at half depth (DiT); "blocks.3[1]" is
    the second of the tensors that a module returns.
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
    hooks.check_no_container(model, "the conditioning")
    if has_hooks(model):
        twice = f"this {type(model).__name__}, or a model inside or around it, is conditioned on its features already"
        raise ValueError(f"model: {twice}; call scalelong.remove(model, 'features') first")
    if hasattr(model, FEATURES_NAME):
        raise ValueError(f"model: this {type(model).__name__} has an attribute {FEATURES_NAME!r} of its own")
    if pool not in ("mean", "attention"):
        raise unknown_name("pool", pool, ("mean", "attention"))
    if targets is not None:
        targets = list(targets) if isinstance(targets, Iterable) and not isinstance(targets, str) else [targets]
    for key, names in (("tap", [] if tap is None else [tap]), ("targets", targets or [])):
        if wrong := [name for name in names if not isinstance(name, str)]:
            raise TypeError(f"{key}: must be the names of modules, got {type(wrong[0]).__name__}")
    if not (token in (None, "all") or (isinstance(token, int) and token >= 0)):
        raise ValueError(f"token: must be the number of a token, or 'all', got {token!r}")
    known, candidates = _defaults(model)
    if known is None and (tap is None or not targets):
        unknown = f"where a {type(model).__name__} takes its condition is not known"
        raise ValueError(f"targets: {unknown}; name the tap, the targets, the argument, and pass example=")
    route = known or Route("", ())
    if targets is not None:
        route, candidates = replace(route, argument=OUTPUT, token=None), list(dict.fromkeys(targets))
    wanted = route.token if token is None else None if token == "all" else token
    tap, argument = tap or route.tap, argument or route.argument
    route = replace(route, tap=tap, argument=argument, token=wanted, pool=pool, detach=detach)
    chosen = targets is not None or not candidates
    route = measure_route(model, route, candidates or [route.tap], chosen, example)
    with torch.inference_mode(False):
        conditioning = FeatureConditioning(route)
    attach_features(model, conditioning)
    return conditioning


def _defaults(model: nn.Module) -> tuple[Route | None, list[str]]:
    """The route of a known class, and the modules that can be its targets in the order of their calls; [] is the tap."""
    names = {f"{cls.__module__.partition('.')[0]}.{cls.__name__}" for cls in type(model).__mro__}
    module: Any = model
    if "scalelong.UViT" in names:
        time = 1 if module.config.num_classes else 0
        return Route("mid_block", (), token=time), []
    if names & {"diffusers.UNet2DModel", "diffusers.UNet2DConditionModel"}:
        tap = (
            "mid_block"
            if getattr(module, "mid_block", None) is not None
            else f"down_blocks.{len(module.down_blocks) - 1}"
        )
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


def measure_route(model: nn.Module, route: Route, names: Sequence[str], chosen: bool, example: Any = None) -> Route:
    """The route with its targets and widths, from one run of the model; `chosen` targets must run after the tap."""
    modules, tap = {name: module for name, module in model.named_modules() if name}, split_item(route.tap)[0]
    for key, name in (("tap", tap), *(("targets", name) for name in names)):
        if name not in modules:
            raise ValueError(f"{key}: no module {name!r}; {did_you_mean(name, modules)}see model.named_modules()")
    slots = {n: None if route.argument == OUTPUT else find_argument(modules[n], n, route.argument) for n in names}
    events: list[tuple[str, str]] = []
    seen: dict[str, Any] = {}  # by role and name

    def enter(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        events.append(("start", name))
        if (slot := slots.get(name)) is not None:
            seen.setdefault(f"condition {name}", _tensor(slot.get((args, kwargs))))

    def leave(name: str, output: Any) -> None:
        events.append(("end", name))
        if name == tap:
            seen.setdefault("tap", output)
        tensor = _tensor(output[0] if isinstance(output, (tuple, list)) and output else output)
        seen.setdefault(f"output {name}", tensor)

    handles = []
    for name in dict.fromkeys([tap, *names]):
        module = modules[name]
        handles += [
            module.register_forward_pre_hook(lambda _m, a, k, name=name: enter(name, a, k), with_kwargs=True),
            module.register_forward_hook(lambda _m, _a, output, name=name: leave(name, output)),
        ]
    try:
        with undisturbed(model), torch.no_grad():
            with torch.device("cpu"):  # where a model is built on the meta device
                call = _example(model, example)
            run_example(model, call)
    finally:
        for handle in handles:
            handle.remove()
    if ("end", tap) not in events:
        raise ValueError(f"tap: {route.tap} does not run in this model's forward; choose a module that does")
    after = events[events.index(("end", tap)) :]
    late = [name for name in names if ("start", name) not in events[: -len(after)] and ("start", name) in after]
    if names == [tap] and route.argument == OUTPUT:
        late = list(names)
    if chosen and (early := [name for name in names if name not in late]):
        raise ValueError(f"targets: {early[0]} does not run after the tap {route.tap}; choose modules behind it")
    if not late:
        raise ValueError(f"tap: no block of this {type(model).__name__} runs after {route.tap}; choose an earlier one")
    role = "output" if route.argument == OUTPUT else "condition"
    late = [name for name in late if chosen or seen.get(f"{role} {name}") is not None]
    features = _as_features(named_output(seen["tap"], route.tap, "tap"), f"tap: the output of {route.tap}")
    widths, channels = {}, {}
    for name in late:
        condition = _as_features(seen.get(f"{role} {name}"), f"targets: the {route.argument} of {name}")
        channels[name] = channels_of(modules[name], condition) if role == "output" else _only_dimension(condition)
        widths[name] = as_tokens(condition, channels[name]).shape[-1]
        rows = seen.get(f"output {name}")  # a condition of one sample is used for all samples of its target
        single = condition.shape[0] == 1 and (rows is None or rows.ndim < 3 or len(rows) == len(features))
        if condition.shape[0] != features.shape[0] and not single:
            sizes = f"{condition.shape[0]} samples, the tap has {features.shape[0]}"
            raise ValueError(f"targets: the {route.argument} of {name} has {sizes}; choose others")
        if route.token is not None and (condition.ndim != 3 or not 0 <= route.token < condition.shape[1]):
            lacks = f"the {route.argument} of {name}, {tuple(condition.shape)}, has no token {route.token}"
            raise ValueError(f"token: {lacks}; choose another token, or other modules")
    for what, found in (("width", widths), ("layout", channels)):
        if len(set(found.values())) > 1:
            raise ValueError(f"targets: their conditions differ in {what}, {found}; choose targets of one {what}")
    route = replace(route, first=extra_tokens(model, features))
    where = channels_of(modules[tap], features), next(iter(channels.values()))
    width = as_tokens(features, where[0]).shape[-1]
    return replace(route, targets=tuple(late), widths=(width, next(iter(widths.values()))), channels=where)


def _only_dimension(condition: Tensor) -> int:
    """The dimension of the channels of (B, D, 1) or (B, 1, 1, D); 0: the usual one."""
    wide = [dim for dim in range(1, condition.ndim) if condition.shape[dim] > 1]
    usual = 2 if condition.ndim == 3 else 1
    return wide[0] if len(wide) == 1 and wide[0] != usual else 0


def _tensor(value: Any) -> Tensor | None:
    return value if isinstance(value, Tensor) else None


def _as_features(found: Tensor | None, what: str) -> Tensor:
    if found is None or not found.is_floating_point() or found.ndim < 2:
        shape = "not a tensor" if found is None else f"{found.dtype} {tuple(found.shape)}"
        raise ValueError(f"{what} must be floats (B, D), (B, T, D) or (B, D, ...), got {shape}; choose another")
    return found
