"""Training stability: oscillation probes, choice of kappa, diagnosis (without torch)."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from scalelong.stability.callbacks import lightning_callback, trainer_callback
    from scalelong.stability.kappa import Recommendation, recommend_kappa
    from scalelong.stability.probes import OscillationProbe, relative_oscillation, relative_spread, stages

__all__ = ["OscillationProbe", "Recommendation", "lightning_callback", "recommend_kappa", "relative_oscillation"]
__all__ += ["relative_spread", "stages", "trainer_callback"]

_ELSEWHERE = {"Recommendation": "kappa", "recommend_kappa": "kappa"}
_ELSEWHERE |= {"lightning_callback": "callbacks", "trainer_callback": "callbacks"}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"scalelong.stability.{_ELSEWHERE.get(name, 'probes')}"), name)
