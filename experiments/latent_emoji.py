"""Latent diffusion with none, cs and ls: an autoencoder is trained, emoji are encoded, U-ViTs are trained on the latents.

python experiments/latent_emoji.py --steps 150 --autoencoder-steps 150   # minutes on one core; blurs, and not FID
python experiments/latent_emoji.py --scale gpu --jobs 3                  # about 6 minutes on an H200
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import tyro
from common import Options, compared, label, setting
from output import Claim, beats, print_claims, print_table, write_csv, write_summary

from scalelong.backbones.autoencoder import load_autoencoder
from scalelong.data import load_source
from scalelong.data.images import save_grid
from scalelong.data.latents import Origin, encode
from scalelong.evaluation import evaluate_run, get_extractor, reference_statistics
from scalelong.evaluation.evaluate import load_training_data
from scalelong.training import RunConfig, TrainedRun, get_preset
from scalelong.training.autoencoder import AutoencoderSettings, train_autoencoder

NAME = "latent-emoji"
DATA = "emoji32"


@dataclass(frozen=True)
class Latent(Options):
    """All options."""

    seeds: tuple[int, ...] = (0,)
    methods: tuple[str, ...] = ("none", "cs:0.7", "ls")
    autoencoder_steps: int = 0  # 0: 1,500 (cpu) or 4,000 (gpu)
    images: int = 0  # to measure; 0: 200 (cpu) or 10,000 (gpu)
    weights: str | None = None  # the Inception's file (gpu); default: fetched and verified


def main() -> None:
    options = tyro.cli(Latent, description=__doc__)
    out = options.folder(NAME)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    latents = encoded(options, device)
    base = latent_config(options, latents)
    rows: list[dict[str, Any]] = []
    for name, (series, run) in compared(base, options.methods, options, device).items():
        rows.append({"run": name, **quality(run, options, device), "final_loss": series.final_loss()})
        draw(run, out / f"{label(series).replace(' ', '-')}-seed{series.seed}.png")
    write_csv(rows, out / "quality.csv")
    claims = [claim(rows)]
    write_summary(out, claims, f"latents of {DATA}; {setting(base)}; dpm++2m, {base.sampling.steps} steps", table=rows)
    print_claims(claims)
    print()
    print_table(rows)


def encoded(options: Latent, device: torch.device) -> Path:
    """The latents, made once: an autoencoder of 4 x 16 x 16 latents is trained, and all emoji are encoded."""
    gpu = options.scale == "gpu"
    steps = options.autoencoder_steps or (4000 if gpu else 1500)
    settings = AutoencoderSettings(widths=(32, 64) if gpu else (16, 32), steps=steps, batch_size=128 if gpu else 32)
    folder = Path(options.runs) / f"{DATA}-autoencoder-{options.scale}-{steps}"
    source = load_source(DATA)
    if not folder.is_dir():
        found = train_autoencoder(source, folder, settings, device)
        print(f"autoencoder: PSNR {found.psnr:.2f} dB over {found.count} images", flush=True)
    latents = Path(options.runs) / f"{DATA}-latents-{options.scale}-{steps}"
    return encode(source, load_autoencoder(folder, device), latents, Origin(DATA), batch_size=256)


def latent_config(options: Latent, latents: Path) -> RunConfig:
    """The preset, shortened; smaller on a CPU."""
    gpu = options.scale == "gpu"
    steps = options.steps or (5000 if gpu else 600)
    preset = get_preset("emoji32-latent")
    model = preset.model if gpu else dataclasses.replace(preset.model, dim=64, depth=8)
    training = dataclasses.replace(
        preset.training,
        steps=steps,
        batch_size=128 if gpu else 16,
        compile="default" if gpu else "off",
        log_every=10,
        checkpoint_every=steps,
        sample_every=0,
    )
    return dataclasses.replace(
        preset,
        data=dataclasses.replace(preset.data, name=f"latents:{latents}"),
        model=model,
        optimizer=dataclasses.replace(preset.optimizer, warmup_steps=steps // 10),
        training=training,
        sampling=dataclasses.replace(preset.sampling, steps=25),
    )


def quality(run: TrainedRun, options: Latent, device: torch.device) -> dict[str, Any]:
    """The distance of decoded samples to the emoji themselves."""
    gpu = options.scale == "gpu"
    extractor = get_extractor("inception" if gpu else "random-conv", device, options.weights)
    reference = reference_statistics(load_training_data(run), extractor, root=run.config.data.root)
    sampling = dataclasses.replace(
        run.config.sampling,
        count=options.images or (10_000 if gpu else 200),
        batch_size=1000 if gpu else 50,
        precision="bf16" if gpu else "fp32",
    )
    evaluation = evaluate_run(run, extractor, reference, sampling)
    result = evaluation.result
    return {"metric": result.metric, "value": result.value, "images": result.n, "extractor": result.extractor}


def draw(run: TrainedRun, path: Path) -> None:
    """A grid of decoded samples; the same noise for every run."""
    save_grid(run.sample(run.config.sampling), path)


def claim(rows: Sequence[dict[str, Any]]) -> Claim:
    """Whether both of the paper's methods beat the unscaled network here."""
    values = {row["run"]: row["value"] for row in rows}
    listed = "; ".join(f"{name} {value:.2f}" for name, value in values.items())
    return Claim(
        "latent diffusion with CS and with LS has a lower FID than without scaling (Table 1, MS-COCO)",
        f"{rows[0]['metric']} of {rows[0]['images']:,} images: {listed}",
        beats(values, lower=True),
    )


if __name__ == "__main__":
    main()
