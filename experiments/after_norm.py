"""Does it matter on which side of the GroupNorm kappa acts? The CIFAR-10 UNet unscaled, with CS before its norms (as the
paper scales, where most blocks cancel kappa but for their shortcut) and with CS after them (kappa acts in full), over seeds.

Example, one GPU:  python experiments/after_norm.py --steps 3000 --batch 64 --jobs 3 --out runs/after-norm
Example, CPU:      python experiments/after_norm.py --data fashion_mnist --channels 32 32 64 --steps 300 --batch 16 \
                       --out runs/after-norm-cpu

Writes runs.csv (a row per run), summary.json and after_norm.png into --out. Run again, it goes on with what is missing.
"""

from __future__ import annotations

import csv
import dataclasses
import json
import multiprocessing
import platform
import shlex
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import matplotlib
import torch
import tyro
from tqdm import tqdm

import scalelong
from scalelong.backbones import as_network
from scalelong.cli.train import oscillation_probe
from scalelong.data import load_source, to_float
from scalelong.diffusion import draw_time_and_noise
from scalelong.stability.probes import relative_oscillation, relative_spread
from scalelong.training import RunConfig, Trainer, get_preset, load_run, read_events
from scalelong.training.build import build_model

matplotlib.use("Agg")
import matplotlib.pyplot as plt

VARIANTS: dict[str, tuple[str, Literal["before", "after_norm"]]] = {
    "none": ("none", "before"),
    "cs before the norm": ("cs", "before"),
    "cs after the norm": ("cs", "after_norm"),
}
COLOURS = {"none": "#4e79a7", "cs before the norm": "#f28e2b", "cs after the norm": "#59a14f"}
MEASURES = ("final_loss", "test_loss", "gradient_spread", "feature_oscillation", "gradient_oscillation")


@dataclass(frozen=True)
class Settings:
    """What is on the command line."""

    out: str = "runs/after-norm"
    steps: int = 5000
    batch: int = 128
    seeds: tuple[int, ...] = (0, 1, 2)
    kappa: float = 0.5
    channels: tuple[int, ...] = (128, 256, 256, 256)
    data: str = "cifar10"
    lr: float = 2e-4
    warmup: int = 0  # 0: a tenth of the steps
    probe_every: int = 10
    test_images: int = 2048  # held-out images of the final loss
    compile: bool = False
    jobs: int = 1  # runs at once; small networks leave a GPU idle
    commit: str = ""  # default: asked of git


def run_config(settings: Settings, variant: str, seed: int) -> RunConfig:
    """The CIFAR-10 UNet preset, this long and this wide."""
    base = get_preset("cifar10-unet")
    method, placement = VARIANTS[variant]
    return dataclasses.replace(
        base,
        data=dataclasses.replace(base.data, name=settings.data),
        model=dataclasses.replace(base.model, channels=settings.channels),
        scaling=dataclasses.replace(base.scaling, method=method, kappa=settings.kappa, placement=placement),
        optimizer=dataclasses.replace(
            base.optimizer, lr=settings.lr, warmup_steps=settings.warmup or settings.steps // 10
        ),
        training=dataclasses.replace(
            base.training,
            steps=settings.steps,
            batch_size=settings.batch,
            seed=seed,
            compile="default" if settings.compile else "off",
            log_every=10,
            checkpoint_every=1000,
            sample_every=0,
        ),
    )


def run_folder(settings: Settings, variant: str, seed: int) -> Path:
    return Path(settings.out) / "runs" / f"{variant.replace(' ', '-')}-seed{seed}"


def train_one(settings: Settings, variant: str, seed: int) -> dict[str, Any]:
    """Train (or go on, or only read) one run and measure it."""
    torch.set_num_threads(1)
    folder = run_folder(settings, variant, seed)
    measured = folder / "measured.json"
    if measured.is_file():
        row: dict[str, Any] = json.loads(measured.read_text())
        return row
    trainer = Trainer(run_config(settings, variant, seed), folder)
    trainer.observers.append(oscillation_probe(trainer, settings.probe_every))
    trainer.run()
    row = {
        "variant": variant,
        "seed": seed,
        "reach": reach(trainer.config, trainer.source.shape),
        **measures(folder, settings.steps),
        "test_loss": test_loss(folder, settings, trainer.device),
        "seconds": round(trainer.seconds, 1),
    }
    measured.write_text(json.dumps(row) + "\n")
    return row


def measures(folder: Path, steps: int) -> dict[str, float]:
    """From a run's records: the loss of the last tenth, and how restless gradients and features were after the warm-up."""
    records = [record for record in read_events(folder)[0] if record["step"] > steps // 10]
    train = [record for record in records if record["kind"] == "train"]
    probes = [record for record in records if record["kind"] == "probe"]
    return {
        "final_loss": statistics.fmean(record["loss"] for record in train if record["step"] > 0.9 * steps),
        "gradient_spread": relative_spread([record["gradient_norm"] for record in train]),
        "feature_oscillation": oscillation(probes, "norm/"),
        "gradient_oscillation": oscillation(probes, "gradient/"),
    }


def oscillation(probes: Sequence[dict[str, Any]], prefix: str) -> float:
    """The mean over the stages of the U of how much of its size a norm moves between two records."""
    names = [name for name in probes[0] if name.startswith(prefix)]
    return statistics.fmean(relative_oscillation([record[name] for record in probes]) for name in names)


def test_loss(folder: Path, settings: Settings, device: torch.device) -> float:
    """The averaged weights' loss on held-out images, with the same times and noise for every run."""
    run = load_run(folder, device=device)
    source = load_source(settings.data, split="test")
    net, losses = as_network(run.model), []
    for first in range(0, min(settings.test_images, len(source)), 128):
        items = range(first, min(first + 128, settings.test_images, len(source)))
        images = to_float(source.read_many(items).to(device))
        index = torch.arange(items.start, items.stop, device=device)
        t, noise = draw_time_and_noise(run.objective.process, 12345, index, run.shape)
        with torch.no_grad():
            losses += run.objective.loss(net, images, noise, t).tolist()
    return statistics.fmean(losses)


def reach(config: RunConfig, shape: tuple[int, int, int]) -> str:
    """How far kappa reaches on the skips of this configuration's network, measured on it."""
    model = build_model(config, shape)
    if config.scaling.placement == "after_norm":
        counts = Counter(
            "full" if skip.after_norm else skip.reach for skip in scalelong.skips.hooks.attached_skips(model)
        )
    else:
        x, t = torch.randn(1, *shape, generator=torch.Generator().manual_seed(0)), torch.tensor([37])
        counts = Counter(skip.reach for skip in scalelong.find_skips(model, x, t))
    return " ".join(f"{kind}:{count}" for kind, count in sorted(counts.items()))


def train_all(settings: Settings) -> list[dict[str, Any]]:
    """Every variant and seed, `jobs` at a time, in processes of their own."""
    asked = [(variant, seed) for seed in settings.seeds for variant in VARIANTS]
    context = multiprocessing.get_context("spawn")
    rows = {}
    with ProcessPoolExecutor(settings.jobs, mp_context=context) as pool:
        futures = {pool.submit(train_one, settings, *each): each for each in asked}
        for future in tqdm(as_completed(futures), total=len(futures), unit="run", disable=None):
            rows[futures[future]] = future.result()
    return [rows[each] for each in asked]


def summarise(settings: Settings, rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Means over seeds, and differences from the unscaled run of the same seed, which saw the same images and noise."""
    found: dict[str, Any] = {}
    plain = {row["seed"]: row for row in rows if row["variant"] == "none"}
    for variant in VARIANTS:
        mine = [row for row in rows if row["variant"] == variant]
        found[variant] = {"reach": mine[0]["reach"]}
        for key in MEASURES:
            found[variant][key] = mean_and_sd([row[key] for row in mine])
            found[variant][f"{key}_minus_none"] = mean_and_sd([row[key] - plain[row["seed"]][key] for row in mine])
    return {
        "command": shlex.join(["python", "experiments/after_norm.py", *sys.argv[1:]]),
        "commit": settings.commit,
        "date": time.strftime("%Y-%m-%d"),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor() or "cpu",
        "torch": torch.__version__,
        "settings": {k: v for k, v in dataclasses.asdict(settings).items() if k not in ("out", "commit", "jobs")},
        "variants": found,
    }


def mean_and_sd(values: Sequence[float]) -> dict[str, float]:
    """One seed has no spread: 0."""
    return {"mean": statistics.fmean(values), "sd": statistics.stdev(values) if len(values) > 1 else 0.0}


def git_commit() -> str:
    done = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


def draw(settings: Settings, rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Loss against the unscaled run's, gradient norms, and restlessness; a band spans the seeds."""
    figure, (loss, gradient, bars) = plt.subplots(1, 3, figsize=(14, 4.2), layout="constrained")
    plain = curves(settings, "none", "loss")
    for variant, colour in COLOURS.items():
        steps, values = curves(settings, variant, "loss")
        differences = [
            [a - b for a, b in zip(one, other, strict=True)] for one, other in zip(values, plain[1], strict=True)
        ]
        band(loss, steps, [smoothed(each) for each in differences], colour, variant)
        band(gradient, *curves(settings, variant, "gradient_norm"), colour, variant)
    width = 0.8 / len(VARIANTS)
    for at, (variant, colour) in enumerate(COLOURS.items()):
        for group, key in enumerate(("feature_oscillation", "gradient_oscillation", "gradient_spread")):
            found = [row[key] for row in rows if row["variant"] == variant]
            place = group + (at - 1) * width
            bars.bar(place, statistics.fmean(found), width * 0.92, color=colour, label=variant if group == 0 else None)
            bars.plot([place] * len(found), found, "o", color="black", markersize=3)
    bars.set_xticks(range(3), ["features move", "gradients move", "gradient norm\nspreads"])
    titles = {
        loss: "Training loss minus the unscaled run's (same seed)",
        gradient: "Gradient norm",
        bars: "Restlessness after the warm-up, dots: seeds",
    }
    for axes, title in titles.items():
        axes.set_title(title, fontsize=10.5, loc="left")
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    loss.set_xlabel("step")
    gradient.set(xlabel="step", yscale="log")
    loss.legend(frameon=False, fontsize=9)
    figure.suptitle(
        f"κ = {settings.kappa}, {settings.data}, UNet {settings.channels}, batch {settings.batch}", fontsize=9
    )
    figure.savefig(path, dpi=110)
    plt.close(figure)


def curves(settings: Settings, variant: str, key: str) -> tuple[list[int], list[list[float]]]:
    """Steps, and a column of the training records of each seed."""
    steps: list[int] = []
    values: list[list[float]] = []
    for seed in settings.seeds:
        records = [r for r in read_events(run_folder(settings, variant, seed))[0] if r["kind"] == "train"]
        steps, values = [r["step"] for r in records], [*values, [r[key] for r in records]]
    return steps, values


def smoothed(values: Sequence[float], width: int = 20) -> list[float]:
    return [statistics.fmean(values[max(0, i - width + 1) : i + 1]) for i in range(len(values))]


def band(axes: plt.Axes, steps: list[int], values: list[list[float]], colour: str, label: str) -> None:
    columns = list(zip(*values, strict=True))
    axes.fill_between(
        steps, [min(c) for c in columns], [max(c) for c in columns], color=colour, alpha=0.15, linewidth=0
    )
    axes.plot(steps, [statistics.fmean(c) for c in columns], color=colour, linewidth=1.3, label=label)


def main() -> None:
    settings = tyro.cli(Settings, description=__doc__)
    settings = dataclasses.replace(settings, commit=settings.commit or git_commit())
    load_source(settings.data, split="test")  # missing data is refused before any work
    out = Path(settings.out)
    out.mkdir(parents=True, exist_ok=True)
    rows = train_all(settings)
    with (out / "runs.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    summary = summarise(settings, rows)
    (out / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")
    draw(settings, rows, out / "after_norm.png")
    for variant, found in summary["variants"].items():
        print(f"{variant:20} {found['reach']}")
        for key in MEASURES:
            mine, paired = found[key], found[f"{key}_minus_none"]
            print(
                f"  {key:22} {mine['mean']:.5f} ± {mine['sd']:.5f}   minus none {paired['mean']:+.5f} ± {paired['sd']:.5f}"
            )


if __name__ == "__main__":
    main()
