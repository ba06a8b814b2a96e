"""Conditioning of models without defaults, by named taps and targets, alone and composed with scaling."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from diffusers import (
    CogVideoXTransformer3DModel,
    FluxTransformer2DModel,
    PixArtTransformer2DModel,
    SD3Transformer2DModel,
)
from torch import Tensor, nn

import scalelong
from tests.families import FAMILIES, _randn, output

UP = {"tap": "mid_block", "targets": ["up_blocks.0", "up_blocks.1"], "argument": "temb"}
UNETS: dict[str, dict[str, Any]] = {
    "UNet1DModel": {**UP, "argument": "output"},
    "UNet1DModel temporal": UP,
    "UNet3DConditionModel": UP,
    "I2VGenXLUNet": UP,
    "UNetSpatioTemporalConditionModel": UP,
    "UNetMotionModel": UP,
    "HunyuanDiT2DModel": {"tap": "blocks.3", "targets": [f"blocks.{i}" for i in range(4, 8)], "argument": "temb"},
    "UniDiffuser UTransformer2DModel": {"tap": "transformer_mid_block", "targets": "transformer_out_blocks.0.block"},
    "Kandinsky3UNet": {
        "tap": "down_blocks.3",
        "targets": [f"up_blocks.{i}" for i in range(3)],
        "argument": "time_embed",
    },
    "StableCascadeUNet": {"tap": "down_blocks.2.2", "targets": "up_blocks.2.0"},
    "MONAI DiffusionModelUNet": {**UP, "tap": "middle_block"},
}
HEADS = {"num_attention_heads": 2, "attention_head_dim": 8, "num_layers": 4, "in_channels": 4}
TEXT = {"encoder_hidden_states": _randn(2, 5, 12), "timestep": torch.tensor([3, 500])}
IMAGE = {**TEXT, "hidden_states": _randn(2, 4, 8, 8)}
LATER = ["transformer_blocks.2", "transformer_blocks.3"]


def sd3() -> tuple[nn.Module, dict[str, Any]]:
    sizes = {"sample_size": 8, "pos_embed_max_size": 8, "out_channels": 4, "joint_attention_dim": 12}
    model = SD3Transformer2DModel(**HEADS, **sizes, caption_projection_dim=16, pooled_projection_dim=10)
    return model, {**IMAGE, "pooled_projections": _randn(2, 10)}


def flux() -> tuple[nn.Module, dict[str, Any]]:
    sizes = {
        "num_single_layers": 2,
        "joint_attention_dim": 12,
        "pooled_projection_dim": 10,
        "axes_dims_rope": (2, 2, 4),
    }
    inputs = {"hidden_states": _randn(2, 16, 4), "pooled_projections": _randn(2, 10), "img_ids": _randn(16, 3)}
    return FluxTransformer2DModel(**HEADS, **sizes), {**TEXT, **inputs, "txt_ids": torch.zeros(5, 3)}


def pixart() -> tuple[nn.Module, dict[str, Any]]:
    sizes = {"sample_size": 8, "out_channels": 8, "cross_attention_dim": 16, "caption_channels": 12}
    model = PixArtTransformer2DModel(**HEADS, **sizes, norm_num_groups=4)
    return model, {**IMAGE, "added_cond_kwargs": {"resolution": None, "aspect_ratio": None}}


def cogvideox() -> tuple[nn.Module, dict[str, Any]]:
    sizes = {"sample_width": 8, "sample_height": 8, "sample_frames": 5, "max_text_seq_length": 5, "out_channels": 4}
    model = CogVideoXTransformer3DModel(
        **HEADS | {"attention_head_dim": 16}, **sizes, time_embed_dim=8, text_embed_dim=12
    )
    return model, {**TEXT, "hidden_states": _randn(2, 2, 4, 8, 8)}


TRANSFORMERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "SD3": (sd3, {"tap": "transformer_blocks.1[1]", "targets": LATER, "argument": "temb"}),
    "Flux": (flux, {"tap": "transformer_blocks.3[1]", "targets": "single_transformer_blocks.0", "argument": "temb"}),
    "PixArt": (pixart, {"tap": "transformer_blocks.1", "targets": LATER, "argument": "timestep"}),
    "CogVideoX": (cogvideox, {"tap": "transformer_blocks.1[0]", "targets": LATER, "argument": "temb"}),
}


def perturbed(model: nn.Module) -> nn.Module:
    """With noise on every parameter: layers that start at zero would hide the condition."""
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
    return model.eval()


def check(model: nn.Module, inputs: dict[str, Any], route: dict[str, Any]) -> None:
    """The output is the plain one until the gate is trained, which it can be; `remove` restores it."""
    before, names = output(model, inputs), list(model.state_dict())
    conditioning = scalelong.condition_on_features(model, **route, example=inputs)
    assert torch.equal(output(model, inputs), before)
    output(model, inputs).square().mean().backward()
    assert float(conditioning.gate.grad.abs()) > 0
    with torch.no_grad():
        conditioning.gate.fill_(1.0)
    assert not torch.allclose(output(model, inputs), before, atol=1e-5)
    scalelong.remove(model, "features")
    assert torch.equal(output(model, inputs), before)
    assert list(model.state_dict()) == names


@pytest.mark.parametrize("name", TRANSFORMERS)
def test_transformers(name: str) -> None:
    torch.manual_seed(0)
    make, route = TRANSFORMERS[name]
    model, inputs = make()
    check(perturbed(model), inputs, route)


@pytest.mark.slow
@pytest.mark.parametrize("name", UNETS)
def test_networks_with_long_skips_are_conditioned_and_scaled(name: str) -> None:
    family = next(family for family in FAMILIES if family.name == name)
    torch.manual_seed(0)
    model, inputs, outputs = perturbed(family.build()), family.inputs(), []
    check(model, inputs, UNETS[name])
    plain = output(model, inputs)
    for order in (("scaling", "features"), ("features", "scaling")):
        for step in order:
            torch.manual_seed(7)
            if step == "scaling":
                scalelong.apply(model, "cs", kappa=0.5, example=inputs)
            else:
                conditioning = scalelong.condition_on_features(model, **UNETS[name], example=inputs)
        with torch.no_grad():
            conditioning.gate.fill_(1.0)
        outputs.append(output(model, inputs))
        scalelong.remove(model)
        assert torch.equal(output(model, inputs), plain)
    assert torch.allclose(*outputs, atol=1e-6)


class Block(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor, *skips: Tensor, emb: Tensor | None = None) -> Tensor:
        return x + torch.tanh(self.layer(x + sum(skips) + (0.0 if emb is None else emb)))


class Net(nn.Module):
    """Three blocks with skips; the time of each sample is a condition of the given shape."""

    def __init__(self, layer: Callable[[], nn.Module], shape: tuple[int, ...], passes: bool = True) -> None:
        super().__init__()
        self.blocks, self.shape, self.passes = nn.ModuleList(Block(layer()) for _ in range(3)), shape, passes

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        emb = time.reshape(-1, *[1] * len(self.shape)).expand(-1, *self.shape)
        for block in self.blocks:
            x = block(x, x, x, emb=emb) if self.passes else block(x, x, x)
        return x


NET: dict[str, Any] = {"tap": "blocks.0", "targets": ["blocks.1", "blocks.2"], "argument": "emb"}
LAYOUTS = {
    "(B, D, 1)": (lambda: nn.Conv1d(6, 6, 3, padding=1), (6, 1), (6, 8)),
    "(B, D, 1, 1)": (lambda: nn.Conv2d(6, 6, 3, padding=1), (6, 1, 1), (6, 4, 4)),
    "(B, 1, D)": (lambda: nn.Linear(6, 6), (1, 6), (5, 6)),
    "(B, 1, 1, D)": (lambda: nn.Linear(6, 6), (1, 1, 6), (4, 4, 6)),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_channel_of_a_condition_gets_its_own_change(name: str) -> None:
    torch.manual_seed(0)
    layer, shape, size = LAYOUTS[name]
    model, inputs = Net(layer, shape), {"x": _randn(2, *size), "time": torch.tensor([0.1, 0.9])}
    assert scalelong.condition_on_features(model, **NET, example=inputs).route.widths == (6, 6)
    scalelong.remove(model)
    check(model, inputs, NET)


def test_a_condition_that_is_not_passed_is_not_taken_from_the_positional_arguments() -> None:
    model = Net(lambda: nn.Linear(6, 6), (1, 6), passes=False)
    with pytest.raises(ValueError, match=r"targets: the emb of blocks.1 must be floats .* got not a tensor"):
        scalelong.condition_on_features(model, **NET, example=(_randn(2, 5, 6), torch.rand(2)))


class Frames(Net):
    """The first block sees every frame as a sample."""

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        x = self.blocks[0](x.flatten(0, 1)).unflatten(0, x.shape[:2])
        for block in self.blocks[1:]:
            x = block(x, emb=time[:, None, None].expand(-1, 1, 6))
        return x


@pytest.mark.parametrize("batch", [1, 2])
def test_taps_with_other_samples_than_the_condition_are_refused(batch: int) -> None:
    model, example = Frames(lambda: nn.Linear(6, 6), ()), (_randn(batch, 5, 3, 6).mean(2), torch.rand(batch))
    with pytest.raises(ValueError, match=rf"the emb of blocks.1 has {batch} samples, the tap has {5 * batch}"):
        scalelong.condition_on_features(model, **NET, example=example)


class Context(Net):
    """The condition is a learned one, of one sample."""

    def __init__(self) -> None:
        super().__init__(lambda: nn.Linear(6, 6), (5, 6))
        self.context = nn.Parameter(torch.randn(1, 5, 6))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, emb=self.context)
        return x


def test_one_token_of_a_condition_for_all_samples() -> None:
    torch.manual_seed(0)
    model, inputs = Context(), {"x": _randn(2, 5, 6)}
    check(model, inputs, {**NET, "token": 1})
