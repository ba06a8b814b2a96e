"""Models of diffusers that have no long skips: their settings and an example."""

from __future__ import annotations

from typing import Any

import torch

from tests.standins import randn

SIZES: dict[str, Any] = {
    "num_attention_heads": 2,
    "attention_head_dim": 8,
    "sample_size": 8,
    "patch_size": 2,
    "num_layers": 4,
}
TIME, ZEROS = torch.tensor([3, 500]), torch.zeros(2, dtype=torch.long)
WITHOUT_SKIPS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "DiTTransformer2DModel": (
        {**SIZES, "num_embeds_ada_norm": 1000, "norm_num_groups": 4},
        {"hidden_states": randn(2, 4, 8, 8), "timestep": TIME, "class_labels": ZEROS},
    ),
    "PixArtTransformer2DModel": (
        {**SIZES, "cross_attention_dim": 16, "caption_channels": 12, "use_additional_conditions": False},
        {
            "hidden_states": randn(2, 4, 8, 8),
            "timestep": TIME,
            "encoder_hidden_states": randn(2, 5, 12),
            "added_cond_kwargs": {"resolution": None, "aspect_ratio": None},
        },
    ),
    "UVit2DModel": (
        {
            "hidden_size": 16, "cond_embed_dim": 8, "micro_cond_encode_dim": 4, "micro_cond_embed_dim": 24,
            "encoder_hidden_size": 12, "vocab_size": 32, "codebook_size": 24, "block_out_channels": 16,
            "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 32, "sample_size": 8, "in_channels": 16,
        },
        {
            "input_ids": ZEROS[:, None, None].expand(2, 8, 8),
            "encoder_hidden_states": randn(2, 5, 12),
            "pooled_text_emb": randn(2, 8),
            "micro_conds": randn(2, 6),
        },
    ),
    "SD3Transformer2DModel": (
        {**SIZES, "in_channels": 4, "out_channels": 4, "joint_attention_dim": 12, "caption_projection_dim": 16,
         "pooled_projection_dim": 10},
        {
            "hidden_states": randn(2, 4, 8, 8),
            "encoder_hidden_states": randn(2, 5, 12),
            "pooled_projections": randn(2, 10),
            "timestep": TIME.float(),
        },
    ),
    "AutoencoderKL": (
        {"block_out_channels": (8, 16), "down_block_types": ("DownEncoderBlock2D",) * 2,
         "up_block_types": ("UpDecoderBlock2D",) * 2, "norm_num_groups": 4},
        {"sample": randn(2, 3, 16, 16)},
    ),
}  # fmt: skip
