"""The peers are torchmetrics (FID and KID on the same features) and scipy's matrix square root."""

from __future__ import annotations

import itertools
import math
import warnings

import numpy as np
import pytest
import scipy.linalg
import torch
from torch import Tensor, nn

from scalelong.evaluation import (
    FewSamplesWarning,
    frechet_distance,
    kernel_distance,
)
from scalelong.evaluation.frechet import squared_mmd
from tests.evaluation.distance import frechet_distance_of_features


def features(n: int, dim: int, seed: int, shift: float = 0.0) -> Tensor:
    """Correlated, skewed and non-negative, as pooled activations are."""
    generator = torch.Generator().manual_seed(seed)
    mix = torch.randn(dim, dim, generator=generator, dtype=torch.float64) / math.sqrt(dim)
    return (torch.randn(n, dim, generator=generator, dtype=torch.float64) @ mix + shift).relu()


def covariance(dim: int, seed: int) -> Tensor:
    root = torch.randn(dim, dim, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return root @ root.T


def by_sqrtm(mean1: Tensor, cov1: Tensor, mean2: Tensor, cov2: Tensor) -> float:
    root = scipy.linalg.sqrtm((cov1 @ cov2).numpy())
    return float((mean1 - mean2).square().sum() + cov1.trace() + cov2.trace()) - 2 * float(np.trace(root).real)


class Same(nn.Module):
    """Features are the images."""

    num_features = 64

    def forward(self, x: Tensor) -> Tensor:
        return x


def test_equals_torchmetrics() -> None:
    fid = pytest.importorskip("torchmetrics.image.fid")
    real, fake = features(500, 64, 0), features(400, 64, 1, shift=0.2)
    peer = fid.FrechetInceptionDistance(feature=Same(), input_img_size=(64,)).set_dtype(torch.float64)
    peer.update(real, real=True)
    peer.update(fake, real=False)
    assert frechet_distance_of_features(real, fake) == pytest.approx(float(peer.compute()), rel=1e-6)


@pytest.mark.parametrize("dim", [1, 2, 7, 40])
def test_equals_scipys_matrix_square_root(dim: int) -> None:
    for seed in range(5):
        gaussians = [
            (torch.randn(dim, generator=torch.Generator().manual_seed(k), dtype=torch.float64), covariance(dim, k))
            for k in (seed, seed + 100)
        ]
        flat = (*gaussians[0], *gaussians[1])
        assert frechet_distance(*flat) == pytest.approx(by_sqrtm(*flat), rel=1e-6)


def test_closed_form_where_covariances_commute() -> None:
    a, b = torch.rand(9, dtype=torch.float64) + 0.1, torch.rand(9, dtype=torch.float64) + 0.1
    rotation = torch.linalg.qr(torch.randn(9, 9, dtype=torch.float64)).Q
    mean = torch.linspace(-1, 1, 9, dtype=torch.float64)
    want = float(mean.square().sum() + (a.sqrt() - b.sqrt()).square().sum())
    rotated = (rotation @ torch.diag(a) @ rotation.T, rotation @ torch.diag(b) @ rotation.T)
    assert frechet_distance(mean, rotated[0], 0 * mean, rotated[1]) == pytest.approx(want, rel=1e-12)


def test_closed_form_in_two_dimensions() -> None:
    """tr (C1 C2)^(1/2) = sqrt(tr C1 C2 + 2 sqrt(det C1 C2)) for any two 2 x 2 covariances."""
    zero = torch.zeros(2)
    for seed in range(20):
        a, b = covariance(2, seed), covariance(2, seed + 50)
        assert not torch.allclose(a @ b, b @ a)
        root = math.sqrt(float((a @ b).trace()) + 2 * math.sqrt(float(torch.linalg.det(a @ b))))
        want = float(a.trace() + b.trace()) - 2 * root
        assert frechet_distance(zero, a, zero, b) == pytest.approx(want, rel=1e-9)


def test_is_symmetric_zero_on_itself_and_blind_to_rotation() -> None:
    x, y = features(300, 32, 3), features(300, 32, 4, shift=0.1)
    forth, back = frechet_distance_of_features(x, y), frechet_distance_of_features(y, x)
    assert forth == pytest.approx(back, rel=1e-12)
    assert forth > 0.01
    assert frechet_distance_of_features(x, x) < 1e-10
    rotation = torch.linalg.qr(torch.randn(32, 32, dtype=torch.float64)).Q
    assert frechet_distance_of_features(x @ rotation, y @ rotation) == pytest.approx(forth, rel=1e-10)


def test_few_samples_warn_and_are_exact() -> None:
    """With n <= D the covariances lack rank; the trace of the root is then the nuclear norm of the centred products."""
    x, y = features(12, 40, 5), features(9, 40, 6)
    with pytest.warns(FewSamplesWarning, match=r"evaluation\.cov\d: rank (11|8) of 40"):
        found = frechet_distance_of_features(x, y)
    cx, cy = (x - x.mean(0)) / math.sqrt(11), (y - y.mean(0)) / math.sqrt(8)
    root = torch.linalg.svdvals(cx @ cy.T).sum()
    want = (x.mean(0) - y.mean(0)).square().sum() + cx.square().sum() + cy.square().sum() - 2 * root
    assert found == pytest.approx(float(want), rel=1e-10)
    with pytest.warns(FewSamplesWarning):
        assert frechet_distance_of_features(x, x) < 1e-10


def test_features_that_never_vary_are_no_lack_of_samples() -> None:
    x, y = features(300, 16, 7), features(300, 16, 8)
    x[:, 3] = y[:, 3] = 0.0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with_dead = frechet_distance_of_features(x, y)
    live = [k for k in range(16) if k != 3]
    assert with_dead == pytest.approx(frechet_distance_of_features(x[:, live], y[:, live]), rel=1e-12)


def test_errors_name_the_argument() -> None:
    mean, cov = torch.zeros(3), torch.eye(3)
    with pytest.raises(ValueError, match=r"evaluation\.mean2: must be of 3 features as mean1 is, got 4"):
        frechet_distance(mean, cov, torch.zeros(4), torch.eye(4))
    with pytest.raises(ValueError, match=r"evaluation\.cov2: must be \(3, 3\)"):
        frechet_distance(mean, cov, mean, torch.eye(4))
    with pytest.raises(ValueError, match=r"evaluation\.mean1: must be \(D,\)"):
        frechet_distance(torch.zeros(1, 3), cov, mean, cov)
    with pytest.raises(ValueError, match=r"evaluation\.cov1: 1 of 9 values are not finite"):
        frechet_distance(mean, torch.diag_embed(torch.tensor([1.0, math.inf, 1.0])), mean, cov)
    with pytest.raises(ValueError, match=r"evaluation\.cov1: must be symmetric"):
        frechet_distance(mean, torch.eye(3).roll(1, 0), mean, cov)


def test_decompositions_take_one_thread_and_give_the_others_back(monkeypatch) -> None:
    """Two processes on the same cores would otherwise wait for each other's threads, many times as long as they work."""
    seen: list[int] = []

    def watched(name: str) -> None:
        real = getattr(torch.linalg, name)
        monkeypatch.setattr(torch.linalg, name, lambda matrix: seen.append(torch.get_num_threads()) or real(matrix))

    watched("eigh")
    watched("svdvals")
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        frechet_distance(torch.zeros(3), torch.eye(3), torch.ones(3), torch.eye(3))
        assert seen == [1, 1, 1]
        assert torch.get_num_threads() == 2
        monkeypatch.setattr(torch.linalg, "eigh", lambda _: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            frechet_distance(torch.zeros(3), torch.eye(3), torch.ones(3), torch.eye(3))
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_takes_numpy_arrays() -> None:
    x, y = features(50, 4, 9), features(50, 4, 10)
    assert frechet_distance_of_features(x.numpy(), y.numpy()) == frechet_distance_of_features(x, y)


def test_squared_mmd_is_the_double_sum() -> None:
    x, y = features(7, 5, 11), features(6, 5, 12)

    def k(a: Tensor, b: Tensor) -> float:
        return (float(a @ b) / 5 + 1) ** 3

    same_x = sum(k(a, b) for a, b in itertools.permutations(x, 2)) / (7 * 6)
    same_y = sum(k(a, b) for a, b in itertools.permutations(y, 2)) / (6 * 5)
    mixed = sum(k(a, b) for a in x for b in y) / (7 * 6)
    assert squared_mmd(x, y) == pytest.approx(same_x + same_y - 2 * mixed, rel=1e-12)


def test_squared_mmd_equals_torchmetrics() -> None:
    kid = pytest.importorskip("torchmetrics.image.kid")
    x, y = features(80, 32, 13), features(80, 32, 14, shift=0.2)
    assert squared_mmd(x, y) == pytest.approx(float(kid.poly_mmd(x, y)), rel=1e-9)


def test_kernel_distance_is_unbiased() -> None:
    """Over independent pairs of samples of one distribution the mean is 0 within its error, at any sample size."""
    generator = torch.Generator().manual_seed(0)
    for n in (4, 40):
        values = torch.tensor(
            [squared_mmd(*torch.randn(2, n, 6, generator=generator, dtype=torch.float64)) for _ in range(800)]
        )
        assert abs(values.mean()) < 4 * values.std() / math.sqrt(len(values))
        assert values.min() < 0
    apart = kernel_distance(features(300, 16, 15), features(300, 16, 15, shift=0.5), subset_size=100, subsets=10)
    assert apart.mean > 10 * apart.sd / math.sqrt(10)


def test_kernel_distance_of_whole_sets_and_subsets() -> None:
    x, y = features(60, 8, 16), features(50, 8, 17, shift=0.1)
    whole = kernel_distance(x[:50], y, subset_size=50, subsets=3)
    assert whole.mean == pytest.approx(squared_mmd(x[:50], y), rel=1e-9)
    assert whole.sd < 1e-12
    first, again, other = (kernel_distance(x, y, subset_size=20, subsets=5, seed=seed) for seed in (1, 1, 2))
    assert first == again != other
    assert first.sd > 0
    with pytest.raises(ValueError, match=r"evaluation\.kid_subset_size: must be in 2 \.\. 50 .*got 51"):
        kernel_distance(x, y, subset_size=51)
    with pytest.raises(ValueError, match=r"evaluation\.kid_subsets"):
        kernel_distance(x, y, subset_size=5, subsets=0)
