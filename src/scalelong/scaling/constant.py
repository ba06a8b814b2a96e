"""Interface of scaling methods, and the constant methods (ScaleLong, NeurIPS 2023).

Skip i = 1 is the outermost of N (first encoder block to last decoder block). Before the decoder uses skip x_i, it is
multiplied by kappa_i:

    none         kappa_i = 1                             unscaled
    rsqrt2       kappa_i = 1 / sqrt(2)                   used by earlier work
    universal    kappa_i = kappa                         one number for all skips
    cs           kappa_i = kappa ** (i - 1)              Eq. 8, constant scaling
    cs_reversed  kappa_i = kappa ** (N - i + 1)          reversed order, a control (Table 4)
    cs_annealed  kappa_i = k ** (i - 1), k: 1 -> kappa   CS whose k falls linearly over the first `anneal_steps` steps
    subset       kappa_i = 0 or 1                        inner or outer skips removed
    ls           kappa_i = sigmoid(zeta(GAP(x_i)))       Eq. 9 and 10, learnable scaling: `learned`

To add a constant method, write a function like `constant_coefficients` and list it in `CONSTANT_METHODS`. Shapes: B batch,
T tokens, C channels; a skip is (B, T, C), (T, B, C) or (B, C, *spatial).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

if TYPE_CHECKING:
    from scalelong.scaling.registry import ScalingConfig

Coefficient = float | Tensor


def constant_coefficients(num_skips: int, kappa: float) -> list[float]:
    """CS, Eq. 8: kappa_i = kappa ** (i - 1); the outermost skip (i = 1) keeps 1.

    >>> constant_coefficients(4, kappa=0.5)
    [1.0, 0.5, 0.25, 0.125]
    """
    return [kappa ** (i - 1) for i in range(1, num_skips + 1)]


def reversed_coefficients(num_skips: int, kappa: float) -> list[float]:
    """The control of Table 4: kappa_i = kappa ** (N - i + 1); the outermost skip is scaled the most."""
    return [kappa ** (num_skips - i + 1) for i in range(1, num_skips + 1)]


def subset_coefficients(num_skips: int, removed: str, count: int) -> list[float]:
    """0 for the `count` innermost ("inner") or outermost ("outer") skips, 1 for the others."""
    if count > num_skips:
        raise ValueError(f"scaling.count: must be at most {num_skips}, the skips of a U, got {count}; remove fewer")
    kept, dropped = [1.0] * (num_skips - count), [0.0] * count
    return kept + dropped if removed == "inner" else dropped + kept


def universal_coefficients(num_skips: int, kappa: float) -> list[float]:
    return [kappa] * num_skips


CONSTANT_METHODS: Mapping[str, Callable[[int, float], list[float]]] = {  # (num_skips, kappa) -> kappa_1 .. kappa_N
    "universal": universal_coefficients,
    "cs": constant_coefficients,
    "cs_reversed": reversed_coefficients,
}
FIXED_METHODS: Mapping[str, float] = {"none": 1.0, "rsqrt2": 2**-0.5}  # the same coefficient for every skip, no options


@dataclass(frozen=True)
class SkipSize:
    """Size and memory layout of one skip.

    >>> image, tokens = SkipSize(channels=64), SkipSize(channels=512, tokens=257, channels_last=True)
    """

    channels: int
    tokens: int | None = None  # transformers with a fixed number of tokens
    channels_last: bool = False  # (B, T, C) rather than (B, C, *spatial)
    batch_dim: int = 0  # 1: (T, B, C)
    time_token: int | None = None  # position of the time token, if any
    main: int | None = None  # channels of the tensor the skip is joined with; filled in for methods that need it
    nest: int = 1  # index of its U; constant methods count from the outermost skip of each U
    stage: int | None = None  # 1 = the lowest resolution of the decoder; filled in for methods that need it


def per_u(sizes: Sequence[SkipSize], rule: Callable[[int], list[float]]) -> list[float]:
    """Apply a rule from a number of skips to their coefficients to each U of a network."""
    return [kappa for count in Counter(size.nest for size in sizes).values() for kappa in rule(count)]


class Scaling(nn.Module):
    """Base class of methods, the identity by default. Skips are indexed from i = 1, the outermost.

    >>> from scalelong.scaling import ScalingConfig
    >>> scaling = ScalingConfig.create("cs", kappa=0.5).build([SkipSize(channels=64)] * 3)
    >>> scaling.coefficient(3, torch.zeros(1, 64, 8, 8)), scaling.current()
    (0.25, [1.0, 0.5, 0.25])
    """

    config: ScalingConfig
    recorded: Tensor  # one number per skip; not saved
    fusible = True  # False: the method is more than a multiplication by `coefficient`
    changes_main = False  # True: `scale_main` is not the identity

    def __init__(self, num_skips: int, records: bool = False) -> None:
        super().__init__()
        self.num_skips = num_skips
        self.constants: dict[str, Sequence[Any]] = {}  # fixed numbers by their key in the state dict
        if records:
            self.register_buffer("recorded", torch.full((num_skips,), math.nan), persistent=False)

    def coefficient(self, index: int, skip: Tensor) -> Coefficient:  # noqa: ARG002
        """kappa_i: a number, or a tensor that broadcasts against the skip, (B, T, 1), (B, 1, C) or (B, C, 1, ...)."""
        return 1.0

    def forward(self, index: int, skip: Tensor) -> Tensor:
        """kappa_i * x_i."""
        coefficient = self.coefficient(index, skip)
        return skip if isinstance(coefficient, float) and coefficient == 1.0 else skip * coefficient

    def advance(self, step: int) -> None:
        """Update a method that depends on the training step; call before step `step` (from 1)."""

    def scale_main(self, index: int, main: Tensor) -> Tensor:  # noqa: ARG002
        """Scale the tensor that skip i is joined with."""
        return main

    def scale_branch(self, block: int, output: Tensor) -> Tensor:  # noqa: ARG002
        """Scale the output of a residual branch of block number `block`."""
        return output

    def current(self) -> list[float]:
        """Current kappa_i: constants, or the mean gates of the last forward (nan before the first)."""
        if "recorded" not in self._buffers:
            return [1.0] * self.num_skips
        return [math.nan] * self.num_skips if self.recorded.is_meta else self.recorded.tolist()

    def add_constants(self, key: str, values: Sequence[Any]) -> None:
        """Register constants as a buffer, so loading weights without them is detected."""
        self.constants[key] = values
        self.register_buffer(key, torch.tensor(values, dtype=torch.float32))

    def record(self, index: int, value: Tensor) -> None:
        """Store the value that `current` reports for skip i; a no-op in functorch transforms and forward-mode AD."""
        if not torch.compiler.is_compiling():
            if torch._C._functorch.peek_interpreter_stack() is not None or forward_ad._current_level >= 0:
                return
            if self.recorded.is_inference() and not torch.is_inference_mode_enabled():
                self.recorded = self.recorded.clone()  # a copy made in inference mode
            if self.recorded.is_meta and not value.is_meta:
                self.recorded = value.new_full((self.num_skips,), math.nan)  # built on meta, weights assigned later
        self.recorded[index - 1] = value.detach()


class ConstantScaling(Scaling):
    """One fixed number per skip."""

    def __init__(self, coefficients: Sequence[float]) -> None:
        super().__init__(len(coefficients))
        self.values = tuple(float(c) for c in coefficients)
        self.add_constants("kappa", self.values)

    def coefficient(self, index: int, skip: Tensor) -> Coefficient:  # noqa: ARG002
        return self.values[index - 1]

    def current(self) -> list[float]:
        return [float(f"{value:.15g}") for value in self.values]  # 0.49 rather than 0.48999999999999994


class AnnealedScaling(Scaling):
    """cs_annealed: CS with k = 1 at step 0 and k = kappa from step `anneal_steps` on, linear in between.

    The coefficients depend only on the step passed to `advance`, and are a buffer, so checkpoints and EMA include them.

    >>> scaling = AnnealedScaling([SkipSize(channels=64)] * 3, kappa=0.5, anneal_steps=100)
    >>> scaling.advance(50)
    >>> scaling.current()
    [1.0, 0.75, 0.5625]
    """

    now: Tensor

    def __init__(
        self,
        sizes: Sequence[SkipSize],
        kappa: float = 0.7,
        allow_amplify: bool = False,  # noqa: ARG002
        anneal_steps: int = 10_000,
    ) -> None:
        super().__init__(len(sizes))
        self.sizes, self.kappa_at_end, self.anneal_steps = tuple(sizes), kappa, anneal_steps
        self.add_constants("kappa", self._coefficients(kappa))
        self.register_buffer("now", torch.ones(len(sizes)))

    def _coefficients(self, kappa: float) -> list[float]:
        return per_u(self.sizes, lambda count: constant_coefficients(count, kappa))

    def advance(self, step: int) -> None:
        kappa = 1 + (self.kappa_at_end - 1) * min(1.0, step / self.anneal_steps)
        self.now.copy_(torch.tensor(self._coefficients(kappa)))

    def coefficient(self, index: int, skip: Tensor) -> Coefficient:
        return self.now[index - 1].to(skip.dtype)

    def current(self) -> list[float]:
        return [float(f"{value:.6g}") for value in self.now.tolist()]
