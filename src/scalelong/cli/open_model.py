"""Find the model that a user names: a preset, a run's folder, a diffusers folder, or module:callable."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import scalelong
from scalelong.data.registry import expected_shape
from scalelong.runs.presets import EXPECTED
from scalelong.runs.settings import Conditioning
from scalelong.skips.attach import CONFIG_KEY
from scalelong.skips.example import as_call
from scalelong.skips.example_inputs import generated_example
from scalelong.skips.long_skip import Call
from scalelong.training import PRESETS, get_preset, load_run
from scalelong.training.build import build_model

LARGE = 100_000_000  # parameters from which on a model is looked at on the meta device, without values
COMPONENTS = ("unet", "transformer", "prior", "decoder")  # of a pipeline, the first that is there is meant


@dataclass(frozen=True)
class Opened:
    """A model and calls of it; a None call means that its class needs none to be known."""

    model: nn.Module
    small: Call | None  # to run
    full: Call | None  # as large as the model was made for


def open_model(target: str, shapes: Sequence[str]) -> Opened:
    """The model by its name; shapes are those of an example input, for classes that are not known."""
    example = as_call(tuple(example_tensor(shape) for shape in shapes)) if shapes else None
    model, given = _find(target, example)
    example = example or given
    if example is not None:
        return Opened(model, example, example)
    try:
        return Opened(model, generated_example(model), generated_example(model, full_size=True))
    except ValueError:
        if scalelong.skips.known_skips(model) is None:
            raise ValueError(
                f"shape: {type(model).__name__} is of no known family, so it must be run once; give its inputs' shapes, "
                "--shape 1,3,32,32 1 (or let module:callable return the model and an example)"
            ) from None
        return Opened(model, None, None)


def example_tensor(text: str) -> Tensor:
    """ "1,3,32,32" is random numbers of that shape, "1:int64" zeros of that type."""
    shape, _, dtype = text.partition(":")
    try:
        sizes = [int(size) for size in shape.split(",")]
    except ValueError:
        raise ValueError(f"shape: must be numbers with commas such as 1,3,32,32 or 1:int64, got {text!r}") from None
    if dtype:
        kind = getattr(torch, dtype, None)
        if not isinstance(kind, torch.dtype):
            raise ValueError(f"shape: {dtype!r} is no type of torch; for example 1:int64")
        return torch.zeros(sizes, dtype=kind)
    return torch.randn(sizes, generator=torch.Generator().manual_seed(0))


def _find(target: str, example: Call | None) -> tuple[nn.Module, Call | None]:
    if target in PRESETS:
        return _preset(target, example), None
    folder = Path(target)
    if (folder / "config.yaml").is_file():
        return load_run(folder).model, None
    if folder.is_dir():
        return _diffusers(_component(folder)), None
    if ":" in target:
        return _from_callable(target)
    get_preset(target)  # refuses the name, and suggests the nearest
    raise AssertionError


def _preset(name: str, example: Call | None) -> nn.Module:
    config = get_preset(name)
    shape, sizes = EXPECTED.get(config.data.name, (expected_shape(config.data.name), Conditioning()))
    if example is not None:
        channels, height, width = example[0][0].shape[1:]
        shape = (channels, height, width)
    if shape is None:
        raise ValueError(f"shape: the size of {config.data.name} is not known here; give one, --shape 1,3,32,32")
    return _small_or_meta(lambda: build_model(config, shape, sizes))


def _component(folder: Path) -> Path:
    """The folder of the model itself, inside a pipeline's."""
    if (folder / "config.json").is_file():
        return folder
    for name in COMPONENTS:
        if (folder / name / "config.json").is_file():
            return folder / name
    raise ValueError(
        f"model: {folder} holds no model: no config.json there or in {', '.join(COMPONENTS)}, and no config.yaml of a run"
    )


def _diffusers(folder: Path) -> nn.Module:
    import diffusers

    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    cls = getattr(diffusers, config.get("_class_name", ""), None)
    if cls is None:
        raise ValueError(f"model: {folder / 'config.json'}: diffusers has no class {config.get('_class_name')!r}")
    if CONFIG_KEY in config and any(folder.glob("*.safetensors")):
        model: nn.Module = scalelong.from_pretrained(cls, folder)
        return model
    plain = {key: value for key, value in config.items() if key != CONFIG_KEY}
    return _small_or_meta(lambda: cls.from_config(plain))


def _small_or_meta(build: Callable[[], nn.Module]) -> nn.Module:
    """Large models are built without values: their skips are known all the same."""
    with torch.device("meta"):
        model = build()
    if sum(parameter.numel() for parameter in model.parameters()) >= LARGE:
        return model
    return build().eval()


def _from_callable(target: str) -> tuple[nn.Module, Call | None]:
    module, _, name = target.partition(":")
    sys.path.insert(0, str(Path.cwd()))
    try:
        made = getattr(importlib.import_module(module), name, None)
    finally:
        sys.path.pop(0)
    if not callable(made):
        raise ValueError(f"model: {module} has no callable {name!r}; name one that returns a torch.nn.Module")
    result = made if isinstance(made, nn.Module) else made()
    model, example = result if isinstance(result, tuple) and len(result) == 2 else (result, None)
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: {target} gave a {type(model).__name__}; it must return a torch.nn.Module")
    return model.eval(), None if example is None else as_call(example)
