"""The matrix UNet against Eq. 3 and Eq. 17 written out by hand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import scalelong
from scalelong.lab.matrix_unet import MatrixUNet

KAPPA = [1.0, 0.6, 0.25]


def build(width: int = 8, layers: int = 2, num_skips: int = 3) -> MatrixUNet:
    torch.manual_seed(0)
    return MatrixUNet(width, layers, num_skips).double()


def inputs() -> Tensor:
    return torch.randn(4, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def matrices(block: nn.Module) -> list[Tensor]:
    return list(block.parameters())


def stacked(weights: Sequence[Tensor], x: Tensor) -> Tensor:
    """Eq. 17: W_l relu(W_{l-1} ... relu(W_1 x))."""
    for weight in weights[:-1]:
        x = (x @ weight.T).clamp(min=0)
    return x @ weights[-1].T


def f(i: int, x: Tensor, model: MatrixUNet, kappa: Sequence[float], outputs: dict[int, Tensor]) -> Tensor:
    """Eq. 3, literally; a_{i+1}, b_{i+1} and kappa_{i+1} are at index i."""
    if i == model.num_skips:
        outputs[i] = stacked(matrices(model.middle), x)
    else:
        encoded = stacked(matrices(model.a[i]), x)
        joined = kappa[i] * encoded + f(i + 1, encoded, model, kappa, outputs)
        outputs[i] = stacked(matrices(model.b[i]), joined)
    return outputs[i]


@pytest.mark.parametrize("layers", [1, 2, 3])
@pytest.mark.parametrize("kappa", [None, KAPPA])
def test_hidden_features_follow_the_recursion(layers: int, kappa: list[float] | None) -> None:
    model = build(layers=layers)
    assert all(len(matrices(block)) == layers for block in (*model.a, *model.b, model.middle))
    expected: dict[int, Tensor] = {}
    f(0, inputs(), model, kappa or [1.0, 1.0, 1.0], expected)
    hidden = model.hidden(inputs(), kappa)
    assert len(hidden) == 4
    for i, value in enumerate(hidden):
        torch.testing.assert_close(value, expected[i], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(model(inputs(), kappa), hidden[0], rtol=1e-12, atol=1e-12)


def test_apply_and_coefficients_mean_the_same() -> None:
    model = build()
    expected = model(inputs(), [1.0, 0.5, 0.25])
    plain = model(inputs())
    scalelong.apply(model, "cs", kappa=0.5)
    torch.testing.assert_close(model(inputs()), expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(model(inputs(), [1.0, 1.0, 1.0]), plain, rtol=1e-12, atol=1e-12)  # replaces, not adds to
    assert not torch.allclose(expected, plain)


def test_weights_are_normal_with_variance_two_over_width() -> None:
    torch.manual_seed(0)
    model = MatrixUNet(width=128, layers=2, num_skips=2)
    parameters = list(model.parameters())
    assert [tuple(p.shape) for p in parameters] == [(128, 128)] * 10  # no biases
    for weight in parameters:
        assert weight.var().item() == pytest.approx(2 / 128, rel=0.05)
        assert (weight.abs() > 3 * (2 / 128) ** 0.5).any()  # tails, so not uniform or truncated


@pytest.mark.parametrize("key", ["width", "layers", "num_skips"])
@pytest.mark.parametrize("value", [0, 2.0, True])
def test_wrong_sizes_are_refused(key: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"matrix_unet\.{key}: .* got {value!r}"):
        MatrixUNet(**{"width": 4, "layers": 1, "num_skips": 1, key: value})


def test_wrong_inputs_are_refused() -> None:
    model = build()
    with pytest.raises(ValueError, match=r"matrix_unet\.width: this network takes vectors of 8, got 7"):
        model(torch.zeros(2, 7, dtype=torch.float64))
    with pytest.raises(ValueError, match=r"matrix_unet\.coefficients: 2 given, the network has 3 skips"):
        model(inputs(), [1.0, 1.0])
