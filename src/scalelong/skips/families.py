"""Table of known model classes: long skips, example input, stages and residual branches.

To add a class, write a function from a model to its skips and list it in `FAMILIES`. Decoders consume the innermost skip
first, so these functions yield skips in that order; `known_skips` numbers them from the outermost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from scalelong.scaling.constant import SkipSize
from scalelong.skips.long_skip import Argument, Call, ChannelSlice, Fused, Item, LongSkip, Reach, Slot

Found = tuple[str, str, SkipSize, Reach, str, Slot]  # made_in, used_in, size, reach, consumer, slot
Inputs = dict[str, Any]
K_BLOCKS = {"KUpBlock2D", "KCrossAttnUpBlock2D"}  # use one skip per block and drop the rest: traced instead


@dataclass(frozen=True)
class Family:
    skips: Callable[[Any], Iterator[Found]]  # innermost first
    example: Callable[[Any, _Random], Inputs] | None = None
    stages: tuple[str, ...] = ("down_blocks", "mid_block", "up_blocks")  # encoder, middle, decoder
    residuals: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # block class: modules whose outputs it adds


def known_family(model: nn.Module) -> Family | None:
    """The entry of the model's class or of a base class."""
    blocks = getattr(model, "up_blocks", None)
    if isinstance(blocks, nn.ModuleList) and {type(block).__name__ for block in blocks} & K_BLOCKS:
        return None
    names = (f"{cls.__module__.partition('.')[0]}.{cls.__name__}" for cls in type(model).__mro__)
    return next((FAMILIES[name] for name in names if name in FAMILIES), None)


def known_families() -> Sequence[str]:
    """The class names that need no example input.

    >>> "diffusers.UNet2DModel" in known_families()
    True
    """
    return sorted(FAMILIES)


def known_skips(model: nn.Module) -> list[LongSkip] | None:
    """The long skips of a model of a known class, outermost first; None for any other class."""
    family = known_family(model)
    if family is None:
        return None
    return [LongSkip(index, *found) for index, found in enumerate(reversed(list(family.skips(model))), start=1)]


def generated_example(model: nn.Module, full_size: bool = False) -> Call:
    """Random inputs for the most common classes, at the native or smallest possible size."""
    family = known_family(model)
    if family is None or family.example is None:
        none = f"example: none was given, and none can be generated for a {type(model).__name__}"
        raise ValueError(f"{none}; pass the arguments you would call the model with")
    weight = next(model.parameters())
    return (), family.example(model, _Random(weight.device, weight.dtype, full_size))


def stages(model: nn.Module) -> list[str]:
    """Names of the encoder blocks, middle and decoder blocks; for unknown models, the items of their module lists.

    >>> from scalelong import UViT, UViTConfig
    >>> stages(UViT(UViTConfig(image_size=8, patch_size=4, dim=16, depth=2, heads=2)))
    ['in_blocks.0', 'mid_block', 'out_blocks.0']
    """
    children, modules = dict(model.named_children()), dict(model.named_modules())
    lists = [name for name, child in children.items() if isinstance(child, (nn.ModuleList, nn.ModuleDict))]
    found = []
    for name in [name for name in _stage_names(model) if name in modules] or lists:
        is_list = isinstance(modules[name], (nn.ModuleList, nn.ModuleDict))
        items = [(f"{name}.{item}", child) for item, child in modules[name].named_children()] if is_list else []
        for item, child in items or [(name, modules[name])]:
            last = [*child._modules][-1:] if isinstance(child, nn.ModuleList) else []  # a list is never called
            found.append(".".join([item, *last]))
    if not found:
        name = type(model).__name__
        raise ValueError(f"blocks: the stages of {name} are not known; pass blocks= of {list(children)}")
    return found


def _stage_names(model: nn.Module) -> tuple[str, ...]:
    """Names of the stages by the model's class, or those of a known class that the model's children have."""
    if (family := known_family(model)) is not None:
        return family.stages
    children = dict(model.named_children())
    patterns = sorted({*(known.stages for known in FAMILIES.values()), _GUIDED_DIFFUSION}, key=len, reverse=True)
    return next((names for names in patterns if all(name in children for name in names)), ())


def has_known_stages(model: nn.Module) -> bool:
    """True if the class is known or its children have the names of a known class."""
    return known_family(model) is not None or len(_stage_names(model)) > 1


def residual_branches(model: nn.Module) -> list[tuple[str, ...]]:
    """For each residual block, outermost ones only, the modules whose outputs it adds to its input; raises if unknown."""
    family, blocks = known_family(model), dict[str, tuple[str, ...]]()
    residuals = family.residuals if family is not None else {}
    for stage in stages(model) if residuals else ():
        for name, module in model.get_submodule(stage).named_modules(prefix=stage):
            branches = next((residuals[cls.__name__] for cls in type(module).__mro__ if cls.__name__ in residuals), ())
            if branches and not any(name.startswith(f"{block}.") for block in blocks):
                blocks[name] = tuple(f"{name}.{branch}" for branch in branches)
    if not blocks:
        known = ", ".join(name for name in known_families() if FAMILIES[name].residuals)
        name = type(model).__name__
        raise ValueError(f"scaling.method: the residual blocks of this {name} are not known; use one of {known}")
    return list(blocks.values())


TUPLE = Argument(1, "res_hidden_states_tuple")
LIST = Argument(1, "res_hidden_states_list")


def _unet(model: Any, argument: Argument = TUPLE) -> Iterator[Found]:
    """UNets whose up blocks receive a tuple of skips and take them from its end, one per ResNet block."""
    made = ["conv_in" if not hasattr(model, "transformer_in") else "transformer_in"]
    for b, block in enumerate(model.down_blocks):
        made += [f"down_blocks.{b}{name}" for name in _down_outputs(block)]
    last = model.down_blocks[-1].resnets[-1]
    hidden = getattr(last, "spatial_res_block", last).out_channels
    for b, block in enumerate(model.up_blocks):
        for r, resnet in enumerate(block.resnets):
            core = getattr(resnet, "spatial_res_block", resnet)
            size, reach = SkipSize(core.norm1.num_channels - hidden), _reach(core.norm1, hidden)
            yield made.pop(), f"up_blocks.{b}.resnets.{r}", size, reach, f"up_blocks.{b}", Item(argument, -1 - r)
            hidden = core.out_channels


def _down_outputs(block: Any) -> list[str]:
    """The modules of a down block whose outputs are skips, in order: the last of each layer, then the downsampler."""
    names = {"resnet_down": "", "downsamplers": ".downsamplers.0", "downsampler": ".downsampler"}  # resnet_down: NCSN++
    last = [names[name] for name in names if getattr(block, name, None) is not None][:1]
    return [f".{name}" for name in _layer_outputs(block)] + last


def _layer_outputs(block: Any) -> list[str]:
    order = ("temp_attentions", "motion_modules", "attentions", "temp_convs", "resnets")
    last = next(name for name in order if getattr(block, name, None) is not None)
    return [f"{last}.{i}" for i in range(len(block.resnets))]


def _reach(norm: Any, hidden: int) -> Reach:
    """GroupNorm of [hidden, skip] cancels kappa if no group holds channels of both: only the shortcut then sees it."""
    return "shortcut" if hidden % (norm.num_channels // norm.num_groups) == 0 else "partial"


def _unet_1d(model: Any) -> Iterator[Found]:
    """One skip per up block; its first layer is a convolution of [hidden, skip]."""
    for b in range(len(model.up_blocks)):
        level = len(model.down_blocks) - 1 - b
        block, consumer = model.down_blocks[level], f"up_blocks.{b}"
        last = block.resnets[-1]
        size = SkipSize(_out_channels(last.conv_2 if hasattr(last, "conv_2") else last.conv_out.conv1d))
        made_in = f"down_blocks.{level}.{_layer_outputs(block)[-1]}"
        yield made_in, f"{consumer}.resnets.0", size, "full", consumer, Item(TUPLE, -1)


def _out_channels(convolution: Any) -> int:
    """Output channels of a layer, also inside a peft adapter."""
    return int(getattr(convolution, "base_layer", convolution).out_channels)


def _kandinsky3(model: Any) -> Iterator[Found]:
    """The root concatenates; each up block but the first receives [hidden, skip] as its input."""
    levels = len(model.down_blocks)
    for b in range(1, levels):
        made_in, consumer = f"down_blocks.{levels - 1 - b}", f"up_blocks.{b}"
        norm = model.up_blocks[b].resnets_in[0].resnet_blocks[0].group_norm.norm
        hidden = _out_channels(model.up_blocks[b - 1].resnets_out[-1].resnet_blocks[-1].projection)
        channels = norm.num_channels - hidden
        slot = ChannelSlice(Argument(0, "x"), -channels, channels)
        yield made_in, f"{consumer}.resnets_in.0", SkipSize(channels), _reach(norm, hidden), consumer, slot


def _stable_cascade(model: Any) -> Iterator[Found]:
    """The first block of each up level but the first takes the level's skip as its second input."""
    levels = len(model.down_blocks)
    for b in range(1, levels):
        block, consumer = model.up_blocks[b][0], f"up_blocks.{b}.0"
        channels = block.channelwise[0].in_features - _out_channels(block.depthwise)
        if channels > 0:
            level = levels - 1 - b
            made_in = f"down_blocks.{level}.{len(model.down_blocks[level]) - 1}"
            yield made_in, consumer, SkipSize(channels), "full", consumer, Argument(1, "x_skip")


def _hunyuan_dit(model: Any) -> Iterator[Found]:
    """LayerNorm of [hidden, skip], then a linear layer."""
    tokens = (model.config.sample_size // model.config.patch_size) ** 2
    with_skip = [b for b, block in enumerate(model.blocks) if block.skip_linear is not None]
    for position, b in enumerate(with_skip):
        size = SkipSize(model.blocks[b].skip_linear.out_features, tokens, channels_last=True)
        made_in = f"blocks.{len(with_skip) - 1 - position}"
        yield made_in, f"blocks.{b}.skip_norm", size, "partial", f"blocks.{b}", Argument(4, "skip")


def _u_transformer(model: Any, prefix: str = "", tokens: int | None = None) -> Iterator[Found]:
    """A linear layer of [hidden, skip]."""
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
    yield from _u_transformer(model.transformer, "transformer.", tokens)


def _uvit(model: Any) -> Iterator[Found]:
    """x Wx + kappa * (s Ws), without a concatenation."""
    blocks = len(model.out_blocks)
    for b in range(blocks):
        consumer = f"out_blocks.{b}.skip_linear"
        width = model.out_blocks[b].skip_linear.out_features
        token = int(model.label_emb is not None)  # [class, time, ...] or [time, ...]
        size = SkipSize(width, model.num_tokens, channels_last=True, time_token=token, main=width)
        slot = Fused(Argument(1, "skip"), Argument(0, "x"))
        yield f"in_blocks.{blocks - 1 - b}", consumer, size, "full", consumer, slot


def _f5_unet_t(model: Any) -> Iterator[Found]:
    """F5-TTS: a linear layer of [hidden, skip] in the later half of the layers; any number of tokens."""
    if model.skip_connect_type == "add":
        inline = "it adds its skips in its own forward (skip_connect_type='add'), where no module receives them"
        name = type(model).__name__
        raise ValueError(f"model: this {name} cannot be scaled: {inline}; use skip_connect_type='concat'")
    half = model.depth // 2
    for layer in range(half, model.depth) if model.skip_connect_type == "concat" else ():
        consumer, source = f"layers.{layer}.0", model.depth - 2 - layer
        made_in = f"layers.{source}" if source >= 0 else "input_embed"
        slot = ChannelSlice(Argument(0, "input"), model.dim, model.dim, dim=2)
        yield made_in, consumer, SkipSize(model.dim, channels_last=True), "full", consumer, slot


def _matrix_unet(model: Any) -> Iterator[Found]:
    """Eq. 3: inner + kappa * skip."""
    for b in reversed(range(len(model.joins))):
        yield f"a.{b}", f"joins.{b}", SkipSize(model.width), "full", f"joins.{b}", Fused(Argument(1, "skip"))


class _Random:
    """Deterministic random tensors that leave the global random state unchanged."""

    def __init__(self, device: torch.device, dtype: torch.dtype, full_size: bool) -> None:
        self.device, self.dtype, self.full_size = device, dtype, full_size
        self.generator = torch.Generator().manual_seed(0)

    def __call__(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator).to(self.device, self.dtype)

    def integers(self, value: int) -> Tensor:
        return torch.tensor([value], device=self.device)


def _unet2d_inputs(model: Any, random: _Random) -> Inputs:
    config = model.config
    size = int(2 ** (len(config.block_out_channels) + 1))  # the smallest image that can be halved at every level
    if isinstance(config.sample_size, int):
        size = config.sample_size if random.full_size else min(config.sample_size, size)
    inputs = {"sample": random(1, config.in_channels, size, size), "timestep": random.integers(37)}
    if config.num_class_embeds is not None:
        inputs["class_labels"] = random.integers(0)
    return inputs


def _unet2d_condition_inputs(model: Any, random: _Random) -> Inputs:
    config, width = model.config, model.config.cross_attention_dim
    if config.addition_embed_type not in (None, "text_time") or config.class_embed_type is not None:
        raise ValueError("example: none was given, and none can be generated for this conditioning; pass one")
    inputs = _unet2d_inputs(model, random)
    width = config.encoder_hid_dim or (width if isinstance(width, int) else width[0])
    inputs["encoder_hidden_states"] = random(1, 4, width)
    if config.addition_embed_type == "text_time":
        text = config.projection_class_embeddings_input_dim - 6 * config.addition_time_embed_dim
        inputs["added_cond_kwargs"] = {"text_embeds": random(1, text), "time_ids": random(1, 6)}
    return inputs


def _unet1d_inputs(model: Any, random: _Random) -> Inputs:
    return {"sample": random(1, model.config.in_channels, model.config.sample_size), "timestep": random.integers(37)}


def _u_transformer_inputs(model: Any, random: _Random) -> Inputs:
    return {"hidden_states": random(1, model.config.in_channels, *[model.config.sample_size] * 2)}


def _uvit_inputs(model: Any, random: _Random) -> Inputs:
    config = model.config
    inputs = {"x": random(1, config.in_channels, config.image_size, config.image_size), "time": random(1)}
    if config.num_classes:
        inputs["class_labels"] = random.integers(0)
    if config.text_dim:
        inputs["context"] = random(1, config.text_tokens, config.text_dim)
    return inputs


_GUIDED_DIFFUSION = ("input_blocks", "middle_block", "output_blocks")  # stages of many models that are not in the table
_TRANSFORMER = ("transformer_in_blocks", "transformer_mid_block", "transformer_out_blocks")

_UNET_BLOCKS = {
    **dict.fromkeys(("ResnetBlock2D", "ResnetBlockCondNorm2D"), ("conv2",)),
    "Attention": ("to_out.0",),
    "Transformer2DModel": ("proj_out",),
}
_DIT_BLOCKS = {"HunyuanDiTBlock": ("attn1", "attn2", "ff")}
_UVIT_BLOCKS = {"Block": ("attn", "mlp")}

FAMILIES: dict[str, Family] = {
    "diffusers.UNet2DModel": Family(_unet, _unet2d_inputs, residuals=_UNET_BLOCKS),
    "diffusers.UNet2DConditionModel": Family(_unet, _unet2d_condition_inputs, residuals=_UNET_BLOCKS),
    "diffusers.UNet3DConditionModel": Family(_unet),
    "diffusers.UNetSpatioTemporalConditionModel": Family(_unet),
    "diffusers.UNetMotionModel": Family(_unet),
    "diffusers.I2VGenXLUNet": Family(_unet),
    "diffusers.UNet1DModel": Family(_unet_1d, _unet1d_inputs),
    "diffusers.Kandinsky3UNet": Family(_kandinsky3),
    "diffusers.StableCascadeUNet": Family(_stable_cascade),
    "diffusers.HunyuanDiT2DModel": Family(_hunyuan_dit, stages=("blocks",), residuals=_DIT_BLOCKS),
    "diffusers.UTransformer2DModel": Family(_u_transformer, _u_transformer_inputs, _TRANSFORMER),
    "diffusers.UniDiffuserModel": Family(_unidiffuser, stages=tuple(f"transformer.{name}" for name in _TRANSFORMER)),
    "monai.DiffusionModelUNet": Family(
        partial(_unet, argument=LIST), stages=("down_blocks", "middle_block", "up_blocks")
    ),
    "f5_tts.UNetT": Family(_f5_unet_t, stages=("layers",)),
    "scalelong.UViT": Family(_uvit, _uvit_inputs, ("in_blocks", "mid_block", "out_blocks"), _UVIT_BLOCKS),
    "scalelong.MatrixUNet": Family(_matrix_unet, stages=("a", "middle", "b")),
}
