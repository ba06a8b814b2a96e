"""The convolutional UNets of the paper's Table 1 as configurations of diffusers' models, and one way to call any model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn


def ddpm_cifar10(**changes: Any) -> nn.Module:
    """The CIFAR-10 network of DDPM, 35.7M parameters: 32x32, attention at 16x16.

    >>> model = ddpm_cifar10(block_out_channels=(32, 32, 32, 32))  # replaces this field of the configuration
    """
    settings = {
        "sample_size": 32,
        "block_out_channels": (128, 256, 256, 256),
        "layers_per_block": 2,
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
    """A class-conditional 64x64 network as in IDDPM, 144M parameters: attention at 16x16 and 8x8."""
    settings = {
        "sample_size": 64,
        "block_out_channels": (160, 320, 480, 640),
        "layers_per_block": 2,
        "down_block_types": ("DownBlock2D", "DownBlock2D", "AttnDownBlock2D", "AttnDownBlock2D"),
        "up_block_types": ("AttnUpBlock2D", "AttnUpBlock2D", "UpBlock2D", "UpBlock2D"),
        "attention_head_dim": 32,
        "resnet_time_scale_shift": "scale_shift",
        "num_class_embeds": 1000,
    }
    return _build("UNet2DModel", {**settings, **changes})


def text_latent(**changes: Any) -> nn.Module:
    """A text-to-image network on 32x32x4 latents, 261M parameters: cross attention to features of width 768."""
    settings = {
        "sample_size": 32,
        "in_channels": 4,
        "out_channels": 4,
        "block_out_channels": (224, 448, 448, 672),
        "layers_per_block": 2,
        "down_block_types": ("CrossAttnDownBlock2D",) * 4,
        "up_block_types": ("CrossAttnUpBlock2D",) * 4,
        "attention_head_dim": 7,  # diffusers' name for the NUMBER of heads here: 32, 64, 64 and 96 channels each
        "cross_attention_dim": 768,
    }
    return _build("UNet2DConditionModel", {**settings, **changes})


def _build(name: str, settings: Mapping[str, Any]) -> nn.Module:
    import diffusers  # takes seconds to import, and U-ViTs do not need it

    model: nn.Module = getattr(diffusers, name)(**settings)
    return model


_OURS = {"class_labels": "class_labels", "context": "context"}
_DIFFUSERS = {
    "UNet2DModel": {"class_labels": "class_labels"},
    "UNet2DConditionModel": {"class_labels": "class_labels", "context": "encoder_hidden_states"},
}


@dataclass(frozen=True)
class ModelWrapper:
    """A model called as net(x, time, class_labels=..., context=...) -> Tensor; conditions that are None are omitted."""

    model: nn.Module
    names: Mapping[str, str]  # condition -> the model's keyword for it
    options: Mapping[str, Any]  # passed in every call

    def __call__(self, x: Tensor, time: Tensor, **condition: Tensor | None) -> Tensor:
        given = {name: value for name, value in condition.items() if value is not None}
        for name in given:
            if name not in self.names:
                takes = ", ".join(self.names)
                raise ValueError(f"network.{name}: {type(self.model).__name__} takes {takes}; leave {name} out")
        output = self.model(x, time, **{self.names[name]: value for name, value in given.items()}, **self.options)
        image: Tensor = output[0] if isinstance(output, tuple) else output
        return image


def as_network(model: nn.Module) -> ModelWrapper:
    """Wrap a U-ViT, a UNet of diffusers or any module of (x, time, class_labels=, context=), compiled or in DDP too.

    >>> import torch
    >>> net = as_network(ddpm_cifar10(block_out_channels=(32, 32, 32, 32)))
    >>> net(torch.randn(1, 3, 32, 32), torch.tensor([500.0])).shape
    torch.Size([1, 3, 32, 32])
    """
    for cls in type(unwrapped(model)).__mro__:
        if cls.__name__ in _DIFFUSERS and cls.__module__.startswith("diffusers."):
            return ModelWrapper(model, _DIFFUSERS[cls.__name__], {"return_dict": False})
    return ModelWrapper(model, _OURS, {})


def unwrapped(model: nn.Module) -> nn.Module:
    """The user's module inside those of torch.compile and DDP."""
    for attribute, wrapper in (("_orig_mod", "OptimizedModule"), ("module", "DistributedDataParallel")):
        if type(model).__name__ == wrapper:
            inner: nn.Module = getattr(model, attribute)
            return unwrapped(inner)
    return model
