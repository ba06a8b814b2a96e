from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from scalelong.backbones.autoencoder import load_autoencoder, small_autoencoder
from scalelong.data import load_source, to_float
from scalelong.training.autoencoder import GRID, AutoencoderSettings, train_autoencoder

SHORT = AutoencoderSettings(widths=(8, 8), latent_channels=2, steps=40, batch_size=16, lr=1e-2, log_every=1)


def test_reconstructions_improve_and_latents_get_unit_variance(tmp_path: Path) -> None:
    source = load_source("digits")
    trained = train_autoencoder(source, tmp_path / "ae", SHORT)
    records = [json.loads(line) for line in (tmp_path / "ae" / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records] == list(range(1, 41))
    assert records[-1]["reconstruction"] < 0.7 * records[0]["reconstruction"]
    assert (tmp_path / "ae" / GRID).is_file()
    found = load_autoencoder(tmp_path / "ae")
    assert found.scale == pytest.approx(trained.scale)
    moments = found.moments(to_float(source.read_many(range(256))))
    noise = torch.randn(moments[:, 0].shape, generator=torch.Generator().manual_seed(0))
    sample = moments[:, 0] + torch.exp(0.5 * moments[:, 1]) * noise
    assert float((sample * found.scale).square().mean()) == pytest.approx(1.0, abs=0.1)
    again = train_autoencoder(source, tmp_path / "again", SHORT)
    torch.testing.assert_close(
        load_autoencoder(again.folder).model.state_dict(), found.model.state_dict(), rtol=1e-3, atol=1e-4
    )
    with pytest.raises(ValueError, match="exists and is not empty"):
        train_autoencoder(source, tmp_path / "ae", SHORT)


def test_bad_settings_are_refused_and_nothing_is_left(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"autoencoder\.steps: must be at least 1, got 0"):
        AutoencoderSettings(steps=0)
    with pytest.raises(ValueError, match=r"autoencoder\.widths: must be multiples of 8, got \(12,\)"):
        small_autoencoder(widths=(12,))
    with pytest.raises(ValueError, match="5 levels halve the image 4 times, which 8 pixels do not allow"):
        train_autoencoder(load_source("digits"), tmp_path / "ae", AutoencoderSettings(widths=(8,) * 5))
    with pytest.raises(ValueError, match=r"autoencoder\.lr: the loss is nan"):
        train_autoencoder(
            load_source("digits"), tmp_path / "ae", AutoencoderSettings((8,), steps=9, lr=1e18, log_every=1)
        )
    assert list(tmp_path.iterdir()) == []
