"""U-ViT as a model of diffusers. An exported folder holds this file, with the network itself put in front of it."""

from __future__ import annotations

import importlib
from typing import Any

from diffusers import ConfigMixin, ModelMixin
from diffusers.configuration_utils import register_to_config
from diffusers.models.unets.unet_2d import UNet2DOutput
from torch import Tensor

from scalelong.backbones.uvit import UViT, UViTConfig


class UViTModel(ModelMixin, ConfigMixin):  # type: ignore[misc]
    """Called as diffusers' UNets are; `timestep` is t * 999 in continuous time."""

    @register_to_config  # type: ignore[untyped-decorator]
    def __init__(
        self,
        sample_size: int = 32,
        patch_size: int = 2,
        in_channels: int = 3,
        dim: int = 512,
        depth: int = 12,
        heads: int = 8,
        mlp_ratio: float = 4.0,
        qkv_bias: bool = False,
        mlp_time_embed: bool = False,
        num_classes: int = 0,
        text_dim: int = 0,
        text_tokens: int = 0,
        final_conv: bool = True,
        long_skip_scaling: dict[str, Any] | None = None,
    ) -> None:
        super().__init__()
        sizes: dict[str, Any] = {
            "image_size": sample_size, "patch_size": patch_size, "in_channels": in_channels, "dim": dim,
            "depth": depth, "heads": heads, "mlp_ratio": mlp_ratio, "qkv_bias": qkv_bias,
            "mlp_time_embed": mlp_time_embed, "num_classes": num_classes, "text_dim": text_dim,
            "text_tokens": text_tokens, "final_conv": final_conv,
        }  # fmt: skip
        if long_skip_scaling is None:  # none, or folded into the weights: nothing but this file is needed
            self.uvit: Any = UViT(UViTConfig(**sizes))
            return
        library = importlib.import_module("scalelong")
        backbones = importlib.import_module("scalelong.backbones")
        self.uvit = backbones.UViT(backbones.UViTConfig(**sizes))
        library.apply(self.uvit, long_skip_scaling["method"], **long_skip_scaling["options"])

    def forward(
        self,
        sample: Tensor,
        timestep: Tensor | float,
        class_labels: Tensor | None = None,
        encoder_hidden_states: Tensor | None = None,
        return_dict: bool = True,
    ) -> Any:
        """The prediction, shaped like `sample`."""
        time = timestep if isinstance(timestep, Tensor) else sample.new_tensor(timestep)
        output = self.uvit(sample, time.to(sample.device), class_labels, encoder_hidden_states)
        return UNet2DOutput(sample=output) if return_dict else (output,)
