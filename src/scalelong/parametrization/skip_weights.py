"""CS without a multiplication: constant coefficients as the initial size and the learning rate of the weights behind skips.

Adam does not see the size of a gradient. So W (kappa s) trained at rate lr is (kappa W) s, where kappa W is trained at rate
kappa * lr with its decay divided by kappa: exactly, for Adam's eps near 0, where a linear layer or convolution reads a skip.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize as torch_parametrize

from scalelong import skips
from scalelong.parametrization.attach import PLAN, attach, multiply, plan_of, stored_plan
from scalelong.parametrization.shapes import TensorRole
from scalelong.scaling.constant import ConstantScaling
from scalelong.skips.example import as_call, is_meta, unchanged_on_error
from scalelong.skips.families import generated_example
from scalelong.skips.fold import Columns, folded_columns
from scalelong.skips.hooks import MUP_KEY, write_config


class JoinedColumns(nn.Module):
    """A weight as a function of two parameters: the columns that read the skip, and the others."""

    def __init__(self, columns: Columns) -> None:
        super().__init__()
        self.columns = columns

    def forward(self, others: Tensor, skip: Tensor) -> Tensor:
        start, dim = self.columns.start, self.columns.dim
        before, after = torch.split(others, [start, others.shape[dim] - start], dim=dim)
        return torch.cat([before, skip, after], dim=dim)

    def right_inverse(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        start, dim, size = self.columns.start, self.columns.dim, self.columns.size
        before, skip, after = torch.split(weight, [start, size, weight.shape[dim] - start - size], dim=dim)
        return torch.cat([before, after], dim=dim), skip.contiguous()


@unchanged_on_error
def scale_skip_weights(
    model: nn.Module, method: str = "cs", *, size: bool = True, rate: bool = True, example: Any = None, **options: Any
) -> dict[str, float]:
    """Scale the weights behind the long skips by kappa_i, and their learning rates; returns the factors by tensor.

    The alternative to `scalelong.apply` for constant methods: nothing is multiplied in the forward pass, no hooks remain.
    Train with `param_groups`; `fold` joins the weights again. size=False or rate=False leaves out the one or the other, to
    tell the two effects of CS apart. In muP, call `parametrize` first. method, example, options: as for `scalelong.apply`.

    >>> from scalelong import UViT, UViTConfig
    >>> from scalelong.parametrization import param_groups
    >>> model = UViT(UViTConfig(image_size=8, patch_size=4, dim=16, depth=6, heads=2))
    >>> list(scale_skip_weights(model, "cs", kappa=0.5).values())
    [0.5, 0.25]
    >>> [group["lr"] for group in param_groups(model, lr=1e-3)]
    [0.001, 0.00025, 0.0005]
    """
    plan = plan_of(model)
    if plan.joined or skips.is_scaled(model):
        done = (
            "are scaled already"
            if plan.joined
            else "are scaled in the forward pass; call scalelong.remove(model) first"
        )
        raise ValueError(f"model: the skips of this {type(model).__name__} {done}")
    if is_meta(model):
        raise ValueError("model: is on the meta device and has no weights to scale; build it on a device")
    scaled = copy.deepcopy(model)
    scaling = skips.apply(scaled, method, example=example, **options).scaling
    if not isinstance(scaling, ConstantScaling):
        raise ValueError(f"scaling.method: {method!r} is not a constant; use scalelong.apply")
    call = generated_example(model) if example is None else as_call(example)
    changes = list(folded_columns(scaled, scaling.values, call, None))
    weights = [columns.weight for columns, _ in changes]
    for name in weights:
        if weights.count(name) > 1 or not name.endswith(".weight"):
            raise ValueError(f"model: {name} reads several skips or is not a layer's weight; use scalelong.apply")
    factors = {}
    for columns, kappa in changes:
        path = columns.weight.rpartition(".")[0]
        module = model.get_submodule(path)
        torch_parametrize.register_parametrization(module, "weight", JoinedColumns(columns))
        others, skip = (f"{path}.parametrizations.weight.original{part}" for part in (0, 1))
        multiply(model, [(model.get_parameter(skip), kappa if size else 1.0)])
        role = plan.roles.pop(columns.weight, TensorRole("finite", ()))
        factors[skip] = kappa
        plan.roles[others] = role
        plan.roles[skip] = replace(
            role, initial=role.initial * (kappa if size else 1), lr=role.lr * (kappa if rate else 1)
        )
        plan.joined.append(path)
    if PLAN not in model.__dict__:
        attach(model, plan)
    write_config(model, stored_plan(model), MUP_KEY)
    return factors
