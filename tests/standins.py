"""Small stand-ins for networks that no package index has, written after their published structure, and for what can go wrong.

Each has an input and the number of its long skips, counted by hand; `None` where it must be refused although it has some.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class StandIn:
    name: str
    build: Callable[[], nn.Module]
    inputs: Callable[[], tuple[Any, ...]]
    num_skips: int | None
    refusal: str = ""  # what the error says, where there is nothing to scale or it cannot be taken hold of


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(7))


def image() -> tuple[Tensor]:
    return (randn(2, 3, 8, 8),)


def image_and_time() -> tuple[Tensor, Tensor]:
    return randn(2, 3, 8, 8), torch.tensor([3.0, 500.0])


class ResBlock(nn.Module):
    """norm, act, conv, time, norm, act, zero conv, plus a shortcut."""

    def __init__(self, inputs: int, outputs: int, time: int = 16, up: bool = False, down: bool = False) -> None:
        super().__init__()
        self.in_channels, self.up, self.down = inputs, up, down
        self.norm1, self.norm2 = nn.GroupNorm(4, inputs), nn.GroupNorm(4, outputs)
        self.conv1, self.conv2 = nn.Conv2d(inputs, outputs, 3, padding=1), nn.Conv2d(outputs, outputs, 3, padding=1)
        self.time = nn.Linear(time, outputs)
        self.shortcut = nn.Conv2d(inputs, outputs, 1) if inputs != outputs else nn.Identity()
        nn.init.zeros_(self.conv2.weight)
        nn.init.zeros_(self.conv2.bias)

    def forward(self, x: Tensor, emb: Tensor) -> Tensor:
        if self.up:
            x = F.interpolate(x, scale_factor=2.0)
        if self.down:
            x = F.avg_pool2d(x, 2)
        h = self.conv1(F.silu(self.norm1(x)))
        h = h + self.time(emb)[:, :, None, None]
        h = self.conv2(F.silu(self.norm2(h)))
        return self.shortcut(x) + h


class SelfAttention(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm, self.qkv = nn.GroupNorm(4, channels), nn.Conv1d(channels, 3 * channels, 1)
        self.out = nn.Conv1d(channels, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(2)
        q, k, v = self.qkv(self.norm(flat)).transpose(1, 2).chunk(3, dim=2)
        h = F.scaled_dot_product_attention(q, k, v).transpose(1, 2)
        return (flat + self.out(h)).reshape(x.shape)


class Embed(nn.Module):
    def __init__(self, size: int = 16) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(2, size), nn.SiLU(), nn.Linear(size, size))

    def forward(self, time: Tensor) -> Tensor:
        return self.layers(torch.cat([time[:, None].cos(), time[:, None].sin()], dim=1))


# ------------------------------------------------------------------------------------------------------ UNets with cat


class TimeSequential(nn.Sequential):
    """Hands the time to the layers that take it."""

    def forward(self, x: Tensor, emb: Tensor) -> Tensor:
        for layer in self:
            x = layer(x, emb) if isinstance(layer, ResBlock) else layer(x)
        return x


class GuidedStyle(nn.Module):
    """Every input block's output is kept; the root concatenates it with the hidden state before each output block."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = Embed()
        self.input_blocks = nn.ModuleList(
            [
                TimeSequential(nn.Conv2d(3, 8, 3, padding=1)),
                TimeSequential(ResBlock(8, 8)),
                TimeSequential(nn.Conv2d(8, 8, 3, stride=2, padding=1)),
                TimeSequential(ResBlock(8, 16), SelfAttention(16)),
            ]
        )
        self.middle = TimeSequential(ResBlock(16, 16), SelfAttention(16), ResBlock(16, 16))
        self.output_blocks = nn.ModuleList(
            [
                TimeSequential(ResBlock(32, 16), SelfAttention(16)),
                TimeSequential(ResBlock(24, 16), nn.Upsample(scale_factor=2)),
                TimeSequential(ResBlock(24, 8)),
                TimeSequential(ResBlock(16, 8)),
            ]
        )
        self.out = nn.Sequential(nn.GroupNorm(4, 8), nn.SiLU(), nn.Conv2d(8, 3, 3, padding=1))

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        emb, kept, h = self.embed(time), [], x
        for block in self.input_blocks:
            h = block(h, emb)
            kept.append(h)
        h = self.middle(h, emb)
        for block in self.output_blocks:
            h = torch.cat([h, kept.pop()], dim=1)
            h = block(h, emb)
        return self.out(h)


class EDMStyle(nn.Module):
    """A dictionary of blocks; the root concatenates only where a block wants more channels. Wrapped in preconditioning."""

    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = Embed()
            self.enc = nn.ModuleDict(
                {
                    "8x8_conv": nn.Conv2d(3, 8, 3, padding=1),
                    "8x8_block0": ResBlock(8, 8),
                    "4x4_down": ResBlock(8, 8, down=True),
                    "4x4_block0": ResBlock(8, 12),
                }
            )
            self.dec = nn.ModuleDict(
                {
                    "4x4_in0": ResBlock(12, 12),
                    "4x4_block0": ResBlock(24, 12),
                    "4x4_block1": ResBlock(20, 12),
                    "8x8_up": ResBlock(12, 12, up=True),
                    "8x8_block0": ResBlock(20, 8),
                    "8x8_block1": ResBlock(16, 8),
                }
            )
            self.out = nn.Conv2d(8, 3, 3, padding=1)

        def forward(self, x: Tensor, sigma: Tensor) -> Tensor:
            emb, skips = self.embed(sigma), []
            for name, block in self.enc.items():
                x = block(x) if "conv" in name else block(x, emb)
                skips.append(x)
            for block in self.dec.values():
                if x.shape[1] != block.in_channels:
                    x = torch.cat([x, skips.pop()], dim=1)
                x = block(x, emb)
            return self.out(F.silu(x))

    def __init__(self) -> None:
        super().__init__()
        self.model = self.Inner()

    def forward(self, x: Tensor, sigma: Tensor) -> Tensor:
        s = sigma.reshape(-1, 1, 1, 1)
        c_skip, c_out, c_in = 1 / (s**2 + 1), s / (s**2 + 1).sqrt(), 1 / (s**2 + 1).sqrt()
        return c_skip * x + c_out * self.model(c_in * x, sigma.log() / 4)


def mp_cat(a: Tensor, b: Tensor, t: float = 0.5) -> Tensor:
    """Concatenation that keeps the magnitude of both parts."""
    na, nb = a.shape[1], b.shape[1]
    c = ((na + nb) / ((1 - t) ** 2 + t**2)) ** 0.5
    return torch.cat([c / na**0.5 * (1 - t) * a, c / nb**0.5 * t * b], dim=1)


class MPConv(nn.Module):
    """A convolution whose weight is normalised in every forward."""

    def __init__(self, inputs: int, outputs: int, kernel: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(outputs, inputs, kernel, kernel))

    def forward(self, x: Tensor, gain: float | Tensor = 1.0) -> Tensor:
        w = self.weight
        w = w / (1e-4 + w.flatten(1).norm(dim=1)[:, None, None, None])
        return F.conv2d(x, w * gain, padding=w.shape[-1] // 2)


class MPBlock(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.res0, self.res1 = MPConv(inputs, outputs, 3), MPConv(outputs, outputs, 3)
        self.skip = MPConv(inputs, outputs, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.res1(F.silu(self.res0(F.silu(x)) / 0.596) / 0.596)
        return self.skip(x).lerp(y, 0.3) / (0.7**2 + 0.3**2) ** 0.5


class EDM2Style(nn.Module):
    """Magnitude-preserving concatenation; residuals are lerps; the output gain starts at zero."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = MPConv(4, 8, 3)
        self.enc = nn.ModuleList([MPBlock(8, 8), MPBlock(8, 12), MPBlock(12, 12)])
        self.mid = MPBlock(12, 12)
        self.dec = nn.ModuleList([MPBlock(24, 12), MPBlock(24, 12), MPBlock(20, 8), MPBlock(16, 8)])
        self.out, self.gain = MPConv(8, 3, 3), nn.Parameter(torch.zeros([]))

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(torch.cat([x, torch.ones_like(x[:, :1])], dim=1))
        skips = [x]
        for block in self.enc:
            x = block(x)
            skips.append(x)
        x = self.mid(x)
        for block in self.dec:
            x = block(mp_cat(x, skips.pop()))
        return self.out(x, gain=self.gain)


class SkipCat(nn.Module):
    """cat([x, submodule(x)]): the skip comes first, and its module also feeds what it encloses."""

    def __init__(self, submodule: nn.Module) -> None:
        super().__init__()
        self.submodule = submodule

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x, self.submodule(x)], dim=1)


class Wrapped(nn.Module):
    """A network that holds a sequence of layers, as segmentation networks do."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x)


def nested_segmentation() -> nn.Module:
    """Segmentation UNets in the manner of MONAI: down, then everything below next to it, then up."""

    def level(inputs: int, outputs: int, channels: list[int]) -> nn.Module:
        down = nn.Sequential(
            nn.Conv2d(inputs, channels[0], 3, stride=2, padding=1), nn.InstanceNorm2d(channels[0]), nn.PReLU()
        )
        if len(channels) > 2:
            inside, joined = level(channels[0], channels[0], channels[1:]), 2 * channels[0]
        else:
            inside, joined = nn.Conv2d(channels[0], channels[1], 3, padding=1), channels[0] + channels[1]
        up = nn.Sequential(nn.ConvTranspose2d(joined, outputs, 2, stride=2), nn.InstanceNorm2d(outputs), nn.PReLU())
        return nn.Sequential(down, SkipCat(inside), up)

    return Wrapped(level(3, 3, [4, 8, 12, 16]))


class PixStyle(nn.Module):
    """Recursive blocks that change their input in place before they concatenate it."""

    def __init__(self, channels: int, inner: nn.Module | None, outermost: bool = False) -> None:
        super().__init__()
        self.outermost = outermost
        here = channels if not outermost else 3
        down = [] if outermost else [nn.LeakyReLU(0.2, inplace=True)]
        wide = 2 * channels if not outermost else channels
        parts = [*down, nn.Conv2d(here, wide, 4, 2, 1)]
        parts += [inner] if inner is not None else []
        parts += [nn.ReLU(inplace=True), nn.ConvTranspose2d(2 * wide if inner else wide, here, 4, 2, 1)]
        self.model = nn.Sequential(*parts)

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x) if self.outermost else torch.cat([x, self.model(x)], 1)


def pix_style() -> nn.Module:
    return PixStyle(4, PixStyle(4, PixStyle(8, None)), outermost=True)


class TutorialUNet(nn.Module):
    """Plain convolutions with batch norm, max pooling, cat in the root with the skip first, attention in the middle."""

    def __init__(self) -> None:
        super().__init__()

        def double(inputs: int, outputs: int) -> nn.Module:
            return nn.Sequential(
                *(nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU(inplace=True)),
                *(nn.Conv2d(outputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU(inplace=True)),
            )

        self.down1, self.down2, self.down3 = double(3, 8), double(8, 16), double(16, 16)
        self.middle, self.attention = double(16, 16), nn.Conv2d(16, 16, 1)
        self.up3, self.up2, self.up1 = double(32, 16), double(32, 8), double(16, 8)
        self.out = nn.Conv2d(8, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        s1 = self.down1(x)
        s2 = self.down2(F.max_pool2d(s1, 2))
        s3 = self.down3(F.max_pool2d(s2, 2))
        x = self.middle(F.max_pool2d(s3, 2))
        x = x + self.attention(x)
        x = self.up3(torch.cat([s3, F.interpolate(x, scale_factor=2)], dim=1))
        x = self.up2(torch.cat([s2, F.interpolate(x, scale_factor=2)], dim=1))
        x = self.up1(torch.cat([s1, F.interpolate(x, scale_factor=2)], dim=1))
        return self.out(x)


class ResidualUNet(nn.Module):
    """Attention added in the root's forward, a last cat with the first convolution's output, dropout, global residual."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.init = Embed(), nn.Conv2d(3, 8, 3, padding=1)
        self.downs = nn.ModuleList(
            nn.ModuleList([ResBlock(8, 8), ResBlock(8, 8), nn.Conv2d(8, 8, 1), nn.Conv2d(8, 8, 4, 2, 1)])
            for _ in range(2)
        )
        self.mid1, self.mid_attention, self.mid2 = ResBlock(8, 8), nn.Conv2d(8, 8, 1), ResBlock(8, 8)
        self.ups = nn.ModuleList(
            nn.ModuleList([ResBlock(16, 8), ResBlock(16, 8), nn.Conv2d(8, 8, 1), nn.ConvTranspose2d(8, 8, 2, 2)])
            for _ in range(2)
        )
        self.final, self.out, self.drop = ResBlock(16, 8), nn.Conv2d(8, 3, 1), nn.Dropout(0.5)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        emb, image, kept = self.embed(time), x, []
        x = self.init(x)
        first = x.clone()
        for block1, block2, attention, down in self.downs:
            x = block1(x, emb)
            kept.append(x)
            x = block2(x, emb)
            x = attention(x) + x
            kept.append(x)
            x = self.drop(down(x))
        x = self.mid2(self.mid_attention(self.mid1(x, emb)) + x, emb)
        for block1, block2, attention, up in self.ups:
            x = block1(torch.cat((up(x), kept.pop()), dim=1), emb)
            x = block2(torch.cat((x, kept.pop()), dim=1), emb)
            x = attention(x) + x
        return self.out(self.final(torch.cat((x, first), dim=1), emb)) + image


# -------------------------------------------------------------------------------------------------- UNets with add, lerp


class Up(nn.Module):
    """A decoder block that is handed the skip and adds it."""

    def __init__(self, channels: int, projected: bool = False) -> None:
        super().__init__()
        self.project = nn.Conv2d(channels, channels, 1) if projected else None
        self.layers = nn.Sequential(
            nn.Conv2d(channels, channels, 3, padding=1), nn.SiLU(), nn.Conv2d(channels, channels, 1)
        )

    def forward(self, x: Tensor, skip: Tensor | None = None) -> Tensor:
        if skip is not None:
            x = x + (self.project(skip) if self.project is not None else skip)
        return x + self.layers(x)


class AdditiveUNet(nn.Module):
    """h + skip: in the decoder blocks, or in the root's forward, where no module is handed the skip alone."""

    def __init__(self, in_root: bool = False, projected: bool = False) -> None:
        super().__init__()
        self.in_root = in_root
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.down = nn.ModuleList(Up(8) for _ in range(3))
        self.mid = Up(8)
        self.up = nn.ModuleList(Up(8, projected) for _ in range(3))
        self.out = nn.Conv2d(8, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        x, kept = self.first(x), []
        for block in self.down:
            x = block(x)
            kept.append(x)
        x = self.mid(x)
        for block in self.up:
            x = block(x + kept.pop()) if self.in_root else block(x, skip=kept.pop())
        return self.out(x)


class Merge(nn.Module):
    """lerp(skip, x, learned): an hourglass transformer's token split."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.proj, self.fac = nn.Linear(width, width), nn.Parameter(torch.full((1,), 0.5))

    def forward(self, x: Tensor, skip: Tensor) -> Tensor:
        x = self.proj(x).repeat_interleave(2, dim=1).repeat_interleave(2, dim=2)
        return torch.lerp(skip, x, self.fac.to(x.dtype))


class TokenBlock(nn.Module):
    """Attention-free stand-in of a transformer block: two residuals on (..., width)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mix, self.up, self.down = nn.Linear(width, width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mix(self.norm1(x))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class HDiTStyle(nn.Module):
    """An hourglass of transformer blocks on (B, H, W, C), levels joined by lerp."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Linear(3, 8)
        self.down = nn.ModuleList(TokenBlock(8) for _ in range(2))
        self.merge = nn.ModuleList(nn.Linear(32, 8) for _ in range(2))
        self.mid = TokenBlock(8)
        self.split = nn.ModuleList(Merge(8) for _ in range(2))
        self.up = nn.ModuleList(TokenBlock(8) for _ in range(2))
        self.out = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x, kept = self.patch(x.movedim(1, -1)), []
        for block, merge in zip(self.down, self.merge, strict=True):
            x = block(x)
            kept.append(x)
            b, h, w, c = x.shape
            x = merge(x.reshape(b, h // 2, 2, w // 2, 2, c).permute(0, 1, 3, 2, 4, 5).reshape(b, h // 2, w // 2, 4 * c))
        x = self.mid(x)
        for block, split in zip(self.up, self.split, strict=True):
            x = block(split(x, kept.pop()))
        return self.out(x).movedim(-1, 1)


class TokenUViT(nn.Module):
    """Tokens (B, T, C); the block concatenates and projects in its own forward."""

    class Block(TokenBlock):
        def __init__(self, width: int, skip: bool = False) -> None:
            super().__init__(width)
            self.skip_linear = nn.Linear(2 * width, width) if skip else None

        def forward(self, x: Tensor, skip: Tensor | None = None) -> Tensor:
            if self.skip_linear is not None:
                x = self.skip_linear(torch.cat([x, skip], dim=-1))
            return super().forward(x)

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.position = nn.Conv2d(3, 16, 2, stride=2), nn.Parameter(torch.zeros(1, 17, 16))
        self.time = Embed()
        self.inside = nn.ModuleList(self.Block(16) for _ in range(3))
        self.mid = self.Block(16)
        self.outside = nn.ModuleList(self.Block(16, skip=True) for _ in range(3))
        self.head = nn.Linear(16, 12)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        tokens = self.embed(x).flatten(2).transpose(1, 2)
        x, kept = torch.cat([self.time(time)[:, None], tokens], dim=1) + self.position, []
        for block in self.inside:
            x = block(x)
            kept.append(x)
        x = self.mid(x)
        for block in self.outside:
            x = block(x, kept.pop())
        return self.head(x[:, 1:])


# ------------------------------------------------------------------------------------------- what can go wrong, or looks it


class SharedDecoder(nn.Module):
    """One decoder block for all levels: its calls cannot be told apart."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.out = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 3, 1)
        self.down, self.mid, self.up = nn.ModuleList(Up(8) for _ in range(2)), Up(8), nn.Conv2d(16, 8, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x, kept = self.first(x), []
        for block in self.down:
            x = block(x)
            kept.append(x)
        x = self.mid(x)
        for _ in range(2):
            x = self.up(torch.cat([x, kept.pop()], dim=1))
        return self.out(x)


class SharedParts(nn.Module):
    """Encoder and decoder share their activation, a norm and their inner layers; consumers are modules of their own."""

    class Decode(nn.Module):
        def __init__(self, shared: nn.Module) -> None:
            super().__init__()
            self.shared, self.reduce = shared, nn.Conv2d(16, 8, 1)

        def forward(self, x: Tensor, skip: Tensor) -> Tensor:
            return self.shared(self.reduce(torch.cat([skip, x], dim=1)))

    def __init__(self) -> None:
        super().__init__()
        shared = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.SiLU())
        self.first, self.out = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 3, 1)
        self.down = nn.ModuleList(nn.Sequential(shared, nn.GroupNorm(2, 8)) for _ in range(3))
        self.mid = nn.Sequential(shared, nn.Conv2d(8, 8, 1))
        self.up = nn.ModuleList(self.Decode(shared) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x, kept = self.first(x), []
        for block in self.down:
            x = block(x)
            kept.append(x)
        x = self.mid(x)
        for block in self.up:
            x = block(x, kept.pop())
        return self.out(x)


class Twice(nn.Module):
    """A whole UNet called twice in one forward, the second time on its own first estimate."""

    def __init__(self) -> None:
        super().__init__()
        self.net = TutorialUNet()

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x + self.net(x))


class TwoInARow(nn.Module):
    """Two UNets, one behind the other."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = TutorialUNet(), TutorialUNet()

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))


class Draining(nn.Module):
    """Decoder blocks pop their skip out of the list that they share with the root."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.short = nn.Conv2d(16, 8, 3, padding=1), nn.Conv2d(16, 8, 1)

        def forward(self, x: Tensor, kept: list[Tensor]) -> Tensor:
            x = torch.cat([x, kept.pop()], dim=1)
            return F.silu(self.conv(x)) + self.short(x)

    def __init__(self) -> None:
        super().__init__()
        self.first, self.out, self.mid = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 3, 1), Up(8)
        self.down = nn.ModuleList(nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.SiLU()) for _ in range(2))
        self.up = nn.ModuleList(self.Block() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x, kept = self.first(x), []
        for block in self.down:
            x = block(x)
            kept.append(x)
        x = self.mid(x)
        for block in self.up:
            x = block(x, kept)
        return self.out(x)


class GatedBranch(nn.Module):
    """Data-dependent control flow: bright images skip the skips."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.out, self.mid = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 3, 1), Up(8)
        self.down = nn.ModuleList(nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.SiLU()) for _ in range(2))
        self.wide = nn.ModuleList(nn.LazyConv2d(8, 1) for _ in range(2))
        self.narrow = nn.ModuleList(nn.Conv2d(8, 8, 1) for _ in range(2))
        self(torch.zeros(1, 3, 8, 8))

    def forward(self, x: Tensor) -> Tensor:
        bright = bool(x.mean() > 1)
        x, kept = self.first(x), []
        for block in self.down:
            x = block(x)
            kept.append(x)
        x = self.mid(x)
        for wide, narrow in zip(self.wide, self.narrow, strict=True):
            x = narrow(x) if bright else wide(torch.cat([x, kept.pop()], dim=1))
        return self.out(x)


class BranchedSkips(nn.Module):
    """A transformer encoder whose skips pass through residual blocks of their own; only the innermost comes straight."""

    class Decode(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.reduce = nn.Conv2d(16, 8, 1)

        def forward(self, x: Tensor, skip: Tensor) -> Tensor:
            return self.reduce(torch.cat([x, skip], dim=1))

    def __init__(self) -> None:
        super().__init__()
        self.first, self.out, self.mid = nn.Conv2d(3, 8, 1), nn.Conv2d(8, 3, 1), nn.Conv2d(8, 8, 3, padding=1)
        self.down = nn.ModuleList(nn.Conv2d(8, 8, 3, padding=1) for _ in range(3))
        self.branch, self.up = nn.ModuleList(Up(8) for _ in range(3)), nn.ModuleList(self.Decode() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x, kept = self.first(x), []
        for at, (down, branch) in enumerate(zip(self.down, self.branch, strict=True)):
            x = F.silu(down(x))
            kept.append(x if at == 2 else branch(x))
        x = self.mid(x)
        for up in self.up:
            x = up(x, kept.pop())
        return self.out(x)


class PlusPlus(nn.Module):
    """Nested dense skips in the manner of UNet++: one feature is joined in several places."""

    def __init__(self) -> None:
        super().__init__()
        conv = lambda i, o: nn.Sequential(nn.Conv2d(i, o, 3, padding=1), nn.SiLU())  # noqa: E731
        self.x00, self.x10, self.x20 = conv(3, 8), conv(8, 8), conv(8, 8)
        self.x01, self.x11, self.x02, self.out = conv(16, 8), conv(16, 8), conv(24, 8), nn.Conv2d(8, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        x00 = self.x00(x)
        x10 = self.x10(x00)
        x20 = self.x20(x10)
        x01 = self.x01(torch.cat([x00, x10], 1))
        x11 = self.x11(torch.cat([x10, x20], 1))
        return self.out(self.x02(torch.cat([x00, x01, x11], 1)))


# --------------------------------------------------------------------------------------------- networks without long skips


def plain_cnn() -> nn.Module:
    return Wrapped(
        nn.Sequential(*(nn.Conv2d(3 if i == 0 else 8, 8, 3, padding=1) for i in range(5)), nn.Conv2d(8, 3, 1))
    )


class Bottleneck(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            *(nn.Conv2d(inputs, 4, 1), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Conv2d(4, 4, 3, padding=1)),
            *(nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Conv2d(4, outputs, 1), nn.BatchNorm2d(outputs)),
        )
        self.downsample = nn.Conv2d(inputs, outputs, 1) if inputs != outputs else None

    def forward(self, x: Tensor) -> Tensor:
        identity = x if self.downsample is None else self.downsample(x)
        out = self.body(x)
        out += identity
        return F.relu(out, inplace=True)


def resnet(blocks: int = 6) -> nn.Module:
    layers = [Bottleneck(8 if i % 3 else 8 * (1 + (i > 0)), 16 if i % 3 == 2 else 8) for i in range(blocks)]
    head = nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.LazyLinear(10)
    model = Wrapped(nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), *layers, *head)).eval()
    model(*image())
    return model


class InlineResNet(nn.Module):
    """Residuals written out in the root's forward."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 1)
        self.convs = nn.ModuleList(nn.Conv2d(8, 8, 3, padding=1) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for i in range(0, 6, 2):
            x = x + self.convs[i + 1](F.relu(self.convs[i](x)))
        return x


class DenseNet(nn.Module):
    """Every layer gets the outputs of all before it; blocks with transitions between them."""

    class Block(nn.Module):
        def __init__(self, inputs: int, layers: int) -> None:
            super().__init__()
            self.layers = nn.ModuleList(
                nn.Sequential(nn.BatchNorm2d(inputs + 4 * i), nn.ReLU(), nn.Conv2d(inputs + 4 * i, 4, 3, padding=1))
                for i in range(layers)
            )

        def forward(self, x: Tensor) -> Tensor:
            features = [x]
            for layer in self.layers:
                features.append(layer(torch.cat(features, 1)))
            return torch.cat(features, 1)

    def __init__(self, blocks: int = 2, layers: int = 4) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.blocks = nn.ModuleList(
            nn.Sequential(self.Block(8, layers), nn.Conv2d(8 + 4 * layers, 8, 1)) for _ in range(blocks)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return x


class GrowingDenseNet(nn.Module):
    """x = cat([x, layer(x)]), again and again."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 1)
        self.layers = nn.ModuleList(nn.Conv2d(8 + 4 * i, 4, 3, padding=1) for i in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = torch.cat([x, F.relu(layer(x))], dim=1)
        return x


class ViT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.cls = nn.Conv2d(3, 16, 2, stride=2), nn.Parameter(torch.randn(1, 1, 16))
        self.position = nn.Parameter(torch.randn(1, 17, 16))
        layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, norm_first=True)
        self.encoder, self.head = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False), nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.embed(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls.expand(len(x), -1, -1), tokens], dim=1) + self.position
        return self.head(self.encoder(x)[:, 0])


class DiTStyle(nn.Module):
    """Transformer blocks modulated by the time, every residual gated, the output layer zero."""

    class Block(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.modulation = nn.Linear(width, 6 * width)
            self.attention = nn.MultiheadAttention(width, 2, batch_first=True)
            self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

        def forward(self, x: Tensor, emb: Tensor) -> Tensor:
            a, b, c, d, e, f = self.modulation(F.silu(emb))[:, None].chunk(6, dim=2)
            h = F.layer_norm(x, x.shape[-1:]) * (1 + a) + b
            x = x + c * self.attention(h, h, h, need_weights=False)[0]
            return x + d * self.mlp(F.layer_norm(x, x.shape[-1:]) * (1 + e) + f)

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.time = nn.Linear(12, 16), Embed()
        self.blocks, self.out = nn.ModuleList(self.Block(16) for _ in range(4)), nn.Linear(16, 12)
        nn.init.zeros_(self.out.weight)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        x, emb = self.embed(F.pixel_unshuffle(x, 2).flatten(2).transpose(1, 2)), self.time(time)
        for block in self.blocks:
            x = block(x, emb)
        return self.out(x)


class TwoStreams(nn.Module):
    """Blocks with an image and a text stream that attend to each other: two residuals enclose each other in every block."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.c, self.out = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 16)

        def forward(self, text: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
            both = torch.cat([self.q(x), self.c(text)], dim=1)
            mixed = self.out(F.scaled_dot_product_attention(both, both, both))
            return text + mixed[:, x.shape[1] :], x + mixed[:, : x.shape[1]]

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.text = nn.Linear(3, 16), nn.Linear(3, 16)
        self.blocks = nn.ModuleList(self.Block() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(2).transpose(1, 2)
        x, text = self.embed(x), self.text(x[:, :4])
        for block in self.blocks:
            text, x = block(text, x)
        return x


class Inception(nn.Module):
    """Parallel branches of different depth, concatenated."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Conv2d(8, 4, 1), nn.Sequential(nn.Conv2d(8, 4, 1), nn.Conv2d(4, 4, 3, padding=1))

        def forward(self, x: Tensor) -> Tensor:
            return torch.cat([self.a(x), self.b(x)], dim=1)

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(3, 8, 1), *(self.Block() for _ in range(3)))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


NONE = "no long skip connections"

FOUND = [
    StandIn("guided-diffusion style", GuidedStyle, image_and_time, 4),
    StandIn("EDM style", EDMStyle, image_and_time, 4),
    StandIn("EDM2 style", EDM2Style, image, 4),
    StandIn("nested segmentation", nested_segmentation, lambda: (randn(2, 3, 16, 16),), 3),
    StandIn("pix2pix style", pix_style, image, 2),
    StandIn("tutorial UNet", TutorialUNet, image, 3),
    StandIn("residuals in the root", ResidualUNet, image_and_time, 5),
    StandIn("additive in blocks", AdditiveUNet, image, 3),
    StandIn("HDiT style", HDiTStyle, image, 2),
    StandIn("token U-ViT", TokenUViT, image_and_time, 3),
    StandIn("shared parts", SharedParts, image, 3),
    StandIn("data-dependent branch", GatedBranch, image, 2),
]

REFUSED = [
    StandIn(
        "additive in the root", lambda: AdditiveUNet(in_root=True), image, None, "joined by add in the model itself"
    ),
    StandIn("projected skips", lambda: AdditiveUNet(projected=True), image, None, "passes it through conv2d before"),
    StandIn("shared decoder", SharedDecoder, image, None, "called 2 times in one forward"),
    StandIn("UNet called twice", Twice, image, None, "does not fit in"),
    StandIn("two UNets in a row", TwoInARow, image, None, "does not fit in"),
    StandIn("draining blocks", Draining, image, None, "takes its skips out of the list"),
    StandIn("skips with blocks of their own", BranchedSkips, image, None, "not all skips would be scaled"),
    StandIn("UNet++ style", PlusPlus, image, None, "joined more than once"),
]

NEGATIVE = [
    StandIn("plain CNN", plain_cnn, image, 0, NONE),
    StandIn("ResNet", resnet, image, 0, NONE),
    StandIn("ResNet of one block", lambda: resnet(1), image, 0, NONE),
    StandIn("inline ResNet", InlineResNet, image, 0, NONE),
    StandIn("DenseNet", DenseNet, image, 0, NONE),
    StandIn("DenseNet of one block", lambda: DenseNet(1, 2), image, 0, NONE),
    StandIn("growing DenseNet", GrowingDenseNet, image, 0, NONE),
    StandIn("ViT", ViT, image, 0, NONE),
    StandIn("DiT style", DiTStyle, image_and_time, 0, NONE),
    StandIn("two streams", TwoStreams, image, 0, NONE),
    StandIn("Inception", Inception, image, 0, NONE),
]
