"""U-ViT: its sizes, its skip without concatenation, its conditions, its checks. The golden files are in test_official."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import scalelong
from scalelong.backbones.uvit import SkipLinear, UViT, UViTConfig
from scalelong.runs.presets import get_preset
from scalelong.runs.settings import Conditioning
from scalelong.training.build import build_model

SMALL = UViTConfig(image_size=8, patch_size=2, dim=32, depth=4, heads=2)
CLASSES = replace(SMALL, num_classes=10)
TEXT = replace(SMALL, text_dim=24, text_tokens=5)


def build(config: UViTConfig = SMALL, seed: int = 0) -> UViT:
    torch.manual_seed(seed)
    return UViT(config)


def images(batch: int = 2) -> Tensor:
    return torch.randn(batch, 3, 8, 8, generator=torch.Generator().manual_seed(3))


TIME = torch.tensor([12.5, 700.0])


IMAGENET, COCO = Conditioning(num_classes=1000), Conditioning(text_tokens=77, text_dim=768)


@pytest.mark.parametrize(
    ("name", "shape", "condition", "parameters", "tokens", "skips"),
    [
        ("cifar10-uvit-s2", (3, 32, 32), None, 44_255_328, 1 + 256, 6),
        ("celeba64-uvit-s4", (3, 64, 64), None, 44_292_228, 1 + 256, 6),
        ("imagenet64-uvit-m4", (3, 64, 64), IMAGENET, 130_940_292, 2 + 256, 8),
        ("imagenet64-uvit-l4", (3, 64, 64), IMAGENET, 286_827_652, 2 + 256, 10),
        ("coco-uvit-s2", (4, 32, 32), COCO, 44_692_644, 78 + 256, 6),
        ("coco-uvit-s2-deep", (4, 32, 32), COCO, 58_345_636, 78 + 256, 8),
    ],
)
def test_presets_have_the_published_sizes(
    name: str, shape: tuple[int, int, int], condition: Conditioning | None, parameters: int, tokens: int, skips: int
) -> None:
    with torch.device("meta"):
        model = build_model(get_preset(name), shape, condition or Conditioning())
    assert isinstance(model, UViT)
    assert sum(p.numel() for p in model.parameters()) == parameters
    assert (model.num_tokens, model.num_skips) == (tokens, skips)


# ------------------------------------------------------------------------------------------- the skip without concatenation

COEFFICIENTS: dict[str, float | tuple[int, ...]] = {
    "one": 1.0,
    "number": 0.3,
    "token gates": (2, 5, 1),
    "channel gates": (2, 1, 6),
    "scalar tensor": (),
}


@pytest.mark.parametrize("kind", COEFFICIENTS)
def test_skip_linear_equals_linear_of_the_concatenation(kind: str) -> None:
    torch.manual_seed(0)
    layer = SkipLinear(4 + 6, 3).double()  # unequal widths: x and skip cannot be mixed up
    shape = COEFFICIENTS[kind]
    coefficient = torch.rand(shape, dtype=torch.float64) if isinstance(shape, tuple) else shape
    inputs = [torch.randn(2, 5, 4, dtype=torch.float64), torch.randn(2, 5, 6, dtype=torch.float64)]
    upstream = torch.randn(2, 5, 3, dtype=torch.float64)

    def run(fused: bool) -> list[Tensor]:
        x, skip = (t.clone().requires_grad_() for t in inputs)
        kappa = coefficient.clone().requires_grad_() if isinstance(coefficient, Tensor) else coefficient
        if fused:
            output = layer(x, skip, kappa)
        else:
            output = F.linear(torch.cat([x, kappa * skip], dim=-1), layer.weight, layer.bias)
        wanted = [x, skip, layer.weight, layer.bias, *([kappa] if isinstance(kappa, Tensor) else [])]
        return [output, *torch.autograd.grad(output, wanted, upstream)]

    for fused, reference in zip(run(fused=True), run(fused=False), strict=True):
        torch.testing.assert_close(fused, reference, rtol=1e-12, atol=1e-12)


def test_skip_linear_takes_no_coefficient_as_one() -> None:
    layer = SkipLinear(8, 4)
    x, skip = torch.randn(2, 3, 4), torch.randn(2, 3, 4)
    assert torch.equal(layer(x, skip), layer(x, skip, 1.0))
    assert not torch.equal(layer(x, skip), layer(x, skip, 0.5))


@pytest.mark.parametrize(("method", "options"), [("universal", {"kappa": 0.5}), ("ls", {})])
def test_compiles_to_one_graph_with_gradients(method: str, options: dict[str, Any]) -> None:
    torch._dynamo.reset()
    model = build(replace(SMALL, depth=2, dim=16))
    scalelong.apply(model, method, **options)
    names = ["out_blocks.0.skip_linear.weight", "in_blocks.0.attn.qkv.weight"]

    def run(network: nn.Module) -> list[Tensor]:
        output = network(images(), TIME)
        gradients = torch.autograd.grad(output.square().mean(), [model.get_parameter(n) for n in names])
        return [output, *gradients]

    compiled = run(torch.compile(model, fullgraph=True, backend="aot_eager"))
    for got, reference in zip(compiled, run(model), strict=True):
        torch.testing.assert_close(got, reference, rtol=1e-4, atol=1e-6)


def test_skips_join_the_blocks_they_are_numbered_for() -> None:
    """In-block k feeds the out-block as far from the end as k is from the start."""
    model = build(replace(SMALL, depth=6))
    made: list[Tensor] = []
    used: list[Tensor] = []
    for block in model.in_blocks:
        block.register_forward_hook(lambda _module, _args, output: made.append(output))
    for block in model.out_blocks:
        block.skip_linear.register_forward_pre_hook(lambda _module, args: used.append(args[1]))
    model(images(), TIME)
    assert len(used) == 3
    assert all(a is b for a, b in zip(made, reversed(used), strict=True))


# --------------------------------------------------------------------------------------------------------- the whole model


def test_checkpointing_recomputes_and_gives_the_same_gradients() -> None:
    plain, saving = build(), build(replace(SMALL, checkpointing=True))
    calls: list[int] = []
    saving.in_blocks[0].register_forward_pre_hook(lambda *_: calls.append(1))
    for model in (plain, saving):
        model(images(), TIME).square().mean().backward()
    assert len(calls) == 2  # once forward, once again in the backward pass
    for (name, a), b in zip(plain.named_parameters(), saving.parameters(), strict=True):
        assert a.grad is not None
        assert b.grad is not None
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-4, atol=1e-7, msg=name)


def test_a_class_changes_its_own_image_only() -> None:
    model = build(CLASSES)
    one, other = (model(images(), TIME, class_labels=torch.tensor([1, label])) for label in (2, 3))
    torch.testing.assert_close(one[0], other[0], rtol=0, atol=1e-7)
    assert (one[1] - other[1]).abs().max() > 1e-4


def test_text_changes_its_own_image_only() -> None:
    model = build(TEXT)
    context = torch.randn(2, 5, 24)
    changed = context.clone()
    changed[1, 4] += 10.0  # the last text token alone
    one, other = (model(images(), TIME, context=c) for c in (context, changed))
    torch.testing.assert_close(one[0], other[0], rtol=0, atol=1e-7)
    assert (one[1] - other[1]).abs().max() > 1e-5


def test_one_time_serves_the_whole_batch() -> None:
    model = build()
    one = model(images(), torch.tensor(700.0))
    torch.testing.assert_close(one, model(images(), torch.tensor([700.0, 700.0])))
    assert not torch.allclose(one, model(images(), TIME))


def test_without_final_conv_equals_an_identity_convolution() -> None:
    model = build()
    assert isinstance(model.final_layer, nn.Conv2d)
    nn.init.dirac_(model.final_layer.weight)
    nn.init.zeros_(model.final_layer.bias)
    bare = UViT(replace(SMALL, final_conv=False))
    bare.load_state_dict({k: v for k, v in model.state_dict().items() if not k.startswith("final_layer")})
    torch.testing.assert_close(bare(images(), TIME), model(images(), TIME), rtol=1e-5, atol=1e-5)


def test_qkv_bias_is_used() -> None:
    model = build(replace(SMALL, qkv_bias=True))
    before = model(images(), TIME)
    nn.init.normal_(model.mid_block.attn.qkv.bias)
    assert not torch.allclose(before, model(images(), TIME))


def test_initialisation() -> None:
    torch.manual_seed(0)
    model = UViT(UViTConfig(image_size=16, patch_size=2, dim=256, depth=2, heads=4, num_classes=50, qkv_bias=True))
    for module in model.modules():
        if isinstance(module, nn.Linear):
            assert module.bias.count_nonzero() == 0
            assert module.weight.std().item() == pytest.approx(0.02, rel=0.05)
    assert model.pos_embed.std().item() == pytest.approx(0.02, rel=0.05)
    assert model.label_emb is not None
    assert model.label_emb.weight.std().item() == pytest.approx(1.0, rel=0.05)


# ----------------------------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"image_size": 32, "patch_size": 3}, r"uvit\.patch_size: 3 does not divide image_size 32; "),
        ({"heads": 5}, r"uvit\.heads: 5 does not divide dim 32; "),
        ({"depth": 7}, r"uvit\.depth: 7 is odd"),
        ({"dim": 33, "heads": 3}, r"uvit\.dim: 33 is odd"),
        ({"depth": 0}, r"uvit\.depth: 0 must be a whole number of at least 1"),
        ({"dim": 32.0}, r"uvit\.dim: 32\.0 must be a whole number"),
        ({"in_channels": True}, r"uvit\.in_channels: True must be a whole number"),
        ({"num_classes": -1}, r"uvit\.num_classes: -1 must be a whole number of at least 0"),
        ({"mlp_ratio": 0.0}, r"uvit\.mlp_ratio: 0\.0 must be positive"),
        ({"text_dim": 8}, r"uvit\.text_tokens: 0 does not go with text_dim 8; set both"),
        ({"text_dim": 8, "text_tokens": 2, "num_classes": 3}, r"uvit\.num_classes: 3 cannot be combined with text"),
    ],
)
def test_a_wrong_configuration_is_refused_by_key(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(SMALL, **changes)


@pytest.mark.parametrize(
    ("config", "inputs", "message"),
    [
        (SMALL, {"x": torch.zeros(2, 3, 16, 16)}, r"uvit\.image_size: images are \(3, 16, 16\)"),
        (SMALL, {"class_labels": torch.tensor([0, 1])}, r"uvit\.num_classes: .* leave class_labels out"),
        (SMALL, {"context": torch.zeros(2, 5, 24)}, r"uvit\.text_dim: .* leave context out"),
        (CLASSES, {}, r"uvit\.num_classes: .*built with 10, but class_labels is None"),
        (TEXT, {}, r"uvit\.text_dim: .*built with 24, but context is None"),
        (TEXT, {"context": torch.zeros(2, 4, 24)}, r"uvit\.text_tokens: texts are \(4, 24\), .* takes \(5, 24\)"),
    ],
)
def test_wrong_inputs_are_refused(config: UViTConfig, inputs: dict[str, Tensor], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build(config)(**{"x": images(), "time": TIME, **inputs})
