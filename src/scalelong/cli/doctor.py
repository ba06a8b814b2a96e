"""`scalelong doctor`."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import shutil
from collections.abc import Iterator
from dataclasses import dataclass

import tyro


@dataclass(frozen=True)
class Doctor:
    """Report versions, devices, extras, cached data and disk space.

    Example: scalelong doctor
    """

    root: str | None = None  # cache folder; default: $SCALELONG_DATA or the user's cache


def main(arguments: list[str]) -> None:
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
