"""All methods by name: their options, checked, and what they build.

`ScalingConfig.create("cs", kappa=0.7)` refuses what cannot be meant and fills in defaults; it is what is written beside
saved weights.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from scalelong.scaling.base import (
    ConstantScaling,
    Description,
    Scaling,
    SkipSize,
    constant_coefficients,
    learned_scaling,
    reversed_coefficients,
    universal_coefficients,
)
from scalelong.scaling.baselines import BlockScaling, FreeU, MagnitudePreserving, SkipLayerNorm
from scalelong.scaling.gates import ACTIVATIONS


@dataclass(frozen=True)
class ScalingConfig(Description):
    """A method and its options, checked."""

    @staticmethod
    def create(method: str, **options: Any) -> ScalingConfig:
        """Check the method, the names of its options and their values; fill in the defaults."""
        if method not in METHODS:
            near = difflib.get_close_matches(str(method), METHODS, n=1)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise ValueError(f"scaling.method: unknown {method!r}; {hint}choose one of {', '.join(METHODS)}")
        defaults, check = METHODS[method].defaults, METHODS[method].check
        for name in options:
            if name not in defaults:
                takes = ", ".join(defaults) or "no options"
                raise TypeError(
                    f"scaling.{name}: {method!r} has no such option (got {options[name]!r}); it takes {takes}"
                )
        complete = {**defaults, **options}
        check(complete)
        return ScalingConfig(method, complete)

    @property
    def needs(self) -> Needs:
        """What must be known of a model beyond its skips."""
        return METHODS[self.method].needs

    @property
    def is_constant(self) -> bool:
        """Whether a skip is multiplied by a fixed number, and nothing else happens."""
        return METHODS[self.method].constant

    def build(self, sizes: Sequence[SkipSize], blocks: int = 0) -> Scaling:
        """The scaling for a model with these skips, outermost first, and this many residual blocks."""
        options = {**self.options, "blocks": blocks} if self.needs == "blocks" else self.options
        scaling = METHODS[self.method].build(sizes, **options)
        scaling.config = self
        return scaling


Needs = Literal["skips", "operands", "blocks"]  # operands: widths and resolution of joins; blocks: residual branches


@dataclass(frozen=True)
class _Method:
    build: Callable[..., Scaling]
    defaults: Mapping[str, Any]
    check: Callable[[Mapping[str, Any]], None] = lambda _: None
    constant: bool = False
    needs: Needs = "skips"


def _check_kappa(options: Mapping[str, Any]) -> None:
    kappa = options["kappa"]
    if isinstance(kappa, bool) or not isinstance(kappa, (int, float)):
        raise TypeError(f"scaling.kappa: must be a number in (0, 1], got {kappa!r}; the paper advises 0.5 to 0.95")
    if not (math.isfinite(kappa) and kappa > 0):
        raise ValueError(f"scaling.kappa: must be in (0, 1], got {kappa}; the paper advises 0.5 to 0.95")
    if kappa > 1 and not options["allow_amplify"]:
        raise ValueError(
            f"scaling.kappa: must be in (0, 1], got {kappa}; pass allow_amplify=True to use it as a control"
        )


def _check_learned(options: Mapping[str, Any]) -> None:
    _check_choice("module", options["module"], ("se", "ie", "learnable"))
    _check_choice("activation", options["activation"], ACTIVATIONS)
    _check_choice("axis", options["axis"], ("auto", "tokens", "channels"))
    reduction = options["reduction"]
    if isinstance(reduction, bool) or not isinstance(reduction, int) or reduction < 1:
        raise ValueError(
            f"scaling.reduction: must be a whole number of at least 1, got {reduction!r}; the paper has 16"
        )
    if not isinstance(options["shared"], bool):
        raise TypeError(f"scaling.shared: must be True or False, got {options['shared']!r}")
    if options["start"] is not None:
        _check_number("start", options, 0, 1, "leave it out to start at 1/2, or pass 0.95 to start near no scaling")


def _check_choice(key: str, value: Any, allowed: Iterable[str]) -> None:
    if value not in allowed:
        raise ValueError(f"scaling.{key}: unknown {value!r}; choose one of {', '.join(allowed)}")


def _check_number(key: str, options: Mapping[str, Any], low: float, high: float, advice: str) -> None:
    """Strictly between the bounds."""
    value = options[key]
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not low < value < high:
        raise ValueError(f"scaling.{key}: must be a number between {low:g} and {high:g}, got {value!r}; {advice}")


def _check_freeu(options: Mapping[str, Any]) -> None:
    for key in ("s1", "s2", "b1", "b2"):
        _check_number(key, options, 0, 10, "FreeU has s below and b above 1")
    threshold = options["threshold"]
    if isinstance(threshold, bool) or not isinstance(threshold, int) or threshold < 1:
        raise ValueError(f"scaling.threshold: must be a whole number of at least 1, got {threshold!r}; FreeU has 1")


def _check_layernorm(options: Mapping[str, Any]) -> None:
    if not isinstance(options["affine"], bool):
        raise TypeError(f"scaling.affine: must be True or False, got {options['affine']!r}")
    _check_number("eps", options, 0, 1, "1e-6 is usual")


def _constant(coefficients: Callable[[int, float], list[float]]) -> _Method:
    def build(sizes: Sequence[SkipSize], kappa: float, allow_amplify: bool) -> Scaling:  # noqa: ARG001
        return ConstantScaling(coefficients(len(sizes), kappa))

    return _Method(build, {"kappa": 0.7, "allow_amplify": False}, _check_kappa, constant=True)


def _fixed(kappa: float) -> _Method:
    return _Method(lambda sizes: ConstantScaling(universal_coefficients(len(sizes), kappa)), {}, constant=True)


_LEARNED: Mapping[str, Any] = {
    "shared": True,
    "reduction": 16,
    "module": "se",
    "activation": "relu",
    "axis": "auto",
    "start": None,
}
_FREEU: Mapping[str, Any] = {"s1": 0.9, "s2": 0.2, "b1": 1.0, "b2": 1.0, "threshold": 1}

METHODS: Mapping[str, _Method] = {
    "none": _fixed(1.0),
    "universal": _constant(universal_coefficients),
    "rsqrt2": _fixed(2**-0.5),
    "cs": _constant(constant_coefficients),
    "cs_reversed": _constant(reversed_coefficients),
    "ls": _Method(learned_scaling, _LEARNED, _check_learned),
    "mp_cat": _Method(
        MagnitudePreserving,
        {"t": 0.5},
        lambda options: _check_number("t", options, 0, 1, "EDM2 has 0.5"),
        needs="operands",
    ),
    "layernorm": _Method(SkipLayerNorm, {"affine": True, "eps": 1e-6}, _check_layernorm),
    "freeu": _Method(FreeU, _FREEU, _check_freeu, needs="operands"),
    "rezero": _Method(lambda sizes, blocks: BlockScaling(sizes, blocks, 0.0, learnt=True), {}, needs="blocks"),
    "stable_tau": _Method(
        lambda sizes, blocks, tau: BlockScaling(sizes, blocks, tau, learnt=False),
        {"tau": 0.1},
        lambda options: _check_number("tau", options, 0, 10, "the paper's Table 3 has 0.1 and 0.3"),
        needs="blocks",
    ),
}
