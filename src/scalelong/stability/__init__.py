"""The stability laboratory: how features and gradients oscillate, which kappa suits the data, what the theory is worth."""

from scalelong.stability.kappa import Recommendation, recommend_kappa
from scalelong.stability.probes import OscillationProbe, relative_oscillation, relative_spread, stages
from scalelong.stability.theory import Finding, Study, verify_theory

__all__ = [
    "Finding",
    "OscillationProbe",
    "Recommendation",
    "Study",
    "recommend_kappa",
    "relative_oscillation",
    "relative_spread",
    "stages",
    "verify_theory",
]
