"""Stability of training: oscillation probes, the choice of kappa, and a diagnosis of a run."""

from scalelong.stability.kappa import Recommendation, recommend_kappa
from scalelong.stability.probes import OscillationProbe, relative_oscillation, relative_spread, stages

__all__ = [
    "OscillationProbe",
    "Recommendation",
    "recommend_kappa",
    "relative_oscillation",
    "relative_spread",
    "stages",
]
