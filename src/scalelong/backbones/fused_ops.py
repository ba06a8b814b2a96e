"""Custom operators of the fused kernels: one piece each for torch.compile, which would decompose them otherwise.

`attention` and `mlp` run Triton kernels where these compile, and torch's operations elsewhere. `attention`, `mlp` and `join`
have a backward pass; `linear_gelu` and `add_product_` are for inference.
"""

from __future__ import annotations

import importlib
import warnings
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

failures: dict[str, str] = {}  # Triton modules that failed, with the error; they are not tried again


def _try_kernel(module: str, function: str, *arguments: Any) -> Any:
    """What the function of a Triton module returns; None, with one warning, where it does not compile.

    No C compiler, no Python headers, a GPU or a feature that this Triton does not support.
    """
    if module in failures:
        return None
    try:
        return getattr(importlib.import_module(f"scalelong.backbones.{module}"), function)(*arguments)
    except torch.cuda.OutOfMemoryError:
        raise
    except Exception as error:  # noqa: BLE001
        failures[module] = str(error)
        warnings.warn(f"the kernel {module}.{function} failed ({error}); using torch's instead", stacklevel=2)
    return None


# -------------------------------------------------------------------------------------------------------------- attention


def attention(qkv: Tensor, heads: int) -> Tensor:
    """softmax(query key / sqrt(D)) value of each head: (B, T, 3 H D) -> (B, T, H D)."""
    found: Tensor = _attention(qkv, heads)[0]
    return found


@torch.library.custom_op("scalelong::attention", mutates_args=())
def _attention(qkv: Tensor, heads: int) -> tuple[Tensor, Tensor]:
    """The output, and log2 of the sums of exponentials (B, H, T) for the backward pass."""
    found: tuple[Tensor, Tensor] | None = _try_kernel("attention_kernel", "attend", qkv.contiguous(), heads)
    if found is not None:
        return found
    query, key, value = _heads(qkv, heads)
    out = F.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2)
    return out, qkv.new_zeros(len(qkv), heads, qkv.shape[1], dtype=torch.float32)


@torch.library.custom_op("scalelong::attention_backward", mutates_args=())
def _attention_backward(qkv: Tensor, out: Tensor, stats: Tensor, grad: Tensor, heads: int) -> Tensor:
    """The gradient of qkv."""
    arguments = (qkv.contiguous(), out, stats, grad.contiguous(), heads)
    found: Tensor | None = _try_kernel("attention_kernel", "attend_backward", *arguments)
    if found is not None:
        return found
    (query, key, value), dout = _heads(qkv, heads), torch.unflatten(grad, -1, (heads, -1)).transpose(1, 2)
    scale = query.shape[-1] ** -0.5
    weight = torch.softmax(query @ key.mT * scale, dim=-1)
    dweight = dout @ value.mT
    dscore = weight * (dweight - (weight * dweight).sum(-1, keepdim=True)) * scale
    dqkv = torch.stack([dscore @ key, dscore.mT @ query, weight.mT @ dout])  # 3 B H T D
    return dqkv.permute(1, 3, 0, 2, 4).flatten(2)


def _heads(qkv: Tensor, heads: int) -> tuple[Tensor, ...]:
    """Query, key and value, each (B, H, T, D)."""
    return torch.unflatten(qkv, -1, (3, heads, -1)).permute(2, 0, 3, 1, 4).unbind()


@_attention.register_fake
def _(qkv: Tensor, heads: int) -> tuple[Tensor, Tensor]:
    images, tokens, width = qkv.shape
    return qkv.new_empty(images, tokens, width // 3), qkv.new_empty(images, heads, tokens, dtype=torch.float32)


@_attention_backward.register_fake
def _(qkv: Tensor, _out: Tensor, _stats: Tensor, _grad: Tensor, _heads: int) -> Tensor:
    return qkv.new_empty(qkv.shape)


def _keep(ctx: Any, inputs: tuple[Tensor, int], output: tuple[Tensor, Tensor]) -> None:
    qkv, ctx.heads = inputs
    ctx.save_for_backward(qkv, *output)


def _differentiate(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor, None]:
    return _attention_backward(*ctx.saved_tensors, grad, ctx.heads), None


_attention.register_autograd(_differentiate, setup_context=_keep)


# -------------------------------------------------------------------------------------------------------------------- MLP


def mlp(x: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor) -> Tensor:
    """GELU(x w1^T + b1) w2^T + b2 of rows x (M, D), all of one dtype."""
    found: Tensor = _Mlp.apply(x, w1, b1, w2, b2)  # type: ignore[no-untyped-call]
    return found


class _Mlp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor) -> Tensor:
        act, slope = _mlp_hidden(x, w1, b1)
        ctx.save_for_backward(x, w1, w2, act, slope)
        return F.linear(act, w2, b2)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, ...]:
        x, w1, w2, act, slope = ctx.saved_tensors
        dpre, sums = _mlp_hidden_backward(dy, w2, slope)
        return dpre @ w1, dpre.mT @ x, sums.sum(0).to(w1.dtype), dy.mT @ act, dy.sum(0)


@torch.library.custom_op("scalelong::mlp_hidden", mutates_args=())
def _mlp_hidden(x: Tensor, w1: Tensor, b1: Tensor) -> tuple[Tensor, Tensor]:
    """GELU of x w1^T + b1, and its derivative there."""
    found: tuple[Tensor, Tensor] | None = _try_kernel("mlp_kernel", "linear_gelu", x.contiguous(), w1, b1)
    if found is not None:
        return found
    pre = F.linear(x, w1, b1)
    return F.gelu(pre), torch.ops.aten.gelu_backward(torch.ones_like(pre), pre)


@torch.library.custom_op("scalelong::mlp_hidden_backward", mutates_args=())
def _mlp_hidden_backward(dy: Tensor, w2: Tensor, slope: Tensor) -> tuple[Tensor, Tensor]:
    """The gradient before GELU, (dy w2) slope, and its sums over each 128 rows in float32."""
    found: tuple[Tensor, Tensor] | None = _try_kernel("mlp_kernel", "gelu_backward", dy.contiguous(), w2, slope)
    if found is not None:
        return found
    dpre = (dy @ w2) * slope
    padded = F.pad(dpre, (0, 0, 0, -len(dpre) % 128))
    return dpre, torch.unflatten(padded, 0, (-1, 128)).sum(1, dtype=torch.float32)


@_mlp_hidden.register_fake
def _(x: Tensor, w1: Tensor, _b1: Tensor) -> tuple[Tensor, Tensor]:
    return x.new_empty(len(x), len(w1)), x.new_empty(len(x), len(w1))


@_mlp_hidden_backward.register_fake
def _(_dy: Tensor, _w2: Tensor, slope: Tensor) -> tuple[Tensor, Tensor]:
    tiles = (len(slope) + 127) // 128
    return torch.empty_like(slope), slope.new_empty(tiles, slope.shape[1], dtype=torch.float32)


# ------------------------------------------------------------------------------------------------------------------- join


def join(x: Tensor, skip: Tensor, weight: Tensor, bias: Tensor, factor: float) -> Tensor:
    """x Wx^T + factor * skip Ws^T + bias of rows (M, D), where weight is [Wx, Ws]: one product accumulates onto the other."""
    found: Tensor = _Join.apply(x, skip, weight, bias, factor)  # type: ignore[no-untyped-call]
    return found


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, skip: Tensor, weight: Tensor, bias: Tensor, factor: float) -> Tensor:
        ctx.save_for_backward(x, skip, weight)
        ctx.factor = factor
        found: Tensor = _join(x, skip, weight, bias, factor)
        return found

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, skip, weight = ctx.saved_tensors
        weight_x, weight_skip = torch.split(weight, [x.shape[1], skip.shape[1]], dim=1)
        dweight = torch.cat([grad.mT @ x, ctx.factor * (grad.mT @ skip)], dim=1)
        return grad @ weight_x, grad @ (ctx.factor * weight_skip), dweight, grad.sum(0), None


@torch.library.custom_op("scalelong::join", mutates_args=())
def _join(x: Tensor, skip: Tensor, weight: Tensor, bias: Tensor, factor: float) -> Tensor:
    weight_x, weight_skip = torch.split(weight, [x.shape[1], skip.shape[1]], dim=1)
    return F.linear(x, weight_x, bias).addmm_(skip, weight_skip.t(), alpha=factor)


@_join.register_fake
def _(x: Tensor, _skip: Tensor, weight: Tensor, _bias: Tensor, _factor: float) -> Tensor:
    return x.new_empty(len(x), len(weight))


# ---------------------------------------------------------------------------------------------------------- for inference


def linear_gelu(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """GELU(x weight^T + bias), by the tanh approximation, which is off by at most 5e-4."""
    found: Tensor = _linear_gelu(x, weight.to(x.dtype), bias.to(x.dtype))
    return found


def add_product_(onto: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    """onto += x weight^T, in place and in the dtype of `onto`."""
    _add_product_(onto, x.to(onto.dtype), weight.to(onto.dtype))
    return onto


@torch.library.custom_op("scalelong::linear_gelu", mutates_args=())
def _linear_gelu(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    rows: Tensor = torch._addmm_activation(bias, x.flatten(0, -2), weight.t(), use_gelu=True)
    return rows.view(*x.shape[:-1], weight.shape[0])


@_linear_gelu.register_fake
def _(x: Tensor, weight: Tensor, _bias: Tensor) -> Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[0])


@torch.library.custom_op("scalelong::add_product_", mutates_args=("onto",))
def _add_product_(onto: Tensor, x: Tensor, weight: Tensor) -> None:
    onto.view(-1, onto.shape[-1]).addmm_(x.flatten(0, -2), weight.t())
