"""What others do to skips, and what the paper compares with, in the interface of `Scaling`.

    mp_cat      both operands of the concatenation are rescaled, so that its magnitude is kept     EDM2 (2023), Eq. 103
    layernorm   the skip is normalised over its channels
    freeu       low frequencies of the skip are damped, half of the main path amplified             FreeU (2023), inference
    rezero      a block adds alpha * f(x), alpha learnt from 0 on; skips are left alone             Table 3 of the paper
    stable_tau  a block adds tau * f(x); skips are left alone                                       Table 3 of the paper

Shapes: B batch, T tokens, C channels, H x W pixels. A skip is (B, T, C) or (B, C, *spatial).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from scalelong.scaling.base import Coefficient, Scaling, SkipSize, numbers


def magnitude_preserving(main: int, skip: int, t: float) -> tuple[float, float]:
    """Factors of main path and skip: inputs of unit magnitude are joined to unit magnitude, the part t of it skip."""
    whole = math.sqrt((main + skip) / ((1 - t) ** 2 + t**2))
    return whole * (1 - t) / math.sqrt(main), whole * t / math.sqrt(skip)


class MagnitudePreserving(Scaling):
    """mp_cat: fixed factors for both operands of every join, from their widths and the balance t."""

    changes_main = True
    factors: Tensor

    def __init__(self, sizes: Sequence[SkipSize], t: float) -> None:
        super().__init__()
        self.num_skips = len(sizes)
        self.values = tuple(magnitude_preserving(_main(size), size.channels, t) for size in sizes)
        self.register_buffer("factors", torch.tensor(self.values, dtype=torch.float32))  # (skips, 2)

    def coefficient(self, index: int, skip: Tensor) -> Coefficient:  # noqa: ARG002
        return self.values[index - 1][1]

    def main(self, index: int, main: Tensor) -> Tensor:
        return main * self.values[index - 1][0]

    def current(self) -> list[float]:
        return [skip for _, skip in self.values]


def _main(size: SkipSize) -> int:
    if size.main is None:
        raise ValueError("scaling.method: 'mp_cat' needs to know the width of what each skip is joined with")
    return size.main


class Measured(Scaling):
    """A change of the skip that is no coefficient; what is told of it is by how much the skip's norm changed."""

    fusible = False
    last_ratio: Tensor

    def __init__(self, num_skips: int) -> None:
        super().__init__()
        self.num_skips = num_skips
        self.register_buffer("last_ratio", torch.full((num_skips,), math.nan), persistent=False)

    def changed(self, index: int, skip: Tensor) -> Tensor:
        """What stands in for the skip."""
        raise NotImplementedError

    def forward(self, index: int, skip: Tensor) -> Tensor:
        changed = self.changed(index, skip)
        self._note("last_ratio", index, changed.detach().float().norm() / skip.detach().float().norm())
        return changed

    def coefficient(self, index: int, skip: Tensor) -> Coefficient:  # noqa: ARG002
        raise TypeError(f"scaling.method: {self.config} changes skip {index} by more than a coefficient")

    def current(self) -> list[float]:
        return numbers(self.last_ratio)


class SkipLayerNorm(Measured):
    """layernorm: every position's channels to mean 0 and variance 1, then weights and biases per channel if affine."""

    eps: Tensor

    def __init__(self, sizes: Sequence[SkipSize], affine: bool, eps: float) -> None:
        super().__init__(len(sizes))
        self.sizes, self.value = tuple(sizes), eps
        self.register_buffer("eps", torch.tensor([eps]))
        made = [size.channels for size in sizes] if affine else []
        self.weights = nn.ParameterList(nn.Parameter(torch.ones(channels)) for channels in made)
        self.biases = nn.ParameterList(nn.Parameter(torch.zeros(channels)) for channels in made)

    def changed(self, index: int, skip: Tensor) -> Tensor:
        at = -1 if self.sizes[index - 1].channels_last else 1
        last = skip.movedim(at, -1)
        normed = F.layer_norm(last, last.shape[-1:], eps=self.value).to(skip.dtype)
        if len(self.weights):
            normed = normed * self.weights[index - 1].to(skip.dtype) + self.biases[index - 1].to(skip.dtype)
        return normed.movedim(-1, at)


class FreeU(Measured):
    """freeu: in the decoder's two lowest resolutions, damp what is slow in the skip by s and lift half the main path by b."""

    factors: Tensor

    def __init__(self, sizes: Sequence[SkipSize], s1: float, s2: float, b1: float, b2: float, threshold: int) -> None:
        super().__init__(len(sizes))
        if any(size.channels_last or size.stage is None for size in sizes):
            raise ValueError("scaling.method: 'freeu' filters images; the skips of this model are no (B, C, H, W)")
        self.stages = tuple(size.stage for size in sizes)
        self.skip_factors, self.main_factors, self.threshold = {1: s1, 2: s2}, {1: b1, 2: b2}, threshold
        self.changes_main = b1 != 1 or b2 != 1
        self.register_buffer("factors", torch.tensor([s1, s2, b1, b2, float(threshold)]))

    def changed(self, index: int, skip: Tensor) -> Tensor:
        if self.training:
            raise ValueError(
                "scaling.method: 'freeu' is for sampling from a trained model, this one is in training mode; "
                "call model.eval(), or scalelong.remove(model) to train"
            )
        factor = self.skip_factors.get(self.stages[index - 1] or 0, 1.0)
        return skip if factor == 1 else damp_low_frequencies(skip, factor, self.threshold)

    def main(self, index: int, main: Tensor) -> Tensor:
        factor = self.main_factors.get(self.stages[index - 1] or 0, 1.0)
        if factor == 1:
            return main
        half = main.shape[1] // 2
        return torch.cat([main[:, :half] * factor, main[:, half:]], dim=1)


def damp_low_frequencies(images: Tensor, factor: float, threshold: int) -> Tensor:
    """Multiply the frequencies -threshold .. threshold - 1 of both axes by `factor`, in float32 as the transform needs."""
    kept = images.float()
    rows, columns = (_is_low(size, threshold, images.device) for size in images.shape[-2:])
    mask = torch.where(rows[:, None] & columns[None, :], factor, 1.0)
    damped: Tensor = torch.fft.ifft2(torch.fft.fft2(kept) * mask).real
    return damped.to(images.dtype)


def _is_low(size: int, threshold: int, device: torch.device) -> Tensor:
    frequency: Tensor = torch.fft.fftfreq(size, 1 / size, device=device).round()
    return (frequency >= -threshold) & (frequency < threshold)


class BlockScaling(Scaling):
    """rezero, stable_tau: what each block adds to its input is scaled, one factor per block, in place of the skips."""

    def __init__(self, sizes: Sequence[SkipSize], blocks: int, factor: float, learnt: bool) -> None:
        super().__init__()
        self.num_skips = len(sizes)
        self.value = factor
        factors = torch.full((blocks,), factor)
        if learnt:
            self.alpha: Tensor | None = nn.Parameter(factors)
        else:
            self.alpha = None
            self.register_buffer("tau", factors)

    def coefficient(self, index: int, skip: Tensor) -> Coefficient:  # noqa: ARG002
        return 1.0

    def branch(self, block: int, output: Tensor) -> Tensor:
        return output * (self.value if self.alpha is None else self.alpha[block].to(output.dtype))

    def current(self) -> list[float]:
        return [1.0] * self.num_skips
