"""What a long skip is, and the ways a module can be handed one.

A consumer is the module whose call brings the skip into the decoder. A `Take` says where in that call the skip stands and
gives back the same call with the skip scaled.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from scalelong.scaling.base import Scaling, SkipSize

Reach = Literal["full", "partial", "shortcut", "none", "unknown"]
Call = tuple[tuple[Any, ...], dict[str, Any]]


class Take(Protocol):
    """Where a skip stands in its consumer's call."""

    def scaled(self, call: Call, index: int, scaling: Scaling) -> Call:
        """The call with skip `index` scaled."""
        ...


@dataclass(frozen=True)
class Argument:
    """The skip is one whole argument, by position or by keyword; None (no skip in this call) stays None."""

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

    def scaled(self, call: Call, index: int, scaling: Scaling) -> Call:
        skip = self.get(call)
        return call if skip is None else self.put(call, scaling(index, skip))


@dataclass(frozen=True)
class Item:
    """The skip is one item of an argument that is a tuple or list; items count from the end, -1 is used first."""

    argument: Argument
    item: int

    def scaled(self, call: Call, index: int, scaling: Scaling) -> Call:
        items = self.argument.get(call)
        if items[self.item] is None:
            return call
        position = len(items) + self.item
        replaced = [scaling(index, skip) if at == position else skip for at, skip in enumerate(items)]
        return self.argument.put(call, type(items)(replaced))


@dataclass(frozen=True)
class ChannelSlice:
    """The skip is already concatenated: `channels` of an argument's channels from `start` on (from the end if negative).

    `total` is the width that was concatenated when the skip was found: a call with another one is refused.
    """

    argument: Argument
    start: int
    channels: int
    dim: int = 1
    total: int | None = None

    def scaled(self, call: Call, index: int, scaling: Scaling) -> Call:
        joined: Tensor = self.argument.get(call)
        width = joined.shape[self.dim]
        if self.total is not None and width != self.total:
            raise ValueError(
                f"skip {index}: its consumer was handed {width} channels, not the {self.total} that hold the skip; this "
                "call takes another path through the model than the example did, find the skips with such an example"
            )
        start = self.start % width
        sizes = [start, self.channels, width - start - self.channels]
        before, skip, after = torch.split(joined, sizes, dim=self.dim)
        parts = [scaling.main(index, before), scaling(index, skip), scaling.main(index, after)]
        return self.argument.put(call, torch.cat([part for part in parts if part.shape[self.dim]], dim=self.dim))


@dataclass(frozen=True)
class OutputChannels:
    """The skip's channels in what a module gives: behind a normalisation, which would cancel kappa before it."""

    start: int
    channels: int

    def scaled_output(self, output: Tensor, index: int, scaling: Scaling) -> Tensor:
        sizes = [self.start, self.channels, output.shape[1] - self.start - self.channels]
        before, skip, after = torch.split(output, sizes, dim=1)
        parts = [part for part in (before, scaling(index, skip), after) if part.shape[1]]
        return torch.cat(parts, dim=1)


@dataclass(frozen=True)
class Fused:
    """The consumer takes the coefficient beside the skip and applies it itself (backbones of ours)."""

    argument: Argument
    main: Argument | None = None  # what the skip is concatenated with, where it is

    def scaled(self, call: Call, index: int, scaling: Scaling) -> Call:
        if self.main is not None and scaling.changes_main:
            call = self.main.put(call, scaling.main(index, self.main.get(call)))
        if not scaling.fusible:
            return self.argument.put(call, scaling(index, self.argument.get(call)))
        args, kwargs = call
        return args, {**kwargs, "coefficient": scaling.coefficient(index, self.argument.get(call))}


@dataclass(frozen=True)
class LongSkip:
    """One long skip connection of a model."""

    index: int  # 1 = outermost
    made_in: str  # the module whose output is the skip
    used_in: str  # the module where it joins the decoder
    size: SkipSize
    reach: Reach  # how much of what follows sees kappa, see docs/families.md
    consumer: str  # the module whose call is taken hold of
    take: Take
    also: tuple[tuple[str, Take], ...] = ()  # further modules that are handed the same joined tensor
    after_norm: tuple[tuple[str, Take | OutputChannels], ...] = ()  # placement="after_norm": where kappa acts instead

    @property
    def places(self) -> tuple[tuple[str, Take | OutputChannels], ...]:
        """The modules that are hooked for this skip, and where in their call."""
        return self.after_norm or ((self.consumer, self.take), *self.also)


def skip_table(skips: Sequence[LongSkip], coefficients: Sequence[float] | None = None) -> str:
    """The skips as a text table, outermost first, with their coefficients where given."""
    header = ["i", "made in", "used in", "channels", "tokens", "reach"] + (["kappa"] if coefficients else [])
    rows = [header]
    for skip in skips:
        size = skip.size
        row = [str(skip.index), skip.made_in, skip.used_in, str(size.channels), str(size.tokens or "-"), skip.reach]
        rows.append(row + ([f"{coefficients[skip.index - 1]:.4g}"] if coefficients else []))
    widths = [max(len(row[column]) for row in rows) for column in range(len(header))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join([lines[0], "-" * max(len(line) for line in lines), *lines[1:]])
