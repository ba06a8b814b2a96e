"""Do weaker long skips and conditioning on features add up? {none, cs, ls} x {plain, conditioned}, over seeds: FID and the
accuracy of linear probes, with heat maps of where in the network the classes can be read off.

python experiments/features.py                                      # 8x8 digits, on one core
python experiments/features.py --scale gpu --jobs 3                 # the study's network on CIFAR-10, 50,000 steps
python experiments/features.py --scale gpu --model s2 --seeds 0     # U-ViT-S/2 on CIFAR-10
python experiments/features.py --scale gpu --distill none           # also with self-distillation, on this method
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, Literal

import matplotlib.pyplot as plt
import torch
import tyro
from common import Options, base_config, trained, varied
from output import print_table, save, write_csv, write_summary

from scalelong.evaluation import evaluate_run, get_extractor, probe_run, reference_statistics
from scalelong.evaluation.evaluate import load_condition, load_training_data
from scalelong.evaluation.linear_probe import LinearProbe
from scalelong.runs.events import append_event
from scalelong.runs.reader import Run
from scalelong.runs.settings import SamplingSettings
from scalelong.training import RunConfig, load_run

NAME = "features"
METHODS = ("none", "cs:0.5", "ls")
PUBLISHED = {
    "DDPM, CIFAR-10, probe": "90.0%",
    "EDM, CIFAR-10, probe": "94.5%",
    "LightningDiT-B, ImageNet-256, FID-10k without and with DDAE++": "21.26, 20.85",
    "LightningDiT-B, ImageNet-256, probe without and with DDAE++": "64.9%, 66.6%",
}


@dataclass(frozen=True)
class Features(Options):
    """All options."""

    steps: int = 0  # of each run; 0: 400 (cpu) or 50,000 (gpu)
    model: Literal["proxy", "s2"] = "proxy"  # gpu: the study's network, or U-ViT-S/2
    distill: str = ""  # also train this method with self-distillation, conditioned
    images: int = 10_000  # sampled for the FID on a GPU; on a CPU, a tenth and without Inception


def main() -> None:
    options = tyro.cli(Features, description=__doc__)
    out = options.folder(f"{NAME}-{options.model}" if options.scale == "gpu" else NAME)
    variants = [(method, kind) for method in METHODS for kind in ("plain", "conditioned")]
    variants += [(options.distill, "distilled")] if options.distill else []
    asked = [(method, kind, seed) for method, kind in variants for seed in options.seeds]
    rows, maps = [], {}
    for (method, kind, seed), run in zip(
        asked, trained([config(options, *each) for each in asked], options), strict=True
    ):
        probe, distance = measured(run, options)
        floors = {"untrained": probe.random_network, "pixels": probe.pixels}
        where = {"block": probe.block, "noise": probe.level}
        quality = {"distance": distance, "probe": probe.accuracy, "loss": run.final_loss()}
        speed = {"images_per_second": run.throughput()}
        rows.append({"method": method, "kind": kind, "seed": seed, **quality, **where, **floors, **speed})
        maps.setdefault((method, kind), probe)
    write_csv(rows, out / "runs.csv")
    table = [averaged(rows, method, kind) for method, kind in variants]
    training, model = run.config.training, run.config.model
    network = f"{run.config.data.name}, U-ViT {model.dim} x {model.depth}"
    setting = f"{network}, {training.steps} steps, batch {training.batch_size}"
    write_summary(out, [], setting, table=table, published=PUBLISHED)
    draw(maps, setting, out / "heat_maps.png")
    print_table(table)


def config(options: Features, method: str, kind: str, seed: int) -> RunConfig:
    """Compiled without CUDA graphs, which distillation excludes, as it does compiling at all."""
    gpu = options.scale == "gpu"
    base = varied(base_config(options.scale, options.steps or (50_000 if gpu else 400)), method, seed)
    training = dataclasses.replace(base.training, compile="off" if kind == "distilled" or not gpu else "default")
    if gpu:
        training = dataclasses.replace(training, batch_size=128, log_every=100)
        base = dataclasses.replace(base, optimizer=dataclasses.replace(base.optimizer, warmup_steps=2500))
    if gpu and options.model == "proxy":
        base = dataclasses.replace(base, model=dataclasses.replace(base.model, patch_size=4, dim=256, heads=4))
    return dataclasses.replace(
        base,
        training=training,
        features=dataclasses.replace(base.features, conditioning=kind != "plain"),
        distillation=dataclasses.replace(base.distillation, weight=0.1 if kind == "distilled" else 0.0),
    )


def measured(run: Run, options: Features) -> tuple[LinearProbe, float]:
    """The probe of a run and its distance to the data (FID on a GPU); a probe is recorded, and taken from the records."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    loaded = load_run(run.folder, device=device)
    known = next((dict(record) for record in run.linear_probes if record["step"] == loaded.step), None)
    if known is None:
        probe = probe_run(loaded, cache=False)
        append_event(run.folder, loaded.step, "linear_probe", probe.record())
    else:
        probe = LinearProbe(**{field.name: known[field.name] for field in dataclasses.fields(LinearProbe)})
    gpu = options.scale == "gpu"
    extractor = get_extractor("inception" if gpu else "random-conv", device)
    source = load_training_data(loaded)
    sampling = SamplingSettings("dpm++2m", steps=50, count=options.images if gpu else options.images // 10)
    sampling = dataclasses.replace(sampling, precision="bf16" if gpu else "fp32")
    reference, condition = reference_statistics(source, extractor), load_condition(loaded, source)
    return probe, evaluate_run(loaded, extractor, reference, sampling, condition=condition).result.value


def averaged(rows: Sequence[dict[str, Any]], method: str, kind: str) -> dict[str, Any]:
    """Mean ± sd over seeds; one seed has no spread."""
    mine = [row for row in rows if (row["method"], row["kind"]) == (method, kind)]
    cells = {}
    for key in ("distance", "probe", "loss", "images_per_second"):
        values = [row[key] for row in mine]
        cells[key] = f"{fmean(values):.5g}" + (f" ± {stdev(values):.2g}" if len(values) > 1 else "")
    return {"method": method, "kind": kind, "seeds": len(mine), **cells, "block": mine[0]["block"]}


def draw(maps: dict[tuple[str, str], LinearProbe], title: str, path: Path) -> None:
    """Accuracy by block and noise level, one picture for each variant on one scale, of the first seed."""
    figure, axes = plt.subplots(1, len(maps), figsize=(3.4 * len(maps), 4.2), layout="constrained", squeeze=False)
    values = [value for probe in maps.values() for row in probe.held_out for value in row]
    for axis, ((method, kind), probe) in zip(axes[0], maps.items(), strict=True):
        image = axis.imshow(probe.held_out, vmin=min(values), vmax=max(values), aspect="auto", cmap="viridis")
        axis.set_title(f"{method}, {kind}: {100 * probe.accuracy:.1f}%", fontsize=9.5, loc="left")
        axis.set_xticks(range(len(probe.noise)), [f"{level:.2g}" for level in probe.noise], fontsize=7, rotation=90)
        axis.set_yticks(range(len(probe.blocks)), probe.blocks if axis is axes[0][0] else [], fontsize=7)
        axis.set_xlabel("noise level", fontsize=8)
    figure.colorbar(image, ax=axes, label="held-out accuracy")
    figure.suptitle(title, fontsize=10)
    save(figure, path)


if __name__ == "__main__":
    main()
