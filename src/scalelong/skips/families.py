"""The families of models whose long skips are known by name: diffusers' UNets and transformers, MONAI's, and ours.

Each family is one function from a model to its long skips. Decoders consume the innermost skip first, so a family lists
its skips in that order and `_number` turns the order into indices that count from 1 at the outermost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from scalelong.scaling.base import SkipSize
from scalelong.skips.long_skip import Argument, ChannelSlice, Fused, Item, LongSkip, Reach, Take

Found = tuple[str, str, SkipSize, Reach, str, Take]  # made_in, used_in, size, reach, consumer, take


def known_skips(model: nn.Module) -> list[LongSkip] | None:
    """The long skips of a model of a known family, outermost first; None for any other class."""
    if _has_k_blocks(model):
        return None
    for cls in type(model).__mro__:
        family = FAMILIES.get(f"{cls.__module__.partition('.')[0]}.{cls.__name__}")
        if family is not None:
            return _number(family(model))
    return None


def _number(innermost_first: Iterable[Found]) -> list[LongSkip]:
    found = list(innermost_first)
    return [LongSkip(index, *skip) for index, skip in enumerate(reversed(found), start=1)]


# ------------------------------------------------------------------------------------------- diffusers' and MONAI's UNets

TUPLE = Argument(1, "res_hidden_states_tuple")
LIST = Argument(1, "res_hidden_states_list")


def _unet(argument: Argument) -> Callable[[Any], Iterator[Found]]:
    """UNets whose up blocks get a tuple of skips and take them from its end, one per ResNet block."""

    def skips(model: Any) -> Iterator[Found]:
        made = ["conv_in" if not hasattr(model, "transformer_in") else "transformer_in"]
        for b, block in enumerate(model.down_blocks):
            made += [f"down_blocks.{b}{name}" for name in _down_outputs(block)]
        hidden = _resnet(model.down_blocks[-1].resnets[-1]).out_channels
        for b, block in enumerate(model.up_blocks):
            consumer = f"up_blocks.{b}"
            for r, resnet in enumerate(block.resnets):
                core = _resnet(resnet)
                size = SkipSize(core.in_channels - hidden)
                yield made.pop(), f"{consumer}.resnets.{r}", size, core.reach(hidden), consumer, Item(argument, -1 - r)
                hidden = core.out_channels

    return skips


def _down_outputs(block: Any) -> list[str]:
    """The modules of a down block whose outputs are skips, in order: the last of each layer, then the downsampler."""
    outputs = [f".{name}" for name in _layer_outputs(block)]
    if _has(block, "resnet_down"):
        outputs.append("")  # NCSN++: what the block itself gives, its own skip image added
    elif _has(block, "downsamplers"):
        outputs.append(".downsamplers.0")
    elif _has(block, "downsampler"):
        outputs.append(".downsampler")
    return outputs


def _layer_outputs(block: Any) -> list[str]:
    last = next(
        n for n in ("temp_attentions", "motion_modules", "attentions", "temp_convs", "resnets") if _has(block, n)
    )
    return [f"{last}.{i}" for i in range(len(block.resnets))]


def _has_k_blocks(model: Any) -> bool:
    """The K-upscaler's blocks join one skip per block and drop the others: theirs are found by looking."""
    blocks = getattr(model, "up_blocks", None)
    if not isinstance(blocks, nn.ModuleList):
        return False
    return any(type(block).__name__ in ("KUpBlock2D", "KCrossAttnUpBlock2D") for block in blocks)


def _has(block: Any, name: str) -> bool:
    return getattr(block, name, None) is not None


@dataclass(frozen=True)
class _ResNet:
    """What is asked of a ResNet block that normalises [hidden, skip] first and then adds a shortcut of it."""

    in_channels: int
    groups: int
    out_channels: int

    def reach(self, hidden: int) -> Reach:
        """GroupNorm cancels kappa where no group holds both hidden and skip channels: only the shortcut then sees it."""
        return "shortcut" if hidden % (self.in_channels // self.groups) == 0 else "partial"


def _resnet(block: Any) -> _ResNet:
    block = getattr(block, "spatial_res_block", block)
    return _ResNet(block.norm1.num_channels, block.norm1.num_groups, block.out_channels)


def _unet_1d(model: Any) -> Iterator[Found]:
    """One skip per up block; its first layer is a convolution right on [hidden, skip]."""
    for b in range(len(model.up_blocks)):
        level = len(model.down_blocks) - 1 - b
        block, consumer = model.down_blocks[level], f"up_blocks.{b}"
        made_in, channels = f"down_blocks.{level}.{_layer_outputs(block)[-1]}", _last_conv_channels(block)
        yield made_in, f"{consumer}.resnets.0", SkipSize(channels), "full", consumer, Item(TUPLE, -1)


def _last_conv_channels(block: Any) -> int:
    last = block.resnets[-1]
    convolution = last.conv_2 if hasattr(last, "conv_2") else last.conv_out.conv1d
    return _out_channels(convolution)


def _out_channels(convolution: Any) -> int:
    """Of the layer itself, where an adapter of peft is wrapped around it."""
    return int(getattr(convolution, "base_layer", convolution).out_channels)


def _kandinsky3(model: Any) -> Iterator[Found]:
    """The root concatenates; each up block but the first gets [hidden, skip] as its input."""
    levels = len(model.down_blocks)
    for b in range(1, levels):
        made_in, consumer = f"down_blocks.{levels - 1 - b}", f"up_blocks.{b}"
        first = model.up_blocks[b].resnets_in[0].resnet_blocks[0].group_norm.norm
        channels = first.num_channels - _out_channels(
            model.up_blocks[b - 1].resnets_out[-1].resnet_blocks[-1].projection
        )
        reach: Reach = _ResNet(first.num_channels, first.num_groups, 0).reach(first.num_channels - channels)
        take = ChannelSlice(Argument(0, "x"), -channels, channels)
        yield made_in, f"{consumer}.resnets_in.0", SkipSize(channels), reach, consumer, take


def _stable_cascade(model: Any) -> Iterator[Found]:
    """The first block of each up level but the first takes the level's skip beside its input."""
    levels = len(model.down_blocks)
    for b in range(1, levels):
        block = model.up_blocks[b][0]
        channels = block.channelwise[0].in_features - _out_channels(block.depthwise)
        consumer = f"up_blocks.{b}.0"
        if channels > 0:
            level = levels - 1 - b
            made_in = f"down_blocks.{level}.{len(model.down_blocks[level]) - 1}"
            yield made_in, consumer, SkipSize(channels), "full", consumer, Argument(1, "x_skip")


# ----------------------------------------------------------------------------------------------------- transformers


def _hunyuan_dit(model: Any) -> Iterator[Found]:
    """LayerNorm of [hidden, skip], then a linear layer."""
    tokens = (model.config.sample_size // model.config.patch_size) ** 2
    with_skip = [b for b, block in enumerate(model.blocks) if block.skip_linear is not None]
    for position, b in enumerate(with_skip):
        size = SkipSize(model.blocks[b].skip_linear.out_features, tokens, channels_last=True)
        made_in = f"blocks.{len(with_skip) - 1 - position}"
        yield made_in, f"blocks.{b}.skip_norm", size, "partial", f"blocks.{b}", Argument(4, "skip")


def _unidiffuser_transformer(model: Any, prefix: str = "", tokens: int | None = None) -> Iterator[Found]:
    """A linear layer right on [hidden, skip]."""
    if tokens is None:
        tokens = (model.config.sample_size // model.config.patch_size) ** 2
    blocks = len(model.transformer_out_blocks)
    for b, block in enumerate(model.transformer_out_blocks):
        size = SkipSize(block["skip"].skip_linear.out_features, tokens, channels_last=True)
        made_in = f"{prefix}transformer_in_blocks.{blocks - 1 - b}"
        consumer = f"{prefix}transformer_out_blocks.{b}.skip"
        yield made_in, f"{consumer}.skip_linear", size, "full", consumer, Argument(1, "skip")


def _unidiffuser(model: Any) -> Iterator[Found]:
    tokens = model.num_tokens + (1 if model.use_data_type_embedding else 0)
    yield from _unidiffuser_transformer(model.transformer, "transformer.", tokens)


def _uvit(model: Any) -> Iterator[Found]:
    """Ours: x Wx + kappa * (s Ws) without concatenating."""
    blocks = len(model.out_blocks)
    for b in range(blocks):
        consumer = f"out_blocks.{b}.skip_linear"
        width = model.out_blocks[b].skip_linear.out_features
        size = SkipSize(width, model.num_tokens, channels_last=True, main=width)
        take = Fused(Argument(1, "skip"), Argument(0, "x"))
        yield f"in_blocks.{blocks - 1 - b}", consumer, size, "full", consumer, take


def _matrix_unet(model: Any) -> Iterator[Found]:
    """Ours: Eq. 3 itself, inner + kappa * skip."""
    for b in reversed(range(len(model.joins))):
        size = SkipSize(model.width)
        yield f"a.{b}", f"joins.{b}", size, "full", f"joins.{b}", Fused(Argument(1, "skip"))


FAMILIES: dict[str, Callable[[Any], Iterator[Found]]] = {
    "diffusers.UNet2DModel": _unet(TUPLE),
    "diffusers.UNet2DConditionModel": _unet(TUPLE),
    "diffusers.UNet3DConditionModel": _unet(TUPLE),
    "diffusers.UNetSpatioTemporalConditionModel": _unet(TUPLE),
    "diffusers.UNetMotionModel": _unet(TUPLE),
    "diffusers.I2VGenXLUNet": _unet(TUPLE),
    "diffusers.UNet1DModel": _unet_1d,
    "diffusers.Kandinsky3UNet": _kandinsky3,
    "diffusers.StableCascadeUNet": _stable_cascade,
    "diffusers.HunyuanDiT2DModel": _hunyuan_dit,
    "diffusers.UTransformer2DModel": _unidiffuser_transformer,
    "diffusers.UniDiffuserModel": _unidiffuser,
    "monai.DiffusionModelUNet": _unet(LIST),
    "scalelong.UViT": _uvit,
    "scalelong.MatrixUNet": _matrix_unet,
}


def known_families() -> Sequence[str]:
    """The class names `apply` and `find_skips` know without an example input."""
    return sorted(FAMILIES)
