"""Validation of a run's settings against the registries, before anything is built."""

from __future__ import annotations

import math

from scalelong.backbones import UViTConfig
from scalelong.diffusion import SAMPLERS, Objective, get_process
from scalelong.runs.settings import (
    Conditioning,
    ConditionSettings,
    ModelSettings,
    OptimizerSettings,
    RunConfig,
    SamplingSettings,
    dotted,
)
from scalelong.scaling.registry import ScalingConfig


def check_config(config: RunConfig, world_size: int = 1, on_gpu: bool = False) -> RunConfig:
    """Return the configuration if its values are valid together; else raise a ValueError that names the key."""
    ScalingConfig.create(config.scaling.method, **config.scaling.options())
    if config.scaling.method == "freeu":
        raise ValueError("scaling.method: 'freeu' is for sampling from a trained model; train with another method")
    Objective(get_process(config.diffusion.process), config.diffusion.prediction)
    for key, least in _LEAST.items():
        value = dotted(config)[key]
        if value < least:
            raise ValueError(f"{key}: must be at least {least}, got {value}")
    _check_optimizer(config.optimizer)
    _check_condition(config.condition, config.sampling)
    if not 0 <= config.training.ema_decay < 1:
        raise ValueError(f"training.ema_decay: must be in [0, 1), got {config.training.ema_decay}")
    if config.data.name.startswith("latents:") and config.sampling.clip:
        raise ValueError("sampling.clip: latents are not bound to [-1, 1]; set it to false (--sampling.no-clip)")
    if config.sampling.sampler and config.sampling.sampler not in SAMPLERS:
        raise ValueError(f"sampling.sampler: unknown {config.sampling.sampler!r}; one of {', '.join(SAMPLERS)}")
    parts = world_size * config.training.accumulate
    if config.training.batch_size % parts:
        raise ValueError(
            f"training.batch_size: {config.training.batch_size} is not divisible by {world_size} ranks x "
            f"{config.training.accumulate} micro-batches; use a multiple of {parts}"
        )
    if config.training.accumulate > 1 and config.training.compile == "reduce-overhead":
        raise ValueError(
            "training.compile: reduce-overhead replays a step in place, over the gradients that training.accumulate = "
            f"{config.training.accumulate} adds up; use default"
        )
    if config.training.precision == "fp16" and not on_gpu:
        raise ValueError("training.precision: fp16 needs a GPU; use fp32 (or bf16) on a CPU")
    return config


def check_shape(config: RunConfig, shape: tuple[int, int, int], given: Conditioning | None = None) -> None:
    """Raise a ValueError if the model does not fit images of this shape."""
    channels, height, width = shape
    if height != width:
        raise ValueError(f"data.image_size: images must be square, got {height} x {width}; set data.image_size")
    if config.model.backbone == "uvit":
        uvit_config(config.model, channels, height, given)
    factor = 2 ** (len(config.model.channels) - 1)
    if config.model.backbone == "unet" and height % factor:
        raise ValueError(
            f"model.channels: {len(config.model.channels)} levels halve the image {len(config.model.channels) - 1} times, "
            f"but {height} is not divisible by {factor}; use fewer levels or another data.image_size"
        )


def uvit_config(model: ModelSettings, channels: int, image_size: int, given: Conditioning | None = None) -> UViTConfig:
    """The U-ViT for images of this size; errors name keys of `model`."""
    given = given or Conditioning()
    try:
        return UViTConfig(
            image_size=image_size,
            patch_size=model.patch_size,
            in_channels=channels,
            dim=model.dim,
            depth=model.depth,
            heads=model.heads,
            mlp_time_embed=model.mlp_time_embed,
            checkpointing=model.checkpointing,
            num_classes=given.label_rows,
            text_dim=given.text_dim,
            text_tokens=given.text_tokens,
        )
    except ValueError as error:
        raise ValueError(str(error).replace("uvit.", "model.", 1)) from None


def _check_optimizer(optimizer: OptimizerSettings) -> None:
    if not optimizer.lr > 0:
        raise ValueError(f"optimizer.lr: must be positive, got {optimizer.lr}")
    if not all(0 <= beta < 1 for beta in optimizer.betas):
        raise ValueError(f"optimizer.betas: must lie in [0, 1), got {optimizer.betas}")


def _check_condition(condition: ConditionSettings, sampling: SamplingSettings) -> None:
    if not 0 <= condition.drop < 1:
        raise ValueError(f"condition.drop: must be in [0, 1), got {condition.drop}")
    if condition.kind == "text" and not condition.encoder:
        raise ValueError("condition.encoder: text needs one; say minilm, a hub name or a folder of transformers")
    if sampling.guidance < 0 or not math.isfinite(sampling.guidance):
        raise ValueError(f"sampling.guidance: must be a number of at least 0, got {sampling.guidance}; 1 is none")
    low, high = sampling.guidance_interval
    if not 0 <= low < high:
        raise ValueError(f"sampling.guidance_interval: must be 0 <= low < high, got ({low}, {high})")
    if sampling.guidance != 1 and (condition.kind == "none" or condition.drop == 0):
        lacks = "no condition" if condition.kind == "none" else "condition.drop 0, so no null condition"
        raise ValueError(f"sampling.guidance: {sampling.guidance} with {lacks}; leave it at 1")


_LEAST = {
    "training.steps": 1,
    "training.batch_size": 1,
    "training.accumulate": 1,
    "training.log_every": 1,
    "training.checkpoint_every": 1,
    "training.keep": 2,
    "training.sample_every": 0,
    "training.max_nonfinite": 0,
    "training.seed": 0,
    "sampling.count": 1,
    "sampling.steps": 0,
    "optimizer.weight_decay": 0,
    "optimizer.warmup_steps": 0,
    "optimizer.clip_norm": 0,
    "data.workers": 0,
    "data.resident_mb": 0,
    "model.layers_per_block": 1,
    "condition.max_tokens": 1,
}
