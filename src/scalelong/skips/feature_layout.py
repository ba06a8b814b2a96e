"""The features that a name means: which tensor of a module's output, and where its channels and patches are."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn


def split_item(name: str) -> tuple[str, int]:
    """A module, and which of its outputs is meant.

    >>> split_item("blocks.3[1]"), split_item("blocks.3")
    (('blocks.3', 1), ('blocks.3', 0))
    """
    path, _, item = name.removesuffix("]").partition("[")
    return (path, int(item)) if item.isdigit() else (name, 0)


def named_output(output: Any, name: str, key: str) -> Tensor | None:
    """The tensor that `name` means; None if there is none. ValueError if a module returns several and none is chosen."""
    path, item = split_item(name)
    parts = output if isinstance(output, (tuple, list)) else [output]
    count = sum(isinstance(part, Tensor) for part in parts)
    if count > 1 and path == name:
        several = f"{name} returns {count} tensors, and which one holds the features is not known"
        raise ValueError(f"{key}: {several}; choose one, such as {name}[1]")
    found = parts[item] if item < len(parts) else None
    return found if isinstance(found, Tensor) else None


def channels_of(module: nn.Module, output: Tensor) -> int:
    """The dimension of the channels of a module's output; 0: the usual one.

    Inferred from its weights: a convolution returns (B, D, T), linear layers without convolutions (B, H, W, D).

    >>> import torch
    >>> channels_of(nn.Conv1d(2, 4, 3), torch.zeros(1, 4, 8)), channels_of(nn.Linear(2, 4), torch.zeros(1, 8, 8, 4))
    (1, 3)
    """
    shapes = [parameter.shape for parameter in module.parameters()]
    if output.ndim == 3:
        widths = {shape[0] for shape in shapes if len(shape) == 3}
        widths |= {part.out_channels for part in module.modules() if isinstance(part, nn.ConvTranspose1d)}
        return int(output.shape[1] in widths - {1})
    widths = {shape[0] for shape in shapes if len(shape) == 2 or shape[1:].numel() > 1}  # not Swin V2's (heads, 1, 1)
    linear = output.ndim > 3 and all(len(shape) < 4 or shape[1] == 1 for shape in shapes)  # 1: depthwise convolutions
    return output.ndim - 1 if linear and output.shape[-1] in widths and output.shape[1] not in widths else 0


def as_tokens(features: Tensor, channels: int = 0) -> Tensor:
    """(B, D), (B, T, D) or (B, D, ...) -> (B, T, D); `channels` as of `channels_of`."""
    if features.ndim == 2:
        return features[:, None]
    return features.movedim(channels or (2 if features.ndim == 3 else 1), -1).flatten(1, -2)


def extra_tokens(model: nn.Module, output: Tensor) -> int:
    """How many tokens of a module's output come before the patches of a U-ViT."""
    every = output.ndim == 3 and output.shape[1] == getattr(model, "num_tokens", None)
    return int(getattr(model, "num_extras", 0)) if every else 0
