"""Random numbers that are a function of (seed, stream, index)."""

import torch

from scalelong.random import normal, random_bits, uniform


def test_numbers_do_not_depend_on_how_they_are_batched() -> None:
    index = torch.arange(10)
    whole = normal(3, "noise", index, (2, 5))
    parts = torch.cat([normal(3, "noise", index[:4], (2, 5)), normal(3, "noise", index[4:], (2, 5))])
    assert torch.equal(whole, parts)


def test_seed_stream_and_index_each_give_other_numbers() -> None:
    index = torch.arange(1000)
    streams = [random_bits(seed, name, index) for seed in (0, 1, -1) for name in ("noise", "time")]
    everything = torch.cat(streams)
    assert everything.unique().numel() == everything.numel()


def test_normal_has_the_moments_of_a_normal_and_no_correlation() -> None:
    z = normal(0, "noise", torch.arange(2000), (200,)).double()
    n = z.numel()
    assert abs(z.mean()) < 4 / n**0.5
    assert abs(z.var() - 1) < 4 * (2 / n) ** 0.5
    assert abs((z**4).mean() - 3) < 4 * (96 / n) ** 0.5
    for a, b in [(z[1:], z[:-1]), (z[:, 1:], z[:, :-1])]:
        assert abs((a * b).mean()) < 4 / n**0.5


def test_uniform_fills_its_interval_evenly() -> None:
    u = uniform(5, "time", torch.arange(100_000))
    counts = torch.histc(u, bins=20, min=0, max=1)
    chi_square = ((counts - 5000) ** 2 / 5000).sum()
    assert chi_square < 43.8  # 19 degrees of freedom, p = 0.001
    assert u.min() >= 0
    assert u.max() < 1
