"""How long an evaluation takes on this machine: sampling images with U-ViT-S/2, and their Inception features.

python benchmarks/generate.py --num 10000 --out benchmarks/results/generate.json
"""

from __future__ import annotations

import dataclasses
import time
from dataclasses import dataclass
from typing import Any, Literal

import torch
import tyro
from measure import about, kernel_table, write

from scalelong.backbones import UViT, UViTConfig
from scalelong.diffusion import VPSDE, Objective
from scalelong.evaluation import InceptionFeatures
from scalelong.runs.settings import SamplingPrecision, SamplingSettings
from scalelong.training import sample_batches


@dataclass(frozen=True)
class Benchmark:
    num: int = 10_000
    steps: int = 50
    batch_sizes: tuple[int, ...] = (1000, 2000)
    modes: tuple[Literal["eager", "compiled"], ...] = ("eager", "compiled")
    precision: SamplingPrecision = "bf16"
    inception: bool = True  # also time its features
    weights: str | None = None  # file of the Inception weights; default: fetched
    profile: bool = False  # the kernels of one evaluation of the network
    out: str = ""


def main() -> None:
    command = tyro.cli(Benchmark, description=__doc__)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    model = (
        UViT(UViTConfig(image_size=32, patch_size=2, dim=512, depth=12, heads=8))
        .to(device)
        .eval()
        .requires_grad_(False)
    )
    with torch.no_grad():
        model.final_layer.weight.mul_(0.1)  # untrained weights: keep the images finite
    result: dict[str, Any] = {**about(device), "images": command.num, "steps": command.steps, "rows": []}

    def add(what: str, seconds: float) -> None:
        result["rows"].append({"what": what, "seconds": seconds})
        print(result["rows"][-1], flush=True)
        write(command.out, result)

    images = torch.empty(0)
    for what in command.modes:
        net = torch.compile(model) if what == "compiled" else model
        for batch_size in command.batch_sizes:
            settings = SamplingSettings(
                "dpm++2m", command.steps, command.num, precision=command.precision, batch_size=batch_size
            )
            network = (Objective(VPSDE()), net, (3, 32, 32))
            warm_up = dataclasses.replace(settings, steps=2, count=batch_size)
            list(sample_batches(*network, warm_up, progress=False))
            started = time.perf_counter()
            images = torch.cat(list(sample_batches(*network, settings, progress=False)))
            add(f"{what}, batch {batch_size}", time.perf_counter() - started)
            if command.profile:
                with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
                    list(sample_batches(*network, warm_up, progress=False))
                    torch.cuda.synchronize()
                result["rows"][-1]["kernels"] = kernel_table(profile, warm_up.steps)
                write(command.out, result)
    for precision in ("fp32", "tf32") if command.inception else ():
        inception = InceptionFeatures(device, command.weights, precision=precision)
        inception(images[:1000])
        started = time.perf_counter()
        inception(images)
        add(f"Inception, {precision}", time.perf_counter() - started)


if __name__ == "__main__":
    main()
