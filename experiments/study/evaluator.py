"""Loss on test images, and samples, of a run's weights.

Methods differ by 1e-4 in the loss: everything here is float32, so that rounding to bfloat16 does not add to that.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from network import BETA_MAX, BETA_MIN, Spec, build_model, compiled, marginal, predict_noise
from PIL import Image
from torch import Tensor
from weights import Weights

import scalelong
from scalelong.files import atomic_write

SAMPLER_STEPS, LAST_TIME = 50, 1e-3
FIXED_SEED = 20231  # test noises and starting noises, the same for every run of every piece
NOISE_BINS = 10
CHUNK = 500  # images that a GPU takes at once


class Evaluator:
    """A network of its own, in float32; `weights.load` sets the weights to evaluate."""

    def __init__(self, spec: Spec, test: Tensor) -> None:
        self.spec, device = spec, test.device
        self.model = build_model(spec).to(device).requires_grad_(False)
        self.weights = Weights(self.model, torch.float32)
        if device.type == "cuda" and spec.kernels:
            from fast_block import speed_up

            speed_up(self.model, self.weights)
        generator = torch.Generator(device).manual_seed(FIXED_SEED)
        self.noise = torch.randn(test.shape, device=device, generator=generator)
        self.t = (torch.arange(len(test), device=device) + 0.5) / len(test)
        alpha, sigma = marginal(self.t)
        self.x_t = alpha * (test.float() / 127.5 - 1) + sigma * self.noise
        self._predict = compiled(predict_noise, device.type == "cuda")
        self._chunk = (self.x_t[:CHUNK].clone(), self.t[:CHUNK].clone())
        self._replay = self._capture() if device.type == "cuda" else None

    def _capture(self) -> Callable[[], Tensor]:
        """Predict the noise of `_chunk`, as a CUDA graph; the result is overwritten by the next call."""
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

    def predict(self, x: Tensor, t: Tensor) -> Tensor:
        if self._replay is None or len(x) % len(self._chunk[0]):
            return self._predict(self.model, x, t)
        found = []
        for each in zip(x.split(CHUNK), t.split(CHUNK), strict=True):
            for static, value in zip(self._chunk, each, strict=True):
                static.copy_(value)
            found.append(self._replay().clone())
        return torch.cat(found)

    def losses(self) -> tuple[Tensor, list[float]]:
        """(n,) loss per test image, and the mean coefficient of each skip."""
        losses, kappas = [], []
        size = self.spec.eval_batch
        for x, t, noise in zip(self.x_t.split(size), self.t.split(size), self.noise.split(size), strict=True):
            losses.append((self.predict(x, t) - noise).square().flatten(1).mean(1))
            kappas.append(torch.tensor(scalelong.coefficients(self.model), dtype=torch.float64))
        return torch.cat(losses), torch.stack(kappas).mean(0).tolist()

    def samples(self) -> Tensor:
        """uint8 (num_samples, 3, 32, 32), each a function of the weights and its index alone."""
        device, shape, made = self.x_t.device, self.x_t.shape[1:], []
        for start in range(0, self.spec.num_samples, self.spec.eval_batch):
            generator = torch.Generator(device).manual_seed(FIXED_SEED + 1 + start)
            x = torch.randn(self.spec.eval_batch, *shape, device=device, generator=generator)
            made.append(to_uint8(sample(self.predict, x)).cpu())
        return torch.cat(made)[: self.spec.num_samples]


def bin_means(losses: Tensor) -> list[float]:
    """The mean loss in equal bins of t."""
    return [round(float(part.mean()), 7) for part in losses.chunk(NOISE_BINS)]


def sampling_times(steps: int) -> Tensor:
    """(steps,) float64 times from 1 to LAST_TIME, even in log(alpha / sigma)."""
    alpha, sigma = (v.flatten() for v in marginal(torch.tensor([1.0, LAST_TIME], dtype=torch.float64)))
    ends = (alpha / sigma).log()
    log_snr = torch.linspace(float(ends[0]), float(ends[1]), steps, dtype=torch.float64)
    area = 2 * (BETA_MAX - BETA_MIN) * torch.nn.functional.softplus(-2 * log_snr)
    return area / ((BETA_MIN**2 + area).sqrt() + BETA_MIN) / (BETA_MAX - BETA_MIN)


def sample(predict: Callable[[Tensor, Tensor], Tensor], x: Tensor, steps: int = SAMPLER_STEPS) -> Tensor:
    """DPM-Solver++(2M) from noise x (B, 3, H, W) to images in [-1, 1]; the last step goes to the clean image."""
    times = sampling_times(steps)
    alpha, sigma = (v.flatten().tolist() for v in marginal(times))
    log_snr = [math.log(a / s) for a, s in zip(alpha, sigma, strict=True)]
    previous, last_h = x, 0.0
    for i, t in enumerate(times.tolist()):
        x0 = ((x - sigma[i] * predict(x, torch.full((len(x),), t, device=x.device))) / alpha[i]).clamp(-1, 1)
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
