"""The oracle check: it must see every mistake, also behind zero weights, and pass what is right."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from diffusers import UNet2DModel
from torch import nn

import scalelong
from scalelong.scaling.constant import ConstantScaling
from scalelong.skips import VerificationError
from scalelong.skips.hooks import attach, detach
from scalelong.skips.long_skip import Argument, ChannelSlice, Item
from scalelong.skips.tracing.verify import add_noise
from tests.families import FAMILIES, Family, build
from tests.standins import AdditiveUNet, GuidedStyle, TokenUViT, TutorialUNet, image, image_and_time, randn

QUICK = ("UNet2DModel", "UNet1DModel", "HunyuanDiT2DModel", "UniDiffuser UTransformer2DModel", "StableCascadeUNet", "UViT",
         "MatrixUNet")  # fmt: skip
checked_families = [
    pytest.param(family, id=family.name, marks=[] if family.name in QUICK else pytest.mark.slow) for family in FAMILIES
]


@pytest.mark.parametrize("family", checked_families)
def test_every_known_family_agrees_with_the_oracle(family: Family) -> None:
    model = build(family)
    scalelong.apply(model, "cs", kappa=0.7)
    report = scalelong.verify(model, example=family.inputs())
    assert [check.index for check in report.checks] == list(range(1, family.num_skips + 1))
    assert all(check.effect > 1e-6 and check.gradient_error is not None for check in report.checks)


class TestMistakesAreSeen:
    """Hooks put in a wrong place by hand."""

    def skips(self, model: nn.Module, *example: torch.Tensor) -> list[scalelong.LongSkip]:
        return scalelong.find_skips(model, example=example)

    def refused(self, model: nn.Module, skips, example, number: int) -> None:
        attach(model, skips, ConstantScaling([1.0] * len(skips)))
        with pytest.raises(VerificationError, match=f"skip {number} .*outputs differ from the oracle"):
            scalelong.verify(model, example=example)

    def test_the_wrong_channels(self) -> None:
        model = GuidedStyle()
        skips = self.skips(model, *image_and_time())
        slot = skips[2].slot
        assert isinstance(slot, ChannelSlice)
        skips[2] = replace(skips[2], slot=replace(slot, start=0, channels=slot.start))
        self.refused(model, skips, image_and_time(), 3)

    def test_one_channel_too_many(self) -> None:
        model = GuidedStyle()
        skips = self.skips(model, *image_and_time())
        slot = skips[0].slot
        assert isinstance(slot, ChannelSlice)
        skips[0] = replace(skips[0], slot=replace(slot, start=slot.start - 1, channels=slot.channels + 1))
        self.refused(model, skips, image_and_time(), 1)

    def test_all_channels(self) -> None:
        model = TutorialUNet()
        skips = self.skips(model, *image())
        skips[1] = replace(skips[1], slot=Argument(0, "input"))
        self.refused(model, skips, image(), 2)

    def test_the_hidden_state_instead_of_the_skip(self) -> None:
        model = TokenUViT()
        skips = self.skips(model, *image_and_time())
        skips[2] = replace(skips[2], slot=Argument(0, "x"))
        self.refused(model, skips, image_and_time(), 3)

    def test_two_skips_exchanged(self) -> None:
        model = AdditiveUNet()
        first, second, third = self.skips(model, *image())
        swapped = [replace(second, index=1), replace(first, index=2), third]
        self.refused(model, swapped, image(), 1)

    def test_the_wrong_item_of_a_tuple(self) -> None:
        family = FAMILIES[0]
        model = build(family)
        skips = scalelong.find_skips(model)
        slot = skips[0].slot
        assert isinstance(slot, Item)
        skips[0] = replace(skips[0], slot=replace(slot, item=slot.item + 1))
        attach(model, skips, ConstantScaling([1.0] * len(skips)))
        with pytest.raises(VerificationError, match="skip 1 "):
            scalelong.verify(model, example=family.inputs())

    def test_a_skip_forgotten(self) -> None:
        model = AdditiveUNet()
        skips = self.skips(model, *image())
        attach(model, skips[:2], ConstantScaling([1.0] * 2))
        with pytest.raises(VerificationError, match="2 skips are known, 3 are found"):
            scalelong.verify(model, example=image())

    def test_a_hook_that_is_gone(self) -> None:
        model = AdditiveUNet()
        handle = scalelong.apply(model, "cs", example=image())
        model.get_submodule(handle.skips[1].consumer)._forward_pre_hooks.clear()
        with pytest.raises(VerificationError, match="skip 2 "):
            scalelong.verify(model, example=image())

    def test_right_outputs_with_wrong_gradients(self) -> None:
        """A decoder that detaches the scaled skip: every output agrees, no gradient does."""

        class Blind(ChannelSlice):
            def scale(self, call, index, scaling):
                args, kwargs = super().scale(call, index, scaling)
                return (args[0].detach(),), kwargs

        model = TutorialUNet()
        skips = self.skips(model, *image())
        slot = skips[0].slot
        assert isinstance(slot, ChannelSlice)
        skips[0] = replace(skips[0], slot=Blind(slot.argument, slot.start, slot.channels, slot.dim, slot.total))
        attach(model, skips, ConstantScaling([1.0] * len(skips)))
        with pytest.raises(VerificationError, match=r"skip 1 .*gradients differ"):
            scalelong.verify(model, example=image())

    def test_behind_a_zero_output_layer(self) -> None:
        model = TutorialUNet()
        nn.init.zeros_(model.out.weight)
        skips = self.skips(model, *image())
        skips[1] = replace(skips[1], slot=Argument(0, "input"))
        self.refused(model, skips, image(), 2)


def test_apply_undoes_itself_when_the_check_disagrees() -> None:
    class Sneaky(AdditiveUNet):
        """Is another function once a decoder block carries a hook."""

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            before = self.up[0]._forward_pre_hooks
            return super().forward(x) * (1.0 + len(before))

    model = Sneaky()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(VerificationError, match="skip 1 "):
        scalelong.apply(model, "cs", example=image())
    assert list(model.state_dict()) == list(before)
    assert not any(module._forward_pre_hooks for module in model.modules())
    assert not scalelong.skips.is_scaled(model)


def test_the_model_itself_is_left_alone() -> None:
    model = TutorialUNet().train()
    scalelong.apply(model, "ls", example=image())
    state, random_state = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    scalelong.verify(model, example=image())
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
    assert all(module.training for module in model.modules())
    assert all(p.grad is None for p in model.parameters())
    assert torch.equal(torch.get_rng_state(), random_state)


def test_noise_goes_where_weights_are_zero_and_nowhere_else() -> None:
    model = GuidedStyle()
    before = {name: p.clone() for name, p in model.named_parameters()}
    add_noise(model)
    for name, parameter in model.named_parameters():
        assert parameter.any()
        assert torch.equal(parameter, before[name]) == bool(before[name].any())


def test_a_model_that_fixes_its_precision_is_checked_in_that() -> None:
    class Single(TutorialUNet):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x.float())

    model = Single()
    scalelong.apply(model, "cs", example=image())
    report = scalelong.verify(model, example=image())
    assert report.dtype == torch.float32
    detach(model)
    skips = scalelong.find_skips(model, example=image())
    skips[2] = replace(skips[2], slot=Argument(0, "input"))
    attach(model, skips, ConstantScaling([1.0] * 3))
    with pytest.raises(VerificationError, match="skip 3 "):
        scalelong.verify(model, example=image())


def test_a_model_with_checkpointing_can_be_verified() -> None:
    model = build(FAMILIES[0]).train()
    scalelong.apply(model, "cs")
    model.enable_gradient_checkpointing()
    scalelong.verify(model, example=FAMILIES[0].inputs())
    assert model.is_gradient_checkpointing


def test_a_model_without_scaling_or_without_values_is_refused() -> None:
    with pytest.raises(ValueError, match="not scaled"):
        scalelong.verify(TutorialUNet(), example=image())
    with torch.device("meta"):
        model = FAMILIES[0].build()
    scalelong.apply(model, "cs")
    with pytest.raises(ValueError, match="no values to check"):
        scalelong.verify(model, example=FAMILIES[0].inputs())


def test_a_known_model_whose_skips_cannot_be_traced_is_not_verified() -> None:
    blocks = {"down_block_types": ("DownBlock2D",) * 2, "up_block_types": ("UpBlock2D",) * 2}
    model = UNet2DModel(sample_size=8, block_out_channels=(8, 8), norm_num_groups=4, mid_block_type=None, **blocks)
    scalelong.apply(model, "cs")
    with pytest.raises(VerificationError, match=r"its skips cannot be checked: .*joins its input with itself"):
        scalelong.verify(model)


def test_the_report_names_every_skip() -> None:
    model = AdditiveUNet()
    scalelong.apply(model, "cs", example=randn(2, 3, 8, 8))
    lines = str(scalelong.verify(model, example=image())).splitlines()
    assert "3 long skips scaled as intended" in lines[0]
    assert lines[1].startswith("  1: down.0 -> up.2")
