"""Save a scaled model and get it back with its method, kappa and gates."""

from __future__ import annotations

import json
import logging
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from safetensors import safe_open
from safetensors.torch import load_model, save_model
from torch import Tensor, nn

from scalelong.scaling.registry import ScalingConfig
from scalelong.skips.attach import (
    CONFIG_KEY,
    Placement,
    apply,
    describe,
    find_skips,
    placement_of,
    remove,
    write_config,
)
from scalelong.skips.example import as_call
from scalelong.skips.hooks import ROOT_NAME, is_scaled, scaling_of

WEIGHTS_NAME = "model.safetensors"
SCALING_NAME = "scalelong.json"
HUB_OPTIONS = ("revision", "token", "cache_dir", "force_download", "local_files_only")

Model = TypeVar("Model", bound=nn.Module)


def save(model: nn.Module, folder: str | Path) -> Path:
    """Write the weights, gates among them, as safetensors and the scaling as JSON; each file appears whole or not at all."""
    scaling = scaling_of(model)
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as staged:
        save_model(model, str(Path(staged) / WEIGHTS_NAME))
        text = json.dumps(describe(scaling.config, scaling.num_skips, placement_of(model)), indent=2)
        (Path(staged) / SCALING_NAME).write_text(text + "\n")
        for name in (WEIGHTS_NAME, SCALING_NAME):
            (Path(staged) / name).replace(folder / name)
    return folder


def load(model: Model, folder: str | Path, example: Any = None) -> Model:
    """Load what `save` wrote into `model`, putting the saved scaling on it if it has none yet.

    example: as for `apply`, where the class of the model is not known.
    """
    folder = Path(folder)
    for name in (WEIGHTS_NAME, SCALING_NAME):
        if not (folder / name).is_file():
            raise FileNotFoundError(f"{folder / name}: not found; a folder written by scalelong.save holds it")
    stored = _read_scaling(json.loads((folder / SCALING_NAME).read_text()), str(folder / SCALING_NAME))
    with _scaled_as(model, stored, example):
        _check_fit(model, folder / WEIGHTS_NAME)
        load_model(model, str(folder / WEIGHTS_NAME))
    return model


def from_pretrained(cls: type[Model], folder: str | Path, **options: Any) -> Model:
    """`cls.from_pretrained(folder)` with the scaling that the diffusers model carried when `save_pretrained` wrote it.

    folder: on disk or on the hub; options: what `cls.from_pretrained` takes, revision and token of the hub among it.
    """
    hub = {name: options[name] for name in HUB_OPTIONS if name in options}
    source = _local_folder(folder, hub) / options.pop("subfolder", "")
    stored = json.loads((source / "config.json").read_text()).get(CONFIG_KEY)
    if stored is None:
        raise ValueError(
            f"{source / 'config.json'}: holds no {CONFIG_KEY!r}; it was saved without a scaling, "
            f"use {cls.__name__}.from_pretrained and scalelong.apply"
        )
    scaling = _read_scaling(stored, str(source / "config.json"))
    with _quiet_diffusers():
        model: Model = cls.from_pretrained(source, **options)  # type: ignore[attr-defined]
    write_config(model, None)  # some versions of diffusers keep unknown entries; `apply` writes its own
    gates = _read_gates(source, options.get("variant"))
    with _scaled_as(model, scaling):
        if missing := scaling_of(model).state_dict().keys() - gates.keys():
            raise ValueError(
                f"{source}: its safetensors hold no scalelong.{min(missing)} for {scaling.config}; write the folder by "
                "save_pretrained of the scaled model (EMAModel leaves the scaling out)"
            )
        scaling_of(model).load_state_dict(gates)
    return model


@dataclass(frozen=True)
class _Stored:
    """What was written beside weights."""

    config: ScalingConfig
    num_skips: int
    placement: Placement


def _read_scaling(stored: Any, where: str) -> _Stored:
    if not isinstance(stored, dict) or not {"method", "options", "num_skips"} <= stored.keys():
        raise ValueError(f"{where}: must hold method, options and num_skips, got {stored!r}")
    config = ScalingConfig.create(stored["method"], **stored["options"])
    return _Stored(config, int(stored["num_skips"]), stored.get("placement", "before"))


@contextmanager
def _scaled_as(model: nn.Module, stored: _Stored, example: Any = None) -> Iterator[None]:
    """The model carries this scaling inside and, unless an error leaves the block, afterwards."""
    found = _count_skips(model, example)
    if found != stored.num_skips:
        raise ValueError(
            f"num_skips: the saved scaling is of {stored.num_skips} skips, this {type(model).__name__} has {found}"
        )
    if is_scaled(model):
        if scaling_of(model).config != stored.config:
            raise ValueError(
                f"scaling: the model carries {scaling_of(model).config}, the saved one is {stored.config}; "
                "call scalelong.remove(model) first"
            )
        if placement_of(model) != stored.placement:
            raise ValueError(
                f"placement: the model is scaled with {placement_of(model)!r}, the saved one with {stored.placement!r}; "
                "call scalelong.remove(model) first"
            )
        yield
        return
    apply(model, stored.config.method, example=example, placement=stored.placement, **stored.config.options)
    try:
        yield
    except BaseException:
        remove(model)
        raise


def _count_skips(model: nn.Module, example: Any) -> int:
    if is_scaled(model):
        return scaling_of(model).num_skips
    args, kwargs = as_call(example) if example is not None else ((), {})
    return len(find_skips(model, *args, **kwargs))


def _check_fit(model: nn.Module, weights: Path) -> None:
    """Names and shapes, before anything is loaded; of weights that share their memory, one is stored for all."""
    with safe_open(str(weights), framework="pt") as tensors:
        given = {key: tuple(tensors.get_slice(key).get_shape()) for key in tensors.keys()}  # noqa: SIM118
    own = model.state_dict()
    stored = {_memory(own[key]) for key in given if key in own}
    trouble = [f"{key} is not in the model" for key in given if key not in own]
    trouble += [f"{key} is missing" for key, value in own.items() if key not in given and _memory(value) not in stored]
    trouble += [
        f"{key} has shape {shape}, in the model {tuple(own[key].shape)}"
        for key, shape in given.items()
        if key in own and tuple(own[key].shape) != shape
    ]
    if trouble:
        raise ValueError(
            f"{weights}: {len(trouble)} of the weights do not fit this {type(model).__name__}, so none is loaded: "
            f"{trouble[0]}; build the model as it was when it was saved"
        )


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _local_folder(folder: str | Path, hub: dict[str, Any]) -> Path:
    if Path(folder).is_dir():
        return Path(folder)
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(str(folder), allow_patterns=["*.json", "*.safetensors"], **hub))


def _read_gates(folder: Path, variant: str | None) -> dict[str, Tensor]:
    """From the files of one variant, whole or in parts, as diffusers names them."""
    gates: dict[str, Tensor] = {}
    dot, part = re.escape(f".{variant}" if variant else ""), r"(-\d+-of-\d+)?"
    name = re.compile(rf"diffusion_pytorch_model({part}{dot}|{dot}{part})\.safetensors")
    for file in sorted(file for file in folder.iterdir() if name.fullmatch(file.name)):
        with safe_open(str(file), framework="pt") as tensors:
            for key in tensors.keys():  # noqa: SIM118
                if key.startswith(f"{ROOT_NAME}."):
                    gates[key.removeprefix(f"{ROOT_NAME}.")] = tensors.get_tensor(key)
    return gates


@contextmanager
def _quiet_diffusers() -> Iterator[None]:
    """diffusers warns of the entries and weights it does not know; here they are read right after."""
    logger = logging.getLogger("diffusers")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
