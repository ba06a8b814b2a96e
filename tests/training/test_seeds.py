"""Weights are a function of the seed, and making them leaves every random state as it was."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from scalelong.data import load_source
from scalelong.training.autoencoder import AutoencoderSettings, train_autoencoder
from scalelong.training.build import build_model
from tests.training.tiny import tiny


@pytest.fixture
def other_devices(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The seeds that CUDA devices are given."""
    seeds: list[int] = []
    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeds.append)
    return seeds


def test_of_a_denoiser(other_devices: list[int]) -> None:
    before = torch.get_rng_state()
    one, same, other = (build_model(tiny(training_seed=seed), (1, 8, 8)).state_dict() for seed in (3, 3, 4))
    assert all(torch.equal(value, same[name]) for name, value in one.items())
    assert any(not torch.equal(value, other[name]) for name, value in one.items())
    assert torch.equal(torch.get_rng_state(), before)
    assert other_devices == []


def test_of_an_autoencoder(other_devices: list[int], tmp_path: Path) -> None:
    before = torch.get_rng_state()
    settings = AutoencoderSettings(widths=(8, 8), latent_channels=2, steps=1, batch_size=4, seed=3)
    train_autoencoder(load_source("digits"), tmp_path / "ae", settings)
    assert torch.equal(torch.get_rng_state(), before)
    assert other_devices == []
