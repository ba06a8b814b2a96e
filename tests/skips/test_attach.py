"""Applying a scaling: bad calls raise and leave the model unchanged."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import scalelong
from tests.families import FAMILIES, assert_close, build, output

BY_NAME = {family.name: family for family in FAMILIES}
UNET, UVIT = BY_NAME["UNet2DModel"], BY_NAME["UViT"]


def assert_untouched(model: nn.Module, before: nn.Module, config: object) -> None:
    assert list(model.state_dict()) == list(before.state_dict())
    assert getattr(model, "config", None) == config
    assert not any(module._forward_pre_hooks for module in model.modules())
    assert "scalelong" not in model._modules


@pytest.mark.parametrize(
    ("method", "options", "error"),
    [
        ("nonsense", {}, ValueError),
        ("cs", {"kappa": 2.0}, ValueError),
        ("cs", {"shared": True}, TypeError),
        ("ls", {"axis": "tokens"}, ValueError),
    ],
)
def test_a_refused_scaling_leaves_the_model_untouched(method, options, error) -> None:
    model = build(UNET)
    before, config = copy.deepcopy(model), model.config
    with pytest.raises(error, match=r"scaling\."):
        scalelong.apply(model, method, **options)
    assert_untouched(model, before, config)


def test_a_second_scaling_is_refused_and_the_first_stays() -> None:
    model = build(UNET)
    scalelong.apply(model, "cs", kappa=0.6)
    before = output(model, UNET.inputs())
    with pytest.raises(ValueError, match=r"scaled already; call scalelong\.remove"):
        scalelong.apply(model, "ls")
    assert scalelong.coefficients(model) == pytest.approx([0.6**i for i in range(6)])
    assert torch.equal(output(model, UNET.inputs()), before)


def test_a_model_without_long_skips_is_refused() -> None:
    from diffusers import UNet1DModel

    model = UNet1DModel(
        sample_size=16, in_channels=6, out_channels=1, block_out_channels=(64, 64), layers_per_block=1, norm_num_groups=8,
        down_block_types=("DownResnetBlock1D",) * 2, up_block_types=(), mid_block_type="ValueFunctionMidBlock1D",
        out_block_type="ValueFunction", use_timestep_embedding=True, time_embedding_type="positional", act_fn="mish",
    )  # fmt: skip
    with pytest.raises(ValueError, match="has no long skip connections"):
        scalelong.apply(model, "cs")


def test_an_unknown_class_is_refused_and_the_known_ones_are_named() -> None:
    with pytest.raises(ValueError, match=r"Linear are not known.*diffusers\.UNet2DModel"):
        scalelong.find_skips(nn.Linear(2, 2))


def test_a_compiled_model_is_refused_because_its_hooks_would_not_run() -> None:
    with pytest.raises(TypeError, match=r"before torch\.compile"):
        scalelong.apply(torch.compile(build(UVIT)), "cs")


def test_a_model_in_dataparallel_is_refused() -> None:
    with pytest.raises(TypeError, match="apply scalelong before DataParallel, to the module inside it"):
        scalelong.apply(nn.DataParallel(build(UVIT)), "cs", example=UVIT.inputs())


def test_gates_made_in_inference_mode_can_be_trained_in_any_precision() -> None:
    model = build(UVIT).double()
    with torch.inference_mode():
        scalelong.apply(model, "ls")
    inputs = {k: v.double() if v.is_floating_point() else v for k, v in UVIT.inputs().items()}
    output(model, inputs).square().mean().backward()
    assert all(p.grad is not None and p.dtype == torch.float64 for p in model.scalelong.parameters())


def test_only_modules_are_accepted() -> None:
    with pytest.raises(TypeError, match="got str"):
        scalelong.apply("unet", "cs")


def test_a_model_that_is_not_scaled_has_no_coefficients_and_nothing_to_remove() -> None:
    for function in (scalelong.coefficients, scalelong.remove):
        with pytest.raises(ValueError, match=r"not scaled; call scalelong\.apply"):
            function(build(UVIT))
        scaled = build(UVIT)
        scalelong.apply(scaled, "cs")
        with pytest.raises(
            ValueError, match=r"this OptimizedModule is not scaled; pass the model inside torch\.compile"
        ):
            function(torch.compile(scaled))


def test_a_subclass_of_a_known_family_is_known() -> None:
    from diffusers import UNet2DModel

    class MyUNet(UNet2DModel):
        pass

    torch.manual_seed(0)
    assert len(scalelong.find_skips(MyUNet(block_out_channels=(32, 32), down_block_types=("DownBlock2D",) * 2,
                                           up_block_types=("UpBlock2D",) * 2))) == 6  # fmt: skip


def test_gates_take_the_models_device_and_precision() -> None:
    with torch.device("meta"):
        model = BY_NAME["UNet2DConditionModel SDXL"].build().half()
    scalelong.apply(model, "ls")
    assert all(p.is_meta and p.dtype == torch.float16 for p in model.scalelong.parameters())


def test_gates_take_the_precision_of_most_weights() -> None:
    """As of a network in half precision that embeds its times in full."""
    model = build(UVIT).half()
    model.pos_embed.data = model.pos_embed.data.float()  # the first of its weights
    scalelong.apply(model, "ls", reduction=2)
    assert all(p.dtype == torch.float16 for p in model.scalelong.parameters())


def test_the_handle_prints_the_skips_with_their_coefficients() -> None:
    text = str(scalelong.apply(build(UVIT), "cs", kappa=0.5))
    assert text.splitlines()[0] == "cs(kappa=0.5) on UViT"
    last = text.splitlines()[-1].split()
    assert (last[0], last[1], last[-1]) == ("4", "in_blocks.3", "0.125")


class TestStateDicts:
    """Weights meet a model with another scaling."""

    def scaled(self, method: str, **options: object) -> nn.Module:
        model = build(UNET)
        scalelong.apply(model, method, **options)
        return model

    @pytest.mark.parametrize(
        ("saved", "into", "message"),
        [
            (("ls", {}), ("cs", {}), r"saved with another scaling than cs\(kappa=0\.7\)"),
            (("cs", {}), ("ls", {}), r"saved with another scaling than ls"),
            (("cs", {"kappa": 0.5}), ("cs", {"kappa": 0.7}), r"trained with \[1\.0, 0\.5, .*applies \[1\.0, 0\.7"),
            (
                ("universal", {"kappa": 0.68}),
                ("universal", {"kappa": 0.7}),
                r"trained with \[0\.68, .*applies \[0\.7, ",
            ),
            (("ls", {"reduction": 4}), ("ls", {"reduction": 2}), r"state_dict\.scalelong\.gates.*shape"),
        ],
    )
    def test_another_scaling_is_refused_before_anything_is_loaded(self, saved, into, message) -> None:
        weights = {k: v + 1 for k, v in self.scaled(saved[0], **saved[1]).state_dict().items()}
        if "scalelong.kappa" in weights:
            weights["scalelong.kappa"] -= 1
        model = self.scaled(into[0], **into[1])
        before = copy.deepcopy(model.state_dict())
        with pytest.raises(ValueError, match=message):
            model.load_state_dict(weights)
        assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())

    def test_numbers_rounded_to_half_precision_are_the_same(self) -> None:
        self.scaled("cs", kappa=0.7).load_state_dict(self.scaled("cs", kappa=0.7).half().state_dict())

    @pytest.mark.parametrize(
        ("method", "options", "key"),
        [
            ("cs", {"kappa": 0.6}, "kappa"),
            ("mp_cat", {"t": 0.3}, "factors"),
            ("freeu", {"s1": 0.8}, "factors"),
            ("layernorm", {}, "eps"),
            ("stable_tau", {"tau": 0.3}, "tau"),
        ],
    )
    def test_constants_lost_by_to_empty_are_restored(self, method, options, key) -> None:
        family = UVIT if method == "stable_tau" else UNET
        model, empty = build(family), build(family)
        scalelong.apply(model, method, **options)
        scalelong.apply(empty, method, **options)
        expected = model.scalelong.get_buffer(key).clone()
        empty.to("meta").to_empty(device="cpu")
        empty.scalelong.get_buffer(key).fill_(123.0)  # memory that was given anew holds anything
        assert torch.equal(empty.state_dict()[f"scalelong.{key}"], expected)
        empty.scalelong.get_buffer(key).fill_(123.0)
        empty.load_state_dict(model.state_dict())
        assert torch.equal(empty.scalelong.get_buffer(key), expected)
        assert_close(output(empty.eval(), family.inputs()), output(model, family.inputs()))
        scalelong.remove(empty)
        assert not empty._state_dict_pre_hooks

    def test_another_number_of_skips_is_refused(self) -> None:
        other = build(BY_NAME["UNet2DModel NCSN++"])
        scalelong.apply(other, "cs")
        with pytest.raises(ValueError, match=r"scalelong\.kappa: shape \(4,\) does not fit \(6,\).*6 skips"):
            self.scaled("cs").load_state_dict(other.state_dict())

    def test_unscaled_weights_load_into_a_constant_scaling_with_a_warning(self) -> None:
        model, plain = self.scaled("cs", kappa=0.6), build(UNET, seed=5)
        with pytest.warns(UserWarning, match=r"have no scaling.*cs\(kappa=0\.6\)"):
            model.load_state_dict(plain.state_dict())
        assert torch.equal(model.conv_in.weight, plain.conv_in.weight)
        assert scalelong.coefficients(model)[1] == 0.6

    def test_unscaled_weights_do_not_load_into_gates(self) -> None:
        model = self.scaled("ls")
        before = copy.deepcopy(model.state_dict())
        with pytest.raises(ValueError, match=r"contain no gates for ls.*load the weights before scalelong\.apply"):
            model.load_state_dict(build(UNET, seed=5).state_dict())
        assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())

    def test_part_of_a_model_loads_without_a_warning(self) -> None:
        model, other = self.scaled("ls"), build(UNET, seed=5)
        model.load_state_dict({"conv_in.bias": other.conv_in.bias.detach()}, strict=False)
        assert torch.equal(model.conv_in.bias, other.conv_in.bias)

    def test_scaled_weights_do_not_load_silently_into_an_unscaled_model(self) -> None:
        with pytest.raises(RuntimeError, match=r"scalelong\.kappa"):
            build(UNET).load_state_dict(self.scaled("cs").state_dict())
