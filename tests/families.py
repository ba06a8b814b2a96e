"""One small model of every known family, with an input to run it on and the number of long skips counted by hand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Family:
    name: str
    build: Callable[[], nn.Module]
    inputs: Callable[[], dict[str, Any]]
    num_skips: int
    diffusers: bool = True


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


def _unet2d() -> nn.Module:
    from diffusers import UNet2DModel

    return UNet2DModel(
        sample_size=16,
        in_channels=3,
        out_channels=3,
        block_out_channels=(16, 32),
        layers_per_block=2,
        norm_num_groups=8,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        attention_head_dim=8,
    )


def _ncsnpp() -> nn.Module:
    from diffusers import UNet2DModel

    return UNet2DModel(
        sample_size=16,
        block_out_channels=(32, 32),
        layers_per_block=1,
        down_block_types=("SkipDownBlock2D", "AttnSkipDownBlock2D"),
        up_block_types=("AttnSkipUpBlock2D", "SkipUpBlock2D"),
        attention_head_dim=8,
    )


def _sd15() -> nn.Module:
    from diffusers import UNet2DConditionModel

    return UNet2DConditionModel(
        sample_size=8,
        block_out_channels=(8, 16, 16, 16),
        layers_per_block=2,
        cross_attention_dim=12,
        attention_head_dim=4,
        norm_num_groups=4,
    )


def _sdxl() -> nn.Module:
    from diffusers import UNet2DConditionModel

    return UNet2DConditionModel(
        sample_size=8,
        block_out_channels=(8, 16, 32),
        layers_per_block=2,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
        cross_attention_dim=12,
        transformer_layers_per_block=(1, 1, 2),
        attention_head_dim=4,
        norm_num_groups=4,
        use_linear_projection=True,
        addition_embed_type="text_time",
        addition_time_embed_dim=8,
        projection_class_embeddings_input_dim=60,
    )


def _unet1d() -> nn.Module:
    from diffusers import UNet1DModel

    return UNet1DModel(
        sample_size=32,
        in_channels=4,
        out_channels=4,
        extra_in_channels=64,
        block_out_channels=(32, 32, 64),
        down_block_types=("DownBlock1DNoSkip", "DownBlock1D", "AttnDownBlock1D"),
        up_block_types=("AttnUpBlock1D", "UpBlock1D", "UpBlock1DNoSkip"),
    )


def _unet1d_temporal() -> nn.Module:
    from diffusers import UNet1DModel

    return UNet1DModel(
        sample_size=16,
        in_channels=6,
        out_channels=6,
        block_out_channels=(8, 16, 16, 32),
        down_block_types=("DownResnetBlock1D",) * 4,
        up_block_types=("UpResnetBlock1D",) * 3,
        mid_block_type="MidResTemporalBlock1D",
        out_block_type="OutConv1DBlock",
        layers_per_block=1,
        norm_num_groups=8,
        use_timestep_embedding=True,
        time_embedding_type="positional",
        flip_sin_to_cos=False,
        freq_shift=1,
        act_fn="mish",
    )


def _unet3d() -> nn.Module:
    from diffusers import UNet3DConditionModel

    return UNet3DConditionModel(
        sample_size=8,
        block_out_channels=(8, 16),
        down_block_types=("CrossAttnDownBlock3D", "DownBlock3D"),
        up_block_types=("UpBlock3D", "CrossAttnUpBlock3D"),
        cross_attention_dim=12,
        attention_head_dim=4,
        norm_num_groups=4,
        layers_per_block=1,
    )


def _i2vgen() -> nn.Module:
    from diffusers import I2VGenXLUNet

    return I2VGenXLUNet(
        sample_size=8,
        block_out_channels=(8, 16),
        down_block_types=("CrossAttnDownBlock3D", "DownBlock3D"),
        up_block_types=("UpBlock3D", "CrossAttnUpBlock3D"),
        cross_attention_dim=12,
        attention_head_dim=4,
        num_attention_heads=None,
        norm_num_groups=4,
        layers_per_block=1,
    )


def _svd() -> nn.Module:
    from diffusers import UNetSpatioTemporalConditionModel

    return UNetSpatioTemporalConditionModel(
        sample_size=8,
        block_out_channels=(32, 64),
        down_block_types=("CrossAttnDownBlockSpatioTemporal", "DownBlockSpatioTemporal"),
        up_block_types=("UpBlockSpatioTemporal", "CrossAttnUpBlockSpatioTemporal"),
        num_attention_heads=(2, 4),
        addition_time_embed_dim=8,
        projection_class_embeddings_input_dim=24,
        cross_attention_dim=12,
        layers_per_block=1,
    )


def _motion() -> nn.Module:
    from diffusers import UNetMotionModel

    return UNetMotionModel(
        sample_size=8,
        block_out_channels=(8, 16),
        down_block_types=("CrossAttnDownBlockMotion", "DownBlockMotion"),
        up_block_types=("UpBlockMotion", "CrossAttnUpBlockMotion"),
        cross_attention_dim=12,
        num_attention_heads=2,
        motion_num_attention_heads=2,
        norm_num_groups=4,
        layers_per_block=1,
    )


def _hunyuan() -> nn.Module:
    from diffusers import HunyuanDiT2DModel

    return HunyuanDiT2DModel(
        sample_size=8,
        patch_size=2,
        in_channels=4,
        num_layers=8,
        attention_head_dim=8,
        num_attention_heads=2,
        cross_attention_dim=12,
        cross_attention_dim_t5=16,
        pooled_projection_dim=4,
        hidden_size=16,
        text_len=4,
        text_len_t5=4,
    )


def _unidiffuser_transformer() -> nn.Module:
    from diffusers.pipelines.deprecated.unidiffuser.modeling_uvit import UTransformer2DModel

    return UTransformer2DModel(
        sample_size=8,
        patch_size=2,
        in_channels=4,
        out_channels=4,
        num_layers=6,
        num_attention_heads=2,
        attention_head_dim=8,
        norm_num_groups=4,
        use_patch_pos_embed=True,
        ff_final_dropout=True,
        pre_layer_norm=False,
        norm_type="layer_norm",
    )


def _kandinsky3() -> nn.Module:
    from diffusers import Kandinsky3UNet

    return Kandinsky3UNet(
        in_channels=4,
        time_embedding_dim=8,
        groups=4,
        attention_head_dim=4,
        layers_per_block=2,
        block_out_channels=(8, 8, 16, 16),
        cross_attention_dim=8,
        encoder_hid_dim=12,
    )


def _stable_cascade() -> nn.Module:
    from diffusers.models.unets import StableCascadeUNet

    return StableCascadeUNet(
        in_channels=4,
        out_channels=4,
        conditioning_dim=16,
        block_out_channels=(16, 16, 32),
        num_attention_heads=(2, 2, 2),
        down_num_layers_per_block=(1, 1, 1),
        up_num_layers_per_block=(1, 1, 1),
        down_blocks_repeat_mappers=(1, 1, 1),
        up_blocks_repeat_mappers=(1, 2, 1),
        block_types_per_layer=(("SDCascadeResBlock", "SDCascadeTimestepBlock", "SDCascadeAttnBlock"),) * 3,
        clip_text_in_channels=12,
        clip_text_pooled_in_channels=12,
        clip_image_in_channels=12,
        clip_seq=2,
        patch_size=1,
        switch_level=(False, False),
        dropout=(0.0, 0.0, 0.0),
        timestep_ratio_embedding_dim=8,
    )


def _monai() -> nn.Module:
    from monai.networks.nets import DiffusionModelUNet

    return DiffusionModelUNet(
        spatial_dims=2,
        in_channels=1,
        out_channels=1,
        num_res_blocks=(1, 2),
        channels=(8, 16),
        attention_levels=(False, True),
        num_head_channels=(0, 8),
        norm_num_groups=4,
    )


def _uvit() -> nn.Module:
    from scalelong.backbones import UViT, UViTConfig

    return UViT(UViTConfig(image_size=8, patch_size=2, dim=16, depth=8, heads=2))


def _matrix_unet() -> nn.Module:
    from scalelong.backbones import MatrixUNet

    return MatrixUNet(width=8, layers=2, num_skips=5)


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
    Family("UNet2DModel", _unet2d, _image, 6),
    Family("UNet2DModel NCSN++", _ncsnpp, _image, 4),
    Family("UNet2DConditionModel SD-1.5", _sd15, _text, 12),
    Family(
        "UNet2DConditionModel SDXL",
        _sdxl,
        lambda: {**_text(), "added_cond_kwargs": {"text_embeds": _randn(2, 12), "time_ids": _randn(2, 6)}},
        9,
    ),
    Family("UNet1DModel", _unet1d, lambda: {"sample": _randn(2, 4, 32), "timestep": torch.tensor([3, 500])}, 3),
    Family(
        "UNet1DModel temporal",
        _unet1d_temporal,
        lambda: {"sample": _randn(2, 6, 16), "timestep": torch.tensor([3, 5])},
        3,
    ),
    Family("UNet3DConditionModel", _unet3d, _video, 4),
    Family(
        "I2VGenXLUNet",
        _i2vgen,
        lambda: _video(
            {"fps": torch.tensor([8, 8]), "image_latents": _randn(2, 4, 3, 8, 8), "image_embeddings": _randn(2, 12)}
        ),
        4,
    ),
    Family(
        "UNetSpatioTemporalConditionModel",
        _svd,
        lambda: {
            "sample": _randn(2, 3, 8, 8, 8),
            "timestep": torch.tensor([3, 500]),
            "encoder_hidden_states": _randn(2, 1, 12),
            "added_time_ids": torch.tensor([[6.0, 127, 0.02]] * 2),
        },
        4,
    ),
    Family("UNetMotionModel", _motion, lambda: _video({"encoder_hidden_states": _randn(6, 5, 12)}), 4),
    Family(
        "HunyuanDiT2DModel",
        _hunyuan,
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
        "UniDiffuser UTransformer2DModel", _unidiffuser_transformer, lambda: {"hidden_states": _randn(2, 4, 8, 8)}, 3
    ),
    Family(
        "Kandinsky3UNet",
        _kandinsky3,
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
        _stable_cascade,
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
        _monai,
        lambda: {"x": _randn(2, 1, 8, 8), "timesteps": torch.tensor([3, 500])},
        5,
        False,
    ),
    Family("UViT", _uvit, lambda: {"x": _randn(2, 3, 8, 8), "time": torch.tensor([3.0, 500.0])}, 4, False),
    Family("MatrixUNet", _matrix_unet, lambda: {"x": _randn(4, 8)}, 5, False),
]
