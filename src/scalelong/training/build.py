"""From a configuration to what it names: validate it, then build the model and the objective."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from scalelong import skips
from scalelong.backbones import UViT, UViTConfig, ddpm_cifar10, iddpm_imagenet64, text_latent
from scalelong.data import Shape, Source, load_source
from scalelong.diffusion import Objective, get_process, resolve_sampling
from scalelong.errors import require
from scalelong.runs.settings import (
    Conditioning,
    DistillationSettings,
    FeatureSettings,
    ModelSettings,
    RunConfig,
    dotted,
)
from scalelong.scaling.registry import ScalingConfig
from scalelong.skips.feature_conditioning import Route
from scalelong.skips.feature_routes import measure_route
from scalelong.training.distillation import attach_head, check_settings, middle_block

UNCONDITIONAL = Conditioning()
_LEAST = {  # other numbers of these parts must be at least 0
    "training.steps": 1,
    "training.batch_size": 1,
    "training.accumulate": 1,
    "training.log_every": 1,
    "training.checkpoint_every": 1,
    "training.keep": 2,
    "model.layers_per_block": 1,
    "condition.max_tokens": 1,
}


def check_config(config: RunConfig, world_size: int = 1, on_gpu: bool = False) -> RunConfig:
    """Return the configuration if its values are valid together; else raise a ValueError that names the key.

    >>> check_config(RunConfig()).scaling.method
    'cs'
    """
    condition, optimizer, sampling, training = config.condition, config.optimizer, config.sampling, config.training
    ScalingConfig.create(config.scaling.method, **config.scaling.options())
    if config.scaling.method == "freeu":
        raise ValueError("scaling.method: 'freeu' is for sampling from a trained model; train with another method")
    resolve_sampling(sampling, build_objective(config).process)
    for key, value in dotted(config).items():
        if isinstance(value, int | float) and not key.startswith(("scaling.", "sampling.")):
            require(value >= _LEAST.get(key, 0), key, f"at least {_LEAST.get(key, 0)}", value)
    require(optimizer.lr > 0, "optimizer.lr", "positive", optimizer.lr)
    require(all(0 <= beta < 1 for beta in optimizer.betas), "optimizer.betas", "in [0, 1)", optimizer.betas)
    require(0 <= training.ema_decay < 1, "training.ema_decay", "in [0, 1)", training.ema_decay)
    require(0 <= condition.drop < 1, "condition.drop", "in [0, 1)", condition.drop)
    size, parts = training.batch_size, training.accumulate
    multiple = f"a multiple of {world_size * parts} ({world_size} ranks x {parts} micro-batches)"
    require(size % (world_size * parts) == 0, "training.batch_size", multiple, size)
    if parts > 1 and training.compile == "reduce-overhead":  # it replays a step over its own gradients
        raise ValueError(f"training.compile: reduce-overhead does not allow training.accumulate = {parts}; use default")
    check_settings(config.distillation, size // (world_size * parts))
    if config.distillation.weight and training.compile != "off":
        raise ValueError("training.compile: is not supported with distillation.weight; set one of them to off or 0")
    if training.precision == "fp16" and not on_gpu:
        raise ValueError("training.precision: fp16 needs a GPU; use fp32 (or bf16) on a CPU")
    if condition.kind == "text" and not condition.encoder:
        raise ValueError("condition.encoder: text needs one; use minilm, a hub name or a folder of transformers")
    if sampling.guidance != 1 and (condition.kind == "none" or condition.drop == 0):
        lacks = "no condition" if condition.kind == "none" else "condition.drop 0, so no null condition"
        raise ValueError(f"sampling.guidance: {sampling.guidance} with {lacks}; leave it at 1")
    if config.data.name.startswith("latents:") and sampling.clip:
        raise ValueError("sampling.clip: latents are not bound to [-1, 1]; set it to false (--sampling.no-clip)")
    return config


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """CPU random numbers inside are a function of the seed; every random state is restored afterwards."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)  # torch.manual_seed would seed the other devices too
        yield


def build_source(config: RunConfig) -> Source:
    data = config.data
    return load_source(data.name, image_size=data.image_size, split=data.split, root=data.root)


def build_objective(config: RunConfig) -> Objective:
    return Objective(get_process(config.diffusion.process), config.diffusion.prediction)


def build_model(config: RunConfig, shape: Shape, conditioning: Conditioning = UNCONDITIONAL) -> nn.Module:
    """The scaled backbone for images of this shape, with weights that are a function of the seed.

    The backbone is built before the gates, so every method starts from the same weights.
    """
    if shape[1] != shape[2]:
        raise ValueError(f"data.image_size: images must be square, got {shape[1]} x {shape[2]}; set data.image_size")
    build = _uvit if config.model.backbone == "uvit" else _unet
    with seeded(config.training.seed):
        model = build(config.model, shape, conditioning)
        skips.apply(model, config.scaling.method, placement=config.scaling.placement, **config.scaling.options())
        if config.features.conditioning:
            _condition_on_features(model, config.features)
        if config.distillation.weight:
            _add_head(model, config.distillation)
    return model


def _condition_on_features(model: nn.Module, settings: FeatureSettings) -> None:
    try:
        skips.condition_on_features(model, settings.tap or None, pool=settings.pool, detach=settings.detach)
    except ValueError as error:
        raise ValueError(f"features.{error}") from None


def _add_head(model: nn.Module, settings: DistillationSettings) -> None:
    tap = settings.tap or middle_block(model)
    try:
        width = measure_route(model, Route(tap, ()), [tap], chosen=True).widths[0]
    except ValueError as error:
        raise ValueError(f"distillation.{error}") from None
    attach_head(model, replace(settings, tap=tap), width)


def _uvit(settings: ModelSettings, shape: Shape, conditioning: Conditioning) -> nn.Module:
    same = ("patch_size", "dim", "depth", "heads", "mlp_time_embed", "checkpointing")
    try:
        config = UViTConfig(
            image_size=shape[1],
            in_channels=shape[0],
            num_classes=conditioning.label_rows,
            text_dim=conditioning.text_dim,
            text_tokens=conditioning.text_tokens,
            **{name: getattr(settings, name) for name in same},
        )
    except ValueError as error:
        raise ValueError(str(error).replace("uvit.", "model.", 1)) from None
    return UViT(config)


def _unet(settings: ModelSettings, shape: Shape, conditioning: Conditioning) -> nn.Module:
    """The UNet of DDPM or IDDPM, whose class embedding is added to the time; for text, one with cross attention."""
    count, size = len(settings.channels), shape[1]
    if size % 2 ** (count - 1):
        halved = f"{count} levels halve the image {count - 1} times, but {size} is not divisible by {2 ** (count - 1)}"
        raise ValueError(f"model.channels: {halved}; use fewer levels or another data.image_size")
    common: dict[str, Any] = {
        "sample_size": size,
        "in_channels": shape[0],
        "out_channels": shape[0],
        "block_out_channels": settings.channels,
        "layers_per_block": settings.layers_per_block,
    }
    model: Any
    if conditioning.text_dim:
        model = text_latent(
            **common,
            down_block_types=("CrossAttnDownBlock2D",) * count,
            up_block_types=("CrossAttnUpBlock2D",) * count,
            attention_head_dim=max(1, settings.channels[0] // 32),  # 32 channels per head at the first level
            cross_attention_dim=conditioning.text_dim,
        )
    else:
        with_attention = {1} if settings.style == "ddpm" else {count - 2, count - 1}
        attention = ["Attn" if level in with_attention else "" for level in range(count)]
        model = (ddpm_cifar10 if settings.style == "ddpm" else iddpm_imagenet64)(
            **common,
            down_block_types=tuple(f"{kind}DownBlock2D" for kind in attention),
            up_block_types=tuple(f"{kind}UpBlock2D" for kind in reversed(attention)),
            num_class_embeds=conditioning.label_rows or None,
        )
    if settings.checkpointing:
        model.enable_gradient_checkpointing()
    return model  # type: ignore[no-any-return]
