"""Networks some of whose long skips are of another sort than most: none may be left unscaled without a word."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
import torch.nn.functional as F
from diffusers import UNet1DModel
from torch import Tensor, nn

import scalelong
from tests.standins import image
from tests.standins.parallel import Branch, Branches, Checkpointed, InputSkip, Join, SideBySide, TwinDecoders


def conv(inputs: int, outputs: int) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, 3, padding=1)


class Add(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = conv(8, 8)

    def forward(self, x: Tensor, skip: Tensor) -> Tensor:
        return F.silu(self.conv(x + skip))


class Cat(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = conv(16, 8)

    def forward(self, x: Tensor, skip: Tensor) -> Tensor:
        return F.silu(self.conv(torch.cat([x, skip], dim=1)))


class Decoder(nn.Module):
    """A U whose decoder blocks are of the given classes, innermost first; with `residual`, its middle is x + f(x)."""

    def __init__(self, blocks: Sequence[type[nn.Module]], residual: bool = False) -> None:
        super().__init__()
        self.first, self.mid, self.out, self.residual = (
            conv(3, 8),
            nn.ModuleList([conv(8, 8), conv(8, 8)]),
            conv(8, 3),
            residual,
        )
        self.down, self.up = nn.ModuleList(conv(8, 8) for _ in blocks), nn.ModuleList(block() for block in blocks)

    def forward(self, x: Tensor) -> Tensor:
        x, kept = self.first(x), []
        for layer in self.down:
            x = F.silu(layer(x))
            kept.append(x)
        middle = self.mid[1](F.silu(self.mid[0](x)))
        x = x + middle if self.residual else middle
        for block in self.up:
            x = block(x, kept.pop())
        return self.out(x)


class NoMiddle(Decoder):
    """A U whose decoder begins with the output of its encoder, as MDTv2's: the innermost join has it twice."""

    def forward(self, x: Tensor) -> Tensor:
        x, kept = self.first(x), []
        for layer in self.down:
            x = F.silu(layer(x))
            kept.append(x)
        for block in self.up:
            x = block(x, kept.pop())
        return self.out(x)


class Level(nn.Module):
    """A UNet level with the next one inside it."""

    def __init__(self, inner: nn.Module, add: bool) -> None:
        super().__init__()
        self.down, self.inner, self.up, self.add = conv(8, 8), inner, conv(8 if add else 16, 8), add

    def forward(self, x: Tensor) -> Tensor:
        kept = self.down(x).tanh()
        return self.up(kept + self.inner(kept) if self.add else torch.cat([kept, self.inner(kept)], dim=1)).tanh()


class OtherLevel(Level):
    pass


class Levels(nn.Module):
    """Levels of the classes that the letters name, outermost first: L a Level, O an OtherLevel."""

    def __init__(self, letters: str, add: bool) -> None:
        super().__init__()
        levels: nn.Module = conv(8, 8)
        for letter in reversed(letters):
            levels = (Level if letter == "L" else OtherLevel)(levels, add)
        self.first, self.levels = conv(3, 8), levels

    def forward(self, x: Tensor) -> Tensor:
        return self.levels(self.first(x))


@pytest.mark.parametrize(
    ("blocks", "place"),
    [
        ((Cat, Cat, Cat, Add, Add), r"3 of its skips are clear, but up\.4 joins another \(by add\)"),
        ((Add, Add, Cat), r"2 of its skips are clear, but up\.2 joins another \(by cat\)"),
        ((Add, Cat, Cat), r"2 of its skips are clear, but up\.0 joins another \(by add\)"),
        ((Cat, Add, Cat, Add, Cat), r"3 of its skips are clear, but up\.3 joins another \(by add\)"),
    ],
)
def test_a_decoder_that_joins_in_two_ways_is_refused(blocks: Sequence[type[nn.Module]], place: str) -> None:
    with pytest.raises(scalelong.skips.NoLongSkipsError, match=f"{place}.*not all skips would be scaled"):
        scalelong.find_skips(Decoder(blocks), example=image())


def test_a_skip_around_nothing_is_refused_and_the_others_can_be_named() -> None:
    model = NoMiddle((Cat, Cat, Cat))
    with pytest.raises(scalelong.skips.NoLongSkipsError, match=r"up\.0 joins its input with itself.*skips=\.\.\.\)"):
        scalelong.find_skips(model, example=image())
    handle = scalelong.apply(model, "cs", kappa=0.7, example=image(), skips=[("down.0", "up.2"), ("down.1", "up.1")])
    assert handle.coefficients() == [1, 0.7]


class Halves(nn.Module):
    """An encoder and a decoder with the middle; the encoder returns the output of its last block."""

    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(nn.Sequential(conv(width, 8), nn.SiLU()) for width in (3, 8, 8))

        def forward(self, x: Tensor, kept: dict[int, Tensor]) -> Tensor:
            for level, block in enumerate(self.blocks):
                kept[level] = x = block(x)
            return x

    class Decoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mid, self.blocks = conv(8, 8), nn.ModuleList(conv(16, 8) for _ in range(3))

        def forward(self, x: Tensor, kept: dict[int, Tensor]) -> Tensor:
            x = self.mid(x)
            for level in (2, 1, 0):
                x = self.blocks[level](torch.cat([x, kept[level]], dim=1)).tanh()
            return x

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = self.Encoder(), self.Decoder()

    def forward(self, x: Tensor) -> Tensor:
        kept: dict[int, Tensor] = {}
        return self.decoder(self.encoder(x, kept), kept)


@pytest.mark.parametrize("last", ["encoder", "encoder.blocks.2", "encoder.blocks.2.1", "encoder.blocks.2.0"])
def test_every_module_that_returns_a_skip_names_it(last: str) -> None:
    model, outer = Halves(), [(f"encoder.blocks.{level}", f"decoder.blocks.{level}") for level in (0, 1)]
    handle = scalelong.apply(model, "cs", kappa=0.5, example=image(), skips=[*outer, (last, "decoder.blocks.2")])
    assert [skip.consumer for skip in handle.skips] == [f"decoder.blocks.{level}" for level in range(3)]


def test_blocks_whose_classes_are_made_one_by_one_are_of_one_sort() -> None:
    """As a-unet's: with classes taken for different ones, the input was left unscaled without a word."""

    def own_class(block: Join) -> None:
        block.__class__ = type("Join", (Join,), {"__qualname__": "make.<locals>.Join"})

    model = InputSkip()
    for block in (*model.net.up, model.last):
        own_class(block)
    used = [skip.used_in for skip in scalelong.find_skips(model, example=image())]
    assert used == ["last.conv", "net.up.1.conv", "net.up.0.conv"]


@pytest.mark.parametrize(
    ("letters", "add", "place"),
    [
        ("LLO", False, r"levels\.inner\.inner"),
        ("OLL", False, "levels"),
        ("LOL", False, r"levels\.inner"),
        ("LLLOO", False, r"levels\.inner\.inner\.inner"),
        ("LLLOO", True, r"levels\.inner\.inner\.inner"),
        ("OLL", True, "levels"),
        ("LOL", True, r"levels\.inner"),
    ],
)
def test_levels_of_two_classes_are_refused(letters: str, add: bool, place: str) -> None:
    with pytest.raises(scalelong.skips.NoLongSkipsError, match=rf"but {place} joins another \(by"):
        scalelong.find_skips(Levels(letters, add), example=image())


def test_a_second_u_of_another_class_is_numbered_for_itself() -> None:
    class Smaller(Decoder):
        pass

    model = nn.Module()
    model.first, model.second = Decoder((Cat, Cat, Cat)), Smaller((Add, Add))
    model.forward = lambda x: model.second(model.first(x))
    skips = scalelong.find_skips(model, example=image())
    assert [(skip.size.nest, skip.used_in.split(".")[0]) for skip in skips] == [(1, "first")] * 3 + [(2, "second")] * 2


@pytest.mark.parametrize(
    ("build", "nests"),
    [
        (Branches, (["time.up.2", "time.up.1", "time.up.0"], ["freq.up.2", "freq.up.1", "freq.up.0"])),
        (SideBySide, (["time.up.2", "time.up.1", "time.up.0"], ["freq.up.1", "freq.up.0"])),
        (TwinDecoders, (["net.up.2", "net.up.1", "net.up.0"], ["twin.up.2", "twin.up.1", "twin.up.0"])),
        (InputSkip, (["last", "net.up.1", "net.up.0"],)),
    ],
)
def test_skips_are_numbered_per_u(build: type[nn.Module], nests: Sequence[list[str]]) -> None:
    handle = scalelong.apply(build(), "cs", kappa=0.5, example=image())
    found = [[skip for skip in handle.skips if skip.size.nest == number] for number in range(1, len(nests) + 1)]
    assert [[skip.consumer for skip in nest] for nest in found] == list(nests)
    assert [skip.made_in == "input" for skip in handle.skips] == [
        build is InputSkip,
        *[False] * (len(handle.skips) - 1),
    ]
    assert handle.coefficients() == [0.5**at for nest in found for at in range(len(nest))]
    assert [line.split()[0] for line in str(handle).splitlines()[-2:]] == (
        ["2", "3"] if len(nests) == 1 else [f"2.{len(nests[1]) - 1}", f"2.{len(nests[1])}"]
    )


def test_skips_can_be_given_by_u_or_by_name(tmp_path) -> None:
    model = SideBySide()
    found = scalelong.find_skips(model, example=image())
    assert scalelong.apply(model, "cs", kappa=0.5, example=image(), skips=found).coefficients() == [
        1,
        0.5,
        0.25,
        1,
        0.5,
    ]
    scalelong.remove(model)
    handle = scalelong.apply(model, "cs", kappa=0.5, example=image(), skips=[found[1:3], found[3:4]])
    assert handle.coefficients() == [1, 0.5, 1]
    scalelong.remove(model)
    named = [("freq.down.0", "freq.up.1"), ("freq.down.1", "freq.up.0.conv")]
    handle = scalelong.apply(model, "cs", kappa=0.5, example=image(), skips=named)
    assert [skip.consumer for skip in handle.skips] == ["freq.up.1", "freq.up.0"]
    scalelong.save(model, tmp_path)
    other = SideBySide()
    scalelong.load(other, tmp_path, example=image())
    torch.testing.assert_close(other(*image()), model(*image()), rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError, match="scaled already"):
        scalelong.apply(other, "cs", example=image())


@pytest.mark.parametrize(
    ("skips", "message"),
    [
        (
            [("freq.down.0", "freq.up.2")],
            r"no skip is made in 'freq.down.0' and used in 'freq.up.2'; did you mean 'freq",
        ),
        ([], "must be skips or pairs"),
        ([("freq.down.0",)], "must be skips or pairs"),
    ],
)
def test_wrong_skips_are_refused(skips: list[tuple[str, ...]], message: str) -> None:
    model = SideBySide()
    with pytest.raises(ValueError, match=f"skips: .*{message}"):
        scalelong.apply(model, "cs", example=image(), skips=skips)
    assert not scalelong.skips.is_scaled(model)


def test_skips_of_a_known_class_can_be_given_without_an_example() -> None:
    model = UNet1DModel()
    assert scalelong.apply(model, "cs", kappa=0.5, skips=scalelong.find_skips(model)[1:]).coefficients() == [1, 0.5]
    with pytest.raises(ValueError, match=r"the model has down_blocks\.0\.resnets\.2 -> "):
        scalelong.apply(UNet1DModel(), "cs", skips=[("down_blocks.0", "up_blocks.2")])


def test_a_network_that_always_recomputes_activations_is_scaled() -> None:
    model, plain = Checkpointed(), Checkpointed()
    plain.load_state_dict(model.state_dict())
    scalelong.apply(model, "cs", kappa=0.5, example=image())
    assert all(check.gradient_error is None for check in scalelong.verify(model, example=image()).checks)
    assert all(check.output_error < 1e-6 for check in scalelong.verify(model, example=image()).checks)
    x = image()[0]
    model(x).square().sum().backward()
    recomputed = [parameter.grad for parameter in model.down.parameters()]
    model.zero_grad()
    kept = model.encode(x)
    Branch.decode(model, model.mid(kept[-1]), kept).square().sum().backward()
    for found, parameter in zip(recomputed, model.down.parameters(), strict=True):
        torch.testing.assert_close(found, parameter.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("residual", [False, True])
def test_a_residual_of_the_middle_is_no_skip(residual: bool) -> None:
    assert [skip.used_in for skip in scalelong.find_skips(Decoder((Cat, Cat, Cat), residual), example=image())] == [
        "up.2.conv",
        "up.1.conv",
        "up.0.conv",
    ]


def test_levels_of_one_class_are_found() -> None:
    assert len(scalelong.find_skips(Levels("LLL", add=False), example=image())) == 3


class TwoBranches(nn.Module):
    """Two networks side by side; their outputs are concatenated."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.out = conv(3, 8), conv(16, 3)
        self.short = nn.Sequential(*(conv(8, 8) for _ in range(4)))
        self.long = nn.Sequential(*(conv(8, 8) for _ in range(8)))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return self.out(torch.cat([self.long(x), self.short(x)], dim=1))


def test_a_branch_with_layers_of_its_own_is_no_skip() -> None:
    with pytest.raises(scalelong.skips.NoLongSkipsError, match="no long skip connections"):
        scalelong.find_skips(TwoBranches(), example=image())
