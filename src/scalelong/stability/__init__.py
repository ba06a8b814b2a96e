"""Stability of training: oscillation probes, the choice of kappa, a diagnosis of a run (which loads without torch)."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from scalelong.stability.kappa import Recommendation, recommend_kappa
    from scalelong.stability.probes import OscillationProbe, relative_oscillation, relative_spread, stages

__all__ = ["OscillationProbe", "Recommendation", "recommend_kappa", "relative_oscillation", "relative_spread", "stages"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = "kappa" if name in ("Recommendation", "recommend_kappa") else "probes"
    return getattr(importlib.import_module(f"scalelong.stability.{module}"), name)
