"""Say what this machine and this installation can do: versions, devices, extras, cached data, space.

Example: scalelong doctor
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import tyro

from scalelong.data import cache_dir

_EXTRAS = {
    "tensorboard": "curves in TensorBoard",
    "wandb": "curves in Weights & Biases",
    "datasets": "data.name hf:NAME",
    "transformers": "text conditions",
    "monai": "MONAI's networks",
}
_TIGHT_BYTES = 5 * 2**30


@dataclass(frozen=True)
class Doctor:
    """What is on the command line."""

    root: str | None = None  # cache folder; default: $SCALELONG_DATA or the user's cache


@dataclass(frozen=True)
class Finding:
    """One line: what was looked at, what was found, and what to do if it is not as it should be."""

    what: str
    found: str
    remedy: str = ""


def main(arguments: list[str]) -> None:
    """Look and print."""
    command = tyro.cli(Doctor, args=arguments, prog="scalelong doctor", description=__doc__)
    findings = [*_versions(), *_devices(), *_extras(), *_cache(cache_dir(command.root))]
    width = max(len(finding.what) for finding in findings)
    for finding in findings:
        remedy = f"  -> {finding.remedy}" if finding.remedy else ""
        print(f"{'!' if finding.remedy else ' '} {finding.what.ljust(width)}  {finding.found}{remedy}")


def _versions() -> Iterator[Finding]:
    yield Finding("python", platform.python_version())
    for package in ("scalelong", "torch", "diffusers", "accelerate"):
        yield Finding(package, importlib.metadata.version(package))


def _devices() -> Iterator[Finding]:
    for index in range(torch.cuda.device_count()):
        memory = torch.cuda.get_device_properties(index).total_memory / 2**30
        bf16 = "bf16" if torch.cuda.is_bf16_supported() else "no bf16: use training.precision fp16"
        yield Finding(f"cuda:{index}", f"{torch.cuda.get_device_name(index)}, {memory:.0f} GiB, {bf16}")
    if not torch.cuda.is_available():
        yield Finding("gpu", "none", "training runs on the CPU in fp32; enough for digits-demo, not for CIFAR-10")
    yield Finding("cpu", f"{os.cpu_count()} cores, {torch.get_num_threads()} used by torch")


def _extras() -> Iterator[Finding]:
    for package, gives in _EXTRAS.items():
        if importlib.util.find_spec(package):
            yield Finding(package, f"installed ({gives})")
        else:
            yield Finding(package, f"not installed ({gives})", f"pip install {package}")


def _cache(folder: Path) -> Iterator[Finding]:
    here = folder
    while not here.exists():
        here = here.parent
    held = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
    writable = "" if os.access(here, os.W_OK) else "not writable: set SCALELONG_DATA to a folder you may write to"
    yield Finding("cache", f"{folder}: {', '.join(held) or 'empty'}", writable)
    free = shutil.disk_usage(here).free
    tight = "checkpoints of a 44M model take 0.7 GB each" if free < _TIGHT_BYTES else ""
    yield Finding("free space", f"{free / 2**30:.0f} GiB", tight)
