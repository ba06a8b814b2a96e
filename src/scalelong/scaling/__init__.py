"""The scaling methods, in pure torch: `constant` (CS), `learned` (LS), `baselines` (other papers), `registry` (names)."""

from scalelong.scaling.constant import Scaling, SkipSize, constant_coefficients
from scalelong.scaling.registry import METHODS, ScalingConfig

__all__ = ["METHODS", "Scaling", "ScalingConfig", "SkipSize", "constant_coefficients"]
