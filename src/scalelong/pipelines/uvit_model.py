"""U-ViT as a diffusers model. Exported folders contain this file, prefixed by backbones/uvit.py."""

# ruff: noqa: ARG002  # the arguments are read from self.config
from __future__ import annotations

import importlib
from dataclasses import fields
from typing import Any

from diffusers import ConfigMixin, ModelMixin
from diffusers.configuration_utils import register_to_config
from diffusers.models.unets.unet_2d import UNet2DOutput
from torch import Tensor

from scalelong.backbones.uvit import UViT, UViTConfig


class UViTModel(ModelMixin, ConfigMixin):  # type: ignore[misc]
    """U-ViT with the signature of diffusers' UNets; `timestep` is t * 999 in continuous time."""

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
        long_skip_scaling: dict[str, Any] | None = None,  # None: not scaled, or folded into the weights
        condition_on_features: dict[str, Any] | None = None,  # None: no conditioning on features
    ) -> None:
        super().__init__()
        sizes = {field.name: self.config[field.name] for field in fields(UViTConfig) if field.name in self.config}
        sizes["image_size"] = sample_size
        if long_skip_scaling is None and condition_on_features is None:
            self.uvit: Any = UViT(UViTConfig(**sizes))
            return
        backbones = importlib.import_module("scalelong.backbones")  # known to `apply`
        self.uvit = backbones.UViT(backbones.UViTConfig(**sizes))
        if long_skip_scaling is not None:
            apply = importlib.import_module("scalelong").apply
            apply(self.uvit, long_skip_scaling["method"], **long_skip_scaling["options"])
        if condition_on_features is not None:
            features = importlib.import_module("scalelong.skips.feature_conditioning")
            conditioning = features.FeatureConditioning(features.Route.from_json(condition_on_features))
            features.attach_features(self.uvit, conditioning)

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
