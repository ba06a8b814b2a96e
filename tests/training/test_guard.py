"""What is done at steps that are not finite, or whose loss is a spike."""

from __future__ import annotations

import math

import pytest
import torch

from scalelong.runs.settings import TrainingSettings
from scalelong.training import NonFiniteError, Trainer, read_events
from scalelong.training.guard import Guard, describe
from scalelong.training.step import StepResult, find_suspects
from tests.training.tiny import Spike, assert_same_weights, losses, tiny

BAD = StepResult(math.nan, math.nan, stop=False, overflow=False)


def guard(policy: str = "raise", spikes: str = "warn", most: int = 2) -> Guard:
    return Guard(TrainingSettings(on_nonfinite=policy, on_spike=spikes, max_nonfinite=most))


def good(loss: float) -> StepResult:
    return StepResult(loss, 1.0, stop=False, overflow=False)


def test_the_bad_samples_are_named() -> None:
    bad = torch.tensor([False, True, True])
    suspects = find_suspects(bad, torch.tensor([7, 8, 9]), torch.tensor([0.1, 0.2, 0.3]))
    sentence = describe(5, math.nan, math.nan, suspects)
    assert sentence.startswith("step 5: the loss is not finite")
    assert "samples [8, 9] at t = [0.2, 0.3]" in sentence
    assert "gradient is not finite" in describe(5, 1.0, math.inf, [])


def test_each_policy_does_what_it_says() -> None:
    with pytest.raises(NonFiniteError, match=r"stopped before the update.*training\.on_nonfinite"):
        guard("raise").review(3, BAD, list)
    skip = guard("skip")
    assert [skip.review(step, BAD, list)["policy"] for step in (3, 8)] == ["skip", "skip"]
    with pytest.raises(NonFiniteError, match=r"training\.max_nonfinite = 2"):
        skip.review(9, BAD, list)
    rewind = guard("rewind")
    assert rewind.review(3, BAD, list)["kind"] == "nonfinite"
    again = guard("rewind")
    again.restore(rewind.state())
    assert again.avoid == {3}
    assert again.rewinds == 1
    assert again.review(3, BAD, list) is None


def test_a_spike_is_one_after_ten_steps_and_does_not_raise_the_mean() -> None:
    watch = guard()
    assert [watch.review(step, good(100.0 if step == 5 else 1.0), list) for step in range(1, 12)] == [None] * 11
    limit = watch.limit(unread=True)
    assert watch.review(12, good(1000.0), list)["kind"] == "spike"
    assert watch.limit(unread=True) == limit
    assert watch.review(13, good(limit), list) is None


def test_the_limit_is_the_same_whether_the_step_before_was_read_or_not() -> None:
    at_once, later = guard(), guard()
    for step in range(1, 40):
        loss = good(50.0 if step in (20, 21) else 1.0 / step)
        assert at_once.limit(unread=False) == later.limit(unread=step > 1)
        if step > 1:
            later.review(step - 1, before, list)  # noqa: F821  # of the last turn
        at_once.review(step, loss, list)
        before = loss  # noqa: F841


@pytest.mark.parametrize("log_every", [1, 5], ids=["read at once", "read a step later"])
def test_a_spike_is_recorded_and_its_update_skipped_or_undone(log_every: int, tmp_path) -> None:
    weights = {}
    for policy in ("warn", "skip", "rewind"):
        trainer = Trainer(
            tiny(training_steps=18, training_on_spike=policy, training_log_every=log_every), tmp_path / policy
        )
        Spike(trainer, step=14)
        trainer.run()
        (record,) = [record for record in read_events(tmp_path / policy)[0] if record["kind"] == "spike"]
        assert (record["at"], record["policy"], record["step"]) == (14, policy, 12 if policy == "rewind" else 14)
        assert trainer.guard.skipped == ([] if policy == "warn" else [14])
        weights[policy] = torch.cat([p.detach().flatten() for p in trainer.model.parameters()])
    assert [step for step, _ in losses(tmp_path / "rewind")][-1] == 18
    assert_same_weights(tmp_path / "skip", tmp_path / "rewind")
    assert not torch.equal(weights["warn"], weights["skip"])
