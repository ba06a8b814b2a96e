"""The parts of a step: average, learning rate, indices, precision."""

from __future__ import annotations

import pytest
import torch

from scalelong.data import load_source, make_loader
from scalelong.training.build import build_model, build_objective
from scalelong.training.step import EMA, Stepper, learning_rate, resolve_precision, sample_indices
from tests.training.tiny import tiny


def test_the_average_is_the_recursion_with_a_warmed_up_decay() -> None:
    model = torch.nn.Linear(2, 1, bias=False)
    ema = EMA(model, decay=0.5)
    expected = model.weight.detach().clone()
    for step in range(1, 13):  # the warm-up reaches 0.5 at step 8
        with torch.no_grad():
            model.weight.fill_(step)
        ema.update(step)
        decay = min(0.5, (1 + step) / (10 + step))
        expected = decay * expected + (1 - decay) * step
        torch.testing.assert_close(ema.model.weight, expected.expand_as(model.weight))
    assert not ema.model.weight.requires_grad


def test_the_rate_warms_up_linearly() -> None:
    config = tiny(optimizer_warmup_steps=10, optimizer_lr=2.0)
    assert [learning_rate(config, step) for step in (1, 5, 10, 99)] == [0.2, 1.0, 2.0, 2.0]
    assert learning_rate(tiny(optimizer_warmup_steps=0, optimizer_lr=2.0), 1) == 2.0


@pytest.mark.parametrize(("world_size", "accumulate"), [(1, 1), (2, 1), (1, 4), (2, 2)])
def test_ranks_and_micro_batches_cover_each_sample_once(world_size: int, accumulate: int) -> None:
    config = tiny(training_accumulate=accumulate)
    parts = [
        sample_indices(config, step, part, rank, world_size)
        for step in (1, 2, 3)
        for part in range(accumulate)
        for rank in range(world_size)
    ]
    assert torch.cat(parts).sort().values.tolist() == list(range(24))


def test_precision_follows_the_device() -> None:
    assert resolve_precision(tiny(), torch.device("cpu")) == torch.float32
    assert resolve_precision(tiny(), torch.device("cuda")) == torch.bfloat16
    assert resolve_precision(tiny(training_precision="bf16"), torch.device("cpu")) == torch.bfloat16


def test_a_gradient_that_is_not_finite_names_its_sample() -> None:
    config, device = tiny(), torch.device("cpu")
    model = build_model(config, (1, 8, 8))
    seen: list[torch.Tensor] = []

    def poison(_module: object, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> torch.Tensor:
        """The gradient of the third sample is infinite, wherever it is in a batch."""
        seen.append(inputs[0][2].clone()) if not seen else None
        rows = torch.tensor([torch.equal(x, seen[0]) for x in inputs[0]])
        output = output.clone()
        output.register_hook(lambda gradient: gradient.masked_fill(rows[:, None, None, None], torch.inf))
        return output

    model.register_forward_hook(poison)
    stepper = Stepper(config, model, build_objective(config), device)
    pending = stepper.compute(1, make_loader(load_source("digits"), 0).batches([torch.arange(8, 16)]))
    stepper.update(pending)
    assert not pending.read().finite
    ((index, t),) = pending.suspects()
    assert index == 10
    assert 0 < t < 1
