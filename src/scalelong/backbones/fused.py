"""What drawing images in low precision on a GPU spends beyond its matrix products, put into them.

No gradient is wanted then, so a product may take GELU, or the tensor it is added to, into its own kernel, and attention may
take the few tokens beyond a tile one by one. Of the 64 ms that U-ViT-S/2 took for 1,000 images on an H200, GELU alone was
10. The fused GELU is its tanh form, which is off by at most 5e-4, less than bfloat16 rounds by.
Each is one opaque operation: torch.compile would otherwise take it apart again.
"""

from __future__ import annotations

import importlib
from functools import cache
from importlib.util import find_spec

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from scalelong.transforms import in_transform

_KERNEL = "scalelong.backbones.attention_kernel"


def drawing_type(x: Tensor) -> torch.dtype | None:
    """The 16-bit type that products are computed in here, if no derivative is wanted and the fused form pays; else None."""
    if torch.is_grad_enabled() or not x.is_cuda or in_transform():
        return None
    chosen = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else x.dtype
    return chosen if chosen in (torch.bfloat16, torch.float16) else None


def is_plain(module: nn.Module, kind: type[nn.Module] = nn.Linear) -> bool:
    """Whether a module does what its class does and no more: nothing stands in for it, hooks it or replaces its forward."""
    hooked = module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module)
    return type(module) is kind and not hooked


def linear_gelu(x: Tensor, linear: nn.Linear, dtype: torch.dtype) -> Tensor:
    """gelu(linear(x)) in `dtype`, in one kernel where the device has one."""
    found: Tensor = _linear_gelu(x.to(dtype), linear.weight.to(dtype), linear.bias.to(dtype))
    return found


def add_product_(onto: Tensor, x: Tensor, weight: Tensor, factor: float = 1.0) -> Tensor:
    """onto += factor * x weight^T, in place and in the type of `onto`, which must be the caller's own."""
    _add_product_(onto, x.to(onto.dtype), weight.to(onto.dtype), factor)
    return onto


def attention(qkv: Tensor, heads: int) -> Tensor:
    """(B, T, 3 D) -> (B, T, D): multi-head self-attention, by our kernel where it is the faster."""
    if drawing_type(qkv) == qkv.dtype and _has_kernel(qkv, heads):
        found: Tensor = _attention(qkv, heads)
        return found
    query, key, value = torch.unflatten(qkv, -1, (3, heads, -1)).permute(2, 0, 3, 1, 4)
    return F.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2)


def _has_kernel(qkv: Tensor, heads: int) -> bool:
    """16 x 16 patches with one or two tokens more, heads of 64 channels: all U-ViTs without text; measured on an H200."""
    return qkv.shape[1] in (257, 258) and qkv.shape[2] == 3 * heads * 64 and _gpu_runs_it()


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _gpu_runs_it() -> bool:
    return _kernel_is_there() and torch.cuda.get_device_capability()[0] >= 9


@cache
def _kernel_is_there() -> bool:
    """Triton comes with torch's GPU builds only, and an exported network has this file but not this package."""
    return all(find_spec(name) is not None for name in ("triton", "scalelong", _KERNEL))


@torch.library.custom_op("scalelong::linear_gelu", mutates_args=())
def _linear_gelu(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    rows: Tensor = torch._addmm_activation(bias, x.flatten(0, -2), weight.t(), use_gelu=True)
    return rows.view(*x.shape[:-1], weight.shape[0])


@_linear_gelu.register_fake
def _(x: Tensor, weight: Tensor, _bias: Tensor) -> Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[0])


@torch.library.custom_op("scalelong::add_product_", mutates_args=("onto",))
def _add_product_(onto: Tensor, x: Tensor, weight: Tensor, factor: float) -> None:
    onto.view(-1, onto.shape[-1]).addmm_(x.flatten(0, -2), weight.t(), alpha=factor)


@torch.library.custom_op("scalelong::attention", mutates_args=())
def _attention(qkv: Tensor, heads: int) -> Tensor:
    found: Tensor = importlib.import_module(_KERNEL).attend(qkv, heads)
    return found


@_attention.register_fake
def _(qkv: Tensor, _heads: int) -> Tensor:
    return qkv.new_empty(*qkv.shape[:2], qkv.shape[2] // 3)
