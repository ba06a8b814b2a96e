"""The stability laboratory: how much features and gradients oscillate while a model trains."""

from scalelong.stability.probes import OscillationProbe, relative_oscillation, relative_spread, stages

__all__ = ["OscillationProbe", "relative_oscillation", "relative_spread", "stages"]
