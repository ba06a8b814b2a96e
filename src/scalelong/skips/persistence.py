"""Save and load a model with its scaling, gates, feature conditioning and muP."""

from __future__ import annotations

import hashlib
import json
import logging
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar

from safetensors import safe_open
from safetensors.torch import load_model, save_model
from torch import Tensor, nn

from scalelong.errors import CheckpointError
from scalelong.files import atomic_write, file_digest, naming_damage, read_json
from scalelong.skips.example import is_meta, restored_on_error, unchanged_on_error
from scalelong.skips.feature_conditioning import FEATURES_NAME
from scalelong.skips.hooks import CONFIG_KEY, DIFFUSERS, STORED_KEYS, root_name, write_config
from scalelong.skips.patches import plain_loading
from scalelong.skips.restore import HASHES, restore_as, stored_in, stored_of

WEIGHTS_NAME = "model.safetensors"
SCALING_NAME = "scalelong.json"
HUB_OPTIONS = ("revision", "token", "cache_dir", "force_download", "local_files_only")

Model = TypeVar("Model", bound=nn.Module)


def save(model: nn.Module, folder: str | Path) -> Path:
    """Write the weights, including gates, as safetensors; scaling, conditioning, muP and hashes as JSON; atomically.

    >>> from diffusers import UNet1DModel
    >>> from scalelong import apply
    >>> save(apply(UNet1DModel(), "ls").model, "scaled").name
    'scaled'
    """
    folder, stored = Path(folder), stored_of(model)
    with atomic_write(folder / SCALING_NAME) as scaling, atomic_write(folder / WEIGHTS_NAME) as weights:
        save_model(model, weights.name)
        hashes = {WEIGHTS_NAME: file_digest(Path(weights.name)), SCALING_NAME: _digest(stored)}
        scaling.write(json.dumps({**stored, HASHES: hashes}, indent=2).encode() + b"\n")
    return folder


def _digest(stored: Mapping[str, Any]) -> str:
    """sha256 of the content of scalelong.json without its hashes."""
    kept = {key: value for key, value in stored.items() if key != HASHES}
    return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()


@unchanged_on_error
def load(model: Model, folder: str | Path, example: Any = None) -> Model:
    """Load a folder written by `save` into `model`, applying scaling, conditioning and muP if missing.

    Files with a wrong hash are rejected. On error the model, including its weights, is unchanged.
    example: as for `apply`, for unknown classes.

    >>> from diffusers import UNet1DModel
    >>> from scalelong import apply
    >>> folder = save(apply(UNet1DModel(), "cs", kappa=0.6).model, "scaled")
    >>> print(load(UNet1DModel(), folder).scalelong.config)
    cs(kappa=0.6)
    """
    folder = Path(folder)
    if is_meta(model):
        raise ValueError(
            'model: it is on the meta device, which holds no weights; call model.to_empty(device="cpu") first'
        )
    for name in (WEIGHTS_NAME, SCALING_NAME):
        if not (folder / name).is_file():
            raise FileNotFoundError(f"{folder / name}: not found; folders written by scalelong.save contain it")
    stored, weights = read_json(folder, SCALING_NAME), folder / WEIGHTS_NAME
    _check_hashes(stored, folder)
    restore_as(model, stored, folder / SCALING_NAME, example)
    with naming_damage(weights):
        _check_fit(model, weights)
        with restored_on_error(model, model.state_dict().values()):
            load_model(model, str(weights))
    return model


def _check_hashes(stored: Any, folder: Path) -> None:
    hashes = stored.get(HASHES) if isinstance(stored, dict) else None
    if hashes is None:
        return  # written by an older version
    for name, found in ((SCALING_NAME, _digest(stored)), (WEIGHTS_NAME, file_digest(folder / WEIGHTS_NAME))):
        if not isinstance(hashes, dict) or hashes.get(name) != found:
            differs = f"has another sha256 than {SCALING_NAME} says"
            raise CheckpointError(f"{folder / name}: {differs}; it was damaged or changed, save or export it again")


def from_pretrained(cls: type[Model], folder: str | Path, example: Any = None, **options: Any) -> Model:
    """`cls.from_pretrained(folder)` for a scaled diffusers model, or a pipeline with one, saved with `save_pretrained`.

    After `import scalelong.diffusers`, `cls.from_pretrained` does the same; this function also takes an example, and raises
    if the folder has no scaling or lacks its gates.
    folder: local or on the hub; options: passed to `cls.from_pretrained`, such as subfolder, variant, revision and token;
    example: as for `apply`, for unknown classes.

    >>> from diffusers import UNet1DModel
    >>> from scalelong import apply
    >>> apply(UNet1DModel(), "cs", kappa=0.6).model.save_pretrained("unet")
    >>> print(from_pretrained(UNet1DModel, "unet").scalelong.config)
    cs(kappa=0.6)
    """
    import_module(DIFFUSERS)
    source = local_folder(folder, options)
    if (source / "model_index.json").is_file():
        return cls.from_pretrained(source, **options)  # type: ignore[attr-defined, no-any-return]
    path = source / "config.json"
    stored = stored_in(read_json(source, "config.json"))
    if not stored:
        remedy = f"use {cls.__name__}.from_pretrained and scalelong.apply"
        raise ValueError(f"{path}: contains no {CONFIG_KEY!r}; it was saved without a scaling, {remedy}")
    with quiet_diffusers(), plain_loading():
        model: Model = cls.from_pretrained(source, **options)  # type: ignore[attr-defined]
    for key in STORED_KEYS:
        write_config(model, None, key)  # some versions of diffusers keep unknown entries; `apply` writes its own
    restore_as(model, stored, path, example)
    for name in (root_name(model), FEATURES_NAME):
        module = model._modules.get(name)
        tensors = read_tensors(source, options.get("variant"), f"{name}.") if module is not None else {}
        if module is not None and (missing := module.state_dict().keys() - tensors.keys()):
            lacking = f"its safetensors contain no {name}.{min(missing)} for {getattr(module, 'config', name)}"
            raise ValueError(f"{source}: {lacking}; write the folder with save_pretrained of the scaled model")
        if module is not None:
            module.load_state_dict(tensors)
    return model


def local_folder(folder: str | Path, options: dict[str, Any]) -> Path:
    """The local folder, downloaded if necessary; pops subfolder from the options."""
    if not Path(folder).is_dir():
        from huggingface_hub import snapshot_download

        hub = {name: options[name] for name in HUB_OPTIONS if name in options}
        folder = snapshot_download(str(folder), allow_patterns=["*.json", "*.safetensors"], **hub)
    return Path(folder, options.pop("subfolder", ""))


@contextmanager
def quiet_diffusers() -> Iterator[None]:
    """Silence warnings of diffusers about unknown config entries and weights."""
    logger = logging.getLogger("diffusers")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def _check_fit(model: nn.Module, weights: Path) -> None:
    """Check names and shapes before loading; tensors that share memory are stored once."""
    with safe_open(str(weights), framework="pt") as tensors:
        given = {key: tuple(tensors.get_slice(key).get_shape()) for key in tensors.keys()}  # noqa: SIM118
    own = model.state_dict()
    memory = {key: tensor.untyped_storage().data_ptr() for key, tensor in own.items()}
    stored = {memory[key] for key in given if key in own}
    trouble = [f"{key} is not in the model" for key in given if key not in own]
    trouble += [f"{key} is missing" for key in own if key not in given and memory[key] not in stored]
    shapes = [(key, shape, tuple(own[key].shape)) for key, shape in given.items() if key in own]
    trouble += [f"{key} has shape {theirs}, in the model {ours}" for key, theirs, ours in shapes if theirs != ours]
    if trouble:
        count = f"{len(trouble)} of the weights do not fit this {type(model).__name__}"
        raise ValueError(f"{weights}: {count}: {trouble[0]}; build the model as it was when it was saved")


def read_tensors(folder: Path, variant: str | None, prefix: str) -> dict[str, Tensor]:
    """Read tensors whose names start with `prefix` (stripped) from diffusers' weight files of one variant."""
    gates: dict[str, Tensor] = {}
    dot, shard = re.escape(f".{variant}" if variant else ""), r"(-\d+-of-\d+)?"
    name = re.compile(rf"diffusion_pytorch_model({shard}{dot}|{dot}{shard})\.safetensors")
    for file in sorted(file for file in folder.iterdir() if name.fullmatch(file.name)):
        with naming_damage(file), safe_open(str(file), framework="pt") as tensors:
            for key in tensors.keys():  # noqa: SIM118
                if key.startswith(prefix):
                    gates[key.removeprefix(prefix)] = tensors.get_tensor(key)
    return gates
