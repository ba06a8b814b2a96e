"""The convolutional UNets of the paper's Table 1, as configurations of diffusers' models, and one way to call any model.

Shapes: B batch, C channels.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn


def ddpm_cifar10(**changes: Any) -> nn.Module:
    """The CIFAR-10 network of DDPM, 35.7M parameters: 32x32, attention at 16x16."""
    from diffusers import UNet2DModel

    settings: dict[str, Any] = {
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
    model: nn.Module = UNet2DModel(**{**settings, **changes})
    return model


def iddpm_imagenet64(**changes: Any) -> nn.Module:
    """A class-conditional 64x64 network in the manner of IDDPM, 144M parameters: attention at 16x16 and 8x8."""
    from diffusers import UNet2DModel

    settings: dict[str, Any] = {
        "sample_size": 64,
        "block_out_channels": (160, 320, 480, 640),
        "layers_per_block": 2,
        "down_block_types": ("DownBlock2D", "DownBlock2D", "AttnDownBlock2D", "AttnDownBlock2D"),
        "up_block_types": ("AttnUpBlock2D", "AttnUpBlock2D", "UpBlock2D", "UpBlock2D"),
        "attention_head_dim": 32,
        "resnet_time_scale_shift": "scale_shift",
        "num_class_embeds": 1000,
    }
    model: nn.Module = UNet2DModel(**{**settings, **changes})
    return model


def text_latent(**changes: Any) -> nn.Module:
    """A text-to-image network on 32x32x4 latents, 261M parameters: cross attention to features of width 768."""
    from diffusers import UNet2DConditionModel

    settings: dict[str, Any] = {
        "sample_size": 32,
        "in_channels": 4,
        "out_channels": 4,
        "block_out_channels": (224, 448, 448, 672),
        "layers_per_block": 2,
        "down_block_types": ("CrossAttnDownBlock2D",) * 4,
        "up_block_types": ("CrossAttnUpBlock2D",) * 4,
        "attention_head_dim": 7,  # in this class of diffusers the NUMBER of heads, of 32, 64, 64 and 96 channels
        "cross_attention_dim": 768,
    }
    model: nn.Module = UNet2DConditionModel(**{**settings, **changes})
    return model


PRESETS: Mapping[str, Callable[..., nn.Module]] = {
    "ddpm-cifar10": ddpm_cifar10,
    "iddpm-imagenet64": iddpm_imagenet64,
    "text-latent": text_latent,
}


@dataclass(frozen=True)
class Network:
    """A model called as net(x, time, class_labels=..., context=...) -> Tensor, whatever its own names are."""

    model: nn.Module
    names: Mapping[str, str]  # our name of a condition -> the model's
    fixed: Mapping[str, Any]  # arguments that are always passed

    def __call__(self, x: Tensor, time: Tensor, **condition: Tensor | None) -> Tensor:
        given = {name: value for name, value in condition.items() if value is not None}
        for name in given:
            if name not in self.names:
                takes = ", ".join(self.names) or "no condition"
                raise ValueError(f"network.{name}: {type(self.model).__name__} takes {takes}; leave {name} out")
        output = self.model(x, time, **{self.names[name]: value for name, value in given.items()}, **self.fixed)
        image: Tensor = output[0] if isinstance(output, tuple) else output
        return image


def as_network(model: nn.Module) -> Network:
    """One way to call a UViT, a diffusers UNet (compiled or in DDP too) or any model of (x, time, ...)."""
    parameters = inspect.signature(unwrapped(model).forward).parameters
    names = {"class_labels": "class_labels"} if "class_labels" in parameters else {}
    for theirs in ("context", "encoder_hidden_states"):
        if theirs in parameters:
            names["context"] = theirs
    return Network(model, names, {"return_dict": False} if "return_dict" in parameters else {})


def unwrapped(model: nn.Module) -> nn.Module:
    """The user's module inside torch.compile's or DDP's: its forward names its arguments, hooks on it run."""
    for attribute, wrapper in (("_orig_mod", "OptimizedModule"), ("module", "DistributedDataParallel")):
        if type(model).__name__ == wrapper:
            inner: nn.Module = getattr(model, attribute)
            return unwrapped(inner)
    return model
