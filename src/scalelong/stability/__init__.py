"""The stability laboratory: how features and gradients oscillate, which kappa suits the data, what the theory is worth."""

from scalelong.stability.kappa import Recommendation, recommend_kappa
from scalelong.stability.learned import CSFit, fit_cs, learned_coefficients
from scalelong.stability.probes import OscillationProbe, relative_oscillation, relative_spread, stages
from scalelong.stability.robustness import RobustnessPoint, robustness_curve
from scalelong.stability.theory import Finding, Study, verify_theory

__all__ = [
    "CSFit",
    "Finding",
    "OscillationProbe",
    "Recommendation",
    "RobustnessPoint",
    "Study",
    "fit_cs",
    "learned_coefficients",
    "recommend_kappa",
    "relative_oscillation",
    "relative_spread",
    "robustness_curve",
    "stages",
    "verify_theory",
]
