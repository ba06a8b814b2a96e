"""An example call for models whose configuration says what they take."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from scalelong.skips.long_skip import Call


def generated_example(model: nn.Module, full_size: bool = False) -> Call:
    """Random inputs for a model of one of the commonest families; a ValueError asks for an example elsewhere.

    full_size: images as large as the model was made for, rather than the least that it can take.
    """
    reference = next(model.parameters())
    for cls in type(model).__mro__:
        make = GENERATORS.get(f"{cls.__module__.partition('.')[0]}.{cls.__name__}")
        if make is not None:
            random = _Random(reference.device, reference.dtype, full_size)
            return (), make(model, random)
    raise ValueError(
        f"example: none was given, and none is made up for a {type(model).__name__}; pass the arguments you would call the "
        f"model with (made up for {', '.join(sorted(GENERATORS))})"
    )


class _Random:
    """The same numbers every time, without touching the global random state."""

    def __init__(self, device: torch.device, dtype: torch.dtype, full_size: bool) -> None:
        self.device, self.dtype, self.full_size = device, dtype, full_size
        self.generator = torch.Generator().manual_seed(0)

    def __call__(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator).to(self.device, self.dtype)

    def time(self) -> Tensor:
        return torch.tensor([37], device=self.device)


def _unet2d(model: Any, random: _Random) -> dict[str, Any]:
    config, size = model.config, _size(model, random.full_size)
    example = {"sample": random(1, config.in_channels, size, size), "timestep": random.time()}
    if config.num_class_embeds is not None:
        example["class_labels"] = torch.zeros(1, dtype=torch.long, device=random.device)
    return example


def _unet2d_condition(model: Any, random: _Random) -> dict[str, Any]:
    config, width = model.config, model.config.cross_attention_dim
    if config.addition_embed_type not in (None, "text_time") or config.class_embed_type is not None:
        raise ValueError("example: none was given, and none is made up for this conditioning; pass one")
    example = _unet2d(model, random)
    width = config.encoder_hid_dim or (width if isinstance(width, int) else width[0])
    example["encoder_hidden_states"] = random(1, 4, width)
    if config.addition_embed_type == "text_time":
        text = config.projection_class_embeddings_input_dim - 6 * config.addition_time_embed_dim
        example["added_cond_kwargs"] = {"text_embeds": random(1, text), "time_ids": random(1, 6)}
    return example


def _size(model: Any, full: bool) -> int:
    """The least image that can be halved at every level, or what the model was made for if that is less or asked for."""
    least = int(2 ** (len(model.config.block_out_channels) + 1))
    given = model.config.sample_size
    if not isinstance(given, int):
        return least
    return given if full else min(given, least)


def _unet1d(model: Any, random: _Random) -> dict[str, Any]:
    return {"sample": random(1, model.config.in_channels, model.config.sample_size), "timestep": random.time()}


def _unidiffuser_transformer(model: Any, random: _Random) -> dict[str, Any]:
    size = model.config.sample_size
    return {"hidden_states": random(1, model.config.in_channels, size, size)}


def _uvit(model: Any, random: _Random) -> dict[str, Any]:
    config = model.config
    example = {"x": random(1, config.in_channels, config.image_size, config.image_size), "time": random(1)}
    if config.num_classes:
        example["class_labels"] = torch.zeros(1, dtype=torch.long, device=random.device)
    if config.text_dim:
        example["context"] = random(1, config.text_tokens, config.text_dim)
    return example


GENERATORS: dict[str, Callable[[Any, _Random], dict[str, Any]]] = {
    "diffusers.UNet2DModel": _unet2d,
    "diffusers.UNet2DConditionModel": _unet2d_condition,
    "diffusers.UNet1DModel": _unet1d,
    "diffusers.UTransformer2DModel": _unidiffuser_transformer,
    "scalelong.UViT": _uvit,
}
