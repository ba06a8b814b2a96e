"""A forward pass with one skip scaled by hand: the joined operand itself is multiplied, without any hook of ours."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from scalelong import LongSkip
from tests.families import output


def first_tensor(value: Any) -> Tensor:
    """The tensor of a module's output, be it bare, in a tuple or in an output class."""
    if isinstance(value, Tensor):
        return value
    return value[0] if isinstance(value, tuple) else next(iter(value.values()))


class ScaleConcatenated(TorchFunctionMode):
    """Multiplies by `factor` the operand of torch.cat that equals the tensor `made_in` gave last."""

    def __init__(self, made_in: nn.Module, factor: float) -> None:
        super().__init__()
        self.factor, self.skip, self.hits = factor, None, 0
        self.handle = made_in.register_forward_hook(self._remember)

    def _remember(self, module: nn.Module, args: Any, result: Any) -> None:
        self.skip = first_tensor(result)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.cat and self.skip is not None:
            operands = [self._scaled(operand) for operand in args[0]]
            return func(operands, *args[1:], **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def _scaled(self, operand: Tensor) -> Tensor:
        if operand.shape != self.skip.shape or not torch.equal(operand, self.skip):
            return operand
        self.hits += 1
        return operand * self.factor


def hand_scaled_output(model: nn.Module, inputs: dict[str, Any], skip: LongSkip, factor: float) -> Tensor:
    """The output of an untouched model with this one skip multiplied by `factor` where it joins the decoder."""
    if type(model).__name__ == "UViT":
        return _with_scaled_weight(model, inputs, skip, factor)
    if type(model).__name__ == "MatrixUNet":
        return _matrix_unet(model, inputs["x"], skip.index, factor)
    with ScaleConcatenated(model.get_submodule(skip.made_in), factor) as mode:
        result = output(model, inputs)
    mode.handle.remove()
    assert mode.hits > 0, f"the output of {skip.made_in} is joined nowhere"
    return result


def _with_scaled_weight(model: nn.Module, inputs: dict[str, Any], skip: LongSkip, factor: float) -> Tensor:
    weight = model.get_submodule(skip.used_in).weight
    width, before = weight.shape[0], weight.detach().clone()
    with torch.no_grad():
        weight[:, width:] *= factor
        result = output(model, inputs)
        weight.copy_(before)
    return result


def _matrix_unet(model: Any, x: Tensor, index: int, factor: float) -> Tensor:
    """Eq. 3, recursively, with kappa = factor at `index` and 1 elsewhere."""

    def f(i: int, x: Tensor) -> Tensor:
        if i == len(model.a):
            return model.middle(x)
        skip = model.a[i](x)
        kappa = factor if i + 1 == index else 1.0
        return model.b[i](kappa * skip + f(i + 1, skip))

    return f(0, x)
