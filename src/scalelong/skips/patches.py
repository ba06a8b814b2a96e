"""Patches that make diffusers and peft save, restore and check the scaling of a model.

`apply` and `import scalelong.diffusers` install the patches once. diffusers builds every model with `from_config`,
so patching it covers from_pretrained, pipelines and EMAModel.
"""

from __future__ import annotations

import inspect
import json
import logging
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache, wraps
from pathlib import Path
from typing import Any

from torch import nn

from scalelong.files import atomic_write, write_text
from scalelong.scaling.registry import ScalingConfig
from scalelong.skips.hooks import CONFIG_KEY, LORA_TAG, STORED_KEYS, is_scaled, root_name, scaling_of, stored_scaling
from scalelong.skips.restore import restore_as, stored_in

logger = logging.getLogger("scalelong")
_leave_plain = False  # True while `scalelong.from_pretrained` builds a model that it scales itself
_adapted: list[nn.Module] = []  # the models whose LoRA is being loaded


def install() -> None:
    """Patch the imported modules of diffusers and peft; idempotent."""
    if "diffusers.configuration_utils" in sys.modules:
        _patch_loading()
    if "diffusers.training_utils" in sys.modules:
        _patch_ema()
    if "diffusers.loaders.lora_base" in sys.modules and "diffusers.loaders.peft" in sys.modules:
        _patch_diffusers_lora()
    if "peft.peft_model" in sys.modules:
        _patch_peft()


@contextmanager
def plain_loading() -> Iterator[None]:
    """Context in which diffusers ignores the scaling in a config."""
    global _leave_plain
    before, _leave_plain = _leave_plain, True
    try:
        yield
    finally:
        _leave_plain = before


def _wrap(owner: Any, name: str, around: Callable[..., Any], kind: Any = None) -> None:
    """Replace a method by `around(method, ...)`; kind: classmethod or staticmethod."""
    old = owner.__dict__[name]
    method = old.__func__ if kind else old

    @wraps(method)
    def new(*args: Any, **kwargs: Any) -> Any:
        return around(method, *args, **kwargs)

    setattr(owner, name, kind(new) if kind else new)


@cache
def _patch_loading() -> None:
    from diffusers.configuration_utils import ConfigMixin

    def build(from_config: Any, cls: Any, config: Any = None, return_unused_kwargs: bool = False, **kwargs: Any) -> Any:
        if config is not None and not isinstance(config, dict):  # a path, as EMAModel gives it
            config, kwargs = cls.load_config(config, return_unused_kwargs=True, **kwargs)
        own = CONFIG_KEY in inspect.signature(cls.__init__).parameters  # a class that scales itself
        stored = stored_in(config) if config is not None and not own and not _leave_plain else {}
        if stored:
            config = {key: value for key, value in config.items() if key not in STORED_KEYS}
        built = from_config(cls, config, return_unused_kwargs, **kwargs)
        model = built[0] if return_unused_kwargs else built
        if stored and isinstance(model, nn.Module):
            restore_as(model, stored, "config.json", fresh=True)
        return built

    _wrap(ConfigMixin, "from_config", build, classmethod)


@cache
def _patch_ema() -> None:
    from diffusers.training_utils import EMAModel

    def checked(method: Any, self: Any, parameters: Any) -> Any:
        parameters = list(parameters.parameters() if isinstance(parameters, nn.Module) else parameters)
        if len(parameters) != len(self.shadow_params):
            numbers = f"it averages {len(self.shadow_params)} parameters, the model has {len(parameters)}"
            raise ValueError(f"EMAModel: {numbers}; build it after scalelong.apply, so that it sees the gates")
        return method(self, parameters)

    for name in ("step", "copy_to"):
        _wrap(EMAModel, name, checked)


@cache
def _patch_peft() -> None:
    from peft import PeftModel

    def save(save_pretrained: Any, self: Any, save_directory: Any, *args: Any, **kwargs: Any) -> Any:
        result = save_pretrained(self, save_directory, *args, **kwargs)
        base = self.get_base_model()
        if is_scaled(base) and kwargs.get("is_main_process", True):
            _warn_of_lost_gates(base)
            for path in Path(save_directory).rglob("adapter_config.json"):
                stored = {**json.loads(path.read_text()), CONFIG_KEY: stored_scaling(base)}
                write_text(path, json.dumps(stored, indent=2, sort_keys=True))
        return result

    def load(load_adapter: Any, self: Any, model_id: Any, *args: Any, **kwargs: Any) -> Any:
        path = Path(model_id) / (kwargs.get("subfolder") or "") / "adapter_config.json"
        if path.is_file():
            check_adapter(self.get_base_model(), json.loads(path.read_text()).get(CONFIG_KEY), str(path))
        return load_adapter(self, model_id, *args, **kwargs)

    _wrap(PeftModel, "save_pretrained", save)
    _wrap(PeftModel, "load_adapter", load)
    # peft does not know our entry, which is what reports it where these patches are not installed
    warnings.filterwarnings("ignore", message=rf"Unexpected keyword arguments \['{CONFIG_KEY}'\]")


@cache
def _patch_diffusers_lora() -> None:
    """Store the scaling in the adapter metadata; unpatched diffusers rejects the unknown entry by name."""
    from diffusers.loaders import lora_base, peft

    def save(save_lora_adapter: Any, self: Any, save_directory: Any, *args: Any, **kwargs: Any) -> Any:
        result = save_lora_adapter(self, save_directory, *args, **kwargs)
        if is_scaled(self):
            _warn_of_lost_gates(self)
            name = kwargs.get("weight_name") or lora_base.LORA_WEIGHT_NAME_SAFE
            _add_metadata(Path(save_directory) / name, stored_scaling(self))
        return result

    def write(write_lora_layers: Any, state_dict: Any, *args: Any, **kwargs: Any) -> Any:
        tagged = {key.split(".")[0]: getattr(tensor, LORA_TAG, None) for key, tensor in state_dict.items()}
        found = {f"{prefix}.{CONFIG_KEY}": tag for prefix, tag in tagged.items() if tag is not None}
        if found and kwargs.get("safe_serialization", True):
            kwargs["lora_adapter_metadata"] = {**(kwargs.get("lora_adapter_metadata") or {}), **found}
        return write_lora_layers(state_dict, *args, **kwargs)

    def load(load_lora_adapter: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        _adapted.append(self)
        try:
            return load_lora_adapter(self, *args, **kwargs)
        finally:
            _adapted.pop()

    create = peft._create_lora_config

    @wraps(create)
    def checked_config(state_dict: Any, network_alphas: Any, metadata: Any, *args: Any, **kwargs: Any) -> Any:
        if _adapted:
            check_adapter(_adapted[-1], (metadata or {}).get(CONFIG_KEY), "LoRA")
            metadata = {key: value for key, value in (metadata or {}).items() if key != CONFIG_KEY} or None
        return create(state_dict, network_alphas, metadata, *args, **kwargs)

    peft._create_lora_config = checked_config
    _wrap(peft.PeftAdapterMixin, "save_lora_adapter", save)
    _wrap(peft.PeftAdapterMixin, "load_lora_adapter", load)
    _wrap(lora_base.LoraBaseMixin, "write_lora_layers", write, staticmethod)


def _add_metadata(file: Path, stored: Mapping[str, Any]) -> None:
    """Add the scaling to the adapter metadata of a safetensors file."""
    from safetensors import safe_open
    from safetensors.torch import load_file, save_file

    with safe_open(str(file), framework="pt") as opened:
        metadata = opened.metadata() or {}
    adapter = {**json.loads(metadata.get("lora_adapter_metadata", "{}")), CONFIG_KEY: stored}
    tensors, texts = load_file(file), {**metadata, "lora_adapter_metadata": json.dumps(adapter, sort_keys=True)}
    with atomic_write(file) as new:
        save_file(tensors, new.name, texts)


def check_adapter(model: nn.Module, stored: Mapping[str, Any] | None, where: str) -> None:
    """Raise if an adapter was trained with a different scaling; warn if it was trained without one."""
    own = stored_scaling(model) if is_scaled(model) else None
    if stored is None and own is not None:
        logger.warning("%s: it was trained without a scaling, the model has %s", where, scaling_of(model).config)
    if stored is None or (own is not None and dict(stored) == own):
        return
    theirs = f"it was trained on a model with {_described(stored)} on {stored['num_skips']} skips"
    if own is None:
        config = ScalingConfig.from_json(stored)
        arguments = ", ".join(["model", f'"{config.method}"', *filter(None, [config.arguments]), *_where(stored)])
        raise ValueError(
            f"{where}: {theirs}, this {type(model).__name__} has none; call scalelong.apply({arguments}) first"
        )
    raise ValueError(f"{where}: {theirs}, this one has {_described(own)}; apply the scaling it was trained with")


def _described(stored: Mapping[str, Any]) -> str:
    return ", ".join([str(ScalingConfig.from_json(stored)), *_where(stored)])


def _where(stored: Mapping[str, Any]) -> list[str]:
    """The arguments of `apply` that say where a stored scaling acts."""
    return [f"{key}={stored[key]!r}" for key in ("placement", "skips") if key in stored]


def _warn_of_lost_gates(model: nn.Module) -> None:
    """Warn if gates are trained but not listed in modules_to_save."""
    name, trained = root_name(model), any(p.requires_grad for p in scaling_of(model).parameters())
    if trained and not hasattr(getattr(model, name), "modules_to_save"):
        lost = "the gates are trained, but an adapter's file does not contain them"
        logger.warning('%s; pass modules_to_save=["%s"] to LoraConfig, or scalelong.save the model', lost, name)
