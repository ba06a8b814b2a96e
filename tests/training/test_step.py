"""The parts of a step: average, learning rate, indices, precision; what is done at non-finite steps."""

from __future__ import annotations

import math

import pytest
import torch

from scalelong.training import NonFiniteError
from scalelong.training.build import build_model
from scalelong.training.step import (
    EMA,
    Guard,
    describe,
    find_suspects,
    learning_rate,
    make_optimizers,
    resolve_precision,
    sample_indices,
)
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


def test_muon_takes_the_matrices_and_adamw_the_rest() -> None:
    model = build_model(tiny(scaling_method="ls"), (1, 8, 8))
    settings = tiny(optimizer_name="muon").optimizer
    adamw, muon = make_optimizers(settings, model, torch.device("cpu"))
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    matrices = {names[id(p)] for group in muon.param_groups for p in group["params"]}
    others = {names[id(p)] for group in adamw.param_groups for p in group["params"]}
    assert matrices | others == set(names.values()) and not matrices & others
    assert {"in_blocks.0.attn.qkv.weight", "out_blocks.0.skip_linear.weight"} < matrices
    assert {"decoder_pred.weight", "pos_embed", "patch_embed.proj.weight", "norm.weight"} < others
