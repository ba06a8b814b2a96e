"""AdamW, the average and the 16-bit copy of flat weights as one Triton kernel: 36 bytes a weight are moved, each once."""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024


@triton.jit
def _update(
    weights, gradient, m, v, average, low, numbers, n, lr, shrink, rest1, beta2, rest2, eps, rest,
    LOW: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """numbers: whether to apply the gradient, 1 - beta1^t and sqrt(1 - beta2^t)."""
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = index < n
    usable = tl.load(numbers) != 0.0
    correction1, correction2 = tl.load(numbers + 1), tl.load(numbers + 2)
    w = tl.load(weights + index, mask=inside, other=0.0)
    g = tl.load(gradient + index, mask=inside, other=0.0)
    old_first = tl.load(m + index, mask=inside, other=0.0)
    old_second = tl.load(v + index, mask=inside, other=0.0)
    first = old_first + (g - old_first) * rest1
    second = old_second * beta2 + g * g * rest2
    moved = w * shrink - lr / correction1 * first / (tl.sqrt(second) / correction2 + eps)
    w = tl.where(usable, moved, w)
    tl.store(weights + index, w, mask=inside)
    tl.store(m + index, tl.where(usable, first, old_first), mask=inside)
    tl.store(v + index, tl.where(usable, second, old_second), mask=inside)
    mean = tl.load(average + index, mask=inside, other=0.0)
    tl.store(average + index, mean + (w - mean) * rest, mask=inside)
    if LOW:
        tl.store(low + index, w.to(low.dtype.element_ty), mask=inside)


def update_flat(
    weights: Tensor, gradient: Tensor, m: Tensor, v: Tensor, average: Tensor, low: Tensor | None, count: Tensor,
    usable: Tensor, lr: float, weight_decay: float, beta1: float, beta2: float, eps: float, decay: float,
) -> None:  # fmt: skip
    """As `fast.update_flat`."""
    logs = (math.log(beta) if beta else -math.inf for beta in (beta1, beta2))
    bias1, bias2 = (-torch.expm1(count.double() * log) for log in logs)
    numbers = torch.stack([usable.double(), bias1, bias2.sqrt()]).float()
    n = weights.numel()
    _update[(triton.cdiv(n, _BLOCK),)](
        weights, gradient, m, v, average, weights if low is None else low, numbers, n,
        lr, 1 - lr * weight_decay, 1 - beta1, beta2, 1 - beta2, eps, 1 - decay,
        low is not None, _BLOCK,
    )  # fmt: skip
