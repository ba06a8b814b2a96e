"""`scalelong export`, `theory` and `doctor`; each imports what it needs."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import tyro

from scalelong.cli import RunFolder


@dataclass(frozen=True)
class Export:
    """Export a model from a run, with a model card: its weights for this package, or a pipeline that diffusers loads.

    Example: scalelong export runs/demo/cs --out exported/digits-cs

    Example: scalelong export runs/demo/cs --format diffusers --out exported/digits-pipeline
    """

    run: RunFolder  # the run's folder
    format: Literal["scalelong", "diffusers"] = "scalelong"  # weights and gates, or a pipeline folder
    out: str = ""  # default: RUN/export, or RUN/pipeline
    weights: str = "ema"  # ema or model
    checkpoint: int | None = None  # the step of the checkpoint; default: the newest
    sampler: str = ""  # the pipeline's: ddim, ddpm, dpm++2m, dpm++3m or heun; default: the run's, or dpm++2m


def export(arguments: list[str]) -> None:
    """Export and print where to and how to load it."""
    command = tyro.cli(Export, args=arguments, prog="scalelong export")
    from scalelong.pipelines import export_pipeline, export_weights
    from scalelong.training import load_run

    if command.sampler and command.format != "diffusers":
        raise ValueError(f"sampler: weights have none, got {command.sampler!r}; omit it or use --format diffusers")
    run = load_run(command.run, weights=command.weights, step=command.checkpoint)
    if command.format == "scalelong":
        print(f"step {run.step} ({run.weights}): {export_weights(run, command.out or run.folder / 'export')}")
        return
    exported = export_pipeline(run, command.out or run.folder / "pipeline", command.sampler)
    print(f"step {run.step} ({run.weights}): {exported.folder}; load it with\n\n{exported.loading()}\n")
    if exported.needs_us:
        print(f"Loading requires scalelong, since the scaling is not in the weights ({exported.needs_us})")


@dataclass(frozen=True)
class Theory:
    """Check the paper's lemma and theorems numerically: findings, one figure per statement, JSON and CSV.

    Example: scalelong theory --out runs/theory
    """

    out: str = "runs/theory"  # folder of the figures, theory.json, theory.csv and theory.md
    quick: bool = False  # small networks and few of them: takes seconds, too coarse to quote
    seed: int = 0


def theory(arguments: list[str]) -> None:
    """Verify, print, plot."""
    command = tyro.cli(Theory, args=arguments, prog="scalelong theory")
    from scalelong.lab import as_text, draw, verify_theory, write

    out, started = Path(command.out), time.perf_counter()
    out.mkdir(parents=True, exist_ok=True)
    studies = verify_theory(command.quick, command.seed)
    files = write(studies, out)
    print(as_text([finding for study in studies for finding in study.findings]))
    for study in studies:
        print(f"picture  {draw(study, out)}")
    print(f"numbers  {', '.join(map(str, files))}\nin all   {time.perf_counter() - started:.0f} s")


@dataclass(frozen=True)
class Doctor:
    """Report what this machine and this installation can do: versions, devices, extras, cached data, disk space.

    Example: scalelong doctor
    """

    root: str | None = None  # cache folder; default: $SCALELONG_DATA or the user's cache


def doctor(arguments: list[str]) -> None:
    """Check and print."""
    command = tyro.cli(Doctor, args=arguments, prog="scalelong doctor")
    checks = [*_installation(), *_devices(), *_cache(command.root)]
    width = max(len(name) for name, _, _ in checks)
    for name, result, remedy in checks:
        print(f"{'!' if remedy else ' '} {name.ljust(width)}  {result}{f'  -> {remedy}' if remedy else ''}")


Check = tuple[str, str, str]  # what was checked, the result, and what to do about it ("" if nothing)
_EXTRAS = {
    "tensorboard": "curves in TensorBoard",
    "wandb": "curves in Weights & Biases",
    "datasets": "data.name hf:NAME",
    "transformers": "text conditioning",
    "monai": "MONAI's networks",
}


def _installation() -> Iterator[Check]:
    yield "python", platform.python_version(), ""
    for package in ("scalelong", "torch", "diffusers", "accelerate"):
        yield package, importlib.metadata.version(package), ""
    for package, purpose in _EXTRAS.items():
        found = importlib.util.find_spec(package) is not None
        yield package, f"{'' if found else 'not '}installed ({purpose})", "" if found else f"pip install {package}"


def _devices() -> Iterator[Check]:
    import torch

    for index in range(torch.cuda.device_count()):
        memory = torch.cuda.get_device_properties(index).total_memory / 2**30
        bf16 = "bf16" if torch.cuda.is_bf16_supported() else "no bf16: use training.precision fp16"
        yield f"cuda:{index}", f"{torch.cuda.get_device_name(index)}, {memory:.0f} GiB, {bf16}", ""
    if not torch.cuda.is_available():
        yield "gpu", "none", "training runs on the CPU in fp32; enough for digits-demo, not for CIFAR-10"
    yield "cpu", f"{os.cpu_count()} cores, {torch.get_num_threads()} used by torch", ""


def _cache(root: str | None) -> Iterator[Check]:
    from scalelong.data import cache_dir

    folder = cache_dir(root)
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    cached = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
    writable = "" if os.access(existing, os.W_OK) else "not writable: set SCALELONG_DATA to a writable folder"
    yield "cache", f"{folder}: {', '.join(cached) or 'empty'}", writable
    free = shutil.disk_usage(existing).free / 2**30
    yield "free space", f"{free:.0f} GiB", "a checkpoint of a 44M model takes 0.7 GB" if free < 5 else ""
