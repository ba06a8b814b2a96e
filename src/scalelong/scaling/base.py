"""How one long skip connection is scaled: the idea of ScaleLong (NeurIPS 2023), and nothing else.

A U-shaped network has N long skips. Skip i = 1 is the OUTERMOST (first encoder block to last decoder block), i = N the
innermost. Before the decoder uses skip x_i it is multiplied by kappa_i:

    none         kappa_i = 1                             the usual network
    universal    kappa_i = kappa                         one number for all skips
    rsqrt2       kappa_i = 1 / sqrt(2)                   the number of earlier work
    cs           kappa_i = kappa ** (i - 1)              Eq. 8, constant scaling
    cs_reversed  kappa_i = kappa ** (N - i + 1)          the wrong direction, a control (Table 4)
    ls           kappa_i = sigmoid(zeta(GAP(x_i)))       Eq. 9 and 10, learnable scaling

A `Scaling` gives the coefficient of a skip apart from applying it, so that a consumer can fuse the two. What others do to
skips stands in `peers`, the names and options of all methods in `methods`.

Shapes: B batch, T tokens, C channels, N the gated size (T or C). A skip is (B, T, C), (T, B, C) or (B, C, *spatial).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from scalelong.scaling.gates import InstanceEnhance, LearnableKappa, SqueezeExcite
from scalelong.scaling.torch_state import in_transform

Coefficient = float | Tensor
Axis = Literal["tokens", "channels"]


@dataclass(frozen=True)
class SkipSize:
    """What a gate must know of one skip: its sizes and how it is laid out."""

    channels: int
    tokens: int | None = None  # known and fixed only for transformers
    channels_last: bool = False  # (B, T, C) rather than (B, C, *spatial)
    batch_dim: int = 0  # 1: (T, B, C)
    main: int | None = None  # channels of what the skip is joined with; known where a method asks for it
    stage: int | None = None  # 1 = the lowest resolution of the decoder; known where a method asks for it


@dataclass(frozen=True)
class Description:
    """A method and its options."""

    method: str
    options: Mapping[str, Any]

    def to_json(self, num_skips: int) -> dict[str, Any]:
        """What is stored beside weights."""
        return {"method": self.method, "options": dict(self.options), "num_skips": num_skips}

    def __str__(self) -> str:
        shown = ", ".join(
            f"{k}={v!r}" for k, v in self.options.items() if v is not None and (k != "allow_amplify" or v)
        )
        return f"{self.method}({shown})" if shown else self.method


# ----------------------------------------------------------------------------------------------- constant coefficients


def universal_coefficients(num_skips: int, kappa: float) -> list[float]:
    """kappa_i = kappa for every skip."""
    return [kappa] * num_skips


def constant_coefficients(num_skips: int, kappa: float) -> list[float]:
    """CS, Eq. 8: kappa_i = kappa ** (i - 1); the outermost skip (i = 1) keeps 1."""
    return [kappa ** (i - 1) for i in range(1, num_skips + 1)]


def reversed_coefficients(num_skips: int, kappa: float) -> list[float]:
    """The control of Table 4: kappa_i = kappa ** (N - i + 1); the outermost skip is scaled the most."""
    return [kappa ** (num_skips - i + 1) for i in range(1, num_skips + 1)]


# ------------------------------------------------------------------------------------------------------------- scalings


class Scaling(nn.Module):
    """The coefficients of all long skips of one model; index i counts from 1 at the outermost skip."""

    num_skips: int
    config: Description
    fusible = True  # `coefficient` says all that is done to a skip
    changes_main = False  # `main` does something

    def coefficient(self, index: int, skip: Tensor) -> Coefficient:
        """kappa_i: a number, or a tensor that broadcasts against the skip, (B, T, 1), (B, 1, C) or (B, C, 1, ...)."""
        raise NotImplementedError

    def forward(self, index: int, skip: Tensor) -> Tensor:
        """kappa_i * x_i."""
        coefficient = self.coefficient(index, skip)
        return skip if isinstance(coefficient, float) and coefficient == 1.0 else skip * coefficient

    def main(self, index: int, main: Tensor) -> Tensor:  # noqa: ARG002
        """What skip i is joined with, as it goes into the join."""
        return main

    def branch(self, block: int, output: Tensor) -> Tensor:  # noqa: ARG002
        """What a residual branch of a block adds."""
        return output

    def _note(self, statistic: str, index: int, value: Tensor) -> None:
        """Keep what was seen at skip i in a buffer, unless a transform of torch.func looks at a call without effects."""
        if in_transform():
            return
        if not torch.compiler.is_compiling():
            kept = getattr(self, statistic)
            if kept.is_inference() and not torch.is_inference_mode_enabled():
                setattr(self, statistic, kept.clone())  # a copy made in inference mode
            if kept.is_meta and not value.is_meta:
                setattr(self, statistic, value.new_full(kept.shape, math.nan))  # made on meta, its weights assigned
        getattr(self, statistic)[index - 1] = value.detach()

    def current(self) -> list[float]:
        """kappa_i now: the constants, or the mean of what the gates gave on the last forward (nan before the first)."""
        raise NotImplementedError


class ConstantScaling(Scaling):
    """none, universal, rsqrt2, cs, cs_reversed: one fixed number per skip.

    The numbers also stand in the state dict, so that weights trained with them are not used without them unnoticed.
    """

    kappa: Tensor

    def __init__(self, coefficients: Sequence[float]) -> None:
        super().__init__()
        self.num_skips = len(coefficients)
        self.values = tuple(float(c) for c in coefficients)
        self.register_buffer("kappa", torch.tensor(self.values, dtype=torch.float32))

    def coefficient(self, index: int, skip: Tensor) -> Coefficient:  # noqa: ARG002
        return self.values[index - 1]

    def current(self) -> list[float]:
        return list(self.values)


class LearnedScaling(Scaling):
    """LS: kappa_i = gate_i(GAP(x_i)). Gates are shared by skips of equal size, or one stands at each skip.

    axis="tokens" averages each token over its channels and gates tokens, as the paper does on transformers; it is tied
    to one number of tokens. axis="channels" averages each channel over all positions and serves any resolution.
    """

    last_mean: Tensor

    def __init__(
        self, sizes: Sequence[SkipSize], axis: Axis, gates: Sequence[nn.Module], gate_of: Sequence[int]
    ) -> None:
        super().__init__()
        self.num_skips = len(sizes)
        self.sizes = tuple(sizes)
        self.axis = axis
        self.gates = nn.ModuleList(gates)
        self.gate_of = tuple(gate_of)
        self.register_buffer("last_mean", torch.full((len(sizes),), math.nan), persistent=False)

    def coefficient(self, index: int, skip: Tensor) -> Coefficient:
        self._check_tokens(index, skip)
        size = self.sizes[index - 1]
        batch = size.batch_dim
        channel_dim = skip.ndim - 1 if size.channels_last else 1
        kept = 1 - batch if self.axis == "tokens" else channel_dim
        averaged = [d for d in range(skip.ndim) if d not in (batch, kept)]
        pooled = skip.mean(dim=averaged) if averaged else skip  # GAP: (B, N), or (N, B)
        turned = kept < batch
        gated: Tensor = self.gates[self.gate_of[index - 1]](pooled.t() if turned else pooled).to(skip.dtype)
        self._note("last_mean", index, gated.mean())
        shape = [skip.shape[d] if d in (batch, kept) else 1 for d in range(skip.ndim)]
        return (gated.t() if turned else gated).reshape(shape)

    def _check_tokens(self, index: int, skip: Tensor) -> None:
        size = self.sizes[index - 1]
        found = skip.shape[1 - size.batch_dim]
        if self.axis == "tokens" and found != size.tokens:
            raise ValueError(
                f"scaling.axis: the gates of 'ls' were made for {size.tokens} tokens, skip {index} has {found}; "
                "pass axis='channels' to serve several resolutions"
            )

    def current(self) -> list[float]:
        return numbers(self.last_mean)


def numbers(values: Tensor) -> list[float]:
    """The values as numbers, nan where the model has none."""
    return [math.nan] * len(values) if values.is_meta else [float(value) for value in values]


def learned_scaling(
    sizes: Sequence[SkipSize],
    shared: bool,
    reduction: int,
    module: str,
    activation: str,
    axis: str,
    start: float | None = None,
) -> LearnedScaling:
    """LS with the gates that the options name; `start` is the value the gates open at (None: 1/2, or 1 for learnable)."""
    one_each = list(range(len(sizes)))
    if module == "learnable":  # serves any number of tokens: it looks at none
        return LearnedScaling(sizes, "channels", [LearnableKappa(start) for _ in sizes], one_each)
    chosen = _choose_axis(sizes, axis)
    gated = [_gated_size(size, chosen) for size in sizes]
    if module == "ie" and shared:
        distinct = sorted(set(gated))
        gates = [InstanceEnhance(size, start) for size in distinct]
        return LearnedScaling(sizes, chosen, gates, [distinct.index(size) for size in gated])
    if module == "ie":
        return LearnedScaling(sizes, chosen, [InstanceEnhance(size, start) for size in gated], one_each)
    if shared:
        return LearnedScaling(sizes, chosen, [SqueezeExcite(gated, reduction, activation, start)], [0] * len(sizes))
    each = [SqueezeExcite([size], reduction, activation, start) for size in gated]
    return LearnedScaling(sizes, chosen, each, one_each)


def _choose_axis(sizes: Sequence[SkipSize], axis: str) -> Axis:
    """The paper gates tokens on transformers and channels on convolutional networks."""
    if axis == "channels" or (axis == "auto" and not all(size.channels_last for size in sizes)):
        return "channels"
    return "tokens"


def _gated_size(size: SkipSize, axis: Axis) -> int:
    if axis == "channels":
        return size.channels
    if not size.channels_last:
        raise ValueError(
            "scaling.axis: 'tokens' needs a transformer; this model's skips are images, use axis='channels'"
        )
    if size.tokens is None:
        raise ValueError("scaling.axis: the number of tokens of this model is not fixed; use axis='channels'")
    return size.tokens
