"""Guidance: the formula, what scale 1 costs, and the interval."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from scalelong.diffusion import Objective, get_process, guided, resolve_sampling
from scalelong.runs.settings import SamplingSettings
from tests.diffusion.gaussian_oracle import sampled

NULL = {"class_labels": torch.tensor([7])}


class Counting:
    """A network whose output is 0.1 x plus its label, and which remembers the batches it saw."""

    def __init__(self) -> None:
        self.batches: list[int] = []

    def __call__(self, x: Tensor, time: Tensor, class_labels: Tensor) -> Tensor:
        self.batches.append(len(x))
        assert len(time) == len(class_labels) == len(x)
        return 0.1 * x + class_labels.float()[:, None]


def test_the_formula_in_one_doubled_batch() -> None:
    net, x, labels = Counting(), torch.randn(3, 4), torch.tensor([1, 2, 3])
    found = guided(net, NULL, 2.5)(x, torch.ones(3), class_labels=labels)
    expected = 0.1 * x + (7 + 2.5 * (labels - 7.0))[:, None]
    torch.testing.assert_close(found, expected)
    assert net.batches == [6]


def test_the_null_condition_goes_where_the_condition_is() -> None:
    labels = torch.tensor([1, 2, 3], device="meta")
    found = guided(Counting(), NULL, 2.5)(
        torch.randn(3, 4, device="meta"), torch.ones(3, device="meta"), class_labels=labels
    )
    assert found.is_meta


def test_scale_one_is_the_network_itself() -> None:
    net = Counting()
    assert guided(net, NULL, 1.0) is net
    objective, start = Objective(get_process("vp")), torch.randn(2, 4)
    labels = torch.tensor([1, 2])
    plain = sampled(objective, net, start, steps=4, class_labels=labels)
    assert torch.equal(sampled(objective, net, start, steps=4, null=NULL, class_labels=labels), plain)
    assert set(net.batches) == {2}


def test_outside_the_interval_the_condition_acts_alone() -> None:
    objective, start = Objective(get_process("edm")), torch.randn(2, 4)
    net = Counting()
    options = {"sampler": "ddim", "steps": 12, "guidance": 3.0, "guidance_interval": (0.5, 10.0)}
    sampled(objective, net, start, null=NULL, class_labels=torch.tensor([1, 2]), **options)
    levels = objective.process.sampling_times(12, "").tolist()  # of EDM a time is a noise level
    assert net.batches == [4 if 0.5 <= level <= 10.0 else 2 for level in levels]
    assert {2, 4} == set(net.batches)


@pytest.mark.parametrize("scale", [-1.0, math.nan, math.inf])
def test_a_wrong_scale_is_refused(scale: float) -> None:
    with pytest.raises(ValueError, match=r"sampling\.guidance: must be a number of at least 0"):
        resolve_sampling(SamplingSettings(guidance=scale), get_process("vp"))


def test_an_empty_interval_is_refused() -> None:
    with pytest.raises(ValueError, match=r"sampling\.guidance_interval: must be 0 <= low < high"):
        resolve_sampling(SamplingSettings(guidance_interval=(2.0, 1.0)), get_process("vp"))
