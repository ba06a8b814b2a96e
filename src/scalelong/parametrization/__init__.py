"""Initial sizes, forward multipliers and learning rates per tensor: muP, and CS in this form. Also called `scalelong.mup`."""

from scalelong.parametrization.coordinates import CoordinateCheck, coordinate_check
from scalelong.parametrization.mup import fold, param_groups, parametrize, role_table, roles
from scalelong.parametrization.shapes import TensorRole
from scalelong.parametrization.skip_weights import scale_skip_weights

__all__ = [
    "CoordinateCheck",
    "TensorRole",
    "coordinate_check",
    "fold",
    "param_groups",
    "parametrize",
    "role_table",
    "roles",
    "scale_skip_weights",
]
