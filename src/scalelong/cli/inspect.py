"""`scalelong inspect`."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
import tyro
from torch import nn

import scalelong
from scalelong.cli.arguments import ModelName
from scalelong.cli.open_model import Opened, from_config, known_config, named_model, open_model
from scalelong.errors import require
from scalelong.parametrization import parametrize, role_table, roles
from scalelong.report.plots import Rung, UShape, as_text, draw
from scalelong.runs.settings import MupSettings
from scalelong.scaling.registry import METHODS
from scalelong.skips import LongSkip, is_scaled, scaling_of
from scalelong.skips.attach import skip_shapes
from scalelong.skips.example import undisturbed


@dataclass(frozen=True)
class Inspect:
    """Show the long skips of a model as text or image: stages, channels, coefficients and reach of kappa.

    MODEL is a preset, a run folder, a diffusers folder (model or pipeline), or module:callable that returns a model, or a
    model and an example input. Models with 100M parameters or more are built on the meta device.

    Example: scalelong inspect cifar10-unet --method cs --kappa 0.7 --out u.png

    Example: scalelong inspect cifar10-uvit-s2 --roles --base 128
    """

    model: ModelName  # see above
    method: str = ""  # scale with this method first; default: unchanged
    kappa: float | None = None  # kappa of the method
    allow_amplify: bool = False  # allow kappa > 1, as a control
    placement: Literal["before", "after_norm"] = "before"
    shape: tuple[str, ...] = ()  # example inputs for unknown classes: 1,3,32,32 is random numbers, 1:int64 zeros
    out: str = ""  # also write an image: u.png, u.svg or u.pdf
    roles: bool = False  # print muP's role, initial scale, multiplier and rate of every tensor instead
    base: str = ""  # with --roles: base width of a preset or run (default: half its width), or a MODEL at base width


def main(arguments: list[str]) -> None:
    """Open, measure, draw."""
    command = tyro.cli(Inspect, args=arguments, prog="scalelong inspect")
    if command.roles:
        print(role_table(_parametrized(command)))
        return
    if command.out and not command.out.endswith((".png", ".svg", ".pdf")):
        raise ValueError(f"out: must end in .png, .svg or .pdf, got {command.out!r}")
    shape = _u_shape(open_model(command.model, command.shape), command)
    print(as_text(shape))
    if command.out:
        print(f"\npicture  {draw(shape, command.out)}")


def _parametrized(command: Inspect) -> nn.Module:
    """The model in muP; unchanged if it was trained in muP."""
    config = known_config(command.model)
    if config is not None and not config.mup.base_width:
        settings = config.model
        width = command.base or str((settings.dim if settings.backbone == "uvit" else settings.channels[0]) // 2)
        require(width.isdigit() and int(width) > 0, "base", "a width, such as 128", width)
        return from_config(replace(config, mup=MupSettings(int(width))))
    model, _ = named_model(command.model)
    if not roles(model):
        if not command.base:
            raise ValueError("base: the model at base width is not known; pass --base MODEL, such as module:callable")
        parametrize(model, named_model(command.base)[0])
    return model


def _u_shape(opened: Opened, command: Inspect) -> UShape:
    """Scale the model if requested and collect the data to show."""
    model = opened.model
    if command.method and is_scaled(model):
        scalelong.remove(model, "scaling")
    skips = opened.skips()
    shapes = skip_shapes(model, skips, opened.full) if opened.full is not None else [None] * len(skips)
    if command.method:
        options: dict[str, Any] = {} if command.kappa is None else {"kappa": command.kappa}
        if options and command.allow_amplify:
            options["allow_amplify"] = True
        if options and command.method in METHODS and "kappa" not in METHODS[command.method].defaults:
            raise ValueError(f"kappa: {command.method!r} has none; leave it out")
        handle = scalelong.apply(model, command.method, example=opened.example, placement=command.placement, **options)
        pairs = zip(handle.skips, skips, strict=True)
        skips = [new if new.after_norm else replace(new, reach=old.reach) for new, old in pairs]
    subtitle, coefficients = "not scaled: every κ is 1", [1.0] * len(skips)
    if is_scaled(model):
        subtitle, coefficients = str(scaling_of(model).config), scaling_of(model).current()
        if any(map(math.isnan, coefficients)) and opened.example is not None:  # gates: their output on the example
            args, kwargs = opened.example
            with undisturbed(model), torch.no_grad():
                model(*args, **kwargs)
                coefficients = scaling_of(model).current()
    rungs = [
        Rung(skip.index, skip.made_in, skip.used_in, skip.size.channels, _size(skip, shape), kappa, skip.reach)
        for skip, shape, kappa in zip(skips, shapes, coefficients, strict=True)
    ]
    parameters = sum(parameter.numel() for parameter in model.parameters())
    count = f"{parameters / 1e6:.1f}M" if parameters >= 1e5 else f"{parameters:,}"
    plural = "" if len(skips) == 1 else "s"
    return UShape(f"{type(model).__name__}: {count} parameters, {len(skips)} long skip{plural}", subtitle, rungs)


def _size(skip: LongSkip, shape: tuple[int, ...] | None) -> str:
    """A shape without batch and channels."""
    if skip.size.tokens is not None:
        return f"{skip.size.tokens} tokens"
    if shape is None or len(shape) < 3:
        return ""
    return " × ".join(map(str, shape[1:-1] if skip.size.channels_last else shape[2:]))
