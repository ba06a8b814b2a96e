"""U-ViT (Bao et al., 2023): a vision transformer with long skips from its first to its second half.

Time, class and text are tokens, like the patches. An out-block joins hidden state and skip in one linear layer, which takes
an optional coefficient; `scalelong.apply` passes it in a hook, so the network is independent of scaling methods.

Shapes: B batch, T tokens (time, class and text first, then patches), C image channels, D width.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


@dataclass(frozen=True, kw_only=True)
class UViTConfig:
    """Hyperparameters of a U-ViT; invalid ones raise a ValueError.

    >>> UViTConfig(image_size=32, patch_size=2, dim=512, depth=12, heads=8)  # U-ViT-S/2 on CIFAR-10
    UViTConfig(image_size=32, patch_size=2, ...)
    """

    image_size: int
    patch_size: int
    in_channels: int = 3
    dim: int
    depth: int  # in- and out-blocks, excluding the middle block
    heads: int
    mlp_ratio: float = 4.0
    qkv_bias: bool = False
    mlp_time_embed: bool = False  # two linear layers on the sinusoidal embedding of the time
    num_classes: int = 0  # 0: no class token
    text_dim: int = 0  # width of the text features; 0: no text tokens
    text_tokens: int = 0
    final_conv: bool = True  # a 3x3 convolution on the output image
    checkpointing: bool = False  # recompute activations of blocks in the backward pass

    def __post_init__(self) -> None:
        least = dict.fromkeys(("image_size", "patch_size", "in_channels", "dim", "depth", "heads"), 1)
        least |= dict.fromkeys(("num_classes", "text_dim", "text_tokens"), 0)
        for key, minimum in least.items():
            value = getattr(self, key)
            if type(value) is not int or value < minimum:
                raise ValueError(f"uvit.{key}: {value!r} must be a whole number of at least {minimum}")
        size, patch, dim, heads = self.image_size, self.patch_size, self.dim, self.heads
        if size % patch:
            raise ValueError(f"uvit.patch_size: {patch} does not divide image_size {size}; choose a divisor of it")
        if dim % heads:
            raise ValueError(f"uvit.heads: {heads} does not divide dim {dim}; choose a divisor of it")
        if dim % 2:
            raise ValueError(
                f"uvit.dim: {dim} is odd, but the time embedding is half cosines, half sines; use an even one"
            )
        if self.depth % 2:
            raise ValueError(f"uvit.depth: {self.depth} is odd, but each in-block needs its out-block; use an even one")
        if not self.mlp_ratio > 0:
            raise ValueError(f"uvit.mlp_ratio: {self.mlp_ratio!r} must be positive; 4.0 is usual")
        if (self.text_dim > 0) != (self.text_tokens > 0):
            raise ValueError(
                f"uvit.text_tokens: {self.text_tokens} does not go with text_dim {self.text_dim}; set both"
            )
        if self.num_classes and self.text_dim:
            raise ValueError(f"uvit.num_classes: {self.num_classes} cannot be combined with text; set one of them to 0")


def timestep_embedding(time: Tensor, dim: int) -> Tensor:
    """[cos(t w_k), sin(t w_k)] with w_k falling from 1 to 1 / 10,000: (B,) -> (B, dim), in float32."""
    half = dim // 2
    exponents = torch.arange(half, dtype=torch.float32, device=time.device) / half
    angles = time.float()[:, None] * torch.exp(-math.log(10_000.0) * exponents)
    return torch.cat([angles.cos(), angles.sin()], dim=-1)


class SkipLinear(nn.Linear):
    """Linear(cat[x, coefficient * skip]) without the concatenation: x Wx + b + coefficient * (skip Ws).

    The weight is stored as (D, 2D), [Wx, Ws], as in the equivalent linear layer.

    >>> layer = SkipLinear(2 * 8, 8)
    >>> layer(torch.randn(2, 5, 8), torch.randn(2, 5, 8), coefficient=0.7).shape
    torch.Size([2, 5, 8])
    """

    def forward(self, x: Tensor, skip: Tensor, coefficient: float | Tensor = 1.0) -> Tensor:  # type: ignore[override]
        """x, skip: (B, T, D). coefficient: a number, or a tensor that broadcasts against the skip."""
        weight_x, weight_skip = torch.split(self.weight, [x.shape[-1], skip.shape[-1]], dim=1)
        main = F.linear(x, weight_x, self.bias)
        if isinstance(coefficient, Tensor):
            if coefficient.ndim == 0 or coefficient.shape[-1] == 1:  # one number per token: commutes with the matmul
                projected = F.linear(skip, weight_skip)
                return torch.addcmul(main, coefficient.to(projected.dtype), projected)
            skip = skip * coefficient
        elif coefficient != 1.0:
            weight_skip = coefficient * weight_skip  # smaller than the skip and its gradient
        joined = torch.addmm(main.flatten(0, -2), skip.flatten(0, -2), weight_skip.t())
        return joined.view(main.shape)


class Attention(nn.Module):
    """Multi-head self-attention."""

    scale: float | None = None  # of the logits; default: 1 / sqrt(head size)

    def __init__(self, dim: int, heads: int, qkv_bias: bool) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim, bias=qkv_bias)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)  # B heads T D/heads
        attended = F.scaled_dot_product_attention(query, key, value, scale=self.scale)
        mixed: Tensor = self.proj(attended.transpose(1, 2).flatten(2))
        return mixed


class Mlp(nn.Module):
    """Two linear layers with a GELU in between."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(dim, hidden)
        self.fc2 = nn.Linear(hidden, dim)

    def forward(self, x: Tensor) -> Tensor:
        mixed: Tensor = self.fc2(F.gelu(self.fc1(x)))
        return mixed


class Block(nn.Module):
    """A pre-norm transformer block; an out-block first joins its skip."""

    def __init__(self, config: UViTConfig, takes_skip: bool = False) -> None:
        super().__init__()
        self.skip_linear = SkipLinear(2 * config.dim, config.dim) if takes_skip else None
        self.norm1 = nn.LayerNorm(config.dim)
        self.attn = Attention(config.dim, config.heads, config.qkv_bias)
        self.norm2 = nn.LayerNorm(config.dim)
        self.mlp = Mlp(config.dim, int(config.dim * config.mlp_ratio))

    def forward(self, x: Tensor, skip: Tensor | None = None) -> Tensor:
        if self.skip_linear is not None:
            x = self.skip_linear(x, skip)
        x = x + self.attn(self.norm1(x))
        mixed: Tensor = x + self.mlp(self.norm2(x))
        return mixed


class PatchEmbed(nn.Module):
    """(B, C, H, W) -> (B, T, D), one token per patch, row by row."""

    def __init__(self, config: UViTConfig) -> None:
        super().__init__()
        self.proj = nn.Conv2d(config.in_channels, config.dim, kernel_size=config.patch_size, stride=config.patch_size)

    def forward(self, image: Tensor) -> Tensor:
        patches: Tensor = self.proj(image)
        return patches.flatten(2).transpose(1, 2)


def unpatchify(patches: Tensor, patch_size: int, channels: int) -> Tensor:
    """(B, h * w, p * p * C) -> (B, C, h * p, w * p) for a square image."""
    side = math.isqrt(patches.shape[1])
    grid = patches.reshape(-1, side, side, patch_size, patch_size, channels)  # B h w p1 p2 C
    return grid.permute(0, 5, 1, 3, 2, 4).reshape(-1, channels, side * patch_size, side * patch_size)


class UViT(nn.Module):
    """U-ViT. Skip i = 1, the outermost, connects in_blocks[0] with the last out-block.

    >>> model = UViT(UViTConfig(image_size=8, patch_size=2, dim=32, depth=4, heads=2, num_classes=10))
    >>> model(torch.randn(2, 3, 8, 8), torch.tensor([10.0, 500.0]), class_labels=torch.tensor([3, 7])).shape
    torch.Size([2, 3, 8, 8])
    """

    def __init__(self, config: UViTConfig) -> None:
        super().__init__()
        self.config = config
        dim, channels = config.dim, config.in_channels
        self.patch_embed = PatchEmbed(config)
        self.time_embed: nn.Module = nn.Identity()
        if config.mlp_time_embed:
            self.time_embed = nn.Sequential(nn.Linear(dim, 4 * dim), nn.SiLU(), nn.Linear(4 * dim, dim))
        self.label_emb = nn.Embedding(config.num_classes, dim) if config.num_classes else None
        self.context_embed = nn.Linear(config.text_dim, dim) if config.text_dim else None
        self.num_extras = 1 + bool(config.num_classes) + config.text_tokens
        self.num_tokens = self.num_extras + (config.image_size // config.patch_size) ** 2
        self.pos_embed = nn.Parameter(torch.zeros(1, self.num_tokens, dim))
        self.num_skips = config.depth // 2
        self.in_blocks = nn.ModuleList(Block(config) for _ in range(self.num_skips))
        self.mid_block = Block(config)
        self.out_blocks = nn.ModuleList(Block(config, takes_skip=True) for _ in range(self.num_skips))
        self.norm = nn.LayerNorm(dim)
        self.decoder_pred = nn.Linear(dim, config.patch_size**2 * channels)
        self.final_layer = nn.Conv2d(channels, channels, 3, padding=1) if config.final_conv else nn.Identity()
        # Linear weights and positions: truncated normal, std 0.02; biases: 0; all others: torch's default.
        nn.init.trunc_normal_(self.pos_embed, std=0.02)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.trunc_normal_(module.weight, std=0.02)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)

    def forward(
        self, x: Tensor, time: Tensor, class_labels: Tensor | None = None, context: Tensor | None = None
    ) -> Tensor:
        """x: (B, C, H, W); time: (B,) or scalar, already scaled (t * 999); class_labels: (B,); context: (B, text, width)."""
        self._check_inputs(x, class_labels, context)
        extras = self._extra_tokens(time.reshape(-1).expand(x.shape[0]), class_labels, context)
        tokens = torch.cat([*extras, self.patch_embed(x)], dim=1) + self.pos_embed
        skips: list[Tensor] = []
        for block in self.in_blocks:
            tokens = self._run(block, tokens)
            skips.append(tokens)
        tokens = self._run(self.mid_block, tokens)
        for block in self.out_blocks:
            tokens = self._run(block, tokens, skips.pop())
        patches = self.decoder_pred(self.norm(tokens))[:, self.num_extras :]
        image: Tensor = self.final_layer(unpatchify(patches, self.config.patch_size, self.config.in_channels))
        return image

    def _run(self, block: nn.Module, *inputs: Tensor) -> Tensor:
        """Run a block, with activation checkpointing if config.checkpointing is set."""
        recompute = self.config.checkpointing and torch.is_grad_enabled()
        output: Tensor = checkpoint(block, *inputs, use_reentrant=False) if recompute else block(*inputs)
        return output

    def _extra_tokens(self, time: Tensor, class_labels: Tensor | None, context: Tensor | None) -> list[Tensor]:
        """[time], [class, time] or [time, text], each (B, number, D)."""
        tokens = [self.time_embed(timestep_embedding(time, self.config.dim).to(self.pos_embed.dtype))[:, None]]
        if self.label_emb is not None:
            tokens.insert(0, self.label_emb(class_labels)[:, None])
        if self.context_embed is not None:
            tokens.append(self.context_embed(context))
        return tokens

    def _check_inputs(self, x: Tensor, class_labels: Tensor | None, context: Tensor | None) -> None:
        config = self.config
        image, text = (config.in_channels, config.image_size, config.image_size), (config.text_tokens, config.text_dim)
        if x.shape[1:] != image:
            raise ValueError(f"uvit.image_size: images are {tuple(x.shape[1:])}, this model takes {image}; resize them")
        given = {"num_classes": ("class_labels", class_labels), "text_dim": ("context", context)}
        for key, (name, value) in given.items():
            size: int = getattr(config, key)
            if bool(size) != (value is not None):
                wrong = f"None; pass {name}" if size else f"given; leave {name} out"
                raise ValueError(f"uvit.{key}: the model was built with {size}, but {name} is {wrong}")
        if context is not None and context.shape[1:] != text:
            raise ValueError(
                f"uvit.text_tokens: texts are {tuple(context.shape[1:])}, the model takes {text}; pad them"
            )
