"""Attention of many kinds: recognized, scaled by 1 / d where its heads grow, or refused."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from scalelong import mup
from scalelong.parametrization.attach import OUTPUT, plan_of
from tests.parametrization.networks import meta


class Attention(nn.Module):
    """Attention with layers of these names. fused: `scale` is ignored, as by timm's and U-ViT's calls of torch's kernel."""

    def __init__(
        self, width: int, names: tuple[str, ...], fused: bool = False, norm: bool = False, bias: bool = False
    ) -> None:
        super().__init__()
        self.num_heads, self.scale, self.fused, self.names = 2, (width // 2) ** -0.5, fused, names
        for name in names:
            self.add_module(name, nn.Linear(width, width * 3 // len(names), bias=not bias))
        self.q_norm = nn.Identity() if norm else None
        self.q_bias = nn.Parameter(torch.randn(width)) if bias else None
        if len(names) == 1:
            self.to_q = nn.Identity()  # as MONAI has it, which does not call it

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = torch.cat([self.get_submodule(name)(x) for name in self.names], dim=-1).chunk(3, dim=-1)
        q = q if self.q_bias is None else q + self.q_bias
        q, k, v = (part.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for part in (q, k, v))
        q = q if self.q_norm is None else self.q_norm(q)
        own = None if self.fused or len(self.names) > 1 else self.scale
        return F.scaled_dot_product_attention(q, k, v, scale=own).transpose(1, 2).flatten(2)


SEPARATE = [
    ("to_q", "to_k", "to_v"),
    ("q_proj", "k_proj", "v_proj"),
    ("query", "key", "value"),
    ("wq", "wk", "wv"),
    ("q", "k", "v"),
    ("to_query", "to_key", "to_value"),  # Kandinsky
    ("q_lin", "k_lin", "v_lin"),  # DistilBERT
    ("linear_q", "linear_k", "linear_v"),  # Conformer
]


def plain_attention(model: Attention, x: torch.Tensor, scale: float) -> torch.Tensor:
    parts = torch.cat([model.get_submodule(name)(x) for name in model.names], dim=-1).chunk(3, dim=-1)
    q, k, v = (part.unflatten(-1, (2, -1)).transpose(1, 2) for part in parts)
    return F.scaled_dot_product_attention(q, k, v, scale=scale).transpose(1, 2).flatten(2)


@pytest.mark.parametrize("names", [*SEPARATE, ("qkv",), ("to_qkv",), ("c_attn",)])
def test_heads_that_grow_are_scaled_by_1_over_d_whatever_the_layers_are_called(names: tuple[str, ...]) -> None:
    """Also where attention is the model itself, which has no name."""
    torch.manual_seed(0)
    model, x = Attention(64, names), 3 * torch.randn(2, 5, 64)
    mup.parametrize(model, meta(Attention, 16, names))
    unscaled = copy.deepcopy(model)
    for layer in unscaled.children():
        layer._forward_hooks.clear()
    expected = plain_attention(unscaled, x, scale=8**0.5 / 32)
    torch.testing.assert_close(model(x), expected)
    torch.testing.assert_close(mup.fold(model)(x), expected)
    assert not torch.allclose(plain_attention(unscaled, x, scale=32**-0.5), expected)


@pytest.mark.parametrize("names", [("qkv",), ("q_proj", "k_proj", "v_proj")])
@pytest.mark.parametrize("bias", [False, True])
def test_a_multiplier_behind_an_identity_is_folded_into_all_that_queries_come_from(names, bias: bool) -> None:
    torch.manual_seed(0)
    make = {"names": names, "fused": True, "norm": True, "bias": bias and len(names) == 1}
    model, x = Attention(64, **make), 3 * torch.randn(2, 5, 64)
    mup.parametrize(model, meta(Attention, 16, **make))
    assert getattr(model.q_norm, OUTPUT) == pytest.approx(0.5)
    expected = model(x)
    torch.testing.assert_close(mup.fold(model)(x), expected)


def refused(make, message: str) -> None:
    """Of width 64 and base 16; nothing is changed."""
    model = make(64)
    before, attributes, state = copy.deepcopy(model.state_dict()), set(vars(model)), torch.get_rng_state()
    with pytest.raises(ValueError, match=rf"{message}.*; keep the head size and grow the number of heads"):
        mup.parametrize(model, meta(make, 16))
    assert set(vars(model)) == attributes
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), state)


def test_a_scale_that_the_forward_ignores_is_not_relied_on() -> None:
    refused(lambda width: Attention(width, ("qkv",), fused=True), "heads of 32, of 8 at base width, and a fixed scale")


def test_a_scale_that_the_forward_reads_is_found_at_every_width() -> None:
    """Also where a softmax over logits of random weights would be saturated."""
    for width in (32, 384, 1024):
        assert plan_of(mup.parametrize(Attention(width, ("qkv",)), meta(Attention, 16, ("qkv",)))).scales


def test_a_scale_that_is_a_tensor_or_not_1_over_sqrt_d_is_refused() -> None:
    def learned(width: int) -> nn.Module:
        model = Attention(width, ("qkv",))
        del model.scale
        model.scale = nn.Parameter(torch.ones(2, 1, 1))
        return model

    def unscaled(width: int) -> nn.Module:
        model = Attention(width, ("q", "k", "v"))
        model.scaling = 1.0  # as of T5, whose initial queries have 1 / sqrt(d) in them
        return model

    def of_the_width(width: int) -> nn.Module:
        model = Attention(width, ("qkv",))
        model.scale = width**-0.5
        return model

    def fewer_keys(width: int) -> nn.Module:
        model = Attention(width, ("qkv",))
        model.head_dim, model.qkv = (
            width // 2,
            nn.Linear(width, 2 * width),
        )  # two heads of queries, one of keys and values
        return model

    def over_d(width: int) -> nn.Module:
        model = Attention(width, ("q", "k", "v"))
        model.scale = 2 / width  # 1 / d already
        return model

    refused(of_the_width, "Attention has heads of 32, of 8 at base width, and a scale of 0.125, which is not 1 / sqrt")
    refused(over_d, "and a scale of 0.03125, which is not 1 / sqrt")
    refused(fewer_keys, "Attention has heads of 32, of 8 at base width, and a fixed scale")
    refused(learned, "Attention has heads of 32, of 8 at base width, and a fixed scale")
    refused(unscaled, "and a scale of 1, which is not 1 / sqrt")


def test_attention_whose_layers_are_not_recognized_is_refused_by_the_head_size_it_stores() -> None:
    class Block(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.num_heads, self.head_dim = 2, width // 2  # of its attention
            self.attention = Attention(width, ("query_key_value",))
            self.attention.head_dim = width // 2

    refused(Block, "attention has heads of 32, of 8 at base width, and a fixed scale")
    block = Block(64)
    block.attention = nn.MultiheadAttention(64, 8)
    base = meta(Block, 16)
    base.attention = meta(nn.MultiheadAttention, 16, 2)
    mup.parametrize(block, base)  # the block's own numbers are those of its attention, which is recognized


def test_attention_is_refused_by_its_class_and_number_of_heads() -> None:
    refused(lambda width: Attention(width, ("query_key_value",)), "Attention has heads of 96, of 24 at base width")
    model = nn.ModuleList([Attention(64, ("query_key_value",))])
    model[0].num_heads = 8
    mup.parametrize(model, nn.ModuleList([meta(Attention, 16, ("query_key_value",))]))  # more heads, of the same size

    class MultiQueryAttention(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.num_heads, self.bias = width // 8, nn.Embedding(300, width // 8)  # by distance
            self.in_proj, self.out_proj = nn.Linear(width, width + 16), nn.Linear(width, width)

    assert mup.roles(mup.parametrize(MultiQueryAttention(64), meta(MultiQueryAttention, 16)))


def test_a_module_with_more_heads_than_rows_is_no_attention() -> None:
    class AttentionBias(nn.Linear):
        def __init__(self, width: int) -> None:
            super().__init__(3, width)
            self.num_heads = 200  # more than the layer has rows

    assert not plan_of(mup.parametrize(AttentionBias(64), meta(AttentionBias, 16))).heads


@pytest.mark.parametrize("name", ["q_rms_norm", "query_norm", "q_layernorm"])
def test_a_multiplier_is_behind_the_norm_of_queries(name: str) -> None:
    """In front of it, it would have no effect."""

    class Normed(Attention):
        def __init__(self, width: int) -> None:
            super().__init__(width, ("to_q", "to_k", "to_v"), norm=True)
            self.q_norm = None
            self.add_module(name, nn.RMSNorm(width // 2))

    model = mup.parametrize(Normed(64), meta(Normed, 16))
    assert plan_of(model).outputs == {name: pytest.approx(0.5)}


class SingleHead(nn.Module):
    """As in the autoencoder of latent diffusion: convolutions, and no number of heads."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.in_channels, self.last = width, nn.Conv2d(width, 2, 1)
        self.q, self.k, self.v = (nn.Conv2d(width, width, 1) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (layer(x).flatten(2) for layer in (self.q, self.k, self.v))
        mixed = v @ torch.softmax(q.mT @ k * self.in_channels**-0.5, dim=-1).mT
        return self.last(mixed.unflatten(2, x.shape[2:]))


def test_a_single_head_without_a_number_grows_with_the_channels() -> None:
    model, x = mup.parametrize(SingleHead(64), meta(SingleHead, 16)), torch.randn(1, 64, 2, 2)
    assert plan_of(model).outputs == {"q": 0.5}
    expected = model(x)
    torch.testing.assert_close(mup.fold(model)(x), expected)
    several = SingleHead(64)
    several.groups_of_queries = 4  # a number that may be that of heads
    assert not plan_of(mup.parametrize(several, meta(SingleHead, 16))).outputs


class LlamaAttention(Attention):
    """Stores the head size, and the number of heads elsewhere, as in transformers."""

    num_heads = 2

    def __init__(self, width: int, names: tuple[str, ...]) -> None:
        super().__init__(width, names)
        del self.num_heads
        self.head_dim = width // 2


def test_attention_is_recognized_by_the_head_size_alone() -> None:
    names = ("q_proj", "k_proj", "v_proj")
    model = mup.parametrize(LlamaAttention(64, names), meta(LlamaAttention, 16, names))
    assert getattr(model.q_proj, OUTPUT) == pytest.approx(0.5)
    refused(lambda width: LlamaAttention(width, ("query_key_value",)), "LlamaAttention has heads of 32, of 8 at base")


def test_layers_of_other_classes_are_recognized_by_their_names() -> None:
    """As EDM's convolutions, whose attention has a fixed scale."""

    class Linear(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(3 * width, width))

    def make(width: int) -> nn.Module:
        model = Attention(width, ("qkv",))
        model.qkv = Linear(width)
        del model.scale
        return model

    refused(make, "heads of 32, of 8 at base width, and a fixed scale")
