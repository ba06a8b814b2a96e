"""The UNets of the paper's Table 1 as diffusers configs, and a uniform call for any model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn


def ddpm_cifar10(**changes: Any) -> nn.Module:
    """The CIFAR-10 network of DDPM, 35.7M parameters: 32x32, attention at 16x16.

    >>> model = ddpm_cifar10(block_out_channels=(32, 32, 32, 32))  # replaces this field of the configuration
    """
    settings = {
        "sample_size": 32,
        "block_out_channels": (128, 256, 256, 256),
        "down_block_types": ("DownBlock2D", "AttnDownBlock2D", "DownBlock2D", "DownBlock2D"),
        "up_block_types": ("UpBlock2D", "UpBlock2D", "AttnUpBlock2D", "UpBlock2D"),
        "attention_head_dim": None,  # one head
        "downsample_padding": 0,
        "flip_sin_to_cos": False,
        "freq_shift": 1,
        "norm_eps": 1e-6,
    }
    return _build("UNet2DModel", {**settings, **changes})


def iddpm_imagenet64(**changes: Any) -> nn.Module:
    """A class-conditional 64x64 network as in IDDPM, 144M parameters: attention at 16x16 and 8x8.

    >>> model = iddpm_imagenet64(block_out_channels=(32, 32, 32, 32), num_class_embeds=10)
    """
    settings = {
        "sample_size": 64,
        "block_out_channels": (160, 320, 480, 640),
        "down_block_types": ("DownBlock2D", "DownBlock2D", "AttnDownBlock2D", "AttnDownBlock2D"),
        "up_block_types": ("AttnUpBlock2D", "AttnUpBlock2D", "UpBlock2D", "UpBlock2D"),
        "attention_head_dim": 32,
        "resnet_time_scale_shift": "scale_shift",
        "num_class_embeds": 1000,
    }
    return _build("UNet2DModel", {**settings, **changes})


def text_latent(**changes: Any) -> nn.Module:
    """A text-to-image network on 32x32x4 latents, 261M parameters: cross attention to features of width 768.

    >>> model = text_latent(block_out_channels=(32, 32, 32, 32), attention_head_dim=2, cross_attention_dim=64)
    """
    settings = {
        "sample_size": 32,
        "block_out_channels": (224, 448, 448, 672),
        "down_block_types": ("CrossAttnDownBlock2D",) * 4,
        "up_block_types": ("CrossAttnUpBlock2D",) * 4,
        "attention_head_dim": 7,  # diffusers' name for the NUMBER of heads here: 32, 64, 64 and 96 channels each
        "cross_attention_dim": 768,
    }
    return _build("UNet2DConditionModel", {**settings, **changes})


def _build(name: str, settings: dict[str, Any]) -> nn.Module:
    import diffusers  # slow to import, and not needed for U-ViT

    model: nn.Module = getattr(diffusers, name)(**settings)
    return model


def as_network(model: nn.Module) -> Callable[..., Tensor]:
    """Wrap a (compiled or DDP) model as net(x, time, class_labels=..., context=...) -> Tensor.

    >>> import torch
    >>> net = as_network(ddpm_cifar10(block_out_channels=(32, 32, 32, 32)))
    >>> net(torch.randn(1, 3, 32, 32), torch.tensor([500.0])).shape
    torch.Size([1, 3, 32, 32])
    """
    if not _diffusers_class(model):
        return model

    def network(x: Tensor, time: Tensor, **condition: Tensor | None) -> Tensor:
        image: Tensor = model(**model_inputs(model, x, time, **condition), return_dict=False)[0]
        return image

    return network


def model_inputs(model: nn.Module, x: Tensor, time: Tensor, **condition: Tensor | None) -> dict[str, Any]:
    """The keyword arguments of a model for these inputs; None conditions are omitted."""
    given = {name: value for name, value in condition.items() if value is not None}
    cls = _diffusers_class(model)
    if not cls:
        return {"x": x, "time": time, **given}
    for wrong in given.keys() - {"class_labels", "context" if cls == "UNet2DConditionModel" else ""}:
        raise ValueError(f"network.{wrong}: a {cls} has no such condition; leave {wrong} out")
    renamed = {"encoder_hidden_states" if name == "context" else name: value for name, value in given.items()}
    return {"sample": x, "timestep": time, **renamed}


def _diffusers_class(model: nn.Module) -> str:
    """The class name of a diffusers UNet; "" for other models."""
    bases = [cls.__name__ for cls in type(unwrapped(model)).__mro__ if cls.__module__.startswith("diffusers.")]
    return next((name for name in ("UNet2DModel", "UNet2DConditionModel") if name in bases), "")


def unwrapped(model: nn.Module) -> nn.Module:
    """The module inside torch.compile and DDP wrappers."""
    attributes = {"OptimizedModule": "_orig_mod", "DistributedDataParallel": "module"}
    while type(model).__name__ in attributes:
        model = getattr(model, attributes[type(model).__name__])
    return model
