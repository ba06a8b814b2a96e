"""Residual branches of blocks, for the controls of the paper's Table 3, which scale what blocks add and not the skips."""

from __future__ import annotations

from typing import Any

from torch import nn

Branches = list[tuple[str, ...]]  # for each block, the modules whose outputs are added to the stream


def residual_branches(model: nn.Module) -> Branches:
    """The branches of every block of a U-ViT, in the order they run; other models are refused."""
    if not any(cls.__name__ == "UViT" and cls.__module__.startswith("scalelong.") for cls in type(model).__mro__):
        raise ValueError(
            f"scaling.method: the controls that scale block outputs know the blocks of scalelong.backbones.UViT, "
            f"not those of {type(model).__name__}; choose a method that scales skips"
        )
    return [(f"{block}.attn", f"{block}.mlp") for block in _blocks(model)]


def _blocks(model: Any) -> list[str]:
    inner, outer = range(len(model.in_blocks)), range(len(model.out_blocks))
    return [*(f"in_blocks.{i}" for i in inner), "mid_block", *(f"out_blocks.{i}" for i in outer)]
