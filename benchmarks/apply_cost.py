"""What `scalelong.apply` costs: the time to apply it to models of real size, and the forward time of CS against its peers.

The peers in the same run are the untouched model, and the same model with each skip multiplied by a number in a hand-written
hook; rounds alternate between them, and the median of the ratios within a round is printed.

    python benchmarks/apply_cost.py --out benchmarks/results/apply_cost.json
"""

from __future__ import annotations

import copy
import json
import statistics
import time
from dataclasses import dataclass
from typing import Any

import torch
import tyro
from measure import about, write
from torch import nn

import scalelong


@dataclass(frozen=True)
class Benchmark:
    rounds: int = 15
    out: str = ""


def stable_diffusion(name: str) -> nn.Module:
    """The UNet of Stable Diffusion 1.5 or SDXL on the meta device."""
    from diffusers import UNet2DConditionModel

    xl: dict[str, Any] = {
        "block_out_channels": (320, 640, 1280),
        "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
        "up_block_types": ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
        "transformer_layers_per_block": (1, 2, 10),
        "attention_head_dim": (5, 10, 20),
        "cross_attention_dim": 2048,
    }
    with torch.device("meta"):
        model: nn.Module = UNet2DConditionModel(**(xl if name == "SDXL" else {"cross_attention_dim": 768}))
    return model


def hand_scaled(model: nn.Module, kappa: float) -> nn.Module:
    """What a user would patch in: each up block multiplies its own skips."""
    found = scalelong.find_skips(model)
    order = {block: [s.index for s in reversed(found) if s.consumer == block] for block in {s.consumer for s in found}}

    def scale(indices: list[int]) -> Any:
        def hook(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            hidden, skips, *rest = args
            scaled = tuple(s * kappa ** (i - 1) for s, i in zip(reversed(skips), indices, strict=True))
            return (hidden, tuple(reversed(scaled)), *rest), kwargs

        return hook

    for block, indices in order.items():
        model.get_submodule(block).register_forward_pre_hook(scale(indices), with_kwargs=True)
    return model


def forward_ratios(rounds: int) -> dict[str, float]:
    """Median forward time of each variant over that of the untouched model, DDPM's CIFAR-10 UNet at batch 4."""
    from scalelong.backbones import ddpm_cifar10

    plain = ddpm_cifar10().eval()
    ours, peer = copy.deepcopy(plain), hand_scaled(copy.deepcopy(plain), 0.7)
    scalelong.apply(ours, "cs", kappa=0.7)
    x, t = torch.randn(4, 3, 32, 32), torch.tensor([1, 2, 3, 4])
    times: dict[str, list[float]] = {"untouched": [], "cs": [], "multiplied by hand": []}
    with torch.no_grad():
        assert torch.equal(ours(x, t).sample, peer(x, t).sample)
        for _ in range(rounds):
            for name, model in zip(times, (plain, ours, peer), strict=True):
                started = time.perf_counter()
                model(x, t)
                times[name].append(time.perf_counter() - started)
    return {
        name: statistics.median(a / b for a, b in zip(found, times["untouched"], strict=True))
        for name, found in times.items()
    }


def main() -> None:
    command = tyro.cli(Benchmark, description=__doc__)
    result: dict[str, Any] = {**about(torch.device("cpu")), "apply_seconds": {}}
    for name in ("SD-1.5", "SDXL"):
        model = stable_diffusion(name)
        for method in ("cs", "ls"):
            started = time.perf_counter()
            scalelong.apply(model, method)
            result["apply_seconds"][f"{name} {method}"] = time.perf_counter() - started
            scalelong.remove(model)
    result["forward_time_over_untouched"] = forward_ratios(command.rounds)
    print(json.dumps(result, indent=1))
    write(command.out, result)


if __name__ == "__main__":
    main()
