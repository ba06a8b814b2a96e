"""Finding the long skips of unknown networks, and where to hook them."""

from __future__ import annotations

import copy
import io
import time
from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import scalelong
from scalelong.skips.long_skip import Argument, ChannelSlice, Fused, Item, LongSkip
from scalelong.skips.tracing.detect import detect
from tests.families import FAMILIES, Family, assert_close, assert_same_weights, build
from tests.packages import Packaged, monai_networks, tried
from tests.standins import FOUND, NEGATIVE, REFUSED, AdditiveUNet, SkipEncoder, StandIn, image, randn
from tests.without_skips import WITHOUT_SKIPS


def made(stand_in: StandIn) -> nn.Module:
    torch.manual_seed(0)
    return stand_in.build()


by_name = {"ids": lambda stand_in: stand_in.name}


@pytest.mark.parametrize("stand_in", FOUND, **by_name)
def test_every_skip_is_found_and_scaled_as_the_oracle_does(stand_in: StandIn) -> None:
    model = made(stand_in)
    handle = scalelong.apply(model, "cs", kappa=0.5, example=stand_in.inputs())
    assert [skip.index for skip in handle.skips] == list(range(1, stand_in.num_skips + 1))
    report = scalelong.verify(model, example=stand_in.inputs())
    assert len(report.checks) == stand_in.num_skips
    assert report.dtype == torch.float64
    assert all(check.effect > 1e-8 for check in report.checks), "nothing was scaled, so nothing was checked"
    assert all(check.gradient_error is not None for check in report.checks)


@pytest.mark.parametrize("stand_in", NEGATIVE, **by_name)
def test_networks_without_long_skips_have_none(stand_in: StandIn) -> None:
    with pytest.raises(ValueError, match=stand_in.refusal):
        scalelong.find_skips(made(stand_in), example=stand_in.inputs())


@pytest.mark.parametrize("stand_in", REFUSED, **by_name)
def test_what_cannot_be_scaled_alone_is_refused_with_the_reason(stand_in: StandIn) -> None:
    model = made(stand_in)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match=stand_in.refusal):
        scalelong.apply(model, "cs", example=stand_in.inputs())
    assert list(model.state_dict()) == list(before)
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in model.modules())


def place(skip: LongSkip) -> tuple[object, ...]:
    """Where a skip is taken hold of, fused or not, counted from either end."""
    slot = skip.slot
    if isinstance(slot, Fused):
        slot = slot.argument
    if isinstance(slot, ChannelSlice):
        return skip.consumer, slot.argument, slot.channels, slot.dim
    return skip.consumer, slot


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_detection_agrees_with_what_is_known(family: Family) -> None:
    model = build(family)
    known, found = scalelong.find_skips(model), detect(model, ((), family.inputs())).skips()
    assert [place(skip) for skip in found] == [place(skip) for skip in known]
    assert [skip.size for skip in found] == [replace(skip.size, main=None, time_token=None) for skip in known]


@pytest.mark.parametrize("name", WITHOUT_SKIPS)
def test_diffusers_models_without_long_skips_have_none(name: str) -> None:
    import diffusers

    settings, example = WITHOUT_SKIPS[name]
    with pytest.raises(ValueError, match="no long skip connections"):
        scalelong.find_skips(getattr(diffusers, name)(**settings), example=example)


@pytest.mark.parametrize("packaged", monai_networks(), ids=lambda packaged: packaged.name)
def test_segmentation_networks_of_monai(packaged: Packaged) -> None:
    row = tried(packaged)
    assert row["found"] == packaged.skips
    assert packaged.refusal in row.get("said", "")
    assert row.get("worst", 0.0) < 1e-6
    assert row.get("effect", 1.0) > 1e-4


def test_kappa_one_is_bit_equal_and_remove_restores_a_detected_model() -> None:
    model = AdditiveUNet()
    before, keys = model(*image()), list(model.state_dict())
    scalelong.apply(model, "cs", kappa=1.0, example=image())
    assert torch.equal(model(*image()), before)
    scalelong.remove(model)
    scalelong.apply(model, "cs", kappa=0.5, example=image())
    assert not torch.allclose(model(*image()), before)
    scalelong.remove(model)
    assert torch.equal(model(*image()), before)
    assert list(model.state_dict()) == keys


@pytest.mark.parametrize("stand_in", FOUND[:4], **by_name)
def test_a_detected_model_survives_copies_pickles_and_checkpointing(stand_in: StandIn) -> None:
    model = made(stand_in).eval()
    scalelong.apply(model, "ls", axis="channels", example=stand_in.inputs())
    expected = model(*stand_in.inputs())
    expected.square().mean().backward()
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    for other in (copy.deepcopy(copy.deepcopy(model)), copy.deepcopy(torch.load(buffer, weights_only=False))):
        assert_same_weights(other, model)
        with pytest.raises(ValueError, match="the weights contain no gates"):  # the check of state dicts is copied too
            other.load_state_dict({k: v for k, v in model.state_dict().items() if not k.startswith("scalelong.")})
        assert_close(other(*stand_in.inputs()), expected)
        with torch.no_grad():
            for parameter in other.scalelong.parameters():
                parameter.add_(1.0)
        assert torch.equal(model(*stand_in.inputs()), expected), "a copy shares the original's gates"
    again = made(stand_in).eval()
    torch.manual_seed(1)
    scalelong.apply(again, "ls", axis="channels", example=stand_in.inputs())
    again.load_state_dict(model.state_dict())
    checkpoint(lambda: again(*stand_in.inputs()).square().mean(), use_reentrant=False).backward()
    for (name, p), (_, q) in zip(model.named_parameters(), again.named_parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None)
        if p.grad is not None:
            torch.testing.assert_close(q.grad, p.grad, rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.parametrize("stand_in", FOUND, **by_name)
def test_gates_fit_the_sizes_found(stand_in: StandIn) -> None:
    model = made(stand_in)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
    scalelong.apply(model, "ls", module="ie", shared=False, axis="channels", example=stand_in.inputs())
    model(*stand_in.inputs()).square().mean().backward()
    assert all(0 < kappa < 1 for kappa in scalelong.coefficients(model))
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.scalelong.parameters())


@pytest.mark.parametrize("axis", ["tokens", "channels"])
@pytest.mark.parametrize("timed", [False, True])
def test_gates_depend_on_one_sample_alone_with_tokens_first(axis: str, timed: bool) -> None:
    class TokensIn(SkipEncoder):
        """Its input has the tokens first, too, and only the times tell how many images there are."""

        def forward(self, x: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
            return super().forward(x.permute(1, 2, 0).unflatten(-1, (4, 4)) + time[:, None, None, None])

    model = (TokensIn if timed else SkipEncoder)(batch_first=False).eval()
    example = (randn(16, 2, 3), torch.ones(2)) if timed else (randn(2, 3, 4, 4),)
    handle = scalelong.apply(model, "ls", axis=axis, example=example)
    assert {(skip.size.tokens, skip.size.batch_dim) for skip in handle.skips} == {(16, 1)}
    one = [part[:, :1] if part.ndim == 3 else part[:1] for part in example]
    three = [
        torch.cat([first, randn(*part.shape)], dim=int(part.ndim == 3))
        for first, part in zip(one, example, strict=True)
    ]
    torch.testing.assert_close(model(*three)[:1], model(*one), rtol=1e-5, atol=1e-6)


def test_a_skip_by_position_is_an_argument() -> None:
    from tests.standins import TokenUViT

    skips = scalelong.find_skips(TokenUViT(), randn(2, 3, 8, 8), torch.tensor([3.0, 500.0]))
    assert [skip.slot for skip in skips] == [Argument(1, "skip")] * 3
    assert [(skip.size.tokens, skip.size.channels_last) for skip in skips] == [(17, True)] * 3


class States(NamedTuple):
    hidden: torch.Tensor
    skip: torch.Tensor


class TakesSequence(AdditiveUNet):
    """Its decoder blocks take their input and their skip in one argument."""

    class Up(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(8, 8, 3, padding=1)

        def forward(self, states: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
            return self.conv(states[0] + states[1]).relu()

    def __init__(self, kind: type[tuple[torch.Tensor, ...]]) -> None:
        super().__init__()
        self.up, self.kind = nn.ModuleList(self.Up() for _ in range(3)), kind

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x, kept = self.first(x), []
        for block in self.down:
            x = block(x)
            kept.append(x)
        x = self.mid(x)
        for block in self.up:
            x = block(States(x, kept.pop()) if self.kind is States else self.kind([x, kept.pop()]))
        return self.out(x)


@pytest.mark.parametrize("kind", [tuple, list, States])
def test_a_skip_may_be_an_item_of_a_sequence(kind: type[tuple[torch.Tensor, ...]]) -> None:
    model = TakesSequence(kind)
    handle = scalelong.apply(model, "cs", kappa=0.5, example=image())
    assert [skip.slot for skip in handle.skips] == [Item(Argument(0, "states"), -1)] * 3
    assert all(check.effect > 1e-8 for check in scalelong.verify(model, example=image()).checks)


@pytest.mark.slow
def test_a_network_of_sdxl_size_is_traced_in_seconds_on_meta() -> None:
    from diffusers import UNet2DConditionModel

    with torch.device("meta"):
        model = UNet2DConditionModel(
            sample_size=128, block_out_channels=(320, 640, 1280), cross_attention_dim=2048, use_linear_projection=True,
            down_block_types=("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
            up_block_types=("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"), attention_head_dim=(5, 10, 20),
            transformer_layers_per_block=(1, 2, 10), addition_embed_type="text_time", addition_time_embed_dim=256,
            projection_class_embeddings_input_dim=2816,
        )  # fmt: skip
    example = {"sample": torch.zeros(1, 4, 128, 128), "timestep": torch.tensor([3])}
    example["encoder_hidden_states"] = torch.zeros(1, 77, 2048)
    example["added_cond_kwargs"] = {"text_embeds": torch.zeros(1, 1280), "time_ids": torch.zeros(1, 6)}
    start = time.process_time()
    found = detect(model, ((), example)).skips()
    assert time.process_time() - start < 10
    assert [place(skip) for skip in found] == [place(skip) for skip in scalelong.find_skips(model)]


class ZerosFromInput(nn.Module):
    """Blocks with residuals; a condition of zeros takes its type from the first block's input."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.cond = nn.Conv2d(3, 8, 1), nn.Linear(8, 8)
        self.blocks = nn.ModuleList(nn.ModuleDict({"a": nn.Conv2d(8, 8, 1), "b": nn.Conv2d(8, 8, 1)}) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        shift = self.cond(x.new_zeros([x.shape[0], 8]))[:, :, None, None]
        for block in self.blocks:
            x = x + block["b"](block["a"](x + shift).relu())
        return x


def test_zeros_like_does_not_depend_on_its_input() -> None:
    from scalelong.skips.tracing.trace import trace

    found = trace(ZerosFromInput(), (image(), {}))
    assert not any(node.name in ("new_zeros", "linear") for node in found.nodes)
    with pytest.raises(ValueError, match="no long skip connections"):
        scalelong.find_skips(ZerosFromInput(), example=image())


class IdleStage(nn.Module):
    """Two skips per level; where `idle`, the stage between them does nothing, so that the same tensor is kept twice."""

    def __init__(self, idle: bool) -> None:
        super().__init__()
        self.first, self.mid, self.out = nn.Conv2d(3, 4, 1), nn.Conv2d(4, 4, 1), nn.Conv2d(4, 3, 1)
        self.down = nn.ModuleList(nn.Conv2d(4, 4, 3, padding=1) for _ in range(2))
        self.between = nn.ModuleList(nn.Identity() if idle else nn.Conv2d(4, 4, 1) for _ in range(2))
        self.up = nn.ModuleList(nn.Conv2d(8, 4, 3, padding=1) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x, kept = self.first(x), []
        for layer, between in zip(self.down, self.between, strict=True):
            kept.append(layer(x).tanh())
            x = between(kept[-1])
            kept.append(x)
        x = self.mid(x)
        for layer in self.up:
            x = layer(torch.cat([x, kept.pop()], dim=1)).tanh()
        return self.out(x)


@pytest.mark.parametrize("idle", [False, True])
def test_a_tensor_kept_twice_in_a_row_is_two_skips(idle: bool) -> None:
    model = IdleStage(idle)
    handle = scalelong.apply(model, "cs", kappa=0.5, example=image())
    assert [skip.used_in for skip in handle.skips] == ["up.3", "up.2", "up.1", "up.0"]
    assert all(check.effect > 1e-4 for check in scalelong.verify(model, example=image()).checks)


def test_the_k_upscalers_blocks_are_found_by_tracing() -> None:
    """Each up block takes the last tensor of its level; the innermost level's is the main path itself."""
    from diffusers import UNet2DConditionModel

    model = UNet2DConditionModel(
        sample_size=8, block_out_channels=(32, 64, 64), mid_block_type=None, cross_attention_dim=12, attention_head_dim=16,
        layers_per_block=2, resnet_time_scale_shift="ada_group", act_fn="gelu", time_embedding_type="fourier",
        down_block_types=("KDownBlock2D", "KCrossAttnDownBlock2D", "KCrossAttnDownBlock2D"),
        up_block_types=("KCrossAttnUpBlock2D", "KCrossAttnUpBlock2D", "KUpBlock2D"), conv_in_kernel=1, conv_out_kernel=1,
    )  # fmt: skip
    with pytest.raises(ValueError, match="not known, and there is no example"):
        scalelong.apply(model, "cs")
    example = {
        "sample": randn(2, 4, 8, 8),
        "timestep": torch.tensor([3, 500]),
        "encoder_hidden_states": randn(2, 5, 12),
    }
    handle = scalelong.apply(model, "cs", example=example)
    assert [skip.made_in for skip in handle.skips] == ["down_blocks.0.resnets.1", "down_blocks.1.attentions.1"]
