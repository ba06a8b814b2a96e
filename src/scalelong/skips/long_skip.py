"""A long skip, the slot of a module call that carries it, and the hooks that scale it there.

The consumer of a skip is the module whose call brings it into the decoder; a `Slot` locates the skip in that call. Hooks are
module-level functions with their data in an attribute of the hooked module, so copies and pickles are independent.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from scalelong.scaling.constant import Scaling, SkipSize

Reach = Literal["full", "partial", "shortcut", "none", "unknown"]
Call = tuple[tuple[Any, ...], dict[str, Any]]
ATTACHMENT = "_scalelong_attachment"  # attribute of a hooked module


def same_type(given: Any, items: Iterable[Any]) -> Any:
    """A tuple, list or named tuple like the given one, of these items."""
    return getattr(type(given), "_make", type(given))(items)


@dataclass(frozen=True)
class Argument:
    """The skip is a whole argument, by position or keyword; None (no skip in this call) stays None."""

    position: int
    keyword: str

    def get(self, call: Call) -> Any:
        args, kwargs = call
        if self.keyword in kwargs:
            return kwargs[self.keyword]
        return args[self.position] if self.position < len(args) else None

    def put(self, call: Call, value: Any) -> Call:
        args, kwargs = call
        if self.keyword in kwargs:
            return args, {**kwargs, self.keyword: value}
        return (*args[: self.position], value, *args[self.position + 1 :]), kwargs

    def scale(self, call: Call, index: int, scaling: Scaling) -> Call:
        skip = self.get(call)
        return call if skip is None else self.put(call, scaling(index, skip))


@dataclass(frozen=True)
class Item:
    """The skip is an item of an argument that is a tuple or list; items count from the end, -1 is used first."""

    argument: Argument
    item: int

    def scale(self, call: Call, index: int, scaling: Scaling) -> Call:
        given = self.argument.get(call)
        if given is None or given[self.item] is None:
            return call
        items = list(given)
        items[self.item] = scaling(index, items[self.item])
        return self.argument.put(call, same_type(given, items))


@dataclass(frozen=True)
class ChannelSlice:
    """The skip is `channels` channels of a concatenated argument, from `start` on (from the end if negative)."""

    argument: Argument
    start: int
    channels: int
    dim: int = 1
    total: int | None = None  # width of the concatenation in the traced call; other widths raise

    def scale(self, call: Call, index: int, scaling: Scaling) -> Call:
        joined: Tensor = self.argument.get(call)
        width = joined.shape[self.dim]
        if self.total is not None and width != self.total:
            given = f"its consumer received {width} channels, not the {self.total} that contain the skip"
            raise ValueError(f"skip {index}: {given}; use an example that takes the same path through the model")
        start = self.start % width
        return self.argument.put(call, _scale_slice(joined, start, self.channels, self.dim, index, scaling))


@dataclass(frozen=True)
class Fused:
    """The consumer accepts `coefficient=` next to the skip and applies it itself (this package's backbones)."""

    argument: Argument
    main: Argument | None = None  # what the skip is concatenated with, if it is

    def scale(self, call: Call, index: int, scaling: Scaling) -> Call:
        if self.main is not None and scaling.changes_main:
            call = self.main.put(call, scaling.scale_main(index, self.main.get(call)))
        if not scaling.fusible:
            return self.argument.scale(call, index, scaling)
        args, kwargs = call
        return args, {**kwargs, "coefficient": scaling.coefficient(index, self.argument.get(call))}


@dataclass(frozen=True)
class OutputChannels:
    """The skip's channels in the output of a normalization, which would cancel a kappa in front of it."""

    start: int
    channels: int

    def scale_output(self, output: Tensor, index: int, scaling: Scaling) -> Tensor:
        return _scale_slice(output, self.start, self.channels, 1, index, scaling)


def _scale_slice(joined: Tensor, start: int, size: int, dim: int, index: int, scaling: Scaling) -> Tensor:
    before, skip, after = torch.split(joined, [start, size, joined.shape[dim] - start - size], dim=dim)
    parts = [scaling.scale_main(index, before), scaling(index, skip), scaling.scale_main(index, after)]
    return torch.cat([part for part in parts if part.shape[dim]], dim=dim)


Slot = Argument | Item | ChannelSlice | Fused  # location of a skip in the call of its consumer
HookPoints = tuple[tuple[str, Slot | OutputChannels], ...]  # names of modules to hook, with the skip's slot


@dataclass(frozen=True)
class Attachment:
    """Hook data of a module: the scaling of the whole model and the skips that pass through this module."""

    scaling: Scaling
    inputs: tuple[tuple[int, Slot], ...] = ()
    outputs: tuple[tuple[int, OutputChannels], ...] = ()
    block: int | None = None  # the residual block that this module is a branch of


def scale_inputs(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
    """Forward-pre-hook of a consumer."""
    attachment: Attachment = getattr(module, ATTACHMENT)
    call = (args, kwargs)
    for index, slot in attachment.inputs:
        call = slot.scale(call, index, attachment.scaling)
    return call


def scale_output(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:  # noqa: ARG001
    """Forward hook of a normalization (placement="after_norm") or of a residual branch."""
    attachment: Attachment = getattr(module, ATTACHMENT)
    for index, channels in attachment.outputs:
        output = channels.scale_output(output, index, attachment.scaling)
    return output if attachment.block is None else attachment.scaling.scale_branch(attachment.block, output)


@dataclass(frozen=True)
class LongSkip:
    """One long skip connection of a model, as found by `find_skips`.

    >>> import scalelong, diffusers
    >>> skip = scalelong.find_skips(diffusers.UNet1DModel())[0]
    >>> skip.index, skip.made_in, skip.size.channels, skip.reach
    (1, 'down_blocks.0.resnets.2', 32, 'full')
    """

    index: int  # 1 = outermost
    made_in: str  # the module whose output is the skip
    used_in: str  # the module where it joins the decoder
    size: SkipSize
    reach: Reach  # which layers see kappa, see docs/families.md
    consumer: str  # the module that is hooked
    slot: Slot
    also: HookPoints = ()  # further modules that receive the same concatenation
    after_norm: HookPoints = ()  # placement="after_norm": hook these instead
    given: bool = False  # named by the user rather than found

    @property
    def hook_points(self) -> HookPoints:
        return self.after_norm or ((self.consumer, self.slot), *self.also)


Named = LongSkip | tuple[str, str]  # a skip, or the modules it is made and used in


def as_nests(skips: Sequence[Named | Sequence[Named]]) -> list[list[tuple[str, str]]]:
    """Convert user-given skips to pairs of names per U; a flat list is one U."""
    flat = all(isinstance(item, LongSkip) or (len(item) == 2 and isinstance(item[0], str)) for item in skips)
    nests: list[list[Any]] = [list(skips)] if flat else [list(item) for item in skips]  # type: ignore[arg-type]
    if flat and all(isinstance(item, LongSkip) for item in skips):  # from find_skips: grouped by U
        numbers = dict.fromkeys(item.size.nest for item in nests[0])
        nests = [[item for item in nests[0] if item.size.nest == number] for number in numbers]
    named = [[(i.made_in, i.used_in) if isinstance(i, LongSkip) else tuple(i) for i in nest] for nest in nests]
    if not named or not all(named) or not all(len(pair) == 2 for nest in named for pair in nest):
        raise ValueError(
            f"skips: must be skips or pairs (made_in, used_in), outermost first, or lists of them, got {skips!r}"
        )
    return named


def _shown(kappa: float) -> str:
    return "gate" if math.isnan(kappa) else f"{kappa:.4g}"  # nan: learned, and no forward yet


def skip_table(skips: Sequence[LongSkip], coefficients: Sequence[float] | None = None) -> str:
    """The skips as a text table, outermost first, with their coefficients if given.

    >>> import scalelong, diffusers
    >>> print(skip_table(scalelong.find_skips(diffusers.UNet1DModel())[:1]))
    i  made in                  used in                channels  tokens  reach
    --------------------------------------------------------------------------
    1  down_blocks.0.resnets.2  up_blocks.2.resnets.0  32        -       full
    """
    rows = [["i", "made in", "used in", "channels", "tokens", "reach"] + (["kappa"] if coefficients else [])]
    several = len({skip.size.nest for skip in skips}) > 1
    first = {skip.size.nest: skip.index for skip in reversed(skips)}
    for skip in skips:
        size = skip.size
        number = f"{size.nest}.{skip.index - first[size.nest] + 1}" if several else str(skip.index)
        row = [number, skip.made_in, skip.used_in, str(size.channels), str(size.tokens or "-"), skip.reach]
        rows.append(row + ([_shown(coefficients[skip.index - 1])] if coefficients else []))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join([lines[0], "-" * max(map(len, lines)), *lines[1:]])
