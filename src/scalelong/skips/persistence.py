"""Save a scaled model and load it with its method, kappa and gates."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, TypeVar

from safetensors import safe_open
from safetensors.torch import load_model, save_model
from torch import Tensor, nn

from scalelong.errors import did_you_mean
from scalelong.files import atomic_write, write_text
from scalelong.scaling.registry import ScalingConfig
from scalelong.skips.attach import apply, find_skips, remove, to_json
from scalelong.skips.families import known_skips
from scalelong.skips.feature_conditioning import (
    FEATURES_KEY,
    FEATURES_NAME,
    FeatureConditioning,
    Route,
    attach_features,
    conditioning_of,
    is_conditioned,
)
from scalelong.skips.feature_conditioning import to_json as features_to_json
from scalelong.skips.hooks import CONFIG_KEY, is_scaled, root_name, scaling_of, write_config

WEIGHTS_NAME = "model.safetensors"
SCALING_NAME = "scalelong.json"
HUB_OPTIONS = ("revision", "token", "cache_dir", "force_download", "local_files_only")

Model = TypeVar("Model", bound=nn.Module)


def save(model: nn.Module, folder: str | Path) -> Path:
    """Write the weights, including gates, as safetensors, and the scaling and the conditioning on features as JSON; each file
    appears complete or not at all.

    >>> from diffusers import UNet1DModel
    >>> save(apply(UNet1DModel(), "ls").model, "scaled").name
    'scaled'
    """
    conditioned, folder = is_conditioned(model), Path(folder)
    stored = to_json(model) if is_scaled(model) or not conditioned else {}
    if conditioned:
        stored[FEATURES_KEY] = features_to_json(conditioning_of(model))
    with atomic_write(folder / WEIGHTS_NAME) as file:
        save_model(model, file.name)
    write_text(folder / SCALING_NAME, json.dumps(stored, indent=2) + "\n")
    return folder


def load(model: Model, folder: str | Path, example: Any = None) -> Model:
    """Load a folder written by `save` into `model`, applying what was saved (scaling, conditioning) if the model has none.

    example: as for `apply`, for classes that are not known.

    >>> from diffusers import UNet1DModel
    >>> folder = save(apply(UNet1DModel(), "cs", kappa=0.6).model, "scaled")
    >>> print(load(UNet1DModel(), folder).scalelong.config)
    cs(kappa=0.6)
    """
    folder = Path(folder)
    for name in (WEIGHTS_NAME, SCALING_NAME):
        if not (folder / name).is_file():
            raise FileNotFoundError(f"{folder / name}: not found; folders written by scalelong.save contain it")
    stored = json.loads((folder / SCALING_NAME).read_text())
    with _restored_as(model, stored, folder / SCALING_NAME, example):
        _check_fit(model, folder / WEIGHTS_NAME)
        load_model(model, str(folder / WEIGHTS_NAME))
    return model


def from_pretrained(cls: type[Model], folder: str | Path, example: Any = None, **options: Any) -> Model:
    """`cls.from_pretrained(folder)` for a scaled diffusers model that was saved with `save_pretrained`.

    folder: on disk or on the hub; options: those of `cls.from_pretrained`, such as subfolder, variant, revision and token;
    example: as for `apply`, for classes that are not known.

    >>> from diffusers import UNet1DModel
    >>> apply(UNet1DModel(), "cs", kappa=0.6).model.save_pretrained("unet")
    >>> print(from_pretrained(UNet1DModel, "unet").scalelong.config)
    cs(kappa=0.6)
    """
    if not Path(folder).is_dir():
        from huggingface_hub import snapshot_download

        hub = {name: options[name] for name in HUB_OPTIONS if name in options}
        folder = snapshot_download(str(folder), allow_patterns=["*.json", "*.safetensors"], **hub)
    source = Path(folder) / options.pop("subfolder", "")
    path = source / "config.json"
    config = json.loads(path.read_text())
    stored = {**(config.get(CONFIG_KEY) or {})}
    if config.get(FEATURES_KEY) is not None:
        stored[FEATURES_KEY] = config[FEATURES_KEY]
    if not stored:
        remedy = f"use {cls.__name__}.from_pretrained and scalelong.apply"
        raise ValueError(f"{path}: contains no {CONFIG_KEY!r}; it was saved without a scaling, {remedy}")
    logger = logging.getLogger("diffusers")
    level = logger.level
    logger.setLevel(logging.ERROR)  # it would warn about entries and weights it does not know, which are read below
    try:
        model: Model = cls.from_pretrained(source, **options)  # type: ignore[attr-defined]
    finally:
        logger.setLevel(level)
    for key in (CONFIG_KEY, FEATURES_KEY):
        write_config(model, None, key)  # some versions of diffusers keep unknown entries; `apply` writes its own
    with _restored_as(model, stored, path, example):
        added = {
            name: model.get_submodule(name) for name in (root_name(model), FEATURES_NAME) if name in model._modules
        }
        for name, module in added.items():
            tensors = _read_gates(source, options.get("variant"), f"{name}.")
            if missing := module.state_dict().keys() - tensors.keys():
                lacking = f"its safetensors contain no {name}.{min(missing)} for {getattr(module, 'config', name)}"
                raise ValueError(f"{source}: {lacking}; write the folder with save_pretrained of the scaled model")
            module.load_state_dict(tensors)
    return model


@contextmanager
def _restored_as(model: nn.Module, stored: Any, where: Path, example: Any = None) -> Iterator[None]:
    """Apply the stored scaling and conditioning where the model has none; undo that if an error leaves the block."""
    with ExitStack() as undo:
        features = stored.get(FEATURES_KEY) if isinstance(stored, Mapping) else None
        if features is not None:
            undo.enter_context(_conditioned_as(model, features, where))
        elif is_conditioned(model):
            raise ValueError(f"{where}: was saved without conditioning; call scalelong.remove(model, 'features') first")
        if features is None or stored.keys() - {FEATURES_KEY}:
            undo.enter_context(_scaled_as(model, stored, where, example))
        yield


@contextmanager
def _conditioned_as(model: nn.Module, stored: dict[str, Any], where: Path) -> Iterator[None]:
    try:
        route = Route.from_json(stored)
    except (TypeError, KeyError) as error:
        raise ValueError(f"{where}: {FEATURES_KEY} is damaged ({error}); save the model again") from None
    if is_conditioned(model):
        if conditioning_of(model).route != route:
            both = f"the model has {conditioning_of(model).route}, the saved one is {route}"
            raise ValueError(f"{FEATURES_KEY}: {both}; call scalelong.remove(model, 'features') first")
        yield
        return
    modules = dict(model.named_modules())
    for name in (route.tap, *route.targets):
        if name not in modules:
            raise ValueError(
                f"{where}: the model has no module {name!r}; {did_you_mean(name, modules)}build it as it was"
            )
    attach_features(model, FeatureConditioning(route))
    try:
        yield
    except BaseException:
        remove(model, "features")
        raise


@contextmanager
def _scaled_as(model: nn.Module, stored: Mapping[str, Any], where: Path, example: Any = None) -> Iterator[None]:
    """Apply the stored scaling if the model has none; remove it again if an error leaves the block."""
    if not isinstance(stored, Mapping) or not {"method", "options", "num_skips"} <= stored.keys():
        raise ValueError(f"{where}: must contain method, options and num_skips, got {stored!r}")
    config, placement = ScalingConfig.from_json(stored), stored.get("placement", "before")
    if example is None and not is_scaled(model) and known_skips(model) is None:
        unknown = (
            f"model: the skips of this {type(model).__name__} are not known, and there is no example to trace it with"
        )
        raise ValueError(f"{unknown}; pass one as for apply: scalelong.load(..., example=(x, t))")
    found = scaling_of(model).num_skips if is_scaled(model) else len(find_skips(model, example=example))
    if found != stored["num_skips"]:
        own = f"this {type(model).__name__} has {found}"
        raise ValueError(f"num_skips: the saved scaling has {stored['num_skips']} skips, {own}")
    if is_scaled(model):
        placed = to_json(model).get("placement", "before")
        for key, here, saved in (("scaling", scaling_of(model).config, config), ("placement", placed, placement)):
            if here != saved:
                both = f"the model has {here}, the saved one is {saved}"
                raise ValueError(f"{key}: {both}; call scalelong.remove(model) first")
        yield
        return
    apply(model, config.method, example=example, placement=placement, **config.options)
    try:
        yield
    except BaseException:
        remove(model, "scaling")
        raise


def _check_fit(model: nn.Module, weights: Path) -> None:
    """Check names and shapes before anything is loaded; of tensors that share memory, one is stored for all."""
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


def _read_gates(folder: Path, variant: str | None, prefix: str) -> dict[str, Tensor]:
    """Read the tensors of the scaling from the files of one variant, sharded or not, as diffusers names them."""
    gates: dict[str, Tensor] = {}
    dot, shard = re.escape(f".{variant}" if variant else ""), r"(-\d+-of-\d+)?"
    name = re.compile(rf"diffusion_pytorch_model({shard}{dot}|{dot}{shard})\.safetensors")
    for file in sorted(file for file in folder.iterdir() if name.fullmatch(file.name)):
        with safe_open(str(file), framework="pt") as tensors:
            for key in tensors.keys():  # noqa: SIM118
                if key.startswith(prefix):
                    gates[key.removeprefix(prefix)] = tensors.get_tensor(key)
    return gates
