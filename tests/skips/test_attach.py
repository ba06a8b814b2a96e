"""Applying a scaling: bad calls raise and leave the model unchanged."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from diffusers import UNet2DModel
from torch import nn

import scalelong
from scalelong.skips.attach import _log_once
from tests.families import FAMILIES, assert_close, assert_same_weights, build, output
from tests.standins import TutorialUNet, image

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


def test_a_handle_prints_after_removal_too() -> None:
    handle = scalelong.apply(build(UVIT), "cs", kappa=0.7)
    handle.remove()
    assert str(handle) == repr(handle) == "cs(kappa=0.7), removed"


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


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("options", [{}, {"module": "ie"}, {"module": "learnable"}, {"shared": False}], ids=str)
def test_gates_work_when_the_model_is_converted_after_them(options, dtype) -> None:
    """All of it, or, as convert_to_fp16 of guided-diffusion does, all but the gates."""
    model = build(UVIT).eval()
    scalelong.apply(model, "ls", **options)
    expected = output(model, UVIT.inputs())
    inputs = {k: v.to(dtype) if v.ndim > 1 else v for k, v in UVIT.inputs().items()}
    converted, partly = copy.deepcopy(model).to(dtype), copy.deepcopy(model)
    for child in partly.children():
        child.to(torch.float32 if child is partly.scalelong else dtype)
    partly.pos_embed.data = partly.pos_embed.data.to(dtype)
    for other in (converted, partly):
        torch.testing.assert_close(output(other, inputs).float(), expected, rtol=0.1, atol=0.05)
    assert {p.dtype for p in partly.scalelong.parameters()} == {torch.float32}


class Occupied(TutorialUNet):
    """A network with an attribute of our name, as the paper's own class has: the number of its scaling, 0 for none."""

    def __init__(self, scalelong: int) -> None:
        super().__init__()
        self.scalelong = scalelong


@pytest.mark.parametrize("method", ["cs", "ls"])
def test_a_model_that_uses_our_name_is_scaled_under_another(method, tmp_path) -> None:
    model, other = Occupied(0).eval(), Occupied(0).eval()
    keys = list(model.state_dict())
    scalelong.apply(model, method, example=image())
    assert model.scalelong == 0
    assert {key.partition(".")[0] for key in model.state_dict() if key not in keys} == {"scalelong_module"}
    scalelong.verify(model, example=image())
    scalelong.load(other, scalelong.save(model, tmp_path), example=image())
    assert_same_weights(copy.deepcopy(copy.deepcopy(other)), model)
    assert_close(other(*image()), model(*image()))
    plain = {key: value for key, value in model.state_dict().items() if key in keys}
    with pytest.raises(ValueError, match="no gates") if method == "ls" else pytest.warns(UserWarning, match="without"):
        other.load_state_dict(plain)
    scalelong.remove(model)
    assert list(model.state_dict()) == keys


def test_a_model_that_scales_its_skips_itself_is_refused_with_the_remedy() -> None:
    with pytest.raises(ValueError, match=r"'scalelong' is 2\); build it without .*scalelong\.load_official_uvit"):
        scalelong.apply(Occupied(2), "cs", example=image())


def test_verify_false_skips_the_check() -> None:
    """The check runs copies in double precision."""
    seen: list[torch.dtype] = []

    class Recording(TutorialUNet):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen.append(x.dtype)
            return super().forward(x)

    for check in (False, True):
        assert len(scalelong.apply(Recording(), "cs", example=image(), verify=check).skips) == 3
        assert (torch.float64 in seen) is check


@pytest.mark.parametrize("method", ["cs", "ls"])
def test_where_norms_cancel_kappa_this_is_said_at_once(method, caplog) -> None:
    _log_once.cache_clear()
    for _ in range(2):  # logged once
        handle = scalelong.apply(build(UNET), method)
    note = 'norms cancel kappa on 4 of 6 skips, except in the block\'s shortcut; placement="after_norm"'
    assert [record.getMessage() for record in caplog.records if record.name == "scalelong"] == [handle.note]
    assert handle.note.startswith(note)
    assert repr(handle).splitlines()[1] == handle.note
    caplog.clear()
    _log_once.cache_clear()
    for quiet in (("none", {}), ("cs", {"placement": "after_norm"})):
        assert scalelong.apply(build(UNET), quiet[0], **quiet[1]).note == ""
    assert scalelong.apply(build(UVIT), method).note == ""
    assert not [record for record in caplog.records if record.name == "scalelong"]


def test_coefficients_print_without_rounding_errors() -> None:
    assert (
        str(scalelong.coefficients(scalelong.apply(build(UNET), "cs", kappa=0.7).model)[:4])
        == "[1.0, 0.7, 0.49, 0.343]"
    )


def test_gates_take_the_precision_of_most_weights() -> None:
    """As of a network in half precision that embeds its times in full."""
    model = build(UVIT).half()
    model.pos_embed.data = model.pos_embed.data.float()  # the first of its weights
    scalelong.apply(model, "ls", reduction=2)
    assert all(p.dtype == torch.float16 for p in model.scalelong.parameters())


def test_gates_are_named_until_the_first_forward() -> None:
    model = TutorialUNet()
    handle = scalelong.apply(model, "ls", example=image())
    assert "nan" not in str(handle) and str(handle).splitlines()[-1].endswith("gate")
    model(*image())
    assert "gate" not in str(handle).splitlines()[-1]


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

    def test_resuming_as_diffusers_scripts_do_gives_no_warning(self, tmp_path) -> None:
        """They load the saved model as its plain class, then its config and its weights into the scaled one."""
        self.scaled("cs", kappa=0.6).save_pretrained(tmp_path)
        loaded, model = UNet2DModel.from_pretrained(tmp_path), self.scaled("cs", kappa=0.6)
        model.register_to_config(**loaded.config)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            model.load_state_dict(loaded.state_dict())
            copy.deepcopy(model).load_state_dict(loaded.state_dict())

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
