"""Draw the U of a model as text and as a picture: stages, skips, channels, coefficients, how far kappa reaches.

MODEL is a preset, a run's folder, a diffusers folder (of a model or a pipeline), or module:callable, which returns a model,
or a model and an example input. Models of 100M parameters and more are looked at without their values.

Example: scalelong inspect cifar10-unet --method cs --kappa 0.7 --out u.png
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import tyro
from torch import nn

import scalelong
from scalelong.cli.arguments import ModelName
from scalelong.cli.open_model import Opened, open_model
from scalelong.report.ushape import Rung, UShape, as_text, draw
from scalelong.scaling.constant import Scaling
from scalelong.scaling.registry import METHODS
from scalelong.skips import LongSkip, is_scaled, scaling_of
from scalelong.skips.attach import skip_shapes
from scalelong.skips.example import is_meta, undisturbed
from scalelong.skips.hooks import attached_skips
from scalelong.skips.long_skip import Call


@dataclass(frozen=True)
class Inspect:
    """What is on the command line."""

    model: ModelName  # see above
    method: str = ""  # scale with this method first; default: as the model is
    kappa: float | None = None  # of that method, where it has one
    placement: Literal["before", "after_norm"] = "before"
    shape: tuple[str, ...] = ()  # example inputs for unknown classes: 1,3,32,32 is random numbers, 1:int64 zeros
    out: str = ""  # write a picture here too: u.png, u.svg or u.pdf


def main(arguments: list[str]) -> None:
    """Open, look, draw."""
    command = tyro.cli(Inspect, args=arguments, prog="scalelong inspect", description=__doc__)
    if command.out and not command.out.endswith((".png", ".svg", ".pdf")):
        raise ValueError(f"out: must end in .png, .svg or .pdf, got {command.out!r}")
    opened = open_model(command.model, command.shape)
    shape = look(opened, command)
    print(as_text(shape))
    if command.out:
        print(f"\npicture  {draw(shape, command.out)}")


def look(opened: Opened, command: Inspect) -> UShape:
    """Scale as asked, measure what can be measured, and gather what is drawn."""
    model = opened.model
    if command.method and is_scaled(model):
        scalelong.remove(model)
    skips, sizes = _skips(model, opened)
    title = _title(model, len(skips))
    if not is_scaled(model) and not command.method:
        return UShape(title, "not scaled: every κ is 1", _rungs(skips, sizes, [1.0] * len(skips)))
    if command.method:
        example = None if is_meta(model) else opened.small
        handle = scalelong.apply(
            model, command.method, example=example, placement=command.placement, **_options(command)
        )
        skips = [_with_reach(new, old) for new, old in zip(handle.skips, skips, strict=True)]
    scaling = scaling_of(model)
    return UShape(title, str(scaling.config), _rungs(skips, sizes, _coefficients(model, scaling, opened.small)))


def _skips(model: nn.Module, opened: Opened) -> tuple[list[LongSkip], list[tuple[int, ...] | None]]:
    """The skips with their reach measured where the model has values, and their shapes at full size."""
    if is_scaled(model) and any(skip.after_norm for skip in attached_skips(model)):
        skips = attached_skips(model)
    else:
        args, kwargs = opened.small if opened.small is not None and not is_meta(model) else ((), {})
        skips = scalelong.find_skips(model, *args, **kwargs)
    if opened.full is None:
        return skips, [None] * len(skips)
    return skips, skip_shapes(model, skips, opened.full)


def _with_reach(new: LongSkip, old: LongSkip) -> LongSkip:
    return new if new.after_norm else dataclasses.replace(new, reach=old.reach)


def _options(command: Inspect) -> dict[str, float]:
    takes = METHODS[command.method].defaults if command.method in METHODS else {}
    if command.kappa is None:
        return {}
    if "kappa" not in takes:
        raise ValueError(f"kappa: {command.method!r} has none; leave it out")
    return {"kappa": command.kappa}


def _coefficients(model: nn.Module, scaling: Scaling, call: Call | None) -> list[float]:
    """The constants, or what the gates give on the example."""
    if any(math.isnan(value) for value in scaling.current()) and call is not None and not is_meta(model):
        args, kwargs = call
        with undisturbed(model), torch.no_grad():
            model(*args, **kwargs)
            return scaling.current()
    return scaling.current()


def _title(model: nn.Module, num_skips: int) -> str:
    parameters = sum(parameter.numel() for parameter in model.parameters())
    skips = "1 long skip" if num_skips == 1 else f"{num_skips} long skips"
    count = f"{parameters / 1e6:.1f}M" if parameters >= 1e5 else f"{parameters:,}"
    return f"{type(model).__name__}: {count} parameters, {skips}"


def _rungs(
    skips: Sequence[LongSkip], shapes: Sequence[tuple[int, ...] | None], coefficients: Sequence[float]
) -> list[Rung]:
    return [
        Rung(
            skip.index,
            skip.made_in,
            skip.used_in,
            skip.size.channels,
            _size(skip, shape),
            None if math.isnan(kappa) else kappa,
            skip.reach,
        )
        for skip, shape, kappa in zip(skips, shapes, coefficients, strict=True)
    ]


def _size(skip: LongSkip, shape: tuple[int, ...] | None) -> str:
    """What is left of a shape without batch and channels."""
    if skip.size.tokens is not None:
        return f"{skip.size.tokens} tokens"
    if shape is None or len(shape) < 3:
        return ""
    rest = shape[1:-1] if skip.size.channels_last else shape[2:]
    return " × ".join(map(str, rest))
