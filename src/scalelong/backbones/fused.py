"""What drawing images in low precision on a GPU spends beyond its matrix products, put into them.

No derivative is wanted then, so a product may take GELU, or the tensor it is added to, into its own kernel, and attention
may take the few tokens beyond a tile one by one; benchmarks/generate.py and benchmarks/attention.py measure what it saves.
The fused GELU is its tanh form, off by at most 5e-4. Each is one opaque operation: torch.compile would take it apart again.
"""

from __future__ import annotations

import importlib
import warnings
from functools import cache
from importlib.util import find_spec

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules import module as modules

from scalelong.scaling.torch_state import is_watched

_DEVICE, _TYPES = "cuda", (torch.bfloat16, torch.float16)
_KERNEL = "scalelong.backbones.attention_kernel"
_failures: list[str] = []  # of the kernel; after one it is not tried again


def drawing_type(x: Tensor) -> torch.dtype | None:
    """The 16-bit type that products are computed in here, if no derivative is wanted and the fused form pays; else None."""
    if torch.is_grad_enabled() or x.device.type != _DEVICE or is_watched():
        return None
    chosen = torch.get_autocast_dtype(_DEVICE) if torch.is_autocast_enabled(_DEVICE) else x.dtype
    return chosen if chosen in _TYPES else None


def is_plain(module: nn.Module, kind: type[nn.Module] = nn.Linear) -> bool:
    """Whether a module does what its class does and no more: nothing stands in for it, hooks it or replaces its forward."""
    own = module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module)
    everywhere = modules._global_forward_hooks or modules._global_forward_pre_hooks
    return type(module) is kind and not own and not everywhere


def is_plain_linear(module: nn.Module) -> bool:
    """A plain linear layer with a bias, whose weights are nothing but numbers (no quantised or sharded tensor)."""
    if not is_plain(module):
        return False
    return all(type(part) in (Tensor, nn.Parameter) for part in (module.weight, module.bias))


def linear_gelu(x: Tensor, linear: nn.Linear, dtype: torch.dtype) -> Tensor:
    """gelu(linear(x)) in `dtype`, in one kernel where the device has one."""
    found: Tensor = _linear_gelu(x.to(dtype), linear.weight.to(dtype), linear.bias.to(dtype))
    return found


def add_product_(onto: Tensor, x: Tensor, weight: Tensor, factor: float = 1.0) -> Tensor:
    """onto += factor * x weight^T, in place and in the type of `onto`, which must be the caller's own."""
    _add_product_(onto, x.to(onto.dtype), weight.to(onto.dtype), factor)
    return onto


def attention(qkv: Tensor, heads: int) -> Tensor:
    """(B, T, 3 D) -> (B, T, D): multi-head self-attention, by our kernel where one is for this size."""
    if drawing_type(qkv) == qkv.dtype and _has_kernel(qkv, heads):
        found: Tensor = _attention(qkv, heads)
        return found
    return _plain_attention(qkv, heads)


def _plain_attention(qkv: Tensor, heads: int) -> Tensor:
    query, key, value = torch.unflatten(qkv, -1, (3, heads, -1)).permute(2, 0, 3, 1, 4)
    return F.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2)


def _has_kernel(qkv: Tensor, heads: int) -> bool:
    """16 x 16 patches with one or two tokens more and heads of 64 channels, as in every preset without text."""
    return qkv.shape[1] in (257, 258) and qkv.shape[2] == 3 * heads * 64 and _gpu_runs_it()


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _gpu_runs_it() -> bool:
    """It was measured on an H200; older GPUs and AMD's keep torch's kernel."""
    return _kernel_is_there() and torch.version.hip is None and torch.cuda.get_device_capability()[0] >= 9


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
    if not _failures:
        try:
            found: Tensor = importlib.import_module(_KERNEL).attend(qkv, heads)
            return found
        except torch.cuda.OutOfMemoryError:
            raise
        except Exception as error:  # noqa: BLE001  # no C compiler, no headers of Python, a GPU that Triton does not know
            _failures.append(str(error))
            warnings.warn(f"our attention kernel does not run here, so torch's does ({error})", stacklevel=2)
    return _plain_attention(qkv, heads)


@_attention.register_fake
def _(qkv: Tensor, _heads: int) -> Tensor:
    return qkv.new_empty(*qkv.shape[:2], qkv.shape[2] // 3)
