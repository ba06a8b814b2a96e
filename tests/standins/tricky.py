"""What can go wrong: shared modules, modules called twice, lists that drain, branches."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.standins.unets import TutorialUNet, Up


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


class PlainU(nn.Module):
    """As many blocks down as up, each of those up handed its skip."""

    first: nn.Module
    down: nn.ModuleList
    mid: nn.Module
    up: nn.ModuleList
    out: nn.Module

    def forward(self, x: Tensor) -> Tensor:
        x, kept = self.first(x), []
        for block in self.down:
            x = block(x)
            kept.append(x)
        x = self.mid(x)
        for block in self.up:
            x = block(x, kept.pop())
        return self.out(x)


class SharedParts(PlainU):
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
    """Decoder blocks pop their skip out of the list that they share with the root; functional: no module gets the join."""

    class Block(nn.Module):
        def __init__(self, functional: bool) -> None:
            super().__init__()
            self.conv, self.short = nn.Conv2d(16, 8, 3, padding=1), nn.Conv2d(16, 8, 1)
            self.functional = functional

        def forward(self, x: Tensor, kept: list[Tensor]) -> Tensor:
            x = torch.cat([x, kept.pop()], dim=1)
            if self.functional:
                return F.silu(F.conv2d(x, self.conv.weight, padding=1)) + F.conv2d(x, self.short.weight)
            return F.silu(self.conv(x)) + self.short(x)

    def __init__(self, functional: bool = False) -> None:
        super().__init__()
        self.first, self.out, self.mid = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 3, 1), Up(8)
        self.down = nn.ModuleList(nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.SiLU()) for _ in range(2))
        self.up = nn.ModuleList(self.Block(functional) for _ in range(2))

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


class ProjectingUp(PlainU):
    """Each decoder block projects its skip before it joins it; around the innermost one there is no more than one layer."""

    class Block(nn.Module):
        def __init__(self, layers: int) -> None:
            super().__init__()
            self.project = nn.Sequential(*(nn.Conv2d(8, 8, 1) for _ in range(layers)))
            self.conv = nn.Conv2d(16, 8, 3, padding=1)

        def forward(self, x: Tensor, skip: Tensor) -> Tensor:
            return F.silu(self.conv(torch.cat([x, self.project(skip)], dim=1)))

    def __init__(self, layers: int = 1) -> None:
        super().__init__()
        self.first, self.mid, self.out = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 1), nn.Conv2d(8, 3, 1)
        self.down = nn.ModuleList(nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.SiLU()) for _ in range(3))
        self.up = nn.ModuleList(self.Block(layers) for _ in range(3))


class RootShortcut(nn.Module):
    """What was joined goes to a block and to its shortcut, both called by the model itself."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.mid, self.out = nn.Conv2d(3, 8, 3, padding=1), Up(8), nn.Conv2d(8, 3, 1)
        self.down = nn.ModuleList(Up(8) for _ in range(3))
        blocks = [nn.Sequential(nn.GroupNorm(4, 16), nn.SiLU(), nn.Conv2d(16, 8, 3, padding=1)) for _ in range(3)]
        self.up, self.shortcut = nn.ModuleList(blocks), nn.ModuleList(nn.Conv2d(16, 8, 1) for _ in range(3))

    def forward(self, x: Tensor, join: Callable[[Tensor, Tensor], Tensor] | None = None) -> Tensor:
        """`join`: what to do instead of concatenating, to write a method out by hand."""
        kept = [self.first(x)]
        for block in self.down:
            kept.append(block(kept[-1]))
        x = self.mid(kept[-1])
        for block, shortcut in zip(self.up, self.shortcut, strict=True):
            skip = kept.pop()
            joined = torch.cat([x, skip], dim=1) if join is None else join(x, skip)
            x = block(joined) + shortcut(joined)
        return self.out(x)
