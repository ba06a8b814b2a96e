"""Validate a configuration and build its model and objective."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn

from scalelong import skips
from scalelong.backbones import UViT, UViTConfig, ddpm_cifar10, iddpm_imagenet64, text_latent
from scalelong.data import Shape, Source, load_source
from scalelong.diffusion import Objective, get_process, resolve_sampling
from scalelong.errors import SettingError, require, require_memory
from scalelong.parametrization import parametrize
from scalelong.runs.settings import (
    Conditioning,
    DistillationSettings,
    FeatureSettings,
    ModelSettings,
    MupSettings,
    RunConfig,
    check_settings,
)
from scalelong.scaling.registry import METHODS, ScalingConfig
from scalelong.skips.feature_conditioning import Route
from scalelong.skips.feature_routes import measure_route
from scalelong.training.distillation import attach_head, check_distillation, middle_block

UNCONDITIONAL = Conditioning()
GROUPS = 32  # of the UNets' group norms


def check_config(config: RunConfig, world_size: int = 1, on_gpu: bool = False) -> RunConfig:
    """Return the configuration if its settings are consistent; else raise a ValueError that names the key.

    >>> check_config(RunConfig()).scaling.method
    'cs'
    """
    condition, optimizer, sampling, training = config.condition, config.optimizer, config.sampling, config.training
    check_settings(config)
    ScalingConfig.create(config.scaling.method, **config.scaling.options())
    method = config.scaling.method
    if METHODS[method].sampling_only:
        raise ValueError(f"scaling.method: {method!r} is for sampling from a trained model; train with another method")
    resolve_sampling(sampling, build_objective(config).process)
    if optimizer.name == "muon" and config.mup.base_width:
        raise ValueError(
            "optimizer.name: mup supports Adam's learning rates only, got 'muon'; use adamw, or no mup.base_width"
        )
    if optimizer.name == "muon" and not hasattr(torch.optim, "Muon"):
        raise ValueError(f"optimizer.name: muon needs torch 2.9 or newer, this is {torch.__version__}; use adamw")
    require(optimizer.lr > 0, "optimizer.lr", "positive", optimizer.lr)
    require(all(beta < 1 for beta in optimizer.betas), "optimizer.betas", "in [0, 1)", optimizer.betas)
    require(training.ema_decay < 1, "training.ema_decay", "in [0, 1)", training.ema_decay)
    require(condition.drop < 1, "condition.drop", "in [0, 1)", condition.drop)
    _check_shape(config)
    size, parts = training.batch_size, training.accumulate
    multiple = f"a multiple of {world_size * parts} ({world_size} ranks x {parts} micro-batches)"
    require(size % (world_size * parts) == 0, "training.batch_size", multiple, size)
    if parts > 1 and training.compile == "reduce-overhead":  # CUDA graphs overwrite accumulated gradients
        raise ValueError(f"training.compile: reduce-overhead does not allow training.accumulate = {parts}; use default")
    if training.compile == "step" and (name := _unsupported_by_fast(config, world_size)):
        raise ValueError(f"training.compile: step does not support {name}; use default")
    if training.shard == "full":
        _check_shard(config, world_size)
    check_distillation(config.distillation, size // (world_size * parts))
    if config.distillation.weight and training.compile == "reduce-overhead":  # CUDA graphs own the features of the tap
        raise ValueError("training.compile: reduce-overhead does not go with distillation.weight; use default")
    if training.precision == "fp16" and not on_gpu:
        raise ValueError("training.precision: fp16 needs a GPU; use fp32 (or bf16) on a CPU")
    if training.wandb_project and find_spec("wandb") is None:
        raise ImportError("training.wandb_project: wandb is not installed; pip install 'scalelong[wandb]'")
    if condition.kind == "text" and not condition.encoder:
        raise ValueError("condition.encoder: text needs one; use minilm, a hub name or a folder of transformers")
    if sampling.guidance != 1 and (condition.kind == "none" or condition.drop == 0):
        lacks = "no condition" if condition.kind == "none" else "condition.drop 0, so no null condition"
        raise ValueError(f"sampling.guidance: {sampling.guidance} with {lacks}; leave it at 1")
    if config.data.name.startswith("latents:") and sampling.clip:
        raise ValueError("sampling.clip: latents are not bound to [-1, 1]; set it to false (--sampling.no-clip)")
    return config


def resolve_compile(config: RunConfig, world_size: int, on_gpu: bool) -> str:
    """training.compile with auto resolved: step where it is supported (from torch 2.8 on), else default; off on a CPU.

    >>> from scalelong.runs.settings import TrainingSettings
    >>> resolve_compile(RunConfig(training=TrainingSettings(compile="auto")), world_size=2, on_gpu=True)
    'default'
    """
    mode = config.training.compile
    if mode == "auto":
        fast = torch.__version__ >= "2.8" and not _unsupported_by_fast(config, world_size)
        return "off" if not on_gpu else "step" if fast else "default"
    return mode if on_gpu or mode == "step" else "off"


def _unsupported_by_fast(config: RunConfig, world_size: int) -> str:
    """The first setting that the fast step does not support; empty if there is none."""
    training = config.training
    reasons = {
        f"optimizer.name = {config.optimizer.name}": config.optimizer.name != "adamw",
        f"training.accumulate = {training.accumulate}": training.accumulate > 1,
        "training.precision = fp16": training.precision == "fp16",
        "distillation.weight": config.distillation.weight > 0,
        f"{world_size} ranks": world_size > 1,
    }
    return next((name for name, holds in reasons.items() if holds), "")


def _check_shard(config: RunConfig, world_size: int) -> None:
    """Reject settings that are not supported with FSDP2."""
    training = config.training
    for wrong, reason in (
        (world_size == 1, "needs several ranks; start it with torchrun, or use none"),
        (
            find_spec("torch.distributed.fsdp._fully_shard") is None,
            f"needs torch 2.6, not {torch.__version__}; use none",
        ),
        (config.optimizer.name != "adamw", f"does not support optimizer.name = {config.optimizer.name}; use adamw"),
        (training.precision == "fp16", "does not support training.precision = fp16; use bf16"),
        (training.compile == "reduce-overhead", "does not support training.compile = reduce-overhead; use default"),
        (config.distillation.weight > 0, "does not support distillation.weight; set it to 0"),
    ):
        if wrong:
            raise ValueError(f"training.shard: full {reason}")


def _check_shape(config: RunConfig) -> None:
    """Check the requirements of the backbone that do not depend on the data."""
    model = config.model
    if model.backbone == "unet":
        require(len(model.channels) <= 8, "model.channels", "at most 8 levels", model.channels)
        groups = all(channels % GROUPS == 0 for channels in model.channels)
        require(groups, "model.channels", f"multiples of {GROUPS} (group norms have {GROUPS} groups)", model.channels)
    else:
        _uvit_config(model, (1, model.patch_size, model.patch_size), UNCONDITIONAL)


def _check_memory(config: RunConfig, shape: Shape, conditioning: Conditioning) -> None:
    """Reject models and batches that do not fit into memory."""
    model, training, (channels, height, width) = config.model, config.training, shape
    if model.backbone == "uvit":
        tokens = (height // model.patch_size) * (width // model.patch_size) + conditioning.text_tokens
        count = (12 * model.depth * model.dim + tokens + conditioning.label_rows) * model.dim
        name = f"model.dim: {model.dim} at model.depth {model.depth}, {tokens:,} tokens"
    else:
        squares = sum(each * each for each in model.channels)
        count = 36 * model.layers_per_block * squares + 4 * model.channels[0] * conditioning.label_rows
        name = f"model.channels: {model.channels}"
    require_memory(name, 4 * count, "the weights need")
    size = training.batch_size // training.accumulate
    require_memory(
        f"training.batch_size: {training.batch_size:,}", 4 * size * channels * height * width, "the images need"
    )


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed the CPU generator; restore all random states afterwards."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)  # torch.manual_seed would seed the other devices too
        yield


def build_source(config: RunConfig, split: str | None = None) -> Source:
    """The data of a run, or another split of it."""
    data = config.data
    split = data.split if split is None else split
    return load_source(data.name, image_size=data.image_size, split=split, root=data.root)


def build_objective(config: RunConfig) -> Objective:
    diffusion = config.diffusion
    return Objective(get_process(diffusion.process), diffusion.prediction, diffusion.min_snr_gamma)


def build_model(config: RunConfig, shape: Shape, conditioning: Conditioning = UNCONDITIONAL) -> nn.Module:
    """Build the scaled backbone for images of this shape, with deterministic weights.

    The backbone is built before the gates, so every method starts from the same weights. mup.base_width selects muP.
    """
    if shape[1] != shape[2]:
        raise ValueError(f"data.image_size: images must be square, got {shape[1]} x {shape[2]}; set data.image_size")
    if torch.get_default_device().type != "meta":
        _check_memory(config, shape, conditioning)
    with seeded(config.training.seed):
        model: nn.Module
        if config.model.backbone == "uvit":
            model = UViT(_uvit_config(config.model, shape, conditioning))
        else:
            model = _unet(config.model, shape, conditioning)
        skips.apply(model, config.scaling.method, placement=config.scaling.placement, **config.scaling.options())
        if config.features.conditioning:
            _condition_on_features(model, config.features)
        if config.distillation.weight:
            _add_head(model, config.distillation)
    if config.mup.base_width:
        narrow = replace(config, model=at_width(config.model, config.mup.base_width), mup=MupSettings())
        with torch.device("meta"):
            base = build_model(narrow, shape, conditioning)
        parametrize(model, base, same_width=True)
    return model


def at_width(settings: ModelSettings, width: int, key: str = "mup.base_width") -> ModelSettings:
    """The same network at another width; keeps the head size if the width allows it, else the number of heads."""
    if settings.backbone == "uvit":
        head = settings.dim // settings.heads
        heads = settings.heads if width % head else width // head
        require(width % heads == 0 and width % 2 == 0, key, f"even and a multiple of {heads} heads", width)
        return replace(settings, dim=width, heads=heads)
    first = settings.channels[0]
    whole = all(channels * width % first == 0 for channels in settings.channels)
    require(whole and width % 32 == 0, key, f"a multiple of 32 that scales channels {settings.channels} evenly", width)
    return replace(settings, channels=tuple(channels * width // first for channels in settings.channels))


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


def _uvit_config(settings: ModelSettings, shape: Shape, conditioning: Conditioning) -> UViTConfig:
    same = ("patch_size", "dim", "depth", "heads", "mlp_time_embed", "checkpointing")
    try:
        return UViTConfig(
            image_size=shape[1],
            in_channels=shape[0],
            num_classes=conditioning.label_rows,
            text_dim=conditioning.text_dim,
            text_tokens=conditioning.text_tokens,
            **{name: getattr(settings, name) for name in same},
        )
    except ValueError as error:
        raise SettingError(str(error).replace("uvit.", "model.", 1)) from None


def _unet(settings: ModelSettings, shape: Shape, conditioning: Conditioning) -> nn.Module:
    """The UNet of DDPM or IDDPM, or one with cross attention for text."""
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
