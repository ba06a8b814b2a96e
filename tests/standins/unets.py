"""UNets in the manner of published code: root concatenation, conditional concatenation, nesting, adding."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.standins.common import Embed, Persistent, ResBlock, SelfAttention, TimeSequential


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


class EDMStyle(Persistent):
    """A dictionary of blocks; the root concatenates only where a block wants more channels. Wrapped in preconditioning."""

    class Inner(Persistent):
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


class MPBlock(Persistent):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.res0, self.res1 = MPConv(inputs, outputs, 3), MPConv(outputs, outputs, 3)
        self.skip = MPConv(inputs, outputs, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.res1(F.silu(self.res0(F.silu(x)) / 0.596) / 0.596)
        return self.skip(x).lerp(y, 0.3) / (0.7**2 + 0.3**2) ** 0.5


class EDM2Style(Persistent):
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
