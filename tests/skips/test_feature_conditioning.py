"""Conditioning on features: nothing changes at first, the guarantees of `apply`, and what is refused."""

from __future__ import annotations

import copy
import io
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import DiTTransformer2DModel, UNet2DConditionModel, UNet2DModel
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import scalelong
from scalelong import UViT, UViTConfig
from scalelong.skips.feature_conditioning import conditioning_of, is_conditioned

Case = tuple[nn.Module, tuple[Any, ...], dict[str, Any]]


def uvit(**changes: Any) -> Case:
    torch.manual_seed(0)
    model = UViT(UViTConfig(image_size=8, patch_size=4, dim=16, depth=4, heads=2, **changes))
    labels = {"class_labels": torch.tensor([1, 2])} if model.config.num_classes else {}
    return model, (torch.randn(2, 3, 8, 8), torch.tensor([3.0, 500.0])), labels


def unet() -> Case:
    torch.manual_seed(0)
    down, up = ("DownBlock2D", "AttnDownBlock2D"), ("AttnUpBlock2D", "UpBlock2D")
    sizes = {"block_out_channels": (16, 16), "norm_num_groups": 4, "layers_per_block": 1, "attention_head_dim": 8}
    model = UNet2DModel(sample_size=16, down_block_types=down, up_block_types=up, **sizes)
    return model, (torch.randn(2, 3, 16, 16), torch.tensor([3, 500])), {}


def unet_condition() -> Case:
    torch.manual_seed(0)
    down, up = ("CrossAttnDownBlock2D", "DownBlock2D"), ("UpBlock2D", "CrossAttnUpBlock2D")
    sizes = {"block_out_channels": (16, 16), "norm_num_groups": 4, "layers_per_block": 1, "attention_head_dim": 8}
    model = UNet2DConditionModel(
        sample_size=16, down_block_types=down, up_block_types=up, cross_attention_dim=8, **sizes
    )
    return model, (torch.randn(2, 4, 16, 16), torch.tensor([3, 500]), torch.randn(2, 4, 8)), {}


def dit() -> Case:
    torch.manual_seed(0)
    sizes = {"num_attention_heads": 2, "attention_head_dim": 8, "in_channels": 4, "num_layers": 4, "sample_size": 8}
    model = DiTTransformer2DModel(**sizes, norm_num_groups=4, num_embeds_ada_norm=10)
    labels = {"timestep": torch.tensor([3, 500]), "class_labels": torch.tensor([1, 2])}
    return model, (torch.randn(2, 4, 8, 8),), labels


class Own(nn.Module):
    """A network of nobody's: three layers, each with a condition."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        self.embed = nn.Linear(1, 6)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        condition = self.embed(t[:, None])
        for layer in self.layers:
            x = layer(x, emb=condition)
        return x


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.proj = nn.Conv2d(3, 3, 3, padding=1), nn.Linear(6, 3)

    def forward(self, x: Tensor, emb: Tensor) -> Tensor:
        return x + torch.tanh(self.conv(x) + self.proj(emb)[:, :, None, None])


def own() -> Case:
    torch.manual_seed(0)
    return Own(), (torch.randn(2, 3, 8, 8), torch.tensor([0.1, 0.9])), {}


def condition(case: Case, **options: Any) -> scalelong.skips.FeatureConditioning:
    model, args, kwargs = case
    if isinstance(model, Own):
        where = {"tap": "layers.0", "targets": ["layers.1", "layers.2"], "argument": "emb"}
        options = {**where, "example": (args, kwargs), **options}
    return scalelong.condition_on_features(model, **options)


def output(case: Case, model: nn.Module | None = None) -> Tensor:
    own_model, args, kwargs = case
    torch.manual_seed(1)
    found = (own_model if model is None else model)(*args, **kwargs)
    return found if isinstance(found, Tensor) else found.sample


CASES = {"uvit": uvit, "unet": unet, "unet_condition": unet_condition, "dit": dit, "own": own}
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


@every_case
@pytest.mark.parametrize("scaled", [False, True])
def test_save_and_load(make: Any, scaled: bool, tmp_path: Path) -> None:
    case = make()
    if scaled and make in (dit, own):
        pytest.skip("has no long skips")
    model = case[0].eval()
    conditioning = condition(case, pool="attention")
    if scaled:
        scalelong.apply(model, "cs", kappa=0.5)
    with torch.no_grad():
        conditioning.gate.fill_(1.0)
    before, folder = output(case), scalelong.save(model, tmp_path / "saved")
    loaded = scalelong.load(make()[0], folder).eval()
    assert torch.allclose(output(case, loaded), before, atol=1e-5)
    if hasattr(model, "save_pretrained"):
        model.save_pretrained(tmp_path / "diffusers")
        loaded = scalelong.from_pretrained(type(model), tmp_path / "diffusers").eval()
        assert torch.allclose(output(case, loaded), before, atol=1e-5)
    if make is uvit:  # nothing is left of a conditioning whose weights do not fit
        other = UViT(UViTConfig(image_size=8, patch_size=4, dim=32, depth=4, heads=2))
        with pytest.raises(ValueError, match="do not fit"):
            scalelong.load(other, folder)
        assert not is_conditioned(other)


def test_whole_models_are_pickled() -> None:
    case = uvit()
    condition(case)
    output(case)
    stream = io.BytesIO()
    torch.save(case[0], stream)
    stream.seek(0)
    loaded = torch.load(stream, weights_only=False)
    assert torch.allclose(output(case, loaded), output(case), atol=1e-6)


METHODS = {"cs": {"kappa": 0.5}, "ls": {}, "mp_cat": {}, "layernorm": {}, "rsqrt2": {}}


@pytest.mark.parametrize("method", [*METHODS, "rezero", "stable_tau"])
@pytest.mark.parametrize("make", [uvit, unet])
def test_scaling_in_either_order(make: Any, method: str) -> None:
    if make is unet and method not in METHODS:
        pytest.skip("only for U-ViT")
    outputs = []
    for first in ("scaling", "features"):
        case = make()
        model = case[0].eval()
        for step in (first, "features" if first == "scaling" else "scaling"):
            torch.manual_seed(7 if step == "scaling" else 8)
            if step == "scaling":
                scalelong.apply(model, method, **METHODS.get(method, {}))
            else:
                conditioning = condition(case)
        with torch.no_grad():
            conditioning.gate.fill_(1.0)
        outputs.append(output(case))
        scalelong.remove(model, "scaling")
        assert is_conditioned(model)
    assert torch.allclose(*outputs, atol=1e-6)


def test_unknown_models_are_traced_without_their_conditioning() -> None:
    """What a conditioned model adds from the middle to the decoder is not found as a long skip."""
    case = unet()
    conditioning = condition(case)
    with torch.no_grad():
        conditioning.gate.fill_(1.0)
    known = [skip.made_in for skip in scalelong.find_skips(case[0])]
    example = (case[1], case[2])
    assert [skip.made_in for skip in scalelong.find_skips(case[0], example=example)] == known
    assert conditioning.enabled
    scalelong.apply(case[0], "cs", example=example)
    assert scalelong.verify(case[0], example=example)


@pytest.mark.parametrize("make", [uvit, unet, dit, own])
def test_activation_checkpointing(make: Any) -> None:
    """The gradients are those without checkpoints."""
    gradients = []
    for recompute in (False, True):
        case = uvit(checkpointing=recompute) if make is uvit else make()
        model = case[0].eval()  # dropout of labels would differ
        if recompute and make in (unet, dit):
            model.train()
            model.enable_gradient_checkpointing()
            if make is dit:
                for module in model.modules():
                    if type(module).__name__ == "LabelEmbedding":
                        module.eval()
        torch.manual_seed(3)
        conditioning = condition(case)
        with torch.no_grad():
            conditioning.gate.fill_(1.0)
        if recompute and make is own:
            for layer in model.layers:
                run = layer.forward
                layer.forward = lambda x, emb, run=run: checkpoint(run, x, emb, use_reentrant=False)
        output(case).square().mean().backward()
        gradients.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    assert gradients[0].keys() == gradients[1].keys()
    for name, value in gradients[0].items():
        assert torch.allclose(value, gradients[1][name], rtol=1e-3, atol=1e-6), name


def test_two_forwards_before_a_backward_with_checkpoints_are_refused() -> None:
    case = dit()
    model = case[0].train()
    model.enable_gradient_checkpointing()
    condition(case)
    first, second = output(case).mean(), output(case).mean()
    second.backward()
    with pytest.raises(RuntimeError, match="another forward ran"):
        first.backward()


@pytest.mark.parametrize("make", [uvit, unet])
@pytest.mark.slow
def test_compiles(make: Any) -> None:
    case = make()
    model = case[0].eval()
    conditioning = condition(case)
    with torch.no_grad():
        conditioning.gate.fill_(1.0)
    before = output(case)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    found = output(case, compiled)  # type: ignore[arg-type]
    assert torch.allclose(found, before, atol=1e-5)
    found.square().mean().backward()
    assert conditioning.gate.grad is not None


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


def test_targets_follow_the_tap() -> None:
    case = unet()
    assert condition(case, tap="up_blocks.0").route.targets == ("up_blocks.1",)
    scalelong.remove(case[0])
    assert condition(case, tap="down_blocks.1").route.targets == ("mid_block", "up_blocks.0", "up_blocks.1")
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
    assert "where a Own takes its condition is not known" in wrong(own(), targets=None)
    assert "none can be generated" in wrong(own(), example=None)
    case = uvit()
    condition(case)
    assert "conditioned on its features already" in wrong(case)
    with pytest.raises(ValueError, match="is not conditioned"):
        scalelong.remove(unet()[0], "features")
    with pytest.raises(TypeError, match="Sequential"):
        scalelong.condition_on_features(nn.Sequential(nn.Linear(2, 2)))
