"""Networks without long skips."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.standins.common import Embed, image
from tests.standins.unets import Wrapped


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


class Pyramid(nn.Module):
    """Pooled branches of the features beside the features themselves, as in pyramid pooling."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(16, 3, 1)
        self.branches = nn.ModuleList(nn.Conv2d(8, 4, 1) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        pooled = [branch(F.avg_pool2d(x, 2 * at)) for at, branch in enumerate(self.branches, start=1)]
        return self.last(torch.cat([x, *(F.interpolate(each, x.shape[-2:]) for each in pooled)], dim=1))
