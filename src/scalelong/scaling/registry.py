"""Registry of methods: names, constructors, options and validation."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from scalelong.errors import is_number, unknown_name
from scalelong.scaling.baselines import BlockScaling, FreeU, MagnitudePreserving, SkipLayerNorm, SkipTuning
from scalelong.scaling.constant import (
    CONSTANT_METHODS,
    FIXED_METHODS,
    AnnealedScaling,
    ConstantScaling,
    Scaling,
    SkipSize,
    per_u,
    subset_coefficients,
)
from scalelong.scaling.learned import ACTIVATIONS, learned_scaling

Options = Mapping[str, Any]
Needs = Literal["skips", "operands", "blocks"]  # operands: widths and resolutions of joins; blocks: residual branches


@dataclass(frozen=True)
class ScalingConfig:
    """A validated method with all its options; stored as JSON next to saved weights.

    >>> config = ScalingConfig.create("cs", kappa=0.5)
    >>> print(config, config.build([SkipSize(channels=64)] * 3).current())
    cs(kappa=0.5) [1.0, 0.5, 0.25]
    >>> ScalingConfig.from_json(config.to_json()) == config
    True
    """

    method: str
    options: Options

    @classmethod
    def create(cls, method: str, **options: Any) -> ScalingConfig:
        """Validate the method and its options, and fill in defaults."""
        if method not in METHODS:
            raise unknown_name("scaling.method", method, METHODS)
        defaults = METHODS[method].defaults
        for name, value in options.items():
            if name not in defaults:
                takes = ", ".join(defaults) or "no options"
                raise TypeError(f"scaling.{name}: {method!r} has no such option (got {value!r}); it takes {takes}")
            if isinstance(defaults[name], bool) and not isinstance(value, bool):
                raise TypeError(f"scaling.{name}: must be True or False, got {value!r}")
        complete = {**defaults, **options}
        METHODS[method].check(complete)
        return cls(method, complete)

    def to_json(self) -> dict[str, Any]:
        return {"method": self.method, "options": dict(self.options)}

    @classmethod
    def from_json(cls, stored: Mapping[str, Any]) -> ScalingConfig:
        return cls.create(stored["method"], **stored["options"])

    def build(self, sizes: Sequence[SkipSize], blocks: int = 0) -> Scaling:
        """Build the scaling for these skips (outermost first) and number of residual blocks."""
        method = METHODS[self.method]
        scaling = method.build(sizes, **self.options, **({"blocks": blocks} if method.needs == "blocks" else {}))
        scaling.config = self
        return scaling

    @property
    def arguments(self) -> str:
        """The options as keyword arguments of `apply`."""
        return ", ".join(f"{k}={v!r}" for k, v in self.options.items() if v is not None and (k != "allow_amplify" or v))

    def __str__(self) -> str:
        return f"{self.method}({self.arguments})" if self.arguments else self.method


@dataclass(frozen=True)
class Method:
    """How a method is built and checked; its options are the positional parameters of `build` after `sizes`."""

    build: Callable[..., Scaling]
    check: Callable[[Options], None] = lambda _: None
    needs: Needs = "skips"  # what it needs to know about the model
    constant: bool = False  # only multiplies each skip by a fixed number
    sampling_only: bool = False  # not for training

    @property
    def defaults(self) -> Options:
        parameters = list(inspect.signature(self.build).parameters.values())[1:]
        return {p.name: p.default for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD}


def _constant(rule: Callable[[int, float], list[float]]) -> Method:
    def build(sizes: Sequence[SkipSize], kappa: float = 0.7, allow_amplify: bool = False) -> Scaling:  # noqa: ARG001
        return ConstantScaling(per_u(sizes, lambda num_skips: rule(num_skips, kappa)))

    return Method(build, _check_kappa, constant=True)


def _subset(sizes: Sequence[SkipSize], removed: str = "inner", count: int = 1) -> Scaling:
    return ConstantScaling(per_u(sizes, lambda num_skips: subset_coefficients(num_skips, removed, count)))


def _fixed(kappa: float) -> Method:
    return Method(lambda sizes: ConstantScaling([kappa] * len(sizes)), constant=True)


def _check_kappa(options: Options) -> None:
    kappa, advice = options["kappa"], "the paper recommends 0.5 to 0.95"
    if not is_number(kappa):
        raise TypeError(f"scaling.kappa: must be a number in (0, 1], got {kappa!r}; {advice}")
    amplifies = 1 < kappa < math.inf
    if not 0 < kappa <= 1 and not (amplifies and options["allow_amplify"]):
        advice = "pass allow_amplify=True to use it as a control" if amplifies else advice
        raise ValueError(f"scaling.kappa: must be in (0, 1], got {kappa}; {advice}")


def _check_learned(options: Options) -> None:
    choices = {
        "module": ("se", "ie", "learnable", "time"),
        "activation": ACTIVATIONS,
        "axis": ("auto", "tokens", "channels"),
    }
    for key, allowed in choices.items():
        if options[key] not in allowed:
            raise unknown_name(f"scaling.{key}", options[key], allowed)
    _check_count("reduction", options, "the paper uses 16")
    if options["start"] is not None:
        _check_number("start", options, 0, 1, "omit it to start at 1/2, or pass 0.95 to start near no scaling")


def _check_annealed(options: Options) -> None:
    _check_kappa(options)
    _check_count("anneal_steps", options, "a tenth of the training is a start")


def _check_subset(options: Options) -> None:
    if options["removed"] not in ("inner", "outer"):
        raise unknown_name("scaling.removed", options["removed"], ("inner", "outer"))
    _check_count("count", options, "it is the number of skips to remove")


def _check_tuning(options: Options) -> None:
    for key in ("inner", "outer"):
        _check_number(key, options, 0, 2, "Skip-Tuning shrinks the inner skips the most, for example to 0.8")


def _check_freeu(options: Options) -> None:
    for key in ("s1", "s2", "b1", "b2"):
        _check_number(key, options, 0, 10, "FreeU uses s below and b above 1")
    _check_count("threshold", options, "FreeU uses 1")


def _check_count(key: str, options: Options, advice: str) -> None:
    if isinstance(options[key], bool) or not isinstance(options[key], int) or options[key] < 1:
        raise ValueError(f"scaling.{key}: must be an integer of at least 1, got {options[key]!r}; {advice}")


def _check_number(key: str, options: Options, low: float, high: float, advice: str) -> None:
    if not is_number(options[key]) or not low < options[key] < high:
        raise ValueError(
            f"scaling.{key}: must be a number between {low:g} and {high:g}, got {options[key]!r}; {advice}"
        )


METHODS: Mapping[str, Method] = {
    **{name: _fixed(kappa) for name, kappa in FIXED_METHODS.items()},
    **{name: _constant(rule) for name, rule in CONSTANT_METHODS.items()},
    "cs_annealed": Method(AnnealedScaling, _check_annealed),
    "subset": Method(_subset, _check_subset, constant=True),
    "ls": Method(learned_scaling, _check_learned),
    "mp_cat": Method(MagnitudePreserving, lambda given: _check_number("t", given, 0, 1, "EDM2 uses 0.5"), "operands"),
    "layernorm": Method(SkipLayerNorm, lambda given: _check_number("eps", given, 0, 1, "1e-6 is usual")),
    "skip_tuning": Method(SkipTuning, _check_tuning, constant=True, sampling_only=True),
    "freeu": Method(FreeU, _check_freeu, needs="operands", sampling_only=True),
    "rezero": Method(lambda sizes, *, blocks: BlockScaling(sizes, blocks, None), needs="blocks"),
    "stable_tau": Method(
        lambda sizes, tau=0.1, *, blocks: BlockScaling(sizes, blocks, tau),
        lambda given: _check_number("tau", given, 0, 10, "Table 3 of the paper uses 0.1 and 0.3"),
        needs="blocks",
    ),
}
