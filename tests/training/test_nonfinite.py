"""Non-finite steps: which samples are reported, and what each policy does."""

from __future__ import annotations

import math

import pytest
import torch

from scalelong.training.nonfinite import Guard, NonFiniteError, describe, find_suspects


def test_the_bad_samples_are_named() -> None:
    suspects = find_suspects(
        torch.tensor([1.0, math.nan, math.inf]), torch.tensor([7, 8, 9]), torch.tensor([0.1, 0.2, 0.3])
    )
    sentence = describe(5, math.nan, math.nan, suspects)
    assert sentence.startswith("step 5: the loss is not finite")
    assert "samples [8, 9] at t = [0.2, 0.3]" in sentence
    assert "gradient is not finite" in describe(5, 1.0, math.inf, [])


def test_each_policy_does_what_it_says() -> None:
    with pytest.raises(NonFiniteError, match=r"stopped before the update.*training\.on_nonfinite"):
        Guard("raise", 10).judge(3, "step 3")
    skip = Guard("skip", 2)
    assert [skip.judge(step, "s") for step in (3, 8)] == ["skip", "skip"]
    with pytest.raises(NonFiniteError, match=r"training\.max_nonfinite = 2"):
        skip.judge(9, "s")
    rewind = Guard("rewind", 2)
    assert rewind.judge(3, "s") == "rewind"
    again = Guard("rewind", 2)
    again.restore(rewind.state())
    assert again.avoid == {3}
    assert again.rewinds == 1
