"""Speed of one training step of U-ViT-S/2 against the plain form of the same network, in the same run.

The peer concatenates [x, skip] before its linear layer, runs eagerly under autocast and keeps its average with one
multiply-add per tensor: what a training script does before anybody tunes it. Ours is `scalelong.training.Stepper`.

    python benchmarks/train_step.py --batch-sizes 64 128 --out benchmarks/results/train_step.json
"""

from __future__ import annotations

import dataclasses
import json
import platform
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import tyro
from torch import Tensor, nn

from scalelong.backbones import UViT, UViTConfig, as_network
from scalelong.backbones.uvit import SkipLinear
from scalelong.data import MemorySource, make_loader
from scalelong.diffusion import VPSDE, Objective, draw_time_and_noise
from scalelong.training import RunConfig, get_preset
from scalelong.training.build import build_model, build_objective
from scalelong.training.step import EMA, Pending, Stepper, sample_indices


@dataclass(frozen=True)
class Benchmark:
    batch_sizes: tuple[int, ...] = (64, 128)
    methods: tuple[str, ...] = ("none", "cs", "ls")
    compile: tuple[str, ...] = ("off", "default", "reduce-overhead")
    steps: int = 60
    out: str = ""


class ConcatLinear(nn.Linear):
    """The usual way: concatenate, then one linear layer."""

    def forward(self, x: Tensor, skip: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(torch.cat([x, skip], dim=-1))


def peer_steps(batch_size: int, device: torch.device, steps: int) -> float:
    """Seconds per step of the peer."""
    torch.manual_seed(0)
    model = UViT(UViTConfig(image_size=32, patch_size=2, dim=512, depth=12, heads=8)).to(device)
    for module in model.modules():
        if isinstance(module, SkipLinear):
            module.__class__ = ConcatLinear
    average = [p.detach().clone() for p in model.parameters()]
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-4)
    objective, net = Objective(VPSDE()), as_network(model)
    images = torch.randn(batch_size, 3, 32, 32, device=device)

    def step(number: int) -> None:
        index = torch.arange(batch_size, device=device) + number * batch_size
        t, noise = draw_time_and_noise(objective.process, 0, index, (3, 32, 32))
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            loss = objective.loss(net, images, noise, t).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            for mean, parameter in zip(average, model.parameters(), strict=True):
                mean.mul_(0.9999).add_(parameter, alpha=1e-4)

    return timed(step, steps, device)


def our_steps(config: RunConfig, device: torch.device, steps: int) -> float:
    """Seconds per step of the trainer's own stepper, loader and average."""
    images = torch.randint(0, 256, (5000, 3, 32, 32), dtype=torch.uint8)
    loader = make_loader(MemorySource("random", images), 0, device)
    model = build_model(config, (3, 32, 32)).to(device)
    ema = EMA(model, 0.9999)
    stepper = Stepper(config, model, build_objective(config), device)
    before: list[Pending] = []  # a step's numbers are read one step later, as the loop does

    def step(number: int) -> None:
        pending = stepper.compute(number + 1, loader.batches([sample_indices(config, number + 1, 0, 0, 1)]))
        if before:
            before.pop().read()
        before.append(pending)
        stepper.update(pending)
        ema.update(number + 1)
        stepper.clear()

    return timed(step, steps, device)


def timed(step: object, steps: int, device: torch.device) -> float:
    """Seconds per call after a warm-up of 12."""
    for number in range(12):
        step(number)  # type: ignore[operator]
    _wait(device)
    started = time.perf_counter()
    for number in range(12, 12 + steps):
        step(number)  # type: ignore[operator]
    _wait(device)
    return (time.perf_counter() - started) / steps


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def configured(method: str, batch_size: int, mode: str) -> RunConfig:
    preset = get_preset("cifar10-uvit-s2")
    return dataclasses.replace(
        preset,
        scaling=dataclasses.replace(preset.scaling, method=method),
        training=dataclasses.replace(preset.training, batch_size=batch_size, compile=mode, precision="auto"),
    )


def main() -> None:
    command = tyro.cli(Benchmark, description=__doc__)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    name = torch.cuda.get_device_name() if device.type == "cuda" else platform.processor()
    rows = []
    print(f"{name}, torch {torch.__version__}\n{'batch':>6}  {'what':32} {'ms/step':>8} {'img/s':>8} {'ratio':>6}")
    for batch_size in command.batch_sizes:
        peer = peer_steps(batch_size, device, command.steps)
        found = [("peer: concat, eager", peer)]
        for mode in command.compile:
            for method in command.methods:
                torch._dynamo.reset()
                seconds = our_steps(configured(method, batch_size, mode), device, command.steps)
                found.append((f"{method}, compile {mode}", seconds))
        for what, seconds in found:
            row = {"batch": batch_size, "what": what, "ms": seconds * 1e3, "images_per_second": batch_size / seconds}
            rows.append(row | {"ratio_to_peer": peer / seconds})
            print(
                f"{batch_size:6}  {what:32} {seconds * 1e3:8.2f} {batch_size / seconds:8.0f} {peer / seconds:6.2f}",
                flush=True,
            )
    if command.out:
        Path(command.out).parent.mkdir(parents=True, exist_ok=True)
        Path(command.out).write_text(json.dumps({"device": name, "torch": torch.__version__, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
