"""Loss on test images, and samples, of a run's weights.

Methods differ by 1e-4 in the loss: everything here is float32, so that rounding to bfloat16 does not add to that.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
import variants
from network import Spec, build_model, compiled, predict, use_kernels
from PIL import Image
from torch import Tensor
from weights import Weights

import scalelong
from scalelong.diffusion import Network, Objective
from scalelong.files import atomic_write

SAMPLER_STEPS = 50
FIXED_SEED = 20231  # test noises and starting noises, the same for every run of every piece
NOISE_BINS = 10
CHUNK = 500  # images that a GPU takes at once


class Evaluator:
    """A network of its own, in float32; `weights.load` sets the weights to evaluate."""

    def __init__(self, spec: Spec, test: Tensor) -> None:
        self.spec, device = spec, test.device
        self.model = build_model(spec).to(device).requires_grad_(False)
        self.weights = Weights(self.model, torch.float32)
        use_kernels(spec, self.model, self.weights)
        self.objective = replace(variants.objective(spec.changes), min_snr_gamma=0.0)
        generator = torch.Generator(device).manual_seed(FIXED_SEED)
        self.images = test.float() / 127.5 - 1
        self.noise = torch.randn(test.shape, device=device, generator=generator)
        self.t = self.objective.process.time_from_uniform((torch.arange(len(test), device=device) + 0.5) / len(test))
        self._predict = compiled(predict, device.type == "cuda")
        self._chunk = (self.images[:CHUNK].clone(), self.t[:CHUNK].clone())
        self._replay = self._capture() if device.type == "cuda" else None

    def _capture(self) -> Callable[[], Tensor]:
        """The prediction for `_chunk`, as a CUDA graph; the result is overwritten by the next call."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                self._predict(self.model, *self._chunk)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            found = self._predict(self.model, *self._chunk)

        def replay() -> Tensor:
            graph.replay()
            return found

        return replay

    def predict(self, x: Tensor, time: Tensor) -> Tensor:
        if self._replay is None or len(x) % len(self._chunk[0]):
            return self._predict(self.model, x, time)
        found = []
        for each in zip(x.split(CHUNK), time.split(CHUNK), strict=True):
            for static, value in zip(self._chunk, each, strict=True):
                static.copy_(value)
            found.append(self._replay().clone())
        return torch.cat(found)

    def losses(self) -> tuple[Tensor, list[float]]:
        """(n,) loss per test image, and the mean coefficient of each skip."""
        losses, kappas = [], []
        size = self.spec.eval_batch
        for part in zip(self.images.split(size), self.noise.split(size), self.t.split(size), strict=True):
            losses.append(self.objective.loss(self.predict, *part))
            kappas.append(torch.tensor(scalelong.coefficients(self.model), dtype=torch.float64))
        return torch.cat(losses), torch.stack(kappas).mean(0).tolist()

    def samples(self) -> Tensor:
        """uint8 (num_samples, 3, 32, 32), each a function of the weights and its index alone."""
        device, shape, made = self.images.device, self.images.shape[1:], []
        for start in range(0, self.spec.num_samples, self.spec.eval_batch):
            generator = torch.Generator(device).manual_seed(FIXED_SEED + 1 + start)
            x = torch.randn(self.spec.eval_batch, *shape, device=device, generator=generator)
            made.append(to_uint8(sample(self.objective, self.predict, x)).cpu())
        return torch.cat(made)[: self.spec.num_samples]


def bin_means(losses: Tensor) -> list[float]:
    """The mean loss in equal bins of t."""
    return [round(float(part.mean()), 7) for part in losses.chunk(NOISE_BINS)]


def sample(objective: Objective, net: Network, x: Tensor, steps: int = SAMPLER_STEPS) -> Tensor:
    """DPM-Solver++(2M) from noise x (B, 3, H, W) to images in [-1, 1]; the last step goes to the clean image.

    The library's sampler needs diffusers.
    """
    times = objective.process.sampling_times(steps, "snr")
    alpha, sigma = (factors.tolist() for factors in objective.process.marginal(times))
    log_snr = [math.log(a / s) for a, s in zip(alpha, sigma, strict=True)]
    previous, last_h = x, 0.0
    for i, t in enumerate(times.tolist()):
        x0 = objective.denoise(net, x, torch.full((len(x),), t, device=x.device))[0].clamp(-1, 1)
        if i + 1 == steps:
            return x0
        h = log_snr[i + 1] - log_snr[i]
        direction = x0 if i == 0 else x0 + (x0 - previous) * (h / last_h / 2)
        x = sigma[i + 1] / sigma[i] * x - alpha[i + 1] * math.expm1(-h) * direction
        previous, last_h = x0, h
    return x


def to_uint8(images: Tensor) -> Tensor:
    return ((images + 1) * 127.5).round().clamp(0, 255).to(torch.uint8)


def save_samples(path: Path, pixels: Tensor) -> None:
    """Write them whole or not at all: the FID process picks them up."""
    with atomic_write(path) as file:
        np.save(file, pixels.numpy())


def save_grid(path: Path, pixels: Tensor, columns: int = 8) -> None:
    rows = [torch.cat(list(row), dim=2) for row in pixels.split(columns) if len(row) == columns]
    if rows:
        Image.fromarray(torch.cat(rows, dim=1).permute(1, 2, 0).numpy()).save(path)
