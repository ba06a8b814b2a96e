"""Peers and controls on whole models: against hand-written networks, diffusers' own FreeU, and through save and load."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
from diffusers.models.resnet import ResnetBlock2D
from torch import Tensor, nn

import scalelong
from scalelong.scaling.baselines import magnitude_preserving
from tests.families import FAMILIES, Family, assert_close, assert_same_weights, build, output
from tests.standins import FOUND, RootShortcut, TutorialUNet, image

BY_NAME = {family.name: family for family in FAMILIES}
UNET, SD15, UVIT = BY_NAME["UNet2DModel"], BY_NAME["UNet2DConditionModel SD-1.5"], BY_NAME["UViT"]

METHODS: list[tuple[str, dict[str, Any], Family]] = [
    ("mp_cat", {"t": 0.3}, UNET),
    ("mp_cat", {"t": 0.3}, UVIT),
    ("layernorm", {}, UNET),
    ("layernorm", {"affine": False}, UVIT),
    ("freeu", {"s2": 0.4, "b1": 1.3}, UNET),
    ("rezero", {}, UVIT),
    ("stable_tau", {"tau": 0.3}, UVIT),
    ("rezero", {}, UNET),
    ("stable_tau", {"tau": 0.3}, SD15),
]
every_method = pytest.mark.parametrize(
    ("method", "options", "family"), METHODS, ids=[f"{m}-{f.name}" for m, _, f in METHODS]
)


def perturbed(model: nn.Module) -> None:
    """Gates away from where they start, so that a save that loses them is seen."""
    with torch.no_grad():
        for parameter in model.scalelong.parameters():
            parameter.add_(0.3)


@every_method
def test_it_can_be_removed_copied_saved_and_loaded(
    method: str, options: dict[str, Any], family: Family, tmp_path
) -> None:
    model, inputs = build(family), family.inputs()
    before = output(model, inputs)
    handle = scalelong.apply(model, method, **options)
    perturbed(model)
    scaled = output(model, inputs)
    assert not torch.allclose(scaled, before)
    assert len(handle.coefficients()) == family.num_skips
    scalelong.save(model, tmp_path)
    loaded = scalelong.load(build(family, seed=1), tmp_path)
    assert_same_weights(loaded, model)
    assert_close(output(loaded, inputs), scaled)
    copied = copy.deepcopy(model)
    assert_close(output(copied, inputs), scaled)
    scalelong.remove(model)
    assert torch.equal(output(model, inputs), before)
    assert not any(m._forward_pre_hooks or m._forward_hooks for m in model.modules())
    assert_close(output(copied, inputs), scaled)


@every_method
def test_other_options_are_refused_when_loading(method: str, options: dict[str, Any], family: Family) -> None:
    model, other = build(family), build(family)
    scalelong.apply(model, method, **options)
    scalelong.apply(other, "cs", kappa=0.5)
    with pytest.raises(ValueError, match="saved with another scaling"):
        other.load_state_dict(model.state_dict())


@pytest.mark.parametrize(
    ("method", "option", "values", "key"),
    [
        ("mp_cat", "t", (0.3, 0.5), "factors"),
        ("mp_cat", "t", (0.49, 0.5), "factors"),
        ("freeu", "s1", (0.88, 0.9), "factors"),
        ("stable_tau", "tau", (0.103, 0.1), "tau"),
    ],
)
def test_another_number_in_the_weights_is_refused(
    method: str, option: str, values: tuple[float, float], key: str
) -> None:
    family = UVIT if method == "stable_tau" else UNET
    model, other = build(family), build(family)
    scalelong.apply(model, method, **{option: values[0]})
    scalelong.apply(other, method, **{option: values[1]})
    with pytest.raises(ValueError, match=rf"scalelong\.{key}: the weights were trained with"):
        other.load_state_dict(model.state_dict())


class Magnitudes(nn.Module):
    """A concatenating network; with `t`, EDM2's join written out."""

    def __init__(self, t: float | None) -> None:
        super().__init__()
        self.t = t
        self.down = nn.ModuleList(nn.Conv2d(i, o, 3, padding=1) for i, o in ((3, 4), (4, 8)))
        self.mid = nn.Conv2d(8, 8, 3, padding=1)
        self.up = nn.ModuleList(nn.Conv2d(i, o, 3, padding=1) for i, o in ((16, 12), (16, 3)))

    def forward(self, x: Tensor) -> Tensor:
        kept = []
        for layer in self.down:
            x = layer(x).tanh()
            kept.append(x)
        x = self.mid(x)
        for layer in self.up:
            skip = kept.pop()
            if self.t is not None:
                a, b = magnitude_preserving(x.shape[1], skip.shape[1], self.t)
                x, skip = a * x, b * skip
            x = layer(torch.cat([x, skip], dim=1)).tanh()
        return x


def test_mp_cat_equals_a_network_written_that_way() -> None:
    torch.manual_seed(0)
    model, by_hand = Magnitudes(None), Magnitudes(0.3)
    by_hand.load_state_dict(model.state_dict())
    scalelong.apply(model, "mp_cat", t=0.3, example=image())
    torch.testing.assert_close(model(*image()), by_hand(*image()))


def test_mp_cat_on_uvit_equals_its_weights_scaled() -> None:
    model, by_hand, inputs = build(UVIT), build(UVIT), UVIT.inputs()
    scalelong.apply(model, "mp_cat", t=0.3)
    main, skip = magnitude_preserving(16, 16, 0.3)
    with torch.no_grad():
        for block in by_hand.out_blocks:
            block.skip_linear.weight[:, :16] *= main
            block.skip_linear.weight[:, 16:] *= skip
    torch.testing.assert_close(output(model, inputs), output(by_hand, inputs), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("b", [(1.0, 1.0), (1.5, 1.6)])
def test_freeu_equals_that_of_diffusers(b: tuple[float, float]) -> None:
    model, theirs, inputs = build(SD15), build(SD15), {**SD15.inputs(), "sample": torch.randn(2, 4, 32, 32)}
    before = output(model, inputs)
    theirs.enable_freeu(s1=0.9, s2=0.2, b1=b[0], b2=b[1])
    scalelong.apply(model, "freeu", s1=0.9, s2=0.2, b1=b[0], b2=b[1])
    torch.testing.assert_close(output(model, inputs), output(theirs, inputs), rtol=1e-4, atol=1e-5)
    assert not torch.allclose(output(model, inputs), before, rtol=1e-3, atol=1e-4)


class ByHand(nn.Module):
    """A U-ViT block whose branches are multiplied by `factor`, written out."""

    def __init__(self, block: Any, factor: float) -> None:
        super().__init__()
        self.block, self.factor = block, factor

    def forward(self, x: Tensor, skip: Tensor | None = None) -> Tensor:
        block = self.block
        if block.skip_linear is not None:
            x = block.skip_linear(x, skip)
        x = x + self.factor * block.attn(block.norm1(x))
        return x + self.factor * block.mlp(block.norm2(x))


@pytest.mark.parametrize(("method", "options", "factor"), [("rezero", {}, 0.0), ("stable_tau", {"tau": 0.3}, 0.3)])
def test_block_outputs_are_scaled_as_in_a_block_written_by_hand(
    method: str, options: dict[str, float], factor: float
) -> None:
    model, by_hand, inputs = build(UVIT), build(UVIT), UVIT.inputs()
    scalelong.apply(model, method, **options)
    for blocks in (by_hand.in_blocks, by_hand.out_blocks):
        for at, block in enumerate(blocks):
            blocks[at] = ByHand(block, factor)
    by_hand.mid_block = ByHand(by_hand.mid_block, factor)
    torch.testing.assert_close(output(model, inputs), output(by_hand, inputs))
    assert scalelong.coefficients(model) == [1.0] * 4
    assert scalelong.verify(model, example=inputs).checks


RESIDUAL = ("ResnetBlock2D", "Transformer2DModel", "Attention", "HunyuanDiTBlock")


@pytest.mark.parametrize(
    "name", ["UNet2DModel", "UNet2DModel NCSN++", "UNet2DConditionModel SD-1.5", "HunyuanDiT2DModel"]
)
def test_rezero_and_stable_tau_scale_what_each_block_of_a_diffusers_model_adds_to_its_input(name: str) -> None:
    family = BY_NAME[name]
    plain, zero, scaled = (build(family) for _ in range(3))
    scalelong.apply(zero, "rezero")  # alpha is 0 at the start
    scalelong.apply(scaled, "stable_tau", tau=0.3)
    calls: dict[str, tuple[Any, Any]] = {}

    def keep(block: str, _module: nn.Module, args: Any, kwargs: Any, _output: Any) -> None:
        calls[block] = (args, kwargs)

    for block, module in plain.named_modules():
        if type(module).__name__ in RESIDUAL and getattr(module, "residual_connection", True):
            module.register_forward_hook(partial(keep, block), with_kwargs=True)
    output(plain, family.inputs())
    assert len(calls) == len(zero.scalelong.alpha) > 0
    for block, (args, kwargs) in calls.items():
        results = [model.get_submodule(block)(*args, **kwargs) for model in (plain, zero, scaled)]
        whole, shortcut, found = (result[0] if isinstance(result, tuple) else result for result in results)
        module = plain.get_submodule(block)
        if not isinstance(module, ResnetBlock2D) and getattr(module, "skip_linear", None) is None:
            given = args[0] if args else kwargs["hidden_states"]
            torch.testing.assert_close(shortcut * getattr(module, "rescale_output_factor", 1), given)
        if name != "HunyuanDiT2DModel":  # whose blocks have three branches in a row
            torch.testing.assert_close(found, shortcut + 0.3 * (whole - shortcut), rtol=1e-4, atol=1e-5)


def test_blocks_of_a_subclass_are_scaled_too() -> None:
    model = build(UVIT)
    for block in (*model.in_blocks, model.mid_block, *model.out_blocks):
        block.__class__ = type("FastBlock", (type(block),), {})
    scalelong.apply(model, "rezero")
    assert model.scalelong.alpha.shape == (9,)


def test_rezero_learns() -> None:
    model = build(UVIT)
    scalelong.apply(model, "rezero")
    output(model, UVIT.inputs()).square().mean().backward()
    assert model.scalelong.alpha.shape == (9,)
    assert (model.scalelong.alpha.grad != 0).all()


def test_detected_models_take_mp_cat_and_layernorm() -> None:
    chosen = {each.name: each for each in FOUND}["guided-diffusion style"]
    for method in ("mp_cat", "layernorm", "freeu"):
        torch.manual_seed(0)
        model = chosen.build().eval()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.02 * torch.randn_like(parameter))
        before = model(*chosen.inputs())
        scalelong.apply(model, method, example=chosen.inputs())
        assert not torch.allclose(model(*chosen.inputs()), before)


def test_mp_cat_reaches_every_module_that_receives_the_concatenation() -> None:
    model, t = RootShortcut().eval(), 0.3

    def by_hand(x: Tensor, skip: Tensor) -> Tensor:
        both = (16 / ((1 - t) ** 2 + t**2)) ** 0.5 / 8**0.5  # of 8 channels each
        return torch.cat([both * (1 - t) * x, both * t * skip], dim=1)

    expected = model(*image(), join=by_hand)
    scalelong.apply(model, "mp_cat", t=t, example=image())
    torch.testing.assert_close(model(*image()), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("family", "method", "message"),
    [
        ("MatrixUNet", "mp_cat", "is for skips that are concatenated with one other tensor"),
        ("UViT", "freeu", "'freeu' filters images"),
        ("UNet1DModel", "rezero", r"residual blocks of this UNet1DModel are not known; use one of .*scalelong\.UViT"),
    ],
)
def test_what_cannot_be_done_is_refused_with_the_reason(family: str, method: str, message: str) -> None:
    chosen = BY_NAME[family]
    model, inputs = build(chosen), chosen.inputs()
    before = output(model, inputs)
    with pytest.raises(ValueError, match=message):
        scalelong.apply(model, method, example=inputs)
    assert torch.equal(output(model, inputs), before)
    assert not scalelong.skips.is_scaled(model)


def test_a_tutorial_unet_takes_every_baseline() -> None:
    for method in ("mp_cat", "layernorm", "freeu"):
        model = TutorialUNet().eval()
        scalelong.apply(model, method, example=image())
        assert torch.isfinite(model(*image())).all()


@pytest.mark.slow
@every_method
def test_it_is_traced_in_one_graph_with_the_same_gradients(
    method: str, options: dict[str, Any], family: Family
) -> None:
    eager = build(family)
    scalelong.apply(eager, method, **options)
    other = copy.deepcopy(eager)
    torch._dynamo.reset()
    graph = torch.compile(other, fullgraph=True, backend="eager")
    for model in (eager, graph):
        output(model, family.inputs()).square().mean().backward()
    for (name, p), (_, q) in zip(eager.named_parameters(), other.named_parameters(), strict=True):
        if p.grad is not None:
            torch.testing.assert_close(q.grad, p.grad, rtol=1e-3, atol=1e-5, msg=name)
