"""CS as the initial size and the rate of the weights behind skips."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import scalelong
from scalelong import UViT, UViTConfig, mup
from tests.family_models import unidiffuser_transformer
from tests.parametrization.networks import meta

INPUTS = {"x": torch.randn(2, 3, 8, 8, dtype=torch.float64), "time": torch.tensor([10.0, 500.0])}


def uvit(dim: int = 16) -> UViT:
    torch.manual_seed(0)
    return UViT(UViTConfig(image_size=8, patch_size=4, dim=dim, depth=6, heads=2)).double()


def trained(model: nn.Module, steps: int = 30, eps: float = 1e-40) -> torch.Tensor:
    optimizer = torch.optim.AdamW(mup.param_groups(model, 1e-3, weight_decay=0.1), eps=eps)
    for _ in range(steps):
        optimizer.zero_grad()
        (model(**INPUTS) - 1).square().mean().backward()
        optimizer.step()
    return model(**INPUTS).detach()


def plain_cs(kappa: float = 0.5) -> nn.Module:
    return scalelong.apply(uvit(), "cs", kappa=kappa).model


def as_weights(kappa: float = 0.5, **options) -> nn.Module:
    model = uvit()
    mup.scale_skip_weights(model, "cs", kappa=kappa, **options)
    return model


def test_it_is_cs_under_adamw() -> None:
    expected = trained(plain_cs())
    assert float((trained(as_weights()) - expected).abs().max()) < 1e-12
    for other in (uvit(), as_weights(size=False), as_weights(rate=False)):
        assert float((trained(other) - expected).abs().max()) > 1e-4


def test_size_and_rate_alone() -> None:
    model, size, rate = uvit(), as_weights(rate=False), as_weights(size=False)
    names = [name for name, _ in rate.named_parameters() if name.endswith("original1")]
    assert len(names) == 2  # the outermost of three skips keeps 1
    torch.testing.assert_close(rate(**INPUTS), model(**INPUTS))
    torch.testing.assert_close(size(**INPUTS), plain_cs()(**INPUTS))
    assert len(mup.param_groups(size, 1e-3)) == 1
    assert sorted(group["lr_multiplier"] for group in mup.param_groups(rate, 1e-3)) == [0.25, 0.5, 1]


def test_decay_is_divided_so_that_small_rates_decay_as_much() -> None:
    groups = mup.param_groups(as_weights(kappa=0.01), 1e-3, weight_decay=0.1)
    assert {round(group["lr"] * group["weight_decay"], 12) for group in groups} == {1e-4}


def test_adams_eps_is_seen_by_small_kappas_in_the_forward_pass_only() -> None:
    """kappa ** i in the forward pass shrinks the gradient of W_s towards eps; as a rate it does not."""

    def first_update(model: nn.Module, name: str, factor: float) -> float:
        before = model.get_parameter(name).detach().clone()
        trained(model, steps=1, eps=1e-4)
        return float((model.get_parameter(name).detach() - before)[:, -16:].abs().mean()) / factor

    kappa = 1e-3
    forward = first_update(plain_cs(kappa), "out_blocks.1.skip_linear.weight", 1)
    weights = first_update(as_weights(kappa), "out_blocks.1.skip_linear.parametrizations.weight.original1", kappa)
    assert forward < 0.1 * weights


def test_folding_leaves_a_plain_network() -> None:
    model = as_weights()
    expected = trained(model, steps=2)
    mup.fold(model)
    plain = uvit()
    plain.load_state_dict(model.state_dict())
    torch.testing.assert_close(plain(**INPUTS), expected)


def test_copies_and_mup() -> None:
    base = meta(lambda: UViT(UViTConfig(image_size=8, patch_size=4, dim=16, depth=6, heads=2)))
    model = mup.parametrize(uvit(64), base)
    mup.scale_skip_weights(model, "cs", kappa=0.5)
    twin = copy.deepcopy(model)
    multipliers = sorted(group["lr_multiplier"] for group in mup.param_groups(twin, 1e-3))
    assert multipliers == [0.0625, 0.125, 0.25, 1]  # the rate of muP times that of CS
    twin.load_state_dict(model.state_dict())
    torch.testing.assert_close(twin(**INPUTS), model(**INPUTS))
    with pytest.raises(ValueError, match="parametrized already"):
        mup.parametrize(as_weights(), base)


def test_a_linear_layer_on_the_concatenation() -> None:
    model = unidiffuser_transformer().double().eval()
    scaled = scalelong.apply(copy.deepcopy(model), "cs", kappa=0.5).model
    assert len(mup.scale_skip_weights(model, "cs", kappa=0.5)) == 2
    x = torch.randn(1, model.config.in_channels, *[model.config.sample_size] * 2, dtype=torch.float64)
    torch.testing.assert_close(model(x, return_dict=False)[0], scaled(x, return_dict=False)[0])


def test_what_is_refused() -> None:
    with pytest.raises(ValueError, match="scaled already"):
        mup.scale_skip_weights(as_weights(), "cs")
    with pytest.raises(ValueError, match="scaled in the forward pass; call"):
        mup.scale_skip_weights(plain_cs(), "cs")
    with pytest.raises(ValueError, match="'ls' is not a constant"):
        mup.scale_skip_weights(uvit(), "ls")
