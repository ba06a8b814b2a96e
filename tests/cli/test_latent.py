"""Latent diffusion through the commands: autoencoder, encoding, training, sampling, evaluation."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from scalelong.cli.main import main

NETWORK = "--model.dim 16 --model.depth 4 --model.heads 2 --model.patch-size 2"
LENGTH = "--training.steps 2 --training.batch-size 4 --training.sample-every 2 --sampling.count 4 --sampling.steps 2"


def run(line: str) -> int:
    return main(line.split())


@pytest.mark.slow
def test_from_images_to_latents_to_images(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SCALELONG_DATA", str(tmp_path / "cache"))
    assert run("autoencoder train digits --out ae --widths 8 8 --latent-channels 2 --steps 3 --batch-size 8") == 0
    assert "PSNR" in capsys.readouterr().out
    assert run("data encode digits --autoencoder ae --out latents --batch-size 256") == 0
    assert "as latents of 2 x 4 x 4: train on latents:latents" in capsys.readouterr().out
    assert run("data encode digits --autoencoder ae --out latents --batch-size 256") == 0
    assert run("data check latents:latents") == 0
    train = f"train emoji32-latent --data.name latents:latents {NETWORK} {LENGTH} --out run"
    assert run(f"{train} --sampling.clip") == 1
    assert "sampling.clip: latents are not bound to [-1, 1]" in capsys.readouterr().err
    assert run(train) == 0
    assert (tmp_path / "run" / "samples" / "step-00000002.png").is_file()
    assert run("sample run --num 3 --steps 2") == 0
    samples = np.load(tmp_path / "run" / "samples" / "seed0.npz")["images"]
    assert (samples.shape, samples.dtype) == ((3, 8, 8, 1), np.uint8)
    assert run("evaluate run --num-samples 8 --extractor random-conv --steps 2") == 0
    capsys.readouterr()
    shutil.rmtree(tmp_path / "latents")
    assert run("autoencoder train digits --out other --widths 8 8 --latent-channels 2 --steps 4 --batch-size 8") == 0
    assert run("data encode digits --autoencoder other --out latents --batch-size 256") == 0
    assert run("sample run --num 3 --steps 2") == 1
    assert "holds other latents than the model was trained on" in capsys.readouterr().err
    assert run(train.replace("training.steps 2", "training.steps 4")) == 1
    assert "was trained on other data" in capsys.readouterr().err
