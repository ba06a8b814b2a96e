"""`scalelong inspect` and `scalelong kappa`: verbs on any model that can be named on the command line."""

from __future__ import annotations

import importlib
import json
import math
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal

import torch
import tyro
from torch import Tensor, nn

import scalelong
from scalelong.cli import ModelName
from scalelong.data import load_source
from scalelong.data.base import find_source
from scalelong.diffusion import get_process
from scalelong.errors import unknown_name
from scalelong.report.plots import Rung, UShape, as_text, draw
from scalelong.runs.presets import EXPECTED, PRESETS, get_preset
from scalelong.runs.reader import is_run, read_config
from scalelong.runs.settings import Conditioning, DataSettings, DiffusionSettings, RunConfig
from scalelong.scaling.registry import METHODS
from scalelong.skips import LongSkip, is_scaled, scaling_of
from scalelong.skips.attach import CONFIG_KEY, skip_shapes
from scalelong.skips.example import as_call, is_meta, undisturbed
from scalelong.skips.families import generated_example, known_skips
from scalelong.skips.hooks import attached_skips
from scalelong.skips.long_skip import Call
from scalelong.stability.kappa import Recommendation, plot, recommend_kappa
from scalelong.training import load_run
from scalelong.training.build import build_model

LARGE = 100_000_000  # parameters; larger models are built on the meta device, without values
COMPONENTS = ("unet", "transformer", "prior", "decoder")  # of a pipeline; the first that exists is opened


@dataclass(frozen=True)
class Inspect:
    """Draw the U of a model as text and as a picture: stages, skips, channels, coefficients, how far kappa reaches.

    MODEL is a preset, a run folder, a diffusers folder (of a model or a pipeline), or module:callable, which returns a
    model, or a model and an example input. Models of 100M parameters and more are inspected without their values.

    Example: scalelong inspect cifar10-unet --method cs --kappa 0.7 --out u.png
    """

    model: ModelName  # see above
    method: str = ""  # scale with this method first; default: the model as it is
    kappa: float | None = None  # of that method, if it has one
    placement: Literal["before", "after_norm"] = "before"
    shape: tuple[str, ...] = ()  # example inputs for unknown classes: 1,3,32,32 is random numbers, 1:int64 zeros
    out: str = ""  # also write a picture: u.png, u.svg or u.pdf


def inspect(arguments: list[str]) -> None:
    """Open, measure, draw."""
    command = tyro.cli(Inspect, args=arguments, prog="scalelong inspect")
    if command.out and not command.out.endswith((".png", ".svg", ".pdf")):
        raise ValueError(f"out: must end in .png, .svg or .pdf, got {command.out!r}")
    shape = _u_shape(open_model(command.model, command.shape), command)
    print(as_text(shape))
    if command.out:
        print(f"\npicture  {draw(shape, command.out)}")


def _u_shape(opened: Opened, command: Inspect) -> UShape:
    """Scale the model as asked and collect what is drawn."""
    model = opened.model
    if command.method and is_scaled(model):
        scalelong.remove(model)
    skips = opened.skips()
    shapes = skip_shapes(model, skips, opened.full) if opened.full is not None else [None] * len(skips)
    if command.method:
        options = {} if command.kappa is None else {"kappa": command.kappa}
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


@dataclass(frozen=True)
class Kappa:
    """Choose kappa: the interval of the paper's Sec. 4.1 from data, noise process and number of skips, and one value.

    MODEL is a preset or a run folder, which name their data; or, with --data, a diffusers folder or module:callable.

    Example: scalelong kappa digits-demo --out runs/kappa

    Example: scalelong kappa mymodels:build --data folder:photos --image-size 64
    """

    model: ModelName  # see above
    data: str | None = None  # instead of the preset's: a name, folder:PATH or hf:NAME; required for other models
    image_size: int | None = None  # crop and resize the data to this
    skips: int | None = None  # the number of long skips; default: the model's
    shape: tuple[str, ...] = ()  # example inputs for unknown classes: 1,3,32,32 is random numbers, 1:int64 zeros
    process: str = ""  # vp, ddpm, cosine, edm; default: the preset's, or vp
    prediction: str = ""  # noise, x0, v; default: the preset's, or the process's own
    num_samples: int = 4096
    seed: int = 0
    out: str = "runs/kappa"  # folder of the plot


def kappa(arguments: list[str]) -> None:
    """Sample, recommend, plot."""
    command = tyro.cli(Kappa, args=arguments, prog="scalelong kappa")
    config = known_config(command.model)
    if config is None and command.data is None:
        if not Path(command.model).exists() and ":" not in command.model:
            raise unknown_name("preset", command.model, PRESETS)
        raise ValueError(f"data: {command.model} does not name its data; pass it, for example --data folder:photos")
    data = config.data if config and command.data is None else DataSettings(command.data or "")
    root = config.data.root if config else None
    source = load_source(data.name, image_size=command.image_size or data.image_size, split=data.split, root=root)
    skips = command.skips if command.skips is not None else _count_skips(command.model, command.shape, source.shape)
    diffusion = config.diffusion if config else DiffusionSettings()
    process = get_process(command.process or diffusion.process)
    recommend = partial(recommend_kappa, source, process, skips, samples=command.num_samples, seed=command.seed)
    found = recommend(prediction=command.prediction or diffusion.prediction)
    name = re.sub(r"[^A-Za-z0-9_.-]+", "-", command.model).strip("-")
    picture = Path(command.out) / f"kappa-{name}.png"
    picture.parent.mkdir(parents=True, exist_ok=True)
    plot(found, f"{name}: {source.name}, {process.name}", picture)
    print(summary(found, config))
    if "noise" in process.predictions:
        print("\nThe paper's mean ratio of 1.22 (target eps) is a mean of ratios or, by Lemma 3.2, a ratio of means:")
        for reading in (found if found.prediction == "noise" else recommend(prediction="noise")).readings:
            print("  {:24}{:.3f}   kappa {:.3f} .. {:.3f}".format(reading.name, reading.ratio, *reading.kappa_interval))
    print(f"\npicture  {picture}")


def summary(found: Recommendation, config: RunConfig | None) -> str:
    """The numbers, the reasoning and the warnings."""
    (mean, tail), (low, high) = found.sum_interval, found.kappa_interval
    lines = [
        f"skips N                   {found.num_skips}",
        f"ratio, mean               {mean:.3f}  (standard error {found.standard_error:.3f})",
        f"ratio, 97% quantile       {tail:.3f}",
        f"kappa of CS, interval     {low:.3f} .. {high:.3f}  (middle {found.middle:.3f})",
        f"kappa of CS, recommended  {found.kappa:g}",
    ]
    if config is not None and "kappa" in config.scaling.options():
        lines.append(f"kappa in the settings     {config.scaling.kappa} ({config.scaling.method})")
    return "\n".join([*lines, "", found.reasoning, *(f"warning: {warning}" for warning in found.warnings)])


# ------------------------------------------------------------------------------------------------------- opening a model


@dataclass(frozen=True)
class Opened:
    """A model and example calls of it; None where its class is known and needs none."""

    model: nn.Module
    example: Call | None  # to run; None on the meta device
    full: Call | None  # at the model's native resolution

    def skips(self) -> list[scalelong.LongSkip]:
        """The long skips, their reach measured where the model has values."""
        if is_scaled(self.model) and any(skip.after_norm for skip in attached_skips(self.model)):
            return attached_skips(self.model)
        return scalelong.find_skips(self.model, example=self.example)


def known_config(name: str) -> RunConfig | None:
    """The configuration of a preset or a run folder; None for other models."""
    return PRESETS.get(name) or (read_config(name) if is_run(name) else None)


def open_model(name: str, shapes: Sequence[str]) -> Opened:
    """Open a model by name; `shapes` are those of an example input, for unknown classes."""
    example = as_call(tuple(example_tensor(shape) for shape in shapes)) if shapes else None
    folder = Path(name)
    if name in PRESETS:
        model = _from_preset(name, example)
    elif is_run(folder):
        model = load_run(folder).model
    elif folder.is_dir():
        model = _from_diffusers(folder)
    elif ":" in name:
        model, own_example = _from_callable(name)
        example = example or own_example
    else:
        raise unknown_name("preset", name, PRESETS)
    if example is not None:
        return Opened(model, None if is_meta(model) else example, example)
    try:
        example = None if is_meta(model) else generated_example(model)
        return Opened(model, example, generated_example(model, full_size=True))
    except ValueError:
        if known_skips(model) is None:
            cls = type(model).__name__
            raise ValueError(f"shape: {cls} is not a known class; pass its inputs, as --shape 1,3,32,32 1") from None
        return Opened(model, None, None)


def _count_skips(name: str, shapes: Sequence[str], data_shape: tuple[int, int, int]) -> int:
    """The number of long skips; the model of a preset or run is built on the meta device."""
    config = known_config(name)
    if config is None or config.condition.kind == "text":
        return len(open_model(name, shapes).skips())
    with torch.device("meta"):
        return len(scalelong.find_skips(build_model(config, data_shape)))


def example_tensor(text: str) -> Tensor:
    """ "1,3,32,32" is random numbers of that shape, "1:int64" zeros of that dtype."""
    shape, _, dtype = text.partition(":")
    try:
        sizes = [int(size) for size in shape.split(",")]
    except ValueError:
        raise ValueError(f"shape: must be numbers with commas such as 1,3,32,32 or 1:int64, got {text!r}") from None
    if not dtype:
        return torch.randn(sizes, generator=torch.Generator().manual_seed(0))
    kind = getattr(torch, dtype, None)
    if not isinstance(kind, torch.dtype):
        raise ValueError(f"shape: {dtype!r} is not a torch dtype; for example 1:int64")
    return torch.zeros(sizes, dtype=kind)


def _from_preset(name: str, example: Call | None) -> nn.Module:
    config = get_preset(name)
    shape, conditioning = EXPECTED.get(config.data.name, (find_source(config.data.name)[0].shape, Conditioning()))
    if example is not None:
        shape = tuple(example[0][0].shape[1:])
    if shape is None:
        raise ValueError(f"shape: the image size of {config.data.name} is not known; pass --shape 1,3,32,32")
    return _small_or_meta(lambda: build_model(config, shape, conditioning))


def _from_diffusers(folder: Path) -> nn.Module:
    import diffusers

    candidates = [folder, *(folder / name for name in COMPONENTS)]
    home = next((path for path in candidates if (path / "config.json").is_file()), None)
    if home is None:
        raise ValueError(f"model: {folder} has no config.json, there or in {', '.join(COMPONENTS)}, and no config.yaml")
    config = json.loads((home / "config.json").read_text())
    cls = getattr(diffusers, config.get("_class_name", ""), None)
    if cls is None:
        raise ValueError(f"model: {home / 'config.json'}: diffusers has no class {config.get('_class_name')!r}")
    if CONFIG_KEY in config and any(home.glob("*.safetensors")):
        model: nn.Module = scalelong.from_pretrained(cls, home)
        return model
    config.pop(CONFIG_KEY, None)
    return _small_or_meta(lambda: cls.from_config(config))


def _small_or_meta(build: Callable[[], nn.Module]) -> nn.Module:
    with torch.device("meta"):
        model = build()
    return model if sum(parameter.numel() for parameter in model.parameters()) >= LARGE else build().eval()


def _from_callable(name: str) -> tuple[nn.Module, Call | None]:
    module, _, attribute = name.partition(":")
    sys.path.insert(0, str(Path.cwd()))
    try:
        made = getattr(importlib.import_module(module), attribute, None)
    finally:
        sys.path.pop(0)
    if not callable(made):
        raise ValueError(f"model: {module} has no callable {attribute!r}; name one that returns a torch.nn.Module")
    result = made if isinstance(made, nn.Module) else made()
    model, example = result if isinstance(result, tuple) and len(result) == 2 else (result, None)
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: {name} returned a {type(model).__name__}, not a torch.nn.Module")
    return model.eval(), None if example is None else as_call(example)
