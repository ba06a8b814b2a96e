"""Fréchet distance between Gaussians (FID) and kernel distance between samples (KID), in float64.

Shapes: n samples, D features.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from scalelong.errors import require
from scalelong.random import random_bits

Array = Tensor | np.ndarray
_LOCK = threading.Lock()


class FewSamplesWarning(UserWarning):
    """Too few samples to estimate the covariance; the distance is biased upwards."""


class KernelDistance(NamedTuple):
    """KID over random subsets; unbiased, so it may be negative."""

    mean: float
    sd: float  # between subsets


def frechet_distance(mean1: Array, cov1: Array, mean2: Array, cov2: Array) -> float:
    """|m1 - m2|^2 + tr(C1 + C2 - 2 (C1 C2)^(1/2)), Dowson and Landau 1982; warns where a covariance lacks rank.

    >>> frechet_distance(torch.zeros(2), torch.eye(2), torch.ones(2), torch.eye(2))
    2.0
    """
    first, second = checked_gaussian(mean1, cov1, "1"), checked_gaussian(mean2, cov2, "2")
    dims = [len(mean) for mean, _ in (first, second)]
    require(dims[0] == dims[1], "evaluation.mean2", f"of {dims[0]} features as mean1 is", dims[1])
    roots = [square_root(cov) for _, cov in (first, second)]
    for number, ((_, cov), root) in enumerate(zip((first, second), roots, strict=True), start=1):
        rank, live = root.shape[1], int((cov.diagonal() > 0).sum())
        if rank < live:
            few = f"evaluation.cov{number}: rank {rank} of {live} features that vary"
            remedy = (
                "the distance is too large and is not comparable with published values; use 10,000 or 50,000 images"
            )
            warnings.warn(f"{few}; {remedy}", FewSamplesWarning, stacklevel=2)
    # With C = S S^T, tr (C1 C2)^(1/2) is the sum of the singular values of S1^T S2: their absolute error is machine
    # precision, that of roots of the eigenvalues of C1 C2 is its root.
    with _one_thread():
        common = torch.linalg.svdvals(roots[0].T @ roots[1]).sum()
    traces = roots[0].square().sum() + roots[1].square().sum()
    distance = (first[0] - second[0]).square().sum() + traces - 2 * common
    return max(0.0, float(distance))  # rounding may give a small negative number


def square_root(cov: Tensor) -> Tensor:
    """S (D, rank) with S S^T = cov; directions without variance are dropped."""
    with _one_thread():
        values, vectors = torch.linalg.eigh(cov)
    keep = values > len(cov) * torch.finfo(cov.dtype).eps * values[-1].clamp(min=0)
    root: Tensor = vectors[:, keep] * values[keep].sqrt()
    return root


@contextmanager
def _one_thread() -> Iterator[None]:
    """Use one thread: two concurrent distances on two cores take 7 s instead of 106 s (benchmarks/frechet.py)."""
    with _LOCK:  # the number of threads is the whole process's
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            yield
        finally:
            torch.set_num_threads(threads)


def checked_gaussian(mean: Array, cov: Array, suffix: str) -> tuple[Tensor, Tensor]:
    """Validate and convert to float64 (D,) and (D, D) on the CPU."""
    m, c = torch.as_tensor(mean).detach().to("cpu").double(), torch.as_tensor(cov).detach().to("cpu").double()
    mean_key, cov_key = f"evaluation.mean{suffix}", f"evaluation.cov{suffix}"
    require(m.ndim == 1 and len(m) > 0, mean_key, "(D,) with D >= 1", tuple(m.shape))
    require(c.shape == (len(m), len(m)), cov_key, f"{(len(m), len(m))} as the mean is", tuple(c.shape))
    require_finite(m, mean_key)
    require_finite(c, cov_key)
    asymmetry = float((c - c.T).abs().max())
    require(asymmetry <= 1e-6 * float(c.abs().max()), cov_key, "symmetric (|C - C^T| = 0)", asymmetry)
    return m, 0.5 * (c + c.T)


def checked_features(features: Array, key: str, dim: int | None = None) -> Tensor:
    """Validate and convert to float64 (n, D), on the CPU or the same CUDA device."""
    tensor = torch.as_tensor(features).detach()
    if tensor.ndim != 2 or tensor.shape[1] == 0 or (dim is not None and tensor.shape[1] != dim):
        raise ValueError(f"{key}: must be (n, {dim or 'D'}), got {tuple(tensor.shape)}")
    tensor = (tensor if tensor.device.type in ("cpu", "cuda") else tensor.cpu()).double()  # others may lack float64
    require_finite(tensor, key)
    return tensor


def require_finite(tensor: Tensor, key: str) -> None:
    bad = int((~tensor.isfinite()).sum())
    if bad:
        raise ValueError(f"{key}: {bad} of {tensor.numel()} values are not finite; a network has diverged")


def kernel_distance(
    features1: Array, features2: Array, *, subset_size: int = 1000, subsets: int = 100, seed: int = 0
) -> KernelDistance:
    """KID (Binkowski et al. 2018): the unbiased MMD^2 under k(x, y) = (x.y / D + 1)^3, over random subsets of each set.

    >>> features = torch.randn(200, 4)
    >>> kernel_distance(features, features + 1, subset_size=50).mean > 0.1
    True
    """
    x = checked_features(features1, "evaluation.features1")
    y = checked_features(features2, "evaluation.features2", x.shape[1]).to(x.device)
    check_subsets(subset_size, subsets, min(len(x), len(y)))

    def value(k: int) -> float:
        return squared_mmd(_subset(x, seed, f"kid/1/{k}", subset_size), _subset(y, seed, f"kid/2/{k}", subset_size))

    values = torch.tensor([value(k) for k in range(subsets)], dtype=torch.float64)
    return KernelDistance(float(values.mean()), float(values.std(correction=0)))


def check_subsets(subset_size: int, subsets: int, fewest: int) -> None:
    """Raise a ValueError if the smaller set, with `fewest` samples, is too small for these subsets."""
    require(
        2 <= subset_size <= fewest, "evaluation.kid_subset_size", f"in 2 .. {fewest} (the smaller set)", subset_size
    )
    require(subsets >= 1, "evaluation.kid_subsets", "at least 1", subsets)


def squared_mmd(x: Tensor, y: Tensor) -> float:
    """Unbiased MMD^2 of two samples (n, D) and (m, D)."""
    n, m = len(x), len(y)
    within_x, within_y, between = ((a @ b.T / a.shape[1] + 1) ** 3 for a, b in ((x, x), (y, y), (x, y)))
    apart_x = (within_x.sum() - within_x.trace()) / (n * (n - 1))
    apart_y = (within_y.sum() - within_y.trace()) / (m * (m - 1))
    return float(apart_x + apart_y - 2 * between.mean())


def _subset(features: Tensor, seed: int, stream: str, size: int) -> Tensor:
    """`size` random rows without replacement."""
    keys = random_bits(seed, stream, torch.arange(len(features)))
    return features[torch.argsort(keys, stable=True)[:size].to(features.device)]
