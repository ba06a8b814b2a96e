"""placement="after_norm" against a block written by hand, and what must hold for every placement."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import scalelong
from tests.families import FAMILIES, assert_close, build, output
from tests.standins import TutorialUNet, image, randn

UNET = FAMILIES[0]


class Block(nn.Module):
    """A ResNet block that concatenates; `kappa_after` is what after_norm should do, written out."""

    def __init__(self, groups: int) -> None:
        super().__init__()
        self.norm, self.conv, self.short = nn.GroupNorm(groups, 16), nn.Conv2d(16, 8, 3, padding=1), nn.Conv2d(16, 8, 1)
        self.kappa_after = 1.0
        nn.init.normal_(self.norm.weight)
        nn.init.normal_(self.norm.bias)

    def forward(self, x: Tensor, skip: Tensor) -> Tensor:
        joined = torch.cat([x, skip], dim=1)
        normed = self.norm(joined)
        if self.kappa_after == 1.0:
            return self.conv(F.silu(normed)) + self.short(joined)
        branch = torch.cat([normed[:, :8], normed[:, 8:] * self.kappa_after], dim=1)
        return self.conv(F.silu(branch)) + self.short(torch.cat([x, skip * self.kappa_after], dim=1))


class Net(nn.Module):
    def __init__(self, groups: int) -> None:
        super().__init__()
        self.first, self.out = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 3, 1)
        self.down = nn.ModuleList(nn.Conv2d(8, 8, 3, padding=1) for _ in range(3))
        self.mid = nn.Conv2d(8, 8, 3, padding=1)
        self.up = nn.ModuleList(Block(groups) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x, kept = self.first(x), []
        for block in self.down:
            x = F.silu(block(x))
            kept.append(x)
        x = self.mid(x)
        for block in self.up:
            x = block(x, kept.pop())
        return self.out(x)


def net(groups: int) -> Net:
    torch.manual_seed(0)
    return Net(groups)


@pytest.mark.parametrize("groups", [1, 4])
def test_it_equals_a_hand_written_block(groups: int) -> None:
    model, by_hand, x = net(groups), net(groups), randn(2, 3, 8, 8)
    handle = scalelong.apply(model, "cs", kappa=0.5, placement="after_norm", example=x)
    assert [skip.reach for skip in handle.skips] == ["full"] * 3
    for block, kappa in zip(by_hand.up, [0.25, 0.5, 1.0], strict=True):
        block.kappa_after = kappa
    results = []
    for each in (model, by_hand):
        result = each(x)
        result.square().mean().backward()
        results.append((result, {name: p.grad for name, p in each.named_parameters()}))
    torch.testing.assert_close(results[0][0], results[1][0], rtol=1e-5, atol=1e-6)
    for name, gradient in results[1][1].items():
        torch.testing.assert_close(results[0][1][name], gradient, rtol=1e-4, atol=1e-6, msg=name)


def test_before_the_norm_kappa_is_cancelled_and_after_it_is_not() -> None:
    """The reason for the placement: at a small kappa, how much the normalised branch still depends on the skip."""
    hidden, skip = randn(2, 8, 8, 8).double(), 5 * randn(2, 8, 8, 8).double()
    remaining = {}
    for placement in ("none", "before", "after_norm"):
        model, x = net(4).double(), randn(2, 3, 8, 8).double()
        if placement != "none":
            scalelong.apply(model, "universal", kappa=0.02, placement=placement, example=x)
        block = model.up[1]
        nn.init.zeros_(block.short.weight)
        remaining[placement] = float((block(hidden, skip) - block(hidden, skip.flip(1))).detach().norm())
    assert remaining["before"] > 0.9 * remaining["none"]
    assert remaining["after_norm"] < 0.05 * remaining["none"]


def test_kappa_one_is_bit_equal_and_remove_restores_everything() -> None:
    model, inputs = build(UNET), UNET.inputs()
    before, keys = output(model, inputs), list(model.state_dict())
    scalelong.apply(model, "cs", kappa=1.0, placement="after_norm")
    assert torch.equal(output(model, inputs), before)
    scalelong.remove(model)
    scalelong.apply(model, "cs", kappa=0.5, placement="after_norm")
    assert not torch.allclose(output(model, inputs), before)
    scalelong.remove(model)
    assert torch.equal(output(model, inputs), before)
    assert list(model.state_dict()) == keys
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_the_oracle_sees_a_slice_of_the_wrong_channels() -> None:
    from dataclasses import replace

    from scalelong.scaling.constant import ConstantScaling
    from scalelong.skips.hooks import attach, attached_skips, detach
    from scalelong.skips.long_skip import OutputChannels

    model, x = net(4), randn(2, 3, 8, 8)
    scalelong.apply(model, "cs", placement="after_norm", example=x)
    skips = attached_skips(model)
    detach(model)
    wrong = tuple((n, OutputChannels(0, 8) if isinstance(p, OutputChannels) else p) for n, p in skips[1].after_norm)
    attach(model, [skips[0], replace(skips[1], after_norm=wrong), skips[2]], ConstantScaling([1.0] * 3))
    with pytest.raises(scalelong.skips.VerificationError, match="skip 2 "):
        scalelong.verify(model, x)


def test_it_is_saved_and_loaded_with_the_scaling(tmp_path) -> None:
    model = build(UNET)
    scalelong.apply(model, "cs", kappa=0.5, placement="after_norm")
    expected = output(model, UNET.inputs())
    scalelong.save(model, tmp_path / "ours")
    assert_close(output(scalelong.load(build(UNET, seed=1), tmp_path / "ours"), UNET.inputs()), expected)
    model.save_pretrained(tmp_path / "theirs")
    loaded = scalelong.from_pretrained(type(model), tmp_path / "theirs").eval()
    assert_close(output(loaded, UNET.inputs()), expected)
    other = build(UNET)
    scalelong.apply(other, "cs", kappa=0.5)
    with pytest.raises(ValueError, match="placement: the model has before, the saved one is after_norm"):
        scalelong.load(other, tmp_path / "ours")


def test_it_is_folded_exactly_into_the_norms_weights() -> None:
    model, inputs = build(UNET).double(), {k: v.double() for k, v in UNET.inputs().items()}
    plain = copy.deepcopy(model)
    scalelong.apply(model, "cs", kappa=0.5, placement="after_norm")
    expected = output(model, inputs)
    changed = scalelong.fold(model)
    assert {name.rpartition(".")[0].rpartition(".")[2] for name in changed} == {"norm1", "conv_shortcut"}
    torch.testing.assert_close(output(model, inputs), expected, rtol=1e-9, atol=1e-12)
    assert not torch.allclose(output(plain, inputs), expected)
    assert not any(module._forward_hooks for module in model.modules())


@pytest.mark.parametrize(
    ("build_model", "method", "options", "message"),
    [
        (
            TutorialUNet,
            "cs",
            {"placement": "after_norm"},
            "no skip of this TutorialUNet is followed by a GroupNorm",
        ),
        (lambda: net(4), "ls", {"placement": "after_norm"}, "'after_norm' is for constant methods"),
        (lambda: net(4), "cs", {"placement": "behind"}, "unknown 'behind'; choose one of before, after_norm"),
    ],
)
def test_what_it_is_not_for_is_refused(build_model, method, options, message) -> None:
    model = build_model()
    with pytest.raises(ValueError, match=f"placement: {message}"):
        scalelong.apply(model, method, example=image(), **options)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize("part", ["norm", "short"])
def test_a_module_shared_by_two_blocks_is_refused(part: str) -> None:
    model = net(4)
    setattr(model.up[2], part, getattr(model.up[1], part))
    with pytest.raises(
        ValueError, match=r"placement: skip 1 .*needs a GroupNorm module and a shortcut module, each called"
    ):
        scalelong.apply(model, "cs", kappa=0.5, placement="after_norm", example=randn(2, 3, 8, 8))
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
