"""Train a small KL autoencoder for latent diffusion, in minutes on a CPU."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from scalelong.backbones.autoencoder import small_autoencoder
from scalelong.data import Source, make_loader, to_uint8
from scalelong.data.images import save_grid
from scalelong.files import atomic_folder
from scalelong.progress import Progress
from scalelong.random import normal
from scalelong.runs import METRICS
from scalelong.runs.validation import check_values
from scalelong.training.build import seeded

GRID = "reconstructions.png"


@dataclass(frozen=True)
class AutoencoderSettings:
    """Network and training settings."""

    widths: tuple[int, ...] = (16, 32)  # channels per level; every level after the first halves the image
    latent_channels: int = 4
    layers: int = 1  # per level
    steps: int = 1500
    batch_size: int = 32
    lr: float = 2e-3  # cosine decay to zero
    loss: Literal["l1", "l2"] = "l1"
    kl: float = 1e-4  # weight of the KL to N(0, 1), per latent value
    flip: bool = True
    seed: int = 0
    log_every: int = 100

    def __post_init__(self) -> None:
        check_values("autoencoder", self)


@dataclass(frozen=True)
class Trained:
    """A trained autoencoder."""

    folder: Path
    parameters: int
    psnr: float  # dB over `count` images, from the latents' means
    scale: float
    count: int


def train_autoencoder(
    source: Source, folder: str | Path, settings: AutoencoderSettings, device: str | torch.device = "cpu"
) -> Trained:
    """Train on a source and write the folder atomically: the model (`save_pretrained`), settings, metrics, a grid.

    >>> from scalelong.data import load_source
    >>> settings = AutoencoderSettings(widths=(8, 8), steps=2, batch_size=4)
    >>> train_autoencoder(load_source("digits"), "autoencoder", settings).count
    512
    """
    folder = Path(folder)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"out: {folder} exists and is not empty; choose another folder, or remove it")
    channels, size, _ = source.shape
    with seeded(settings.seed):
        model = small_autoencoder(channels, settings.widths, settings.latent_channels, settings.layers, size)
    model.to(device)
    with atomic_folder(folder) as staged:
        _train(model, source, settings, staged)
        count, psnr, scale = _finish(model, source, settings, staged)
    return Trained(folder, sum(p.numel() for p in model.parameters()), psnr, scale, count)


def _train(model: Any, source: Source, settings: AutoencoderSettings, folder: Path) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.lr, betas=(0.9, 0.99), weight_decay=0.0)
    loader = make_loader(source, settings.seed, model.device, flip=settings.flip)
    size = settings.batch_size
    batches = loader.batches(torch.arange(step * size, (step + 1) * size) for step in range(settings.steps))
    progress = Progress(batches, total=settings.steps, unit="step", desc="autoencoder")
    with progress as bar, (folder / METRICS).open("w") as metrics:
        for step, batch in enumerate(bar, 1):
            # a short linear warm-up, then a cosine to zero
            warm_up, cosine = step / (0.02 * settings.steps + 1), math.cos(math.pi * (step - 1) / settings.steps)
            optimizer.param_groups[0]["lr"] = settings.lr * (min(1.0, warm_up) * 0.5 * (1 + cosine))
            reconstruction, kl = _losses(model, batch.images, batch.index, settings)
            optimizer.zero_grad(set_to_none=True)
            (reconstruction + settings.kl * kl).backward()  # type: ignore[no-untyped-call]
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            if step % settings.log_every == 0 or step == settings.steps:
                record = {"step": step, "reconstruction": float(reconstruction.detach()), "kl": float(kl.detach())}
                if not math.isfinite(record["reconstruction"]):
                    raise ValueError(f"autoencoder.lr: the loss is {reconstruction} at step {step}; use a smaller rate")
                metrics.write(json.dumps(record) + "\n")
                metrics.flush()
                bar.set_postfix(reconstruction=f"{record['reconstruction']:.4f}")


def _losses(model: Any, images: Tensor, index: Tensor, settings: AutoencoderSettings) -> tuple[Tensor, Tensor]:
    """Mean reconstruction error, and the mean KL of one latent value to N(0, 1)."""
    posterior = model.encode(images).latent_dist
    noise = normal(settings.seed, "autoencoder", index, posterior.mean.shape[1:])
    decoded = model.decode(posterior.mean + posterior.std * noise).sample
    error = (decoded - images).abs() if settings.loss == "l1" else (decoded - images).square()
    kl = 0.5 * (posterior.mean.square() + posterior.var - 1.0 - posterior.logvar)
    return error.mean(), kl.mean()


def _finish(model: Any, source: Source, settings: AutoencoderSettings, folder: Path) -> tuple[int, float, float]:
    """Set the scaling factor for unit variance, evaluate and save; return (images, PSNR, factor)."""
    model.eval().requires_grad_(False)
    count = min(len(source), 512)
    images = source.prepare(source.read_many(range(count)), settings.seed, torch.arange(count), None)
    squares, error, decoded = 0.0, 0.0, []
    for part in torch.split(images, 64):
        posterior = model.encode(part.to(model.device)).latent_dist
        squares += float((posterior.mean.square() + posterior.var).mean()) * len(part)
        decoded.append(model.decode(posterior.mean).sample.cpu())
        error += float((decoded[-1].clamp(-1, 1) - part).square().mean()) * len(part)
    scale = (squares / count) ** -0.5
    model.register_to_config(scaling_factor=scale)
    model.save_pretrained(folder)
    psnr = 10 * math.log10(4.0 / max(error / count, 1e-12))
    measured = {"source": source.name, "fingerprint": source.fingerprint, "psnr": psnr, "images": count}
    (folder / "training.json").write_text(json.dumps({**asdict(settings), **measured}, indent=1) + "\n")
    shown = torch.linspace(0, count - 1, min(count, 24) // 8 * 8 or count).long()
    pairs = [rows[part] for part in torch.split(shown, 8) for rows in (images, torch.cat(decoded))]
    save_grid(to_uint8(torch.cat(pairs)), folder / GRID, columns=8)  # alternating rows of originals and reconstructions
    return count, psnr, scale
