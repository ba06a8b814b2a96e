"""The loss of a trained run on fixed images, times and noises: the same for every method, so that differences show."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from scalelong.backbones import as_network
from scalelong.data import load_source, to_float
from scalelong.diffusion import draw_time_and_noise
from scalelong.training import TrainedRun, load_run

SEED = 1_000_003  # no run's own
COUNT, CHUNK = 2048, 256


def fixed_loss(folder: Path, split: str = "train") -> float:
    """Of the averaged weights; kept beside the run, so that it is computed once."""
    kept = folder / f"fixed_loss_{split}.json"
    if not kept.is_file():
        kept.write_text(json.dumps({"loss": _fixed_loss(load_run(folder, device=_device()), split)}))
    return float(json.loads(kept.read_text())["loss"])


@torch.no_grad()
def _fixed_loss(run: TrainedRun, split: str) -> float:
    config, device = run.config, _device()
    source = load_source(config.data.name, image_size=config.data.image_size, split=split, root=config.data.root)
    net, losses = as_network(run.model), []
    for start in range(0, COUNT, CHUNK):
        index = torch.arange(start, start + CHUNK)
        images = to_float(source.read_many((index % len(source)).tolist())).to(device)
        t, noise = draw_time_and_noise(run.objective.process, SEED, index.to(device), run.shape)
        losses.append(run.objective.loss(net, images, noise, t))
    return float(torch.cat(losses).mean())


def _device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"
