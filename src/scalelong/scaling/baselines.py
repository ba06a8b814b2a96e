"""Methods from other papers and the paper's controls.

mp_cat      rescale both operands of the concatenation so that its magnitude is preserved      EDM2 (2023), Eq. 103
layernorm   normalize each skip over its channels
skip_tuning shrink skips linearly from the outermost to the innermost                           Ma et al. 2024, sampling
freeu       damp low frequencies of the skip, amplify half of the main path's channels          FreeU (2023), sampling
rezero      a block adds alpha * f(x), alpha learned from 0; skips are unchanged                Table 3 of the paper
stable_tau  a block adds tau * f(x); skips are unchanged                                        Table 3 of the paper
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from scalelong.scaling.constant import Coefficient, ConstantScaling, Scaling, SkipSize, per_u


def magnitude_preserving(main: int, skip: int, t: float) -> tuple[float, float]:
    """Factors for operands of these widths that preserve unit magnitude, with weight t on the skip."""
    total = math.sqrt((main + skip) / ((1 - t) ** 2 + t**2))
    return total * (1 - t) / math.sqrt(main), total * t / math.sqrt(skip)


class MagnitudePreserving(Scaling):
    """mp_cat: fixed factors for both operands of every concatenation, from their widths and the balance t."""

    changes_main = True

    def __init__(self, sizes: Sequence[SkipSize], t: float = 0.5) -> None:
        super().__init__(len(sizes))
        if any(size.main is None for size in sizes):
            pairs = "'mp_cat' is for skips that are concatenated with one other tensor, which not all of these are"
            raise ValueError(f"scaling.method: {pairs}; choose another method")
        self.values = tuple(magnitude_preserving(size.main or 0, size.channels, t) for size in sizes)
        self.add_constants("factors", self.values)

    def coefficient(self, index: int, skip: Tensor) -> Coefficient:  # noqa: ARG002
        return self.values[index - 1][1]

    def scale_main(self, index: int, main: Tensor) -> Tensor:
        return main * self.values[index - 1][0]

    def current(self) -> list[float]:
        return [skip for _, skip in self.values]


class SkipTuning(ConstantScaling):
    """skip_tuning: fixed coefficients, linear from `outer` (i = 1) to `inner` (i = N); for sampling only."""

    def __init__(self, sizes: Sequence[SkipSize], inner: float = 0.8, outer: float = 1.0) -> None:
        super().__init__(per_u(sizes, lambda num_skips: tuning_coefficients(num_skips, inner, outer)))

    def coefficient(self, index: int, skip: Tensor) -> Coefficient:
        if self.training:
            raise ValueError("scaling.method: 'skip_tuning' is for sampling from a trained model; call model.eval()")
        return super().coefficient(index, skip)


class TunedScaling(Scaling):
    """Skip-Tuning on top of a trained model's own scaling."""

    def __init__(self, base: Scaling, inner: float) -> None:
        super().__init__(base.num_skips)
        self.base, self.values = base, tuning_coefficients(base.num_skips, inner)
        self.config, self.fusible, self.changes_main = base.config, base.fusible, base.changes_main

    def coefficient(self, index: int, skip: Tensor) -> Coefficient:
        return self.base.coefficient(index, skip) * self.values[index - 1]

    def forward(self, index: int, skip: Tensor) -> Tensor:
        scaled: Tensor = self.base(index, skip)
        return scaled * self.values[index - 1]

    def scale_main(self, index: int, main: Tensor) -> Tensor:
        return self.base.scale_main(index, main)

    def scale_branch(self, block: int, output: Tensor) -> Tensor:
        return self.base.scale_branch(block, output)

    def current(self) -> list[float]:
        return [kappa * value for kappa, value in zip(self.base.current(), self.values, strict=True)]


def tuning_coefficients(num_skips: int, inner: float, outer: float = 1.0) -> list[float]:
    """Skip-Tuning (Ma et al. 2024): linear from the outermost skip to the innermost.

    >>> tuning_coefficients(3, inner=0.5)
    [1.0, 0.75, 0.5]
    """
    return [outer + (inner - outer) * i / max(1, num_skips - 1) for i in range(num_skips)]


class _SkipTransform(Scaling):
    """A skip transform other than a coefficient; `current` reports the ratio of norms after and before."""

    fusible = False

    def transform(self, index: int, skip: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self, index: int, skip: Tensor) -> Tensor:
        result = self.transform(index, skip)
        self.record(index, result.detach().float().norm() / skip.detach().float().norm())
        return result

    def coefficient(self, index: int, skip: Tensor) -> Coefficient:  # noqa: ARG002
        raise TypeError(f"scaling.method: {self.config} does more to skip {index} than multiply it by a coefficient")


class SkipLayerNorm(_SkipTransform):
    """layernorm: normalize the channels of every position, then weights and biases per channel if `affine`."""

    def __init__(self, sizes: Sequence[SkipSize], affine: bool = True, eps: float = 1e-6) -> None:
        super().__init__(len(sizes), records=True)
        self.sizes, self.value = tuple(sizes), eps
        self.add_constants("eps", [eps])
        widths = [size.channels for size in sizes] if affine else []
        self.weights = nn.ParameterList(nn.Parameter(torch.ones(width)) for width in widths)
        self.biases = nn.ParameterList(nn.Parameter(torch.zeros(width)) for width in widths)

    def transform(self, index: int, skip: Tensor) -> Tensor:
        channel = -1 if self.sizes[index - 1].channels_last else 1
        last = skip.movedim(channel, -1)
        normed = F.layer_norm(last, last.shape[-1:], eps=self.value).to(skip.dtype)
        if len(self.weights):
            normed = normed * self.weights[index - 1].to(skip.dtype) + self.biases[index - 1].to(skip.dtype)
        return normed.movedim(-1, channel)


class FreeU(_SkipTransform):
    """freeu: at the decoder's two lowest resolutions, damp low frequencies of the skip and amplify half the main path."""

    def __init__(
        self,
        sizes: Sequence[SkipSize],
        s1: float = 0.9,
        s2: float = 0.2,
        b1: float = 1,
        b2: float = 1,
        threshold: int = 1,
    ) -> None:
        super().__init__(len(sizes), records=True)
        if any(size.channels_last or size.stage is None for size in sizes):
            raise ValueError("scaling.method: 'freeu' filters images; the skips of this model are not (B, C, H, W)")
        self.stages = tuple(size.stage for size in sizes)
        self.skip_factors, self.main_factors, self.threshold = {1: s1, 2: s2}, {1: b1, 2: b2}, threshold
        self.changes_main = b1 != 1 or b2 != 1
        self.add_constants("factors", [s1, s2, b1, b2, threshold])

    def transform(self, index: int, skip: Tensor) -> Tensor:
        if self.training:
            raise ValueError("scaling.method: 'freeu' is for sampling from a trained model; call model.eval() first")
        factor = self.skip_factors.get(self.stages[index - 1] or 0, 1.0)
        return skip if factor == 1 else damp_low_frequencies(skip, factor, self.threshold)

    def scale_main(self, index: int, main: Tensor) -> Tensor:
        factor = self.main_factors.get(self.stages[index - 1] or 0, 1.0)
        if factor == 1:
            return main
        half = main.shape[1] // 2
        return torch.cat([main[:, :half] * factor, main[:, half:]], dim=1)


def damp_low_frequencies(images: Tensor, factor: float, threshold: int) -> Tensor:
    """Multiply the frequencies -threshold .. threshold - 1 of both axes by `factor`; computed in float32."""
    frequencies = (torch.fft.fftfreq(size, 1 / size, device=images.device).round() for size in images.shape[-2:])
    rows, columns = ((each >= -threshold) & (each < threshold) for each in frequencies)
    mask = torch.where(rows[:, None] & columns[None, :], factor, 1.0)
    damped: Tensor = torch.fft.ifft2(torch.fft.fft2(images.float()) * mask).real
    return damped.to(images.dtype)


class BlockScaling(Scaling):
    """rezero, stable_tau: scale what each block adds to its input by `tau` (None: a learned factor per block, from 0)."""

    def __init__(self, sizes: Sequence[SkipSize], blocks: int, tau: float | None) -> None:
        super().__init__(len(sizes))
        self.value = tau
        if tau is None:
            self.alpha = nn.Parameter(torch.zeros(blocks))
        else:
            self.add_constants("tau", [tau] * blocks)

    def scale_branch(self, block: int, output: Tensor) -> Tensor:
        return output * (self.alpha[block].to(output.dtype) if self.value is None else self.value)
