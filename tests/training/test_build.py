"""Models are built as the settings say, with weights that are a function of the seed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from scalelong.data import load_source
from scalelong.training.autoencoder import AutoencoderSettings, train_autoencoder
from scalelong.training.build import build_model, check_config
from tests.training.tiny import tiny


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


def test_a_unet_is_built_for_the_shape_of_the_images() -> None:
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


def test_placement_after_the_norms() -> None:
    settings = {"model_backbone": "unet", "model_channels": (32, 64), "scaling_method": "cs"}
    model = build_model(tiny(**settings, scaling_placement="after_norm"), (1, 8, 8))
    assert model.config["long_skip_scaling"]["placement"] == "after_norm"


def test_freeu_is_not_for_training() -> None:
    with pytest.raises(ValueError, match=r"scaling\.method: 'freeu' is for sampling from a trained model"):
        check_config(tiny(scaling_method="freeu"))


@pytest.fixture
def other_devices(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The seeds that CUDA devices are given."""
    seeds: list[int] = []
    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeds.append)
    return seeds


def test_weights_of_a_denoiser_are_a_function_of_the_seed(other_devices: list[int]) -> None:
    before = torch.get_rng_state()
    one, same, other = (build_model(tiny(training_seed=seed), (1, 8, 8)).state_dict() for seed in (3, 3, 4))
    assert all(torch.equal(value, same[name]) for name, value in one.items())
    assert any(not torch.equal(value, other[name]) for name, value in one.items())
    assert torch.equal(torch.get_rng_state(), before)
    assert other_devices == []


def test_training_an_autoencoder_leaves_every_random_state_alone(other_devices: list[int], tmp_path: Path) -> None:
    before = torch.get_rng_state()
    settings = AutoencoderSettings(widths=(8, 8), latent_channels=2, steps=1, batch_size=4, seed=3)
    train_autoencoder(load_source("digits"), tmp_path / "ae", settings)
    assert torch.equal(torch.get_rng_state(), before)
    assert other_devices == []
