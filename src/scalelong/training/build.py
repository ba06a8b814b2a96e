"""From a configuration to what it names: validate it, then build the model and the objective."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from scalelong import skips
from scalelong.backbones import UViT, UViTConfig, ddpm_cifar10, iddpm_imagenet64, text_latent
from scalelong.data import Shape, Source, load_source, to_uint8
from scalelong.data.latents import decoder
from scalelong.diffusion import Objective, get_process, resolve_sampling
from scalelong.runs.settings import Conditioning, ModelSettings, RunConfig, dotted
from scalelong.scaling.registry import ScalingConfig

ToPixels = Callable[[Tensor], Tensor]  # samples, float (B, C, H, W), -> uint8 images

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
    "optimizer.weight_decay": 0,
    "optimizer.warmup_steps": 0,
    "optimizer.clip_norm": 0,
    "data.workers": 0,
    "data.resident_mb": 0,
    "model.layers_per_block": 1,
    "condition.max_tokens": 1,
}


def check_config(config: RunConfig, world_size: int = 1, on_gpu: bool = False) -> RunConfig:
    """Return the configuration if its values are valid together; else raise a ValueError that names the key.

    >>> check_config(RunConfig()).scaling.method
    'cs'
    """
    ScalingConfig.create(config.scaling.method, **config.scaling.options())
    if config.scaling.method == "freeu":
        raise ValueError("scaling.method: 'freeu' is for sampling from a trained model; train with another method")
    resolve_sampling(config.sampling, build_objective(config).process)
    values = dotted(config)
    for key, least in _LEAST.items():
        if values[key] < least:
            raise ValueError(f"{key}: must be at least {least}, got {values[key]}")
    if not config.optimizer.lr > 0:
        raise ValueError(f"optimizer.lr: must be positive, got {config.optimizer.lr}")
    if not all(0 <= beta < 1 for beta in config.optimizer.betas):
        raise ValueError(f"optimizer.betas: must lie in [0, 1), got {config.optimizer.betas}")
    if not 0 <= config.training.ema_decay < 1:
        raise ValueError(f"training.ema_decay: must be in [0, 1), got {config.training.ema_decay}")
    _check_condition(config)
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


def _check_condition(config: RunConfig) -> None:
    condition, sampling = config.condition, config.sampling
    if not 0 <= condition.drop < 1:
        raise ValueError(f"condition.drop: must be in [0, 1), got {condition.drop}")
    if condition.kind == "text" and not condition.encoder:
        raise ValueError("condition.encoder: text needs one; use minilm, a hub name or a folder of transformers")
    if sampling.guidance != 1 and (condition.kind == "none" or condition.drop == 0):
        lacks = "no condition" if condition.kind == "none" else "condition.drop 0, so no null condition"
        raise ValueError(f"sampling.guidance: {sampling.guidance} with {lacks}; leave it at 1")
    if config.data.name.startswith("latents:") and sampling.clip:
        raise ValueError("sampling.clip: latents are not bound to [-1, 1]; set it to false (--sampling.no-clip)")


def check_shape(config: RunConfig, shape: tuple[int, int, int], conditioning: Conditioning | None = None) -> None:
    """Raise a ValueError if the model does not fit images of this shape."""
    channels, height, width = shape
    if height != width:
        raise ValueError(f"data.image_size: images must be square, got {height} x {width}; set data.image_size")
    if config.model.backbone == "uvit":
        uvit_config(config.model, channels, height, conditioning)
    factor = 2 ** (len(config.model.channels) - 1)
    if config.model.backbone == "unet" and height % factor:
        raise ValueError(
            f"model.channels: {len(config.model.channels)} levels halve the image {len(config.model.channels) - 1} times, "
            f"but {height} is not divisible by {factor}; use fewer levels or another data.image_size"
        )


def uvit_config(
    model: ModelSettings, channels: int, image_size: int, conditioning: Conditioning | None = None
) -> UViTConfig:
    """The U-ViT for images of this size; errors name keys of `model`."""
    conditioning = conditioning or Conditioning()
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
            num_classes=conditioning.label_rows,
            text_dim=conditioning.text_dim,
            text_tokens=conditioning.text_tokens,
        )
    except ValueError as error:
        raise ValueError(str(error).replace("uvit.", "model.", 1)) from None


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """CPU random numbers inside are a function of the seed; every random state is restored afterwards."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)  # torch.manual_seed would seed the other devices too
        yield


def build_pixels(config: RunConfig, device: torch.device, data: str = "") -> ToPixels:
    """The function from samples to uint8 images; every sample of a run passes through it.

    data: fingerprint of the training data; latents that were encoded anew since are refused.
    """
    autoencoder = decoder(config.data.name, device, data)
    if autoencoder is None:
        return to_uint8
    return lambda latents: to_uint8(autoencoder.decode(latents))


def build_source(config: RunConfig) -> Source:
    """The data of a run."""
    data = config.data
    return load_source(data.name, image_size=data.image_size, split=data.split, root=data.root)


def build_objective(config: RunConfig) -> Objective:
    """The process and what is predicted in it."""
    return Objective(get_process(config.diffusion.process), config.diffusion.prediction)


def build_model(config: RunConfig, shape: Shape, conditioning: Conditioning | None = None) -> nn.Module:
    """The scaled backbone for images of this shape, with weights that are a function of the seed.

    The backbone is built before the gates, so every method starts from the same weights.
    """
    conditioning = conditioning or Conditioning()
    check_shape(config, shape, conditioning)
    with seeded(config.training.seed):
        if config.model.backbone == "uvit":
            model: nn.Module = UViT(uvit_config(config.model, shape[0], shape[1], conditioning))
        else:
            model = _unet(config.model, shape, conditioning)
        skips.apply(model, config.scaling.method, placement=config.scaling.placement, **config.scaling.options())
    return model


def _unet(settings: ModelSettings, shape: Shape, conditioning: Conditioning) -> nn.Module:
    """The UNet of DDPM or IDDPM, whose class embedding is added to the time; for text, one with cross attention."""
    count = len(settings.channels)
    common: dict[str, Any] = {
        "sample_size": shape[1],
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
