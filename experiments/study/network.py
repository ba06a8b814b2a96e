"""What training and evaluation share: the settings of a run, its images, its network and the prediction.

Shapes: B batch, n images; images are uint8 (n, 3, 32, 32).
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import variants
from entries import Recipe
from torch import Tensor, nn
from weights import Weights

import scalelong
from scalelong.backbones import UViT, UViTConfig, ddpm_cifar10


@dataclass(frozen=True)
class Spec(Recipe):
    """Settings of one run."""

    name: str
    method: str
    seed: int
    folder: str  # NAME.jsonl, NAME.png and samples/ are written here
    options: dict[str, Any] = field(default_factory=dict)
    changes: dict[str, Any] = field(default_factory=dict)  # see variants.py
    data: str = ""  # .npz with uint8 arrays train and test; empty: random images, to measure speed
    train_images: int = 50_000  # of random data
    test_images: int = 4000
    num_samples: int = 10_000
    eval_batch: int = 1000
    steps_per_graph: int = 5
    kernels: bool = True  # use the Triton kernels on a GPU
    deadline: float = math.inf  # Unix time at which training stops, wherever it is


def write_spec(spec: Spec, path: Path) -> None:
    path.write_text(json.dumps(asdict(spec)))


def read_spec(path: Path) -> Spec:
    content = json.loads(path.read_text())
    return Spec(**{**content, "fid_at": tuple(content["fid_at"])})


def read_images(spec: Spec) -> tuple[Tensor, Tensor]:
    """uint8 train and test images; random ones where no data is given."""
    if not spec.data:
        made = torch.randint(0, 256, (spec.train_images + spec.test_images, 3, 32, 32), dtype=torch.uint8)
        return made[: spec.train_images], made[spec.train_images :]
    with np.load(spec.data) as arrays:
        return torch.from_numpy(arrays["train"]), torch.from_numpy(arrays["test"][: spec.test_images])


def build_model(spec: Spec) -> nn.Module:
    """The scaled network; the weights outside the gates depend on the seed alone."""
    torch.manual_seed(spec.seed)
    if spec.network == "unet":
        model = ddpm_cifar10(block_out_channels=(spec.dim, *[2 * spec.dim] * 3))
    else:
        sizes = {"patch_size": spec.patch, "dim": spec.dim, "depth": spec.depth, "heads": spec.heads}
        model = UViT(UViTConfig(image_size=32, **sizes))
    scalelong.apply(model, spec.method, placement=spec.changes.get("placement", "before"), **spec.options)
    variants.change(model, spec.changes)
    return model


def predict(model: nn.Module, x: Tensor, time: Tensor, low_precision: bool = False) -> Tensor:
    """The network's prediction in float32."""
    with torch.autocast(x.device.type, torch.bfloat16, enabled=low_precision and x.is_cuda):
        return (model(x, time) if isinstance(model, UViT) else model(x, time, return_dict=False)[0]).float()


def use_kernels(spec: Spec, model: nn.Module, weights: Weights) -> None:
    """Use the Triton kernels in a U-ViT on a GPU."""
    if spec.kernels and isinstance(model, UViT) and weights.master.is_cuda:
        from fast_block import speed_up

        speed_up(model, weights)


def compiled(function: Callable[..., Any], on_gpu: bool) -> Callable[..., Any]:
    return torch.compile(function, fullgraph=True, dynamic=False) if on_gpu else function
