"""Conditioning on features: nothing changes at first, the guarantees of `apply`, and what is refused."""

from __future__ import annotations

import copy
import io
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import scalelong
from scalelong import UViT, UViTConfig
from scalelong.skips.feature_conditioning import conditioning_of, features_off
from tests.skips.conditioned import CASES, Case, condition, dit, output, own, unet, uvit

every_case = pytest.mark.parametrize("make", CASES.values(), ids=CASES)


@every_case
@pytest.mark.parametrize("pool", ["mean", "attention"])
def test_starts_as_the_plain_model_and_remove_undoes_it(make: Any, pool: str) -> None:
    case = make()
    model = case[0].eval()
    names, before = list(model.state_dict()), output(case)
    config = dict(model.config) if hasattr(model, "register_to_config") else None
    conditioning = condition(case, pool=pool)
    assert torch.equal(output(case), before)
    with torch.no_grad():
        conditioning.gate.fill_(1.0)
    assert not torch.allclose(output(case), before, atol=1e-6)
    scalelong.remove(model)
    assert list(model.state_dict()) == names
    assert torch.equal(output(case), before)
    assert config is None or dict(model.config) == config
    assert all(not part._forward_hooks and not part._forward_pre_hooks for part in model.modules())


@every_case
@pytest.mark.parametrize("detach", [False, True])
def test_gradients(make: Any, detach: bool) -> None:
    """Gate and weight are trained; `detach` stops the gradient into the tap and nothing else."""
    case = make()
    model = case[0].eval()
    conditioning = condition(case, detach=detach)
    with torch.no_grad():
        conditioning.gate.fill_(0.5)
    tapped = {}
    hook = conditioning.register_forward_pre_hook(lambda _m, args: tapped.update(h=args[0]))
    output(case).square().mean().backward()
    hook.remove()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in conditioning.parameters())
    assert tapped["h"].requires_grad
    plain = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    conditioning.route = type(conditioning.route)(**{**vars(conditioning.route), "detach": not detach})
    output(case).square().mean().backward()
    other = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert any(not torch.allclose(plain[name], other[name], rtol=1e-4, atol=0) for name in plain)


@every_case
def test_copies_ema_and_state_dicts(make: Any) -> None:
    case = make()
    model = case[0].eval()
    conditioning = condition(case)
    with torch.no_grad():
        conditioning.gate.fill_(1.0)
    before = output(case)  # with a graph: a copy must not hold on to it
    twin = copy.deepcopy(model)
    ema = scalelong.EMA(model)
    with torch.no_grad():
        conditioning.gate.fill_(0.0)
        assert not torch.allclose(output(case), before, atol=1e-6)
        assert torch.allclose(output(case, twin), before, atol=1e-5)
        assert torch.allclose(output(case, ema.model), before, atol=1e-5)
    assert conditioning_of(twin) is not conditioning
    fresh = make()
    condition(fresh)
    fresh[0].eval().load_state_dict(twin.state_dict())
    assert torch.allclose(output(fresh), before, atol=1e-5)
    with pytest.raises(RuntimeError, match=r"feature_conditioning\.gate"):
        fresh[0].load_state_dict(make()[0].state_dict())


def test_whole_models_are_pickled() -> None:
    case = uvit()
    condition(case)
    output(case)
    stream = io.BytesIO()
    torch.save(case[0], stream)
    stream.seek(0)
    loaded = torch.load(stream, weights_only=False)
    assert torch.allclose(output(case, loaded), output(case), atol=1e-6)


def test_adds_less_than_a_hundredth_of_the_arithmetic() -> None:
    """U-ViT-S/2, counted on the meta device; benchmarks/feature_conditioning.py measures the time."""
    with torch.device("meta"):
        model = UViT(UViTConfig(image_size=32, patch_size=2, dim=512, depth=12, heads=8))
        inputs = torch.zeros(2, 3, 32, 32), torch.zeros(2)
    flops = []
    for conditioned in (False, True):
        if conditioned:
            scalelong.condition_on_features(model, pool="attention")
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            model(*inputs)
        flops.append(counter.get_total_flops())
    assert flops[0] < flops[1] < 1.01 * flops[0]


def test_tokens_and_taps_of_a_uvit() -> None:
    case = uvit(num_classes=4)
    model = case[0].eval()
    route = condition(case).route
    assert (route.tap, route.targets, route.token, route.first) == ("mid_block", ("mid_block",), 1, 2)
    scalelong.remove(model)
    route = condition(case, tap="in_blocks.1", token="all").route
    assert (route.targets, route.token) == (("in_blocks.1",), None)


@pytest.mark.parametrize("tap", ["time_embed", "label_emb", "patch_embed"])
def test_taps_of_a_uvit_without_its_extra_tokens(tap: str) -> None:
    case = uvit(num_classes=4)
    before = output((case[0].eval(), *case[1:]))
    conditioning = condition(case, tap=tap, targets="mid_block")
    assert conditioning.route.first == 0
    assert torch.equal(output(case), before)


def test_targets_follow_the_tap() -> None:
    case = unet()
    assert condition(case, tap="up_blocks.0").route.targets == ("up_blocks.1",)
    scalelong.remove(case[0])
    assert condition(case, tap="down_blocks.1").route.targets == ("mid_block", "up_blocks.0", "up_blocks.1")
    assert condition(own(), targets=["layers.2", "layers.2"]).route.targets == ("layers.2",)
    assert condition(own(), targets=(f"layers.{i}" for i in (1, 2))).route.targets == ("layers.1", "layers.2")
    assert condition(dit()).route.targets == tuple(f"transformer_blocks.{i}.norm1.emb" for i in (2, 3))


def wrong(case: Case, **options: Any) -> str:
    """The message of an error that leaves the model as it was."""
    model = case[0]
    names, hooks = list(model.state_dict()), [len(part._forward_hooks) for part in model.modules()]
    with pytest.raises((ValueError, TypeError)) as error:
        condition(case, **options)
    assert list(model.state_dict()) == names
    assert [len(part._forward_hooks) for part in model.modules()] == hooks
    return str(error.value)


def test_bad_input_is_refused() -> None:
    assert "did you mean 'mid_block'?" in wrong(uvit(), tap="middle_block")
    assert "does not run after the tap layers.1" in wrong(own(), tap="layers.1", targets=["layers.0"])
    assert "no block of this UNet2DModel runs after up_blocks.1" in wrong(unet(), tap="up_blocks.1")
    assert "pool: unknown 'max'" in wrong(uvit(), pool="max")
    assert "choose one of x, emb, output" in wrong(own(), argument="embedding")
    assert "token:" in wrong(uvit(), token=99)
    assert "token: must be the number of a token, or 'all', got 'first'" in wrong(uvit(), token="first")
    assert "tap: no module ''; see model.named_modules()" in wrong(own(), tap="")
    assert "where a Own takes its condition is not known" in wrong(own(), targets=None)
    assert "none can be generated" in wrong(own(), example=None)
    assert "targets: must be the names of modules, got int" in wrong(own(), targets=5)
    case = uvit()
    condition(case)
    assert "conditioned on its features already" in wrong(case)
    around = nn.Module()
    around.inner = case[0]
    assert "a model inside or around it" in wrong((around, (), {}), tap="inner.mid_block", targets="inner.mid_block")
    with pytest.raises(ValueError, match="is not conditioned"):
        scalelong.remove(unet()[0], "features")
    for container in (nn.Sequential(nn.Linear(2, 2)), nn.ModuleList([nn.Linear(2, 2)]), nn.ModuleDict()):
        with pytest.raises(TypeError, match=f"a {type(container).__name__} would run the conditioning as a layer"):
            scalelong.condition_on_features(container)
        with pytest.raises(TypeError, match=f"a {type(container).__name__} would run the gates as a layer"):
            scalelong.apply(container, "cs", example=torch.zeros(1, 2))


class TwoStreams(nn.Module):
    """Blocks that return (text, image), as MMDiT's do."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.text, self.image = nn.Linear(4, 4), nn.Linear(6, 6)

        def forward(
            self, text: torch.Tensor, image: torch.Tensor, temb: torch.Tensor
        ) -> tuple[torch.Tensor, torch.Tensor]:
            return self.text(text), self.image(image + temb[:, None]) + text.mean()

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(self.Block() for _ in range(3))

    def forward(self, text: torch.Tensor, image: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            text, image = block(text, image, temb=image.mean(dim=1))
        return image


def test_one_of_several_outputs_is_tapped_by_its_number(tmp_path) -> None:
    torch.manual_seed(0)
    call = (torch.randn(2, 3, 4), torch.randn(2, 5, 6))
    model, options = TwoStreams(), {"targets": ["blocks.1", "blocks.2"], "argument": "temb", "example": call}
    before = model(*call)
    with pytest.raises(ValueError, match=r"tap: blocks.0 returns 2 tensors.*choose one, such as blocks.0\[1\]"):
        scalelong.condition_on_features(model, tap="blocks.0", **options)
    with pytest.raises(ValueError, match=r"tap: the output of blocks.0\[2\] must be floats .* got not a tensor"):
        scalelong.condition_on_features(model, tap="blocks.0[2]", **options)
    conditioning = scalelong.condition_on_features(model, tap="blocks.0[1]", **options)
    assert conditioning.route.widths == (6, 6)
    assert torch.equal(model(*call), before)
    with torch.no_grad():
        conditioning.gate.fill_(1.0)
    tapped = []
    conditioning.register_forward_pre_hook(lambda _m, args: tapped.append(args[0].shape))
    changed = model(*call)
    assert tapped == [(2, 5, 6)]
    loaded = scalelong.load(TwoStreams(), scalelong.save(model, tmp_path / "saved"), example=call)
    torch.testing.assert_close(loaded(*call), changed)
    scalelong.remove(model)
    assert torch.equal(model(*call), before)


class Named(TwoStreams):
    """Blocks that return a named tuple."""

    class Output(NamedTuple):
        text: torch.Tensor
        image: torch.Tensor

    class Block(TwoStreams.Block):
        def forward(self, *args: torch.Tensor, **kwargs: torch.Tensor) -> Named.Output:
            return Named.Output(*super().forward(*args, **kwargs))


def test_an_output_of_a_named_tuple_is_changed() -> None:
    model, call = Named(), (torch.randn(2, 3, 4), torch.randn(2, 5, 6))
    conditioning = scalelong.condition_on_features(model, tap="blocks.0[1]", targets="blocks.1", example=call)
    before = model(*call)
    with torch.no_grad():
        conditioning.gate.fill_(1.0)
    assert not torch.allclose(model(*call), before)


class ByKeyword(nn.Module):
    """Blocks that take their condition from **kwargs."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor, **extras: torch.Tensor) -> torch.Tensor:
            return x + self.layer(x + extras["temb"])

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(self.Block() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x, temb=x.mean(dim=1, keepdim=True).expand(-1, 4))
        return x


def test_conditions_among_keywords_and_names_that_are_not_names() -> None:
    torch.manual_seed(0)
    model, x = ByKeyword(), torch.randn(2, 4)
    before = model(x)
    for wrong in ({"tap": 0, "targets": "blocks.1"}, {"tap": "blocks.0", "targets": [1]}):
        with pytest.raises(TypeError, match="must be the names of modules, got int"):
            scalelong.condition_on_features(model, **wrong, argument="temb", example=x)
    with pytest.raises(ValueError, match=r"targets: the emb of blocks.1 must be floats .* got not a tensor"):
        scalelong.condition_on_features(model, "blocks.0", targets="blocks.1", argument="emb", example=x)
    conditioning = scalelong.condition_on_features(model, "blocks.0", targets="blocks.1", argument="temb", example=x)
    assert torch.equal(model(x), before)
    with torch.no_grad():
        conditioning.gate.fill_(1.0)
    assert not torch.allclose(model(x), before)


class Layout(nn.Module):
    """Blocks of 1D convolutions, (B, D, T), or of linear layers on the last dimension of (B, H, W, D)."""

    def __init__(self, convolutions: bool) -> None:
        super().__init__()
        layers = (nn.Conv1d(6, 12, 3, padding=1), nn.ConvTranspose1d(12, 6, 3, padding=1))
        self.blocks = nn.ModuleList(layers if convolutions else (nn.Linear(6, 12), nn.Linear(12, 6)))
        self.blocks[0].logit_scale = nn.Parameter(torch.ones(2, 1, 1))  # as in Swin V2
        self.blocks[0].depthwise = nn.Conv2d(12, 12, 3, groups=12)  # as in MambaOut

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


@pytest.mark.parametrize("convolutions", [True, False])
def test_channels_are_where_the_weights_have_them(convolutions: bool, tmp_path: Any) -> None:
    """Positions are pooled, so that inputs of other sizes than the example's have as many features."""
    torch.manual_seed(0)
    model, shapes = Layout(convolutions), [(2, 6, 8), (2, 6, 12)] if convolutions else [(2, 8, 8, 6), (2, 4, 4, 6)]
    example = torch.randn(shapes[0])
    conditioning = scalelong.condition_on_features(model, "blocks.0", targets="blocks.1", example=example)
    assert conditioning.route.widths == (12, 6)
    with torch.no_grad():
        conditioning.gate.fill_(1.0)
    loaded = scalelong.load(Layout(convolutions), scalelong.save(model, tmp_path / "saved"), example=example)
    for x in map(torch.randn, shapes):
        with features_off(model):
            plain = model(x)
        pooled = model.blocks[0](x).mean(dim=2 if convolutions else (1, 2))
        change = conditioning(model.blocks[0](x))
        torch.testing.assert_close(change, conditioning.proj(conditioning.norm(pooled)))
        torch.testing.assert_close(model(x), plain + (change[..., None] if convolutions else change[:, None, None]))
        torch.testing.assert_close(loaded(x), model(x))
