"""One small model of every known family, with an input to run it on and the number of long skips counted by hand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tests import family_models


@dataclass(frozen=True)
class Family:
    name: str
    build: Callable[[], nn.Module]
    inputs: Callable[[], dict[str, Any]]
    num_skips: int
    diffusers: bool = True


def assert_close(got: Tensor, expected: Tensor) -> None:
    """Outputs of two models with equal weights: weights at other addresses can change the last bits."""
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


def assert_same_weights(model: nn.Module, other: nn.Module) -> None:
    mine, theirs = model.state_dict(), other.state_dict()
    assert list(mine) == list(theirs)
    assert all(torch.equal(value, theirs[key]) for key, value in mine.items())


def output(model: nn.Module, inputs: dict[str, Any]) -> Tensor:
    """The model's prediction as one tensor, whatever it wraps it in."""
    result = model(**inputs)
    if isinstance(result, Tensor):
        return result
    if hasattr(result, "sample"):
        return result.sample
    return torch.cat([part.flatten(1) for part in (result if isinstance(result, tuple) else result.to_tuple())], dim=1)


def build(family: Family, seed: int = 0) -> nn.Module:
    """The family's model with noise on every parameter, so that zero-initialised layers cannot hide a mistake."""
    torch.manual_seed(seed)
    model = family.build().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
    return model


def _randn(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(7))


def _image(channels: int = 3, size: int = 16) -> dict[str, Any]:
    return {"sample": _randn(2, channels, size, size), "timestep": torch.tensor([3, 500])}


def _text(channels: int = 4, size: int = 8) -> dict[str, Any]:
    return {**_image(channels, size), "encoder_hidden_states": _randn(2, 5, 12)}


def _video(extra: dict[str, Any] | None = None) -> dict[str, Any]:
    return {
        "sample": _randn(2, 4, 3, 8, 8),
        "timestep": torch.tensor([3, 500]),
        "encoder_hidden_states": _randn(2, 5, 12),
        **(extra or {}),
    }


FAMILIES = [
    Family("UNet2DModel", family_models.unet2d, _image, 6),
    Family("UNet2DModel NCSN++", family_models.ncsnpp, _image, 4),
    Family("UNet2DConditionModel SD-1.5", family_models.sd15, _text, 12),
    Family(
        "UNet2DConditionModel SDXL",
        family_models.sdxl,
        lambda: {**_text(), "added_cond_kwargs": {"text_embeds": _randn(2, 12), "time_ids": _randn(2, 6)}},
        9,
    ),
    Family(
        "UNet1DModel", family_models.unet1d, lambda: {"sample": _randn(2, 4, 32), "timestep": torch.tensor([3, 500])}, 3
    ),
    Family(
        "UNet1DModel temporal",
        family_models.unet1d_temporal,
        lambda: {"sample": _randn(2, 6, 16), "timestep": torch.tensor([3, 5])},
        3,
    ),
    Family("UNet3DConditionModel", family_models.unet3d, _video, 4),
    Family(
        "I2VGenXLUNet",
        family_models.i2vgen,
        lambda: _video(
            {"fps": torch.tensor([8, 8]), "image_latents": _randn(2, 4, 3, 8, 8), "image_embeddings": _randn(2, 12)}
        ),
        4,
    ),
    Family(
        "UNetSpatioTemporalConditionModel",
        family_models.svd,
        lambda: {
            "sample": _randn(2, 3, 8, 8, 8),
            "timestep": torch.tensor([3, 500]),
            "encoder_hidden_states": _randn(2, 1, 12),
            "added_time_ids": torch.tensor([[6.0, 127, 0.02]] * 2),
        },
        4,
    ),
    Family("UNetMotionModel", family_models.motion, lambda: _video({"encoder_hidden_states": _randn(6, 5, 12)}), 4),
    Family(
        "HunyuanDiT2DModel",
        family_models.hunyuan,
        lambda: {
            "hidden_states": _randn(2, 4, 8, 8),
            "timestep": torch.tensor([3.0, 500.0]),
            "encoder_hidden_states": _randn(2, 4, 12),
            "text_embedding_mask": torch.ones(2, 4),
            "encoder_hidden_states_t5": _randn(2, 4, 16),
            "text_embedding_mask_t5": torch.ones(2, 4),
            "image_meta_size": torch.tensor([[8.0, 8, 8, 8, 0, 0]] * 2),
            "style": torch.zeros(2, dtype=torch.long),
            "image_rotary_emb": [_randn(16, 8), _randn(16, 8)],
        },
        3,
    ),
    Family(
        "UniDiffuser UTransformer2DModel",
        family_models.unidiffuser_transformer,
        lambda: {"hidden_states": _randn(2, 4, 8, 8)},
        3,
    ),
    Family(
        "Kandinsky3UNet",
        family_models.kandinsky3,
        lambda: {
            "sample": _randn(2, 4, 16, 16),
            "timestep": torch.tensor([3, 500]),
            "encoder_hidden_states": _randn(2, 5, 12),
            "encoder_attention_mask": torch.ones(2, 5),
        },
        3,
    ),
    Family(
        "StableCascadeUNet",
        family_models.stable_cascade,
        lambda: {
            "sample": _randn(2, 4, 8, 8),
            "timestep_ratio": torch.tensor([0.3, 0.7]),
            "clip_text_pooled": _randn(2, 1, 12),
            "clip_text": _randn(2, 4, 12),
            "clip_img": _randn(2, 1, 12),
        },
        2,
    ),
    Family(
        "MONAI DiffusionModelUNet",
        family_models.monai,
        lambda: {"x": _randn(2, 1, 8, 8), "timesteps": torch.tensor([3, 500])},
        5,
        False,
    ),
    Family("UViT", family_models.uvit, lambda: {"x": _randn(2, 3, 8, 8), "time": torch.tensor([3.0, 500.0])}, 4, False),
    Family("MatrixUNet", family_models.matrix_unet, lambda: {"x": _randn(4, 8)}, 5, False),
]
