"""Small networks at any width, for the tests of muP."""

from __future__ import annotations

import torch
from diffusers import DiTTransformer2DModel
from torch import nn

import scalelong
from scalelong import UViT, UViTConfig, mup

INPUTS = {"x": torch.randn(2, 3, 8, 8), "time": torch.tensor([10.0, 500.0])}


def uvit(dim: int, depth: int = 4, heads: int = 2, **sizes) -> UViT:
    return UViT(UViTConfig(image_size=8, patch_size=4, dim=dim, depth=depth, heads=heads, **sizes))


def meta(make, *args, **kwargs) -> nn.Module:
    with torch.device("meta"):
        return make(*args, **kwargs)


def parametrized(dim: int = 64, scaling: str = "", **sizes) -> UViT:
    torch.manual_seed(0)
    model = uvit(dim, **sizes)
    if scaling:
        scalelong.apply(model, scaling)
    return mup.parametrize(model, meta(uvit, 16, **sizes))


def dit(heads: int, head: int = 8) -> DiTTransformer2DModel:
    return DiTTransformer2DModel(
        num_attention_heads=heads, attention_head_dim=head, in_channels=3, num_layers=1, sample_size=8,
        num_embeds_ada_norm=4, norm_num_groups=4,
    )  # fmt: skip


def mlp(width: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 2))
