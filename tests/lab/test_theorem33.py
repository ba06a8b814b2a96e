"""Theorem 3.3: gradients of one sample against l ||x||^2 (sum_{j >= i} kappa_j^2 + 1)."""

import pytest
import torch

from scalelong.lab.matrix_unet import MatrixUNet, coefficients_of, matrices, noisy_inputs
from scalelong.lab.theorem33 import gradient_ratios, measure, tail_sums


def test_tail_sums() -> None:
    assert tail_sums([1, 0.5, 0.5]).tolist() == [1.5, 0.5, 0.25]


def test_ratios_are_the_gradients_of_the_loss() -> None:
    model = MatrixUNet(12, 2, 3).sample_weights_(torch.Generator().manual_seed(0))
    (x,), (noise,) = noisy_inputs(1, 12, 0)
    kappas = [1.0, 0.5, 0.2]
    loss = (noise - model(x[None], kappas)[0]).square().sum()
    loss.backward()
    scale = loss.detach() * x.square().sum()
    found = gradient_ratios(model, x, noise, kappas)
    for side, blocks in enumerate((model.a, model.b)):
        for i, block in enumerate(blocks):
            for p, weight in enumerate(matrices(block)):
                assert weight.grad is not None
                torch.testing.assert_close(
                    found[side, i, p].float(), weight.grad.square().sum() / scale, rtol=1e-4, atol=0
                )


def test_mean_ratio_for_a_fixed_residual_is_4_and_2() -> None:
    """A residual that does not know the weights: on average 4 for the last matrix of a block, 2 for the first."""
    generator = torch.Generator().manual_seed(0)
    model = MatrixUNet(64, 2, 2)
    x, noise = noisy_inputs(250, 64, 0)
    for method in ("none", "cs_reversed"):
        kappas = coefficients_of(method, 2)
        found = []
        for i in range(len(x)):
            model.sample_weights_(generator, 1.0)
            found.append(gradient_ratios(model, x[i], noise[i], kappas, torch.randn(64, generator=generator)))
        mean = torch.stack(found).mean(0) / (tail_sums(kappas)[None, :, None] + 1)
        assert mean[:, :, 0].flatten().tolist() == pytest.approx([2] * 4, rel=0.2)
        assert mean[:, :, 1].flatten().tolist() == pytest.approx([4] * 4, rel=0.2)


def test_true_residual_is_larger_and_grows_with_the_number_of_skips() -> None:
    def largest(num_skips: int, sent: str) -> float:
        ratios = measure(num_skips, 64, 1.0, 10, 1)[("none", 0.7, sent)]
        sums = tail_sums(coefficients_of("none", num_skips))[None, None, :, None] + 1
        return float((ratios / sums).median(0).values.max())

    assert largest(8, "residual") > 1.5 * largest(2, "residual") > 3 * largest(8, "fixed")
