"""Write the table of known families into docs/families.md, from models of their real size on the meta device.

python scripts/families_table.py            # write
python scripts/families_table.py --check    # fail if the page is out of date
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

import scalelong

PAGE = Path(__file__).parents[1] / "docs" / "families.md"
START, END = "<!-- table: begin -->", "<!-- table: end -->"


def models() -> dict[str, Callable[[], nn.Module]]:
    """Name and constructor of one full-size model of each family."""
    import diffusers
    from diffusers.models.unets import StableCascadeUNet
    from diffusers.pipelines.deprecated.unidiffuser.modeling_uvit import UniDiffuserModel
    from monai.networks.nets import DiffusionModelUNet

    from scalelong.backbones import MatrixUNet, UViT, ddpm_cifar10

    return {
        "`UNet2DModel` (DDPM CIFAR-10)": ddpm_cifar10,
        "`UNet2DConditionModel` (Stable Diffusion 1.5)": lambda: diffusers.UNet2DConditionModel(
            sample_size=64, cross_attention_dim=768, attention_head_dim=8
        ),
        "`UNet2DConditionModel` (SDXL)": lambda: diffusers.UNet2DConditionModel(
            sample_size=128,
            block_out_channels=(320, 640, 1280),
            down_block_types=("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
            up_block_types=("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
            transformer_layers_per_block=(1, 2, 10),
            attention_head_dim=(5, 10, 20),
            cross_attention_dim=2048,
            use_linear_projection=True,
            addition_embed_type="text_time",
            addition_time_embed_dim=256,
            projection_class_embeddings_input_dim=2816,
        ),
        "`UNet1DModel`": lambda: diffusers.UNet1DModel(extra_in_channels=64),
        "`UNet3DConditionModel`": diffusers.UNet3DConditionModel,
        "`I2VGenXLUNet`": diffusers.I2VGenXLUNet,
        "`UNetSpatioTemporalConditionModel` (SVD)": diffusers.UNetSpatioTemporalConditionModel,
        "`UNetMotionModel` (AnimateDiff)": diffusers.UNetMotionModel,
        "`Kandinsky3UNet`": diffusers.Kandinsky3UNet,
        "`StableCascadeUNet` (stage C)": lambda: StableCascadeUNet(
            in_channels=16,
            out_channels=16,
            conditioning_dim=2048,
            block_out_channels=(2048, 2048),
            num_attention_heads=(32, 32),
            down_num_layers_per_block=(8, 24),
            up_num_layers_per_block=(24, 8),
            down_blocks_repeat_mappers=(1, 1),
            up_blocks_repeat_mappers=(1, 1),
            block_types_per_layer=(("SDCascadeResBlock", "SDCascadeTimestepBlock", "SDCascadeAttnBlock"),) * 2,
            clip_text_in_channels=1280,
            clip_text_pooled_in_channels=1280,
            clip_image_in_channels=768,
            switch_level=(False,),
            dropout=(0.1, 0.1),
        ),
        "`HunyuanDiT2DModel`": lambda: diffusers.HunyuanDiT2DModel(sample_size=128, patch_size=2, in_channels=4),
        "`UniDiffuserModel` / `UTransformer2DModel`": lambda: UniDiffuserModel(
            text_dim=64, clip_img_dim=512, num_text_tokens=77, sample_size=64, in_channels=4, out_channels=4, patch_size=2,
            num_layers=30, num_attention_heads=24, attention_head_dim=64, norm_type="layer_norm",
        ),
        "MONAI `DiffusionModelUNet`": lambda: DiffusionModelUNet(spatial_dims=2, in_channels=1, out_channels=1),
        "`scalelong` `UViT` (S/2, CIFAR-10)": lambda: UViT.from_preset("cifar10-s2"),
        "`scalelong` `MatrixUNet` (Eq. 3, N = 8)": lambda: MatrixUNet(width=64, layers=2, num_skips=8),
    }  # fmt: skip


def row(name: str, build: Callable[[], nn.Module]) -> str:
    with torch.device("meta"):
        skips = scalelong.find_skips(build())
    outer, inner = skips[0], skips[-1]
    reach = ", ".join(f"{kind} {count}" for kind, count in Counter(skip.reach for skip in skips).items())
    if outer is inner:
        where = f"`{outer.made_in}` → `{outer.used_in}`"
    else:
        where = f"`{outer.made_in}` → `{outer.used_in}` … `{inner.made_in}` → `{inner.used_in}`"
    return f"| {name} | {len(skips)} | {where} | {reach} |"


def main() -> None:
    header = ["| model | skips | made → used, outermost … innermost | reach of kappa |", "|---|---|---|---|"]
    table = "\n".join(header + [row(name, build) for name, build in models().items()])
    page = PAGE.read_text()
    before, rest = page.split(START)
    _, after = rest.split(END)
    new = f"{before}{START}\n{table}\n{END}{after}"
    if "--check" in sys.argv and new != page:
        sys.exit(f"{PAGE.name} is out of date: run python scripts/families_table.py")
    PAGE.write_text(new)


if __name__ == "__main__":
    main()
