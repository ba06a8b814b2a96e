"""The small models of tests/families.py: every one has all parts of its family, in sizes that run in milliseconds."""

from __future__ import annotations

from typing import Any

from torch import nn

SMALL_VIDEO: dict[str, Any] = {
    "sample_size": 8,
    "block_out_channels": (8, 16),
    "cross_attention_dim": 12,
    "norm_num_groups": 4,
    "layers_per_block": 1,
}


def unet2d() -> nn.Module:
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


def ncsnpp() -> nn.Module:
    from diffusers import UNet2DModel

    return UNet2DModel(
        sample_size=16,
        block_out_channels=(32, 32),
        layers_per_block=1,
        down_block_types=("SkipDownBlock2D", "AttnSkipDownBlock2D"),
        up_block_types=("AttnSkipUpBlock2D", "SkipUpBlock2D"),
        attention_head_dim=8,
    )


def sd15() -> nn.Module:
    from diffusers import UNet2DConditionModel

    return UNet2DConditionModel(
        sample_size=8,
        block_out_channels=(8, 16, 16, 16),
        layers_per_block=2,
        cross_attention_dim=12,
        attention_head_dim=4,
        norm_num_groups=4,
    )


def sdxl() -> nn.Module:
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


def unet1d() -> nn.Module:
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


def unet1d_temporal() -> nn.Module:
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


def unet3d() -> nn.Module:
    from diffusers import UNet3DConditionModel

    return UNet3DConditionModel(
        **SMALL_VIDEO,
        down_block_types=("CrossAttnDownBlock3D", "DownBlock3D"),
        up_block_types=("UpBlock3D", "CrossAttnUpBlock3D"),
        attention_head_dim=4,
    )


def i2vgen() -> nn.Module:
    from diffusers import I2VGenXLUNet

    return I2VGenXLUNet(
        **SMALL_VIDEO,
        down_block_types=("CrossAttnDownBlock3D", "DownBlock3D"),
        up_block_types=("UpBlock3D", "CrossAttnUpBlock3D"),
        attention_head_dim=4,
        num_attention_heads=None,
    )


def svd() -> nn.Module:
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


def motion() -> nn.Module:
    from diffusers import UNetMotionModel

    return UNetMotionModel(
        **SMALL_VIDEO,
        down_block_types=("CrossAttnDownBlockMotion", "DownBlockMotion"),
        up_block_types=("UpBlockMotion", "CrossAttnUpBlockMotion"),
        num_attention_heads=2,
        motion_num_attention_heads=2,
    )


def hunyuan() -> nn.Module:
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


def unidiffuser_transformer() -> nn.Module:
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


def kandinsky3() -> nn.Module:
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


def stable_cascade() -> nn.Module:
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


def monai() -> nn.Module:
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


def uvit() -> nn.Module:
    from scalelong.backbones import UViT, UViTConfig

    return UViT(UViTConfig(image_size=8, patch_size=2, dim=16, depth=8, heads=2))


def matrix_unet() -> nn.Module:
    from scalelong.lab.matrix_unet import MatrixUNet

    return MatrixUNet(width=8, layers=2, num_skips=5)
