"""What must hold for every known family."""

from __future__ import annotations

import copy
import logging

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import scalelong
from scalelong.scaling.constant import ConstantScaling
from scalelong.skips.families import stages
from scalelong.skips.patches import plain_loading
from tests.families import FAMILIES, Family, assert_close, assert_same_weights, build, output
from tests.skips.oracle import hand_scaled_output

every_family = pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
every_diffusers_family = pytest.mark.parametrize(
    "family", [family for family in FAMILIES if family.diffusers], ids=lambda family: family.name
)


def gradients(model: torch.nn.Module, family: Family) -> dict[str, torch.Tensor]:
    model.zero_grad()
    torch.manual_seed(0)  # dropout
    output(model, family.inputs()).square().mean().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@every_family
def test_skips_are_counted_and_numbered_from_the_outermost(family: Family) -> None:
    skips = scalelong.find_skips(build(family))
    assert [skip.index for skip in skips] == list(range(1, family.num_skips + 1))


@every_family
def test_each_coefficient_scales_exactly_its_own_skip(family: Family) -> None:
    """Change one coefficient at a time and compare with scaling that joined tensor by hand."""
    untouched, model, inputs = build(family), build(family), family.inputs()
    handle = scalelong.apply(model, "none")
    plain = output(untouched, inputs)
    for skip in handle.skips:
        scaling = handle.scaling
        assert isinstance(scaling, ConstantScaling)
        scaling.values = tuple(0.3 if i == skip.index else 1.0 for i in range(1, family.num_skips + 1))
        by_hand = hand_scaled_output(untouched, inputs, skip, 0.3)
        torch.testing.assert_close(output(model, inputs), by_hand, rtol=1e-4, atol=1e-6)
        assert not torch.allclose(by_hand, plain, rtol=1e-4, atol=1e-6), "the oracle itself changed nothing"


@every_family
def test_sizes_are_those_of_the_tensors(family: Family) -> None:
    """A gate per channel (or token) runs, so the sizes found are the true ones; gates lie in (0, 1)."""
    model = build(family)
    scalelong.apply(model, "ls", module="ie", shared=False)
    output(model, family.inputs()).square().mean().backward()
    assert all(0 < kappa < 1 for kappa in scalelong.coefficients(model))
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.scalelong.parameters())


@every_family
@pytest.mark.parametrize("method", ["none", "cs"])
def test_kappa_one_is_bit_equal_to_the_untouched_model(family: Family, method: str) -> None:
    model, inputs = build(family), family.inputs()
    before = output(model, inputs)
    scalelong.apply(model, method, **({"kappa": 1.0} if method == "cs" else {}))
    assert torch.equal(output(model, inputs), before)


@every_family
@pytest.mark.parametrize("method", ["cs", "ls"])
def test_remove_restores_everything(family: Family, method: str) -> None:
    model, inputs = build(family), family.inputs()
    before, state, config = output(model, inputs), copy.deepcopy(model.state_dict()), getattr(model, "config", None)
    scalelong.apply(model, method)
    assert not torch.allclose(output(model, inputs), before)
    scalelong.remove(model)
    assert torch.equal(output(model, inputs), before)
    assert list(model.state_dict()) == list(state)
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
    assert getattr(model, "config", None) == config
    assert not any(module._forward_pre_hooks or module._forward_pre_hooks_with_kwargs for module in model.modules())
    assert not model._load_state_dict_pre_hooks


@every_family
def test_a_deep_copy_has_gates_of_its_own(family: Family) -> None:
    """An EMA copy must use its own gate, not the live one."""
    model, inputs = build(family), family.inputs()
    scalelong.apply(model, "ls")
    before = output(model, inputs)
    average = copy.deepcopy(model)
    assert_close(output(average, inputs), before)
    with torch.no_grad():
        for parameter in average.scalelong.parameters():
            parameter.add_(1.0)
    assert torch.equal(output(model, inputs), before)
    assert not torch.allclose(output(average, inputs), before)


@every_family
def test_state_dict_makes_the_round_trip(family: Family) -> None:
    model, other = build(family), build(family, seed=1)
    scalelong.apply(model, "ls", shared=False)
    scalelong.apply(other, "ls", shared=False)
    other.load_state_dict(model.state_dict())
    assert any(key.startswith("scalelong.") for key in model.state_dict())
    assert_same_weights(other, model)
    assert_close(output(other, family.inputs()), output(model, family.inputs()))


@every_family
def test_save_and_load_keep_weights_and_scaling(family: Family, tmp_path) -> None:
    model, other = build(family), build(family, seed=1)
    scalelong.apply(model, "ls", module="ie")
    scalelong.save(model, tmp_path)
    scalelong.load(other, tmp_path)
    assert other.scalelong.config == model.scalelong.config
    assert_same_weights(other, model)
    assert_close(output(other, family.inputs()), output(model, family.inputs()))


@every_diffusers_family
@pytest.mark.parametrize(("method", "options"), [("cs", {"kappa": 0.6}), ("ls", {"shared": False})], ids=["cs", "ls"])
def test_save_pretrained_keeps_the_scaling(family: Family, method: str, options: dict[str, object], tmp_path) -> None:
    model = build(family)
    scalelong.apply(model, method, **options)
    model.save_pretrained(tmp_path)
    loaded = scalelong.from_pretrained(type(model), tmp_path).eval()
    assert loaded.scalelong.config == model.scalelong.config
    assert_same_weights(loaded, model)
    assert_close(output(loaded, family.inputs()), output(model, family.inputs()))
    scalelong.remove(loaded)
    assert "long_skip_scaling" not in loaded.config


def test_diffusers_by_itself_warns_of_the_scaling_it_does_not_know(tmp_path, caplog) -> None:
    family = FAMILIES[0]
    model = build(family)
    scalelong.apply(model, "cs", kappa=0.6)
    model.save_pretrained(tmp_path)
    logging.getLogger("diffusers").propagate = True
    with caplog.at_level(logging.WARNING), plain_loading():
        type(model).from_pretrained(tmp_path)
    assert "long_skip_scaling" in caplog.text
    assert "scalelong.kappa" in caplog.text


@every_family
def test_gradient_checkpointing_gives_the_same_gradients(family: Family) -> None:
    """The model's own checkpointing where it has one, else one checkpoint around the whole model."""
    plain, model = build(family).train(), build(family).train()
    for each in (plain, model):
        torch.manual_seed(3)
        scalelong.apply(each, "ls")
    expected = gradients(plain, family)
    if getattr(model, "_supports_gradient_checkpointing", False):
        model.enable_gradient_checkpointing()
        got = gradients(model, family)
    else:
        torch.manual_seed(0)  # dropout
        checkpoint(lambda: output(model, family.inputs()).square().mean(), use_reentrant=False).backward()
        got = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert expected.keys() == got.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(got[name], gradient, rtol=1e-4, atol=1e-6, msg=name)


@every_family
def test_stages_run_from_the_encoder_to_the_decoder(family: Family) -> None:
    """Every skip is made in an earlier stage than it is used in, or before the first stage."""
    model = build(family)
    names = stages(model)
    assert all(isinstance(model.get_submodule(name), torch.nn.Module) for name in names)

    def whole(name: str) -> str:
        """Of a list within a list, which is never called, the stage is the last module."""
        inner, _, _ = name.rpartition(".")
        outer, _, _ = inner.rpartition(".")
        lists = all(isinstance(model.get_submodule(each), torch.nn.ModuleList) for each in (inner, outer))
        return inner if outer and lists else name

    def stage(module: str) -> int:
        return next((at for at, name in enumerate(names) if f"{module}.".startswith(f"{whole(name)}.")), -1)

    for skip in scalelong.find_skips(model):
        if family.name != "MatrixUNet":  # whose joins are modules between the stages
            assert stage(skip.made_in) < stage(skip.used_in)


class UNetT(torch.nn.Module):
    """The structure of F5-TTS's class of this name: layers in lists, skips joined in its own forward, any length."""

    __module__ = "f5_tts.model.backbones.unett"

    def __init__(self, skip_connect_type: str = "concat", dim: int = 8, depth: int = 4) -> None:
        super().__init__()
        self.dim, self.depth, self.skip_connect_type = dim, depth, skip_connect_type
        self.input_embed, self.proj_out = torch.nn.Linear(3, dim), torch.nn.Linear(dim, 3)
        concat = skip_connect_type == "concat"
        joins = [torch.nn.Linear(2 * dim, dim) if concat and at >= depth // 2 else None for at in range(depth)]
        self.layers = torch.nn.ModuleList(torch.nn.ModuleList([join, torch.nn.Linear(dim, dim)]) for join in joins)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x, skips = self.input_embed(x), []
        for at, (join, layer) in enumerate(self.layers):
            if at < self.depth // 2:
                skips.append(x)
            elif self.skip_connect_type == "concat":
                x = join(torch.cat((x, skips.pop()), dim=-1))
            elif self.skip_connect_type == "add":
                x = x + skips.pop()
            x = x + layer(x).tanh()
        return self.proj_out(x)


def test_a_flat_unet_transformer_of_any_length() -> None:
    x = torch.randn(2, 5, 3)
    traced = scalelong.skips.tracing.detect.detect(UNetT(), ((x,), {})).skips()
    for method in ("cs", "ls"):
        model = UNetT()
        handle = scalelong.apply(model, method)
        assert (
            [skip.consumer for skip in handle.skips]
            == [skip.consumer for skip in traced]
            == ["layers.3.0", "layers.2.0"]
        )
        assert [skip.made_in for skip in handle.skips] == ["input_embed", "layers.0"]
        scalelong.verify(model, example=x)
        assert model(torch.randn(2, 9, 3)).shape == (2, 9, 3)
    assert stages(UNetT()) == ["layers.0.1", "layers.1.1", "layers.2.1", "layers.3.1"]
    with pytest.raises(ValueError, match=r"skip_connect_type='add'\), where no module receives them; use"):
        scalelong.apply(UNetT("add"), "cs")
    with pytest.raises(ValueError, match="has no long skip connections"):
        scalelong.apply(UNetT("none"), "cs")
