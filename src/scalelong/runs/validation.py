"""Type and bound checks of all settings. No torch."""

from __future__ import annotations

import math
import typing
from collections.abc import Mapping
from types import UnionType
from typing import Any, Literal

from scalelong.errors import require, require_number, unknown_name

_COUNT = 10**12  # of steps
_FACTOR = 1e6
MAX_CLASSES = 100_000  # of labels and class names

# Bounds of numbers; others must be finite. Methods and samplers add their own checks.
BOUNDS: Mapping[str, tuple[float, float]] = {
    "data.image_size": (1, 8192),
    "data.workers": (0, 1024),
    "data.worker_timeout": (1, 1e7),
    "data.resident_mb": (0, 2**24),
    "model.patch_size": (1, 1024),
    "model.dim": (1, 2**16),
    "model.depth": (1, 1000),
    "model.heads": (1, 4096),
    "model.channels": (1, 2**14),
    "model.layers_per_block": (1, 64),
    "mup.base_width": (0, 2**16),
    "scaling.anneal_steps": (0, _COUNT),
    "scaling.count": (0, 1000),
    **{f"scaling.{key}": (-_FACTOR, _FACTOR) for key in ("kappa", "reduction", "start", "t", "eps", "tau")},
    "distillation.weight": (0, _FACTOR),
    "distillation.temperature": (1e-6, _FACTOR),
    "distillation.t_range": (0, 1),
    "distillation.dim": (1, 2**16),
    "diffusion.min_snr_gamma": (0, _FACTOR),
    "condition.drop": (0, 1),
    "condition.max_tokens": (1, 2**16),
    "optimizer.lr": (0, 1e30),
    "optimizer.weight_decay": (0, 1e30),
    "optimizer.betas": (0, 1),
    "optimizer.warmup_steps": (0, _COUNT),
    "optimizer.clip_norm": (0, 1e30),
    "training.steps": (1, _COUNT),
    "training.batch_size": (1, 10**7),
    "training.accumulate": (1, 10**6),
    "training.ema_decay": (0, 1),
    "training.seed": (0, 2**62),
    "training.log_every": (1, _COUNT),
    "training.checkpoint_every": (1, _COUNT),
    "training.keep": (2, 10**6),
    "training.sample_every": (0, _COUNT),
    "training.max_nonfinite": (0, _COUNT),
    "training.spike_factor": (1, 1e30),
    "training.rank_timeout": (1, 1e7),
    "sampling.steps": (0, 10**6),
    "sampling.count": (1, 10**9),
    "sampling.guidance": (0, _FACTOR),
    "sampling.skip_tuning": (0, 2),
    "sampling.guidance_interval": (0, math.inf),
    "sampling.batch_size": (1, 10**6),
    "conditioning.num_classes": (0, MAX_CLASSES),
    "conditioning.text_tokens": (0, 2**16),
    "conditioning.text_dim": (0, 2**16),
    "autoencoder.widths": (8, 2**13),
    "autoencoder.latent_channels": (1, 1024),
    "autoencoder.layers": (1, 64),
    "autoencoder.steps": (1, _COUNT),
    "autoencoder.batch_size": (1, 10**6),
    "autoencoder.lr": (1e-30, 1e30),
    "autoencoder.kl": (0, _FACTOR),
    "autoencoder.seed": (0, 2**62),
    "autoencoder.log_every": (1, _COUNT),
}


def check_values(part: str, settings: Any) -> None:
    """Raise a SettingError that names the first setting of this dataclass with a bad value.

    >>> from scalelong.runs.settings import OptimizerSettings
    >>> check_values("optimizer", OptimizerSettings(lr=float("inf")))
    Traceback (most recent call last):
    scalelong.errors.SettingError: optimizer.lr: must be a finite number, got inf
    """
    for name, hint in typing.get_type_hints(type(settings)).items():
        _check_value(f"{part}.{name}", getattr(settings, name), hint)


def _check_value(key: str, value: Any, hint: Any) -> None:
    if isinstance(hint, UnionType):  # X | None
        if value is None:
            return
        (hint,) = (kind for kind in hint.__args__ if kind is not type(None))
    kinds, origin = typing.get_args(hint), typing.get_origin(hint)
    if origin is Literal:
        if value not in kinds:
            raise unknown_name(key, value, kinds)
    elif origin is tuple:
        many = kinds[-1] is Ellipsis
        count = "1 to 100,000" if many else str(len(kinds))
        listed = isinstance(value, tuple) and (0 < len(value) <= MAX_CLASSES if many else len(value) == len(kinds))
        if kinds[0] is str and value == ():
            return  # no names
        require(listed, key, f"{count} values", value)
        for each in value:
            _check_value(key, each, kinds[0])
    elif hint in (int, float):
        require_number(key, value, *BOUNDS.get(key, (-1e30, 1e30)), whole=hint is int)
    elif hint in (bool, str):
        require(isinstance(value, hint), key, {bool: "true or false", str: "text"}[hint], value)
        require(value is True or value is False or "\0" not in value, key, "text without a NUL character", value)
