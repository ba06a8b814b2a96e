"""Open a model that is named on the command line."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import scalelong
from scalelong.data.base import find_source
from scalelong.errors import short, unknown_name
from scalelong.files import check_manifest, read_json
from scalelong.runs.folder import is_run, read_config
from scalelong.runs.presets import EXPECTED, PRESETS, get_preset
from scalelong.runs.settings import Conditioning, RunConfig
from scalelong.skips import is_scaled
from scalelong.skips.example import as_call, is_meta
from scalelong.skips.families import generated_example, known_skips
from scalelong.skips.hooks import CONFIG_KEY, attached_skips
from scalelong.skips.long_skip import Call
from scalelong.training import load_run
from scalelong.training.build import build_model

LARGE = 100_000_000  # parameters; larger models are built on the meta device, without values
COMPONENTS = ("unet", "transformer", "prior", "decoder")  # of a pipeline; the first that exists is opened


@dataclass(frozen=True)
class Opened:
    """A model and example inputs; None if its class is known."""

    model: nn.Module
    example: Call | None  # to run; None on the meta device
    full: Call | None  # at the model's native resolution

    def skips(self) -> list[scalelong.LongSkip]:
        """The long skips, with measured reach unless on the meta device."""
        if is_scaled(self.model) and any(skip.after_norm for skip in attached_skips(self.model)):
            return attached_skips(self.model)
        return scalelong.find_skips(self.model, example=self.example)


def known_config(name: str) -> RunConfig | None:
    """The configuration of a preset or a run folder; None for other models."""
    return PRESETS.get(name) or (read_config(name) if is_run(name) else None)


def open_model(name: str, shapes: Sequence[str]) -> Opened:
    """Open a model by name; `shapes` describe an example input for unknown classes."""
    example = as_call(tuple(example_tensor(shape) for shape in shapes)) if shapes else None
    model, own_example = named_model(name, example)
    example = example or own_example
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


def named_model(name: str, example: Call | None = None) -> tuple[nn.Module, Call | None]:
    """A model by name, and an example input if it comes with one."""
    folder = Path(name)
    if name in PRESETS:
        return from_config(get_preset(name), example), None
    if is_run(folder):
        return load_run(folder).model, None
    if folder.is_dir():
        return _from_diffusers(folder), None
    if ":" in name:
        return _from_callable(name)
    raise unknown_name("preset", name, PRESETS)


def count_skips(name: str, shapes: Sequence[str], data_shape: tuple[int, int, int]) -> int:
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


def from_config(config: RunConfig, example: Call | None = None) -> nn.Module:
    """Build the model of a configuration for its data's usual shape or the example's."""
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
        places = f"there or in {', '.join(COMPONENTS)}, and no config.yaml"
        raise ValueError(f"model: {folder} has no config.json, {places}; give the folder of a model or of a run")
    check_manifest(folder)
    config = read_json(home, "config.json")
    name = config.get("_class_name") if isinstance(config, dict) else None
    cls: Any = getattr(diffusers, name, None) if isinstance(name, str) else None
    if not (isinstance(cls, type) and issubclass(cls, diffusers.ModelMixin)):
        raise ValueError(f"model: {home / 'config.json'}: diffusers has no model {short(name)}; pass module:callable")
    if CONFIG_KEY in config and any(home.glob("*.safetensors")):
        model: nn.Module = scalelong.from_pretrained(cls, home)
        return model
    config.pop(CONFIG_KEY, None)
    known: Any = cls
    return _small_or_meta(lambda: known.from_config(config))


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
