"""Initial sizes, forward multipliers and learning rates per tensor: muP, also as `scalelong.mup`."""

from scalelong.parametrization.mup import param_groups, parametrize, role_table, roles
from scalelong.parametrization.shapes import TensorRole

__all__ = ["TensorRole", "param_groups", "parametrize", "role_table", "roles"]
