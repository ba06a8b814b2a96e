"""LS: its gates against the equations."""

from __future__ import annotations

import copy
import math

import pytest
import torch

from scalelong.scaling.constant import SkipSize
from scalelong.scaling.learned import LearnedScaling
from scalelong.scaling.registry import ScalingConfig

TOKENS = SkipSize(channels=12, tokens=32, channels_last=True)
IMAGES = [SkipSize(channels=16), SkipSize(channels=32), SkipSize(channels=32)]


def learned(sizes: list[SkipSize], **options: object) -> LearnedScaling:
    torch.manual_seed(0)
    scaling = ScalingConfig.create("ls", **options).build(sizes)
    assert isinstance(scaling, LearnedScaling)
    return scaling


def count(module: torch.nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def test_token_gates_follow_the_equation() -> None:
    """Eq. 9 to 11 written out: average over the width, two linear layers, sigmoid, one number per token."""
    scaling = learned([TOKENS], reduction=4)
    x = torch.randn(2, 32, 12)
    first, _, second = scaling.gates[0].zeta
    pooled = x.sum(-1) / 12
    hidden = (pooled @ first.weight.T + first.bias).clamp(min=0)
    kappa = 1 / (1 + torch.exp(-(hidden @ second.weight.T + second.bias)))
    assert first.weight.shape == (8, 32)
    torch.testing.assert_close(scaling.coefficient(1, x), kappa[:, :, None])
    torch.testing.assert_close(scaling(1, x), kappa[:, :, None] * x)


def test_channel_gates_average_over_all_positions() -> None:
    scaling = learned([SkipSize(channels=6)], module="ie")
    with torch.no_grad():
        scaling.gates[0].scale.copy_(torch.arange(6.0))
        scaling.gates[0].shift.fill_(0.5)
    x = torch.randn(2, 6, 3, 5, 7)
    kappa = torch.sigmoid(torch.arange(6.0) * x.flatten(2).mean(-1) + 0.5)
    torch.testing.assert_close(scaling.coefficient(1, x), kappa[:, :, None, None, None])


def test_channel_axis_on_tokens_works_for_any_number_of_tokens() -> None:
    scaling = learned([TOKENS], axis="channels")
    for tokens in (32, 50):
        assert scaling.coefficient(1, torch.randn(2, tokens, 12)).shape == (2, 1, 12)


def test_another_number_of_tokens_is_refused_with_the_remedy() -> None:
    with pytest.raises(ValueError, match=r"scaling\.axis: .*32 tokens, skip 1 has 50.*axis='channels'"):
        learned([TOKENS])(1, torch.randn(2, 50, 12))


def test_shared_gates_are_one_network_and_individual_ones_are_not() -> None:
    shared, individual = learned([TOKENS] * 3), learned([TOKENS] * 3, shared=False)
    one = 32 * 2 + 2 + 2 * 32 + 32
    assert count(shared) == one
    assert count(individual) == 3 * one


def test_different_sizes_share_one_zeta_of_the_smallest_through_encoders_and_decoders() -> None:
    """Eq. 12 and 13: d = 2 sizes, N_min = 16, hidden N_i / floor(N_i / 4) = 4; one zeta of 16 -> 1 -> 16."""
    scaling = learned(IMAGES)
    zeta = (16 * 1 + 1) + (1 * 16 + 16)
    pair_16 = (16 * 4 + 4 + 4 * 16 + 16) * 2
    pair_32 = (32 * 4 + 4 + 4 * 16 + 16) + (16 * 4 + 4 + 4 * 32 + 32)
    assert count(scaling) == zeta + pair_16 + pair_32
    gate, pooled = scaling.gates[0], torch.randn(2, 32)
    by_hand = gate.decoders["32"](gate.zeta(gate.encoders["32"](pooled)))
    x = pooled[:, :, None, None].expand(2, 32, 2, 2)
    torch.testing.assert_close(scaling.coefficient(2, x)[..., 0, 0], torch.sigmoid(by_hand))
    torch.testing.assert_close(scaling.coefficient(3, x), scaling.coefficient(2, x))


def test_encoders_reduce_by_the_floor_of_a_quarter() -> None:
    """N_i = 10: r_i = floor(10 / 4) = 2, hidden 5."""
    gate = learned([SkipSize(channels=16), SkipSize(channels=10)]).gates[0]
    assert gate.encoders["10"][0].out_features == gate.decoders["10"][0].out_features == 5


def test_no_tensor_is_twice_in_the_state_dict() -> None:
    tensors = learned(IMAGES).state_dict().values()
    assert len({t.data_ptr() for t in tensors}) == len(tensors)


@pytest.mark.parametrize("module", ["se", "ie"])
@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("activation", ["relu", "elu", "mish"])
def test_gates_start_near_one_half(module: str, shared: bool, activation: str) -> None:
    scaling = learned(IMAGES, module=module, shared=shared, activation=activation, reduction=4)
    for index, size in enumerate(IMAGES, start=1):
        kappa = scaling.coefficient(index, torch.randn(4, size.channels, 8, 8))
        assert ((kappa > 0.2) & (kappa < 0.8)).all()
        assert kappa.mean().item() == pytest.approx(0.5, abs=0.05)


@pytest.mark.parametrize("sizes", [IMAGES, [TOKENS] * 2])
@pytest.mark.parametrize("options", [{}, {"shared": False}, {"module": "ie"}, {"module": "learnable"}])
@pytest.mark.parametrize("start", [0.05, 0.95])
def test_gates_open_at_a_given_value(sizes: list[SkipSize], options: dict, start: float) -> None:
    scaling = learned(sizes, reduction=4, start=start, **options)
    for index, size in enumerate(sizes, start=1):
        shape = (4, 32, 12) if size.channels_last else (4, size.channels, 8, 8)
        assert scaling.coefficient(index, torch.randn(shape)).mean().item() == pytest.approx(start, abs=0.02)


def test_gates_differ_by_the_start_alone() -> None:
    usual, shifted = (dict(learned(IMAGES, start=start).state_dict()) for start in (None, 0.95))
    moved = [name for name, value in usual.items() if not torch.equal(value, shifted[name])]
    assert moved == [f"gates.0.decoders.{size}.2.bias" for size in (16, 32)]
    for name in moved:
        torch.testing.assert_close(shifted[name] - usual[name], torch.full_like(usual[name], math.log(19)))


def test_plain_learnable_coefficients_start_at_one_and_learn() -> None:
    scaling = learned(IMAGES, module="learnable")
    x = torch.randn(2, 16, 4, 4)
    assert torch.equal(scaling(1, x), x)
    scaling(1, x).square().mean().backward()
    gradients = [p.grad for p in scaling.parameters()]
    assert len(gradients) == 3
    assert gradients[0] is not None
    assert gradients[0].item() == pytest.approx(2 * x.square().mean().item(), rel=1e-4)
    assert gradients[1] is None


def test_current_is_the_mean_of_the_last_forward() -> None:
    scaling = learned(IMAGES)
    assert all(math.isnan(kappa) for kappa in scaling.current())
    kappa = scaling.coefficient(2, torch.randn(4, 32, 8, 8))
    assert scaling.current()[1] == pytest.approx(kappa.mean().item(), rel=1e-5)


def test_a_half_precision_skip_stays_half_precision() -> None:
    scaling = learned(IMAGES).double()
    assert scaling.coefficient(2, torch.randn(2, 32, 4, 4).double()).dtype == torch.float64
    skip = torch.randn(2, 32, 4, 4).half()
    assert learned(IMAGES).half()(2, skip).dtype == torch.float16
    for module in ("ie", "learnable"):  # in float32: their numbers would make the skip wider
        assert learned(IMAGES, module=module)(2, skip).dtype == torch.float16


def test_plain_learnable_coefficients_work_for_any_number_of_tokens() -> None:
    unknown = SkipSize(channels=12, tokens=None, channels_last=True)
    for sizes in ([TOKENS], [unknown]):
        scaling = learned(sizes, module="learnable")
        for tokens in (32, 7):
            skip = torch.randn(2, tokens, 12)
            assert torch.equal(scaling(1, skip), skip)


def test_transforms_of_torch_func_see_a_call_without_effects() -> None:
    scaling = learned(IMAGES)
    skip = torch.randn(3, 32, 4, 4)
    scaling(2, skip)
    before = scaling.current()

    def loss(parameters: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(scaling, parameters, (2, x)).square().mean()

    parameters = dict(scaling.named_parameters())
    found = torch.func.grad(loss)(parameters, skip + 1)
    loss(parameters, skip + 1).backward()
    used = {name: gradient for name, gradient in found.items() if gradient.any()}
    assert used
    assert all(torch.allclose(gradient, parameters[name].grad, atol=1e-7) for name, gradient in used.items())
    scaling(2, skip)
    torch.vmap(lambda x: scaling(2, x[None]))(skip + 1)
    assert str(scaling.current()) == str(before)  # nan is not equal to itself


def test_a_copy_made_in_inference_mode_can_be_used_outside() -> None:
    with torch.inference_mode():
        scaling = copy.deepcopy(learned(IMAGES))
    with torch.no_grad():
        kappa = scaling.coefficient(2, torch.randn(2, 32, 4, 4))
    assert scaling.current()[1] == pytest.approx(kappa.mean().item(), rel=1e-5)


@pytest.mark.parametrize("size", [SkipSize(8), SkipSize(8, None, channels_last=True)])
def test_token_gates_need_a_fixed_number_of_tokens(size: SkipSize) -> None:
    with pytest.raises(ValueError, match=r"scaling\.axis: .*axis='channels'"):
        ScalingConfig.create("ls", axis="tokens").build([size])


def test_gates_of_several_sizes_can_be_traced() -> None:
    scaling, skip = learned(IMAGES, activation="elu"), torch.randn(2, 32, 4, 4)
    traced = torch.jit.trace_module(scaling, {"forward": (torch.tensor(2), skip)}, check_trace=False)
    torch.testing.assert_close(traced(torch.tensor(2), skip), scaling(2, skip))


def test_gates_built_on_meta_record_their_mean_once_assigned() -> None:
    with torch.device("meta"):
        scaling = learned(IMAGES)
    scaling.load_state_dict(learned(IMAGES).state_dict(), assign=True)
    kappa = scaling.coefficient(2, torch.randn(2, 32, 4, 4))
    assert scaling.current()[1] == pytest.approx(kappa.mean().item(), rel=1e-5)


def test_time_gates_read_the_time_token_alone() -> None:
    size = SkipSize(channels=12, tokens=32, channels_last=True, time_token=1)
    scaling = learned([size] * 2, module="time", reduction=4)
    x = torch.randn(2, 32, 12)
    first, _, second = scaling.gates[0].zeta
    kappa = torch.sigmoid((x[:, 1] @ first.weight.T + first.bias).clamp(min=0) @ second.weight.T + second.bias)
    torch.testing.assert_close(scaling.coefficient(2, x), kappa[:, :, None])
    other = torch.randn(2, 32, 12)
    other[:, 1] = x[:, 1]
    torch.testing.assert_close(scaling.coefficient(1, other), kappa[:, :, None])
    assert count(learned([size] * 2, module="time", shared=False)) == 2 * count(learned([size] * 2, module="time"))
    assert learned([size], module="time", start=0.95).coefficient(1, x).mean().item() == pytest.approx(0.95, abs=0.02)


def test_time_gates_need_a_time_token() -> None:
    with pytest.raises(ValueError, match=r"scaling\.module: 'time' reads a token of scalelong\.UViT; .*module='se'"):
        learned([TOKENS], module="time")
