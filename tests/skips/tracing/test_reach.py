"""How far kappa reaches, measured on blocks whose answer is known."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import scalelong
from scalelong.skips.tracing.verify import measure_reach
from tests.families import FAMILIES, Family, build
from tests.standins import image, randn


class Decoder(nn.Module):
    """One way to use [hidden, skip], 8 channels each."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        groups = {"straddling": 1}.get(way, 4)
        self.norm, self.conv, self.short = nn.GroupNorm(groups, 16), nn.Conv2d(16, 8, 3, padding=1), nn.Conv2d(16, 8, 1)

    def forward(self, x: Tensor, skip: Tensor) -> Tensor:
        joined = torch.cat([x, skip], dim=1)
        if self.way == "linear":
            return F.silu(self.conv(joined))
        if self.way == "activation":
            return self.conv(F.silu(joined))
        branch = self.conv(F.silu(self.norm(joined)))
        return branch if self.way == "norm only" else branch + self.short(joined)


class Net(nn.Module):
    def __init__(self, way: str) -> None:
        super().__init__()
        self.first, self.out = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 3, 1)
        self.down = nn.ModuleList(nn.Conv2d(8, 8, 3, padding=1) for _ in range(2))
        self.mid = nn.Conv2d(8, 8, 3, padding=1)
        self.up = nn.ModuleList(Decoder(way) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x, kept = self.first(x), []
        for block in self.down:
            x = F.silu(block(x))
            kept.append(10 * x)  # far above the norm's eps
        x = self.mid(x)
        for block in self.up:
            x = block(x, kept.pop())
        return self.out(x)


@pytest.mark.parametrize(
    ("way", "reach"),
    [
        ("linear", "full"),
        ("aligned", "shortcut"),
        ("straddling", "partial"),
        ("norm only", "none"),
        ("activation", "partial"),
    ],
)
def test_the_reach_of_a_hand_written_block(way: str, reach: str) -> None:
    torch.manual_seed(0)
    model = Net(way)
    skips = scalelong.find_skips(model, randn(2, 3, 8, 8))
    assert [skip.reach for skip in skips] == [reach, reach]


def test_kappa_without_reach_changes_nothing_and_with_it_does() -> None:
    """What "none" and "shortcut" say is what the output does."""
    changes = {}
    for way in ("norm only", "aligned"):
        torch.manual_seed(0)
        model, x = Net(way), randn(2, 3, 8, 8)
        before = model(x)
        scalelong.apply(model, "universal", kappa=0.5, example=x)
        changes[way] = float((model(x) - before).norm().detach() / before.norm().detach())
    assert changes["norm only"] < 1e-3 < 1e-2 < changes["aligned"]


QUICK = ("UNet2DModel", "UNet1DModel", "HunyuanDiT2DModel", "UniDiffuser UTransformer2DModel", "StableCascadeUNet", "UViT",
         "MatrixUNet", "MONAI DiffusionModelUNet")  # fmt: skip


@pytest.mark.parametrize(
    "family",
    [pytest.param(f, id=f.name, marks=[] if f.name in QUICK else pytest.mark.slow) for f in FAMILIES],
)
def test_the_rules_of_known_families_say_what_is_measured(family: Family) -> None:
    model = build(family)
    known = scalelong.find_skips(model)
    assert measure_reach(model, known, ((), family.inputs())) == [skip.reach for skip in known]


def test_without_values_the_rule_is_used() -> None:
    with torch.device("meta"):
        model = FAMILIES[0].build()
    known = scalelong.find_skips(model)
    assert scalelong.find_skips(model, example=FAMILIES[0].inputs()) == known


class Sum(nn.Module):
    def forward(self, x: Tensor, skip: Tensor) -> Tensor:
        return x + skip


class EndsInJoin(nn.Module):
    """The outermost join is the output: no layer comes behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.down, self.mid, self.up = (nn.Conv2d(n, 8, 3, padding=1) for n in (3, 8, 8, 8))
        self.joins = nn.ModuleList([Sum(), Sum()])

    def forward(self, x: Tensor) -> Tensor:
        outer = self.first(x)
        inner = self.down(F.silu(outer))
        y = self.joins[0](self.mid(F.silu(inner)), inner)
        return self.joins[1](self.up(F.silu(y)), outer)


def test_kappa_of_a_join_at_the_end_reaches_the_output() -> None:
    handle = scalelong.apply(EndsInJoin(), "cs", example=image())
    assert handle.skips[0].used_in == "joins.1"
    assert handle.skips[0].reach == "full"
