"""Put a scaling on a model in place, and take it off again.

A forward-pre-hook on each consumer scales the skip on its way in. The hook is a plain function of this module and what it
needs stands on the consumer, so deep copies, pickles and compiled graphs are independent of the original. The gates are
registered once, at the root, as `model.scalelong`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from scalelong.scaling import Scaling, ScalingConfig
from scalelong.skips.guard import check_state_dict, check_unwrapped
from scalelong.skips.known import known_families, known_skips
from scalelong.skips.sites import Call, LongSkip, Take, skip_table

ROOT_NAME = "scalelong"  # the gates' place in the model and in its state dict
CONFIG_KEY = "long_skip_scaling"  # the scaling's place in a diffusers config.json
_ATTACHMENT = "_scalelong_attachment"


@dataclass(frozen=True)
class Attachment:
    """What stands on a consumer: the scaling of the whole model and which skips this consumer is handed, and where."""

    scaling: Scaling
    takes: tuple[tuple[int, Take], ...]


def scale_incoming_skips(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
    """The forward-pre-hook of every consumer."""
    attachment: Attachment = getattr(module, _ATTACHMENT)
    call = (args, kwargs)
    for index, take in attachment.takes:
        call = take.scaled(call, index, attachment.scaling)
    return call


@dataclass(frozen=True)
class Handle:
    """A scaled model: what was found and what was put on it."""

    model: nn.Module
    skips: list[LongSkip]
    config: ScalingConfig

    @property
    def scaling(self) -> Scaling:
        """The module that holds the coefficients or gates."""
        return scaling_of(self.model)

    def coefficients(self) -> list[float]:
        """kappa_i now, outermost first."""
        return self.scaling.current()

    def remove(self) -> None:
        """Undo `apply`."""
        remove(self.model)

    def __str__(self) -> str:
        return f"{self.config} on {type(self.model).__name__}\n{skip_table(self.skips, self.coefficients())}"


def find_skips(model: nn.Module) -> list[LongSkip]:
    """The long skips of a model, index 1 = outermost: where each is made and used, its size, how far kappa reaches."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: must be a torch.nn.Module, got {type(model).__name__}")
    check_unwrapped(model)
    skips = known_skips(model)
    if skips is None:
        raise ValueError(
            f"model: {type(model).__name__} is of no known family and has no example input to look at; "
            f"known are {', '.join(known_families())}"
        )
    if not skips:
        raise ValueError(
            f"model: this {type(model).__name__} has no long skip connections, so there is nothing to scale"
        )
    return skips


def apply(model: nn.Module, method: str = "cs", **options: Any) -> Handle:
    """Scale the long skips of `model` in place.

    method: "none", "universal", "rsqrt2", "cs", "cs_reversed" or "ls"; options: kappa and allow_amplify for the constant
    ones; shared, reduction, module, activation and axis for "ls". On any error the model is left as it was.
    """
    config = ScalingConfig.create(method, **options)
    skips = find_skips(model)
    _check_unscaled(model)
    scaling = config.build([skip.size for skip in skips])
    _match_device_and_dtype(scaling, model)
    for consumer in dict.fromkeys(skip.consumer for skip in skips):
        takes = tuple((skip.index, skip.take) for skip in skips if skip.consumer == consumer)
        _hook(model.get_submodule(consumer), Attachment(scaling, takes))
    model.add_module(ROOT_NAME, scaling)
    model.register_load_state_dict_pre_hook(check_state_dict)  # type: ignore[no-untyped-call]
    _write_config(model, config, len(skips))
    return Handle(model, skips, config)


def remove(model: nn.Module) -> None:
    """Take a scaling off: afterwards the model, its state dict and its config are as before `apply`."""
    scaling_of(model)
    for module in model.modules():
        if _ATTACHMENT in module.__dict__:
            delattr(module, _ATTACHMENT)
            _drop_hooks(module)
    delattr(model, ROOT_NAME)
    hooks = model._load_state_dict_pre_hooks
    for key in [key for key, hook in hooks.items() if getattr(hook, "hook", None) is check_state_dict]:
        del hooks[key]
    _write_config(model, None, 0)


def coefficients(model: nn.Module) -> list[float]:
    """kappa_i now, outermost first: constants, or the mean the gates gave on the last forward (nan before the first)."""
    return scaling_of(model).current()


def is_scaled(model: nn.Module) -> bool:
    """Whether `apply` was called on this model."""
    return isinstance(model._modules.get(ROOT_NAME), Scaling)


def scaling_of(model: nn.Module) -> Scaling:
    """The scaling on a model; a ValueError where there is none."""
    scaling = model._modules.get(ROOT_NAME)
    if not isinstance(scaling, Scaling):
        raise ValueError(f"model: this {type(model).__name__} is not scaled; call scalelong.apply(model, ...) first")
    return scaling


def _check_unscaled(model: nn.Module) -> None:
    if any(_ATTACHMENT in module.__dict__ for module in model.modules()):
        raise ValueError(
            f"model: this {type(model).__name__} is scaled already; call scalelong.remove(model) before applying another"
        )
    if hasattr(model, ROOT_NAME):
        raise ValueError(f"model: it has an attribute {ROOT_NAME!r} of its own, where the gates would be stored")


def _match_device_and_dtype(scaling: Scaling, model: nn.Module) -> None:
    reference = next((p for p in model.parameters() if p.is_floating_point()), None)
    if reference is not None:
        scaling.to(device=reference.device, dtype=reference.dtype)


def _hook(consumer: nn.Module, attachment: Attachment) -> None:
    object.__setattr__(consumer, _ATTACHMENT, attachment)
    consumer.register_forward_pre_hook(scale_incoming_skips, with_kwargs=True)


def _drop_hooks(consumer: nn.Module) -> None:
    for key in [key for key, hook in consumer._forward_pre_hooks.items() if hook is scale_incoming_skips]:
        del consumer._forward_pre_hooks[key]
        consumer._forward_pre_hooks_with_kwargs.pop(key, None)


def _write_config(model: Any, config: ScalingConfig | None, num_skips: int) -> None:
    """Write the scaling into a diffusers model's config, which `save_pretrained` stores, or take it out again."""
    if not hasattr(model, "register_to_config"):
        return
    if config is not None:
        model.register_to_config(**{CONFIG_KEY: config.to_json(num_skips)})
        return
    entries = model._internal_dict
    model._internal_dict = type(entries)({key: value for key, value in entries.items() if key != CONFIG_KEY})
