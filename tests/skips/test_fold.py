"""Folding constants into weights: exact, without remains, or refused with the model untouched."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import scalelong
from scalelong.skips.families import generated_example
from tests.families import FAMILIES, build, output
from tests.standins import FOUND, TutorialUNet, image, randn

FAMILY = {family.name: family for family in FAMILIES}
STAND_IN = {stand_in.name: stand_in for stand_in in FOUND}


def deviation(got: Tensor, expected: Tensor) -> float:
    return float((got - expected).detach().abs().max() / expected.detach().abs().max())


def assert_no_remains(model: nn.Module, before: nn.Module) -> None:
    assert not any(module._forward_pre_hooks for module in model.modules())
    assert not any("scalelong" in name for module in model.modules() for name in vars(module))
    assert list(model.state_dict()) == list(before.state_dict())


@pytest.mark.parametrize(
    ("name", "generated", "weights"),
    [
        ("UNet1DModel", True, {"up_blocks.0.resnets.0.conv_1.weight", "up_blocks.0.resnets.0.conv_skip.weight"}),
        ("UNet1DModel temporal", False, {"up_blocks.0.resnets.0.residual_conv.weight"}),
        ("UniDiffuser UTransformer2DModel", True, {"transformer_out_blocks.0.skip.skip_linear.weight"}),
        ("StableCascadeUNet", False, {"up_blocks.1.0.channelwise.0.weight"}),
        ("UViT", True, {"out_blocks.0.skip_linear.weight"}),
    ],
)
def test_known_families_with_weights_directly_on_the_skip(name: str, generated: bool, weights: set[str]) -> None:
    family = FAMILY[name]
    model, plain = build(family).double(), build(family).double()
    inputs = {k: v.double() if v.is_floating_point() else v for k, v in family.inputs().items()}
    scalelong.apply(model, "cs", kappa=0.6)
    expected = output(model, inputs)
    assert weights <= set(scalelong.fold(model, example=None if generated else inputs))
    assert deviation(output(model, inputs), expected) < 1e-12
    assert deviation(output(plain, inputs), expected) > 1e-3, "the scaling itself changed nothing"
    assert_no_remains(model, plain)


@pytest.mark.parametrize(
    "name",
    ["nested segmentation", "pix2pix style", "tutorial UNet", "token U-ViT", "shared parts", "data-dependent branch"],
)
def test_detected_models_with_weights_directly_on_the_skip(name: str) -> None:
    stand_in = STAND_IN[name]
    torch.manual_seed(0)
    model = stand_in.build().double().eval()
    plain, inputs = copy.deepcopy(model), tuple(x.double() for x in stand_in.inputs())
    scalelong.apply(model, "universal", kappa=0.3, example=inputs)
    expected = model(*inputs)
    scalelong.fold(model, example=inputs)
    assert deviation(model(*inputs), expected) < 1e-12
    assert deviation(plain(*inputs), expected) > 1e-6
    assert_no_remains(model, plain)


def test_a_shortcut_is_folded_where_the_norms_eps_is_small_enough() -> None:
    """Aligned GroupNorm plus 1x1 shortcut: only the shortcut's columns for the skip change."""
    model = shortcut_unet(eps=1e-14)
    plain, family = copy.deepcopy(model), FAMILY["UNet2DModel"]
    inputs = {"sample": family.inputs()["sample"].double(), "timestep": torch.tensor([3, 500])}
    scalelong.apply(model, "cs", kappa=0.7)
    expected = output(model, inputs)
    changed = scalelong.fold(model)
    assert changed and all(name.endswith("conv_shortcut.weight") for name in changed)
    assert deviation(output(model, inputs), expected) < 1e-6
    assert deviation(output(plain, inputs), expected) > 1e-3
    for name, weight in model.named_parameters():
        if name not in changed:
            assert torch.equal(weight, plain.get_parameter(name))
    hidden = model.up_blocks[0].resnets[0].conv_shortcut.weight.shape[1] // 2
    before = plain.up_blocks[0].resnets[0].conv_shortcut.weight
    assert torch.equal(model.up_blocks[0].resnets[0].conv_shortcut.weight[:, :hidden], before[:, :hidden])


def shortcut_unet(eps: float) -> nn.Module:
    from diffusers import UNet2DModel

    torch.manual_seed(0)
    return UNet2DModel(
        sample_size=16, block_out_channels=(16, 16), layers_per_block=1, norm_num_groups=4, norm_eps=eps,
        down_block_types=("DownBlock2D",) * 2, up_block_types=("UpBlock2D",) * 2,
    ).double().eval()  # fmt: skip


def test_the_eps_of_a_norm_is_refused_and_can_be_tolerated() -> None:
    model = shortcut_unet(eps=1e-4)
    scalelong.apply(model, "cs", kappa=0.5)
    handle_before, state = scalelong.coefficients(model), copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match=r"fold: skip 2 .*would deviate by .*cancels kappa up to its eps.*tolerance"):
        scalelong.fold(model)
    assert scalelong.coefficients(model) == handle_before
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
    scalelong.fold(model, tolerance=0.5)
    assert not scalelong.skips.is_scaled(model)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("UNet2DModel", "groups of both hidden and skip channels|up to its eps"),
        ("HunyuanDiT2DModel", "passes through layer_norm"),
        ("MatrixUNet", "joined by add"),
    ],
)
def test_what_is_not_exact_is_refused_and_nothing_changes(name: str, reason: str) -> None:
    family = FAMILY[name]
    model = build(family)
    scalelong.apply(model, "cs", kappa=0.5)
    before, state = output(model, family.inputs()), copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match=rf"fold: skip 2 .*({reason})"):
        scalelong.fold(model, example=family.inputs())
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
    assert torch.equal(output(model, family.inputs()), before)


def test_gates_cannot_be_folded() -> None:
    model = build(FAMILY["UViT"])
    scalelong.apply(model, "ls")
    with pytest.raises(ValueError, match="does not multiply each skip by a fixed number"):
        scalelong.fold(model)
    assert scalelong.skips.is_scaled(model)


def test_a_weight_that_is_used_elsewhere_is_refused() -> None:
    class Tied(TutorialUNet):
        """Its second decoder's convolution is used once more on something else."""

        def forward(self, x: Tensor) -> Tensor:
            other = randn(2, 32, 8, 8).to(x) * x.mean()
            return super().forward(x) + torch.nn.functional.conv2d(other, self.up2[0].weight).mean()

    model = Tied().eval()
    scalelong.apply(model, "cs", kappa=0.5, example=image())
    with pytest.raises(ValueError, match=r"up2\.0\.weight is used 2 times"):
        scalelong.fold(model, example=image())


def test_a_grouped_convolution_is_refused() -> None:
    model = TutorialUNet().eval()
    model.up2[0] = nn.Conv2d(32, 8, 3, padding=1, groups=2)
    scalelong.apply(model, "cs", kappa=0.5, example=image())
    state = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match=r"fold: skip 2 .*up2\.0\.weight is a grouped convolution"):
        scalelong.fold(model, example=image())
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())


def test_half_precision_folds_within_its_rounding() -> None:
    """The promise is about the weights as they are stored: seen in double precision, they are off by their rounding."""
    family = FAMILY["UViT"]
    model, inputs = build(family).half(), family.inputs()
    scalelong.apply(model, "universal", kappa=0.3)
    expected = output(copy.deepcopy(model).double(), {k: v.double() for k, v in inputs.items()})
    with pytest.raises(ValueError, match=r"would deviate by .*more than tolerance=1\.0e-06"):
        scalelong.fold(model, tolerance=1e-6)
    scalelong.fold(model)
    assert model.out_blocks[0].skip_linear.weight.dtype == torch.float16
    got = deviation(output(model.double(), {k: v.double() for k, v in inputs.items()}), expected)
    assert 1e-6 < got < torch.finfo(torch.float16).eps


def test_all_skips_folded_together_keep_within_the_tolerance() -> None:
    model = shortcut_unet(eps=1e-4)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
    scalelong.apply(model, "universal", kappa=0.5)
    _, inputs = generated_example(model)
    folded = copy.deepcopy(model)
    scalelong.fold(folded, tolerance=0.5)
    whole = deviation(output(folded, inputs), output(model, inputs))
    with pytest.raises(ValueError, match=r"fold: skip 4 .*would deviate by"):
        scalelong.fold(model, tolerance=0.999 * whole)
    scalelong.fold(model, tolerance=1.001 * whole)


def test_an_unknown_class_needs_an_example() -> None:
    model = TutorialUNet()
    scalelong.apply(model, "cs", example=image())
    with pytest.raises(ValueError, match="pass the arguments you would call the model with"):
        scalelong.fold(model)


def test_kappa_one_folds_into_nothing() -> None:
    model = build(FAMILY["UNet2DModel"])
    before = copy.deepcopy(model)
    scalelong.apply(model, "none")
    assert scalelong.fold(model) == []
    assert_no_remains(model, before)
    assert all(torch.equal(value, before.state_dict()[key]) for key, value in model.state_dict().items())


def test_a_folded_model_is_a_plain_diffusers_model(tmp_path) -> None:
    family = FAMILY["UNet1DModel"]
    model = build(family)
    scalelong.apply(model, "cs", kappa=0.6)
    expected = output(model, family.inputs())
    scalelong.fold(model)
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path).eval()
    assert "long_skip_scaling" not in loaded.config
    assert deviation(output(loaded, family.inputs()), expected) < 1e-5


def test_an_ordinary_unet_scaled_behind_its_norms_folds_and_loads_in_plain_diffusers(tmp_path) -> None:
    """As it is built and used: float32, hooks gone, config and weights without a trace of us."""
    from diffusers import UNet2DModel

    model, inputs = build(FAMILY["UNet2DModel"]), FAMILY["UNet2DModel"].inputs()
    plain = output(model, inputs)
    scalelong.apply(model, "cs", kappa=0.5, placement="after_norm")
    expected = output(model, inputs)
    scalelong.fold(model)
    model.save_pretrained(tmp_path)
    loaded = UNet2DModel.from_pretrained(tmp_path).eval()
    for each in (model, loaded):
        assert (output(each, inputs) - expected).abs().max() <= 1e-6 * expected.abs().max()
        assert not any(m._forward_hooks or m._forward_pre_hooks for m in each.modules())
        assert not any("scalelong" in key for key in each.state_dict())
        assert "long_skip_scaling" not in each.config
    assert (plain - expected).abs().max() > 1e-2 * expected.abs().max()


def test_the_refusal_for_a_norms_eps_names_the_placement_that_folds() -> None:
    model = build(FAMILY["UNet2DModel"])
    scalelong.apply(model, "cs", kappa=0.5)
    with pytest.raises(ValueError, match="train with placement='after_norm', which folds exactly, keep the hooks"):
        scalelong.fold(model, example=FAMILY["UNet2DModel"].inputs())
    assert scalelong.skips.is_scaled(model)
