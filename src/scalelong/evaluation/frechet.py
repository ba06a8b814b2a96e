"""The Frechet distance between two Gaussians, and the kernel distance between two samples.

FID is the Frechet distance between Gaussians fitted to Inception features, KID the kernel distance of those features.
All of it is computed in float64. Legend: n samples, D features.
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

from scalelong.random import random_bits

Array = Tensor | np.ndarray
_LOCK = threading.Lock()


class FewSamplesWarning(UserWarning):
    """A distance of covariances that the samples cannot determine: it is far too large, and grows as n falls."""


class KernelDistance(NamedTuple):
    """KID over random subsets; its expectation is 0 for equal distributions, so a value may be negative."""

    mean: float
    sd: float  # between subsets


def frechet_distance(mean1: Array, cov1: Array, mean2: Array, cov2: Array) -> float:
    """|m1 - m2|^2 + tr(C1 + C2 - 2 (C1 C2)^(1/2)), Dowson and Landau 1982; warns where a covariance lacks rank."""
    first, second = checked_gaussian(mean1, cov1, "1"), checked_gaussian(mean2, cov2, "2")
    if first[0].shape != second[0].shape:
        raise ValueError(
            f"evaluation.mean2: has {len(second[0])} features, mean1 has {len(first[0])}; "
            "both must come from the same extractor"
        )
    roots = [square_root(cov) for _, cov in (first, second)]
    for number, ((_, cov), root) in enumerate(zip((first, second), roots, strict=True), start=1):
        rank, live = root.shape[1], int((cov.diagonal() > 0).sum())
        if rank < live:
            warn_of_few_samples(f"evaluation.cov{number}: rank {rank} of {live} features that vary")
    return gaussian_distance(first[0], roots[0], second[0], roots[1])


def frechet_distance_of_features(features1: Array, features2: Array) -> float:
    """The same for Gaussians fitted to two sets of features (n, D)."""
    parts: list[Tensor] = []
    for number, features in enumerate((features1, features2), start=1):
        samples = checked_features(features, f"evaluation.features{number}")
        if len(samples) < 2:
            raise ValueError(f"evaluation.features{number}: needs at least 2 samples, got {len(samples)}; add images")
        parts += [samples.mean(0), torch.cov(samples.T).reshape(samples.shape[1], samples.shape[1])]
    return frechet_distance(*parts)


def gaussian_distance(mean1: Tensor, root1: Tensor, mean2: Tensor, root2: Tensor) -> float:
    """The formula, from roots of the covariances, C = S S^T: tr (C1 C2)^(1/2) is the sum of singular values of S1^T S2.

    They are found to an absolute error of machine precision; roots of the eigenvalues of a product would have the root
    of that error, once for each feature.
    """
    traces = root1.square().sum() + root2.square().sum()
    with _one_thread():
        common = torch.linalg.svdvals(root1.T @ root2).sum()
    distance = (mean1 - mean2).square().sum() + traces - 2 * common
    return max(0.0, float(distance))  # rounding may leave a trace of a negative number


def square_root(cov: Tensor) -> Tensor:
    """S (D, rank) with S S^T = cov; directions without variance are left out, not filled with rounding noise."""
    with _one_thread():
        values, vectors = torch.linalg.eigh(cov)
    keep = values > len(cov) * torch.finfo(cov.dtype).eps * values[-1].clamp(min=0)
    root: Tensor = vectors[:, keep] * values[keep].sqrt()
    return root


@contextmanager
def _one_thread() -> Iterator[None]:
    """Ranks and runs that share a machine decompose at the same time, and their threads would wait for one another.

    On two cores, two distances of 2048 features at once take 106 s so, and 7 s with one thread each
    (benchmarks/frechet.py). The number is the whole process's, so that only one decomposition at a time changes it.
    """
    with _LOCK:
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            yield
        finally:
            torch.set_num_threads(threads)


def warn_of_few_samples(what: str) -> None:
    warnings.warn(
        f"{what}; the distance is dominated by the small number of samples and compares with no published value; "
        "use more images (10,000 or 50,000 for FID)",
        FewSamplesWarning,
        stacklevel=3,
    )


def checked_gaussian(mean: Array, cov: Array, suffix: str) -> tuple[Tensor, Tensor]:
    """float64 (D,) and (D, D) on the CPU, or a ValueError that names what is wrong."""
    m, c = torch.as_tensor(mean).detach().to("cpu").double(), torch.as_tensor(cov).detach().to("cpu").double()
    if m.ndim != 1 or len(m) == 0:
        raise ValueError(f"evaluation.mean{suffix}: must be (D,) with D >= 1, got {tuple(m.shape)}")
    if c.shape != (len(m), len(m)):
        raise ValueError(f"evaluation.cov{suffix}: must be {(len(m), len(m))} as the mean is, got {tuple(c.shape)}")
    for key, value in (("mean", m), ("cov", c)):
        require_finite(value, f"evaluation.{key}{suffix}")
    asymmetry = float((c - c.T).abs().max())
    if asymmetry > 1e-6 * float(c.abs().max()):
        raise ValueError(f"evaluation.cov{suffix}: must be symmetric, entries differ by {asymmetry:.3g}")
    return m, 0.5 * (c + c.T)


def checked_features(features: Array, key: str, dim: int | None = None) -> Tensor:
    """float64 (n, D), on the CPU or on the CUDA device where they were."""
    tensor = torch.as_tensor(features).detach()
    if tensor.ndim != 2 or tensor.shape[1] == 0 or (dim is not None and tensor.shape[1] != dim):
        raise ValueError(f"{key}: must be (n, {dim or 'D'}), got {tuple(tensor.shape)}")
    if tensor.device.type not in ("cpu", "cuda"):
        tensor = tensor.to("cpu")  # not every accelerator has float64
    tensor = tensor.double()
    require_finite(tensor, key)
    return tensor


def require_finite(tensor: Tensor, key: str) -> None:
    bad = int((~tensor.isfinite()).sum())
    if bad:
        raise ValueError(
            f"{key}: {bad} of {tensor.numel()} values are not finite; the network that made the images or the "
            "features has diverged"
        )


def kernel_distance(
    features1: Array,
    features2: Array,
    *,
    subset_size: int = 1000,
    subsets: int = 100,
    seed: int = 0,
) -> KernelDistance:
    """KID (Binkowski et al. 2018): the unbiased MMD^2 under k(x, y) = (x.y / D + 1)^3, over random subsets of each set.

    The subsets are a function of `seed` and of the order of the features.
    """
    x = checked_features(features1, "evaluation.features1")
    y = checked_features(features2, "evaluation.features2", x.shape[1]).to(x.device)
    check_subsets(subset_size, subsets, min(len(x), len(y)))
    values = torch.tensor(
        [
            squared_mmd(_subset(x, seed, f"kid/1/{k}", subset_size), _subset(y, seed, f"kid/2/{k}", subset_size))
            for k in range(subsets)
        ],
        dtype=torch.float64,
    )
    return KernelDistance(float(values.mean()), float(values.std(correction=0)))


def check_subsets(subset_size: int, subsets: int, fewest: int) -> None:
    """A ValueError unless KID can draw such subsets of two sets, of which the smaller has `fewest` samples."""
    if not 2 <= subset_size <= fewest:
        raise ValueError(f"evaluation.kid_subset_size: must be in 2 .. {fewest} (the smaller set), got {subset_size}")
    if subsets < 1:
        raise ValueError(f"evaluation.kid_subsets: must be at least 1, got {subsets}")


def squared_mmd(x: Tensor, y: Tensor) -> float:
    """Unbiased MMD^2 of two samples (n, D) and (m, D): a sample is never compared with itself."""
    n, m = len(x), len(y)
    within_x, within_y, between = (_cubic_kernel(*pair) for pair in ((x, x), (y, y), (x, y)))
    apart_x = (within_x.sum() - within_x.trace()) / (n * (n - 1))
    apart_y = (within_y.sum() - within_y.trace()) / (m * (m - 1))
    return float(apart_x + apart_y - 2 * between.mean())


def _cubic_kernel(x: Tensor, y: Tensor) -> Tensor:
    return (x @ y.T / x.shape[1] + 1) ** 3


def _subset(features: Tensor, seed: int, stream: str, size: int) -> Tensor:
    """`size` different rows: those with the smallest random keys."""
    keys = random_bits(seed, stream, torch.arange(len(features)))
    return features[torch.argsort(keys, stable=True)[:size].to(features.device)]
