"""Models that are conditioned on their features, for the tests: each with a call."""

from __future__ import annotations

from typing import Any

import torch
from diffusers import DiTTransformer2DModel, UNet2DConditionModel, UNet2DModel
from torch import Tensor, nn

import scalelong
from scalelong import UViT, UViTConfig

Case = tuple[nn.Module, tuple[Any, ...], dict[str, Any]]


def uvit(**changes: Any) -> Case:
    torch.manual_seed(0)
    model = UViT(UViTConfig(image_size=8, patch_size=4, dim=16, depth=4, heads=2, **changes))
    labels = {"class_labels": torch.tensor([1, 2])} if model.config.num_classes else {}
    return model, (torch.randn(2, 3, 8, 8), torch.tensor([3.0, 500.0])), labels


def unet() -> Case:
    torch.manual_seed(0)
    down, up = ("DownBlock2D", "AttnDownBlock2D"), ("AttnUpBlock2D", "UpBlock2D")
    sizes = {"block_out_channels": (16, 16), "norm_num_groups": 4, "layers_per_block": 1, "attention_head_dim": 8}
    model = UNet2DModel(sample_size=16, down_block_types=down, up_block_types=up, **sizes)
    return model, (torch.randn(2, 3, 16, 16), torch.tensor([3, 500])), {}


def unet_condition() -> Case:
    torch.manual_seed(0)
    down, up = ("CrossAttnDownBlock2D", "DownBlock2D"), ("UpBlock2D", "CrossAttnUpBlock2D")
    sizes = {"block_out_channels": (16, 16), "norm_num_groups": 4, "layers_per_block": 1, "attention_head_dim": 8}
    model = UNet2DConditionModel(
        sample_size=16, down_block_types=down, up_block_types=up, cross_attention_dim=8, **sizes
    )
    return model, (torch.randn(2, 4, 16, 16), torch.tensor([3, 500]), torch.randn(2, 4, 8)), {}


def dit() -> Case:
    torch.manual_seed(0)
    sizes = {"num_attention_heads": 2, "attention_head_dim": 8, "in_channels": 4, "num_layers": 4, "sample_size": 8}
    model = DiTTransformer2DModel(**sizes, norm_num_groups=4, num_embeds_ada_norm=10)
    labels = {"timestep": torch.tensor([3, 500]), "class_labels": torch.tensor([1, 2])}
    return model, (torch.randn(2, 4, 8, 8),), labels


class Own(nn.Module):
    """A network of nobody's: three layers, each with a condition."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        self.embed = nn.Linear(1, 6)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        condition = self.embed(t[:, None])
        for layer in self.layers:
            x = layer(x, emb=condition)
        return x


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.proj = nn.Conv2d(3, 3, 3, padding=1), nn.Linear(6, 3)

    def forward(self, x: Tensor, emb: Tensor) -> Tensor:
        return x + torch.tanh(self.conv(x) + self.proj(emb)[:, :, None, None])


def own() -> Case:
    torch.manual_seed(0)
    return Own(), (torch.randn(2, 3, 8, 8), torch.tensor([0.1, 0.9])), {}


def condition(case: Case, **options: Any) -> scalelong.skips.FeatureConditioning:
    model, args, kwargs = case
    if isinstance(model, Own):
        where = {"tap": "layers.0", "targets": ["layers.1", "layers.2"], "argument": "emb"}
        options = {**where, "example": (args, kwargs), **options}
    return scalelong.condition_on_features(model, **options)


def output(case: Case, model: nn.Module | None = None) -> Tensor:
    own_model, args, kwargs = case
    torch.manual_seed(1)
    found = (own_model if model is None else model)(*args, **kwargs)
    return found if isinstance(found, Tensor) else found.sample


CASES = {"uvit": uvit, "unet": unet, "unet_condition": unet_condition, "dit": dit, "own": own}
