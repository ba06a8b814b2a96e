"""The small parts of training: average, guard, rate, indices, model building."""

from __future__ import annotations

import math

import pytest
import torch

from scalelong.training.build import build_model, check_config
from scalelong.training.nonfinite import Guard, NonFiniteError, describe, find_suspects
from scalelong.training.step import EMA, learning_rate, resolve_precision, sample_indices
from tests.training.tiny import tiny


def test_the_average_is_the_recursion_with_a_warmed_up_decay() -> None:
    model = torch.nn.Linear(2, 1, bias=False)
    ema = EMA(model, decay=0.5)
    expected = model.weight.detach().clone()
    for step in range(1, 6):
        with torch.no_grad():
            model.weight.fill_(step)
        ema.update(step)
        decay = min(0.5, (1 + step) / (10 + step))
        expected = decay * expected + (1 - decay) * step
        torch.testing.assert_close(ema.model.weight, expected.expand_as(model.weight))
    assert not ema.model.weight.requires_grad


def test_the_decay_warms_up_and_stays_below_its_limit() -> None:
    ema = EMA(torch.nn.Linear(1, 1), 0.9999)
    assert ema.decay_at(0) == 0.1
    assert ema.decay_at(90) == 0.91
    assert ema.decay_at(10**7) == 0.9999


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


def test_every_method_starts_from_the_same_weights_and_the_global_generator_is_left_alone() -> None:
    torch.manual_seed(123)
    before = torch.get_rng_state()
    models = [build_model(tiny(scaling_method=method), (1, 8, 8)) for method in ("none", "cs", "ls")]
    assert torch.equal(torch.get_rng_state(), before)
    states = [
        {key: value for key, value in model.state_dict().items() if not key.startswith("scalelong")} for model in models
    ]
    for other in states[1:]:
        assert all(torch.equal(other[key], value) for key, value in states[0].items())
    assert not torch.equal(build_model(tiny(training_seed=1), (1, 8, 8)).pos_embed, models[0].pos_embed)


def test_a_unet_is_built_for_the_images_at_hand() -> None:
    model = build_model(tiny(model_backbone="unet", model_channels=(32, 64)), (1, 8, 8))
    assert model(torch.zeros(2, 1, 8, 8), 3).sample.shape == (2, 1, 8, 8)
    assert len(model.scalelong.current()) == 6


@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("mp_cat", {"t": 0.3}),
        ("layernorm", {"affine": False, "eps": 1e-4}),
        ("rezero", {}),
        ("stable_tau", {"tau": 0.3}),
    ],
)
def test_peers_are_built_from_their_settings(method: str, options: dict[str, float]) -> None:
    model = build_model(tiny(scaling_method=method, **{f"scaling_{k}": v for k, v in options.items()}), (1, 8, 8))
    assert (model.scalelong.config.method, model.scalelong.config.options) == (method, options)
    assert model(torch.zeros(2, 1, 8, 8), torch.zeros(2)).shape == (2, 1, 8, 8)


def test_a_unet_is_scaled_behind_its_norms_where_the_settings_say_so() -> None:
    settings = {"model_backbone": "unet", "model_channels": (32, 64), "scaling_method": "cs"}
    model = build_model(tiny(**settings, scaling_placement="after_norm"), (1, 8, 8))
    assert model.config["long_skip_scaling"]["placement"] == "after_norm"


def test_what_is_for_sampling_only_is_not_trained_with() -> None:
    with pytest.raises(ValueError, match=r"scaling\.method: 'freeu' is for sampling from a trained model"):
        check_config(tiny(scaling_method="freeu"))
