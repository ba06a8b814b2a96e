"""The digest of an autoencoder tells apart what encodes differently."""

from __future__ import annotations

import torch
from diffusers import AutoencoderKL

from scalelong.backbones.autoencoder import autoencoder_digest


def test_the_same_weights_in_other_groups_are_another_autoencoder() -> None:
    models = []
    for groups in (8, 2, 8):
        torch.manual_seed(0)
        models.append(AutoencoderKL(block_out_channels=(8,), latent_channels=2, norm_num_groups=groups))
    one, other, again = models
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))
    assert autoencoder_digest(one) == autoencoder_digest(again) != autoencoder_digest(other)
