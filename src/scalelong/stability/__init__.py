"""Stability of training: oscillation probes, the choice of kappa, and a diagnosis of a run.

Names are imported on first use, so that `scalelong.stability.diagnosis` loads without torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from scalelong.runs.oscillation import relative_oscillation, relative_spread
    from scalelong.stability.kappa import Recommendation, recommend_kappa
    from scalelong.stability.probes import OscillationProbe, stages

_MODULES = {
    "OscillationProbe": "scalelong.stability.probes",
    "Recommendation": "scalelong.stability.kappa",
    "recommend_kappa": "scalelong.stability.kappa",
    "relative_oscillation": "scalelong.runs.oscillation",
    "relative_spread": "scalelong.runs.oscillation",
    "stages": "scalelong.stability.probes",
}

__all__ = ["OscillationProbe", "Recommendation", "recommend_kappa", "relative_oscillation", "relative_spread", "stages"]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name]), name)
