"""Fused kernels for U-ViT (bf16/fp16, CUDA), swapped in for sampling and, attention only, for the fast training step.

Without gradients a matrix product can apply the GELU that follows it (the tanh approximation, off by at most 5e-4) or
accumulate in place, and the residual path can stay in 16 bits. Each kernel is one custom operator, since torch.compile would
decompose it otherwise. Measured by benchmarks/generate.py and benchmarks/attention.py.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules import module as modules

from scalelong.backbones.uvit import Attention, Block, Mlp, SkipLinear, UViT

_KERNEL = "scalelong.backbones.attention_kernel"
_failures: list[str] = []  # of the attention kernel; after one it is not tried again


@contextmanager
def inference(model: nn.Module | None, enabled: bool = True) -> Iterator[None]:
    """Use the fused kernels in every U-ViT of `model` inside the block; afterwards it is the plain network again.

    For sampling on CUDA in bf16 or fp16, without gradients. Blocks whose MLP has adapters, hooks or tensor subclasses on
    entry stay plain.

    >>> from scalelong.backbones import UViT, UViTConfig
    >>> model = UViT(UViTConfig(image_size=8, patch_size=2, dim=32, depth=2, heads=2))
    >>> with torch.no_grad(), inference(model):
    ...     model(torch.randn(1, 3, 8, 8), torch.tensor([500.0])).shape
    torch.Size([1, 3, 8, 8])
    """
    networks = [part for part in model.modules() if isinstance(part, UViT)] if model is not None and enabled else []
    swapped = []
    for network in networks:
        attention_kernel = _has_attention_kernel(network)
        for module in network.modules():
            fused = _FUSED.get(type(module))
            if fused is not None and _can_fuse(module, attention_kernel):
                swapped.append((module, type(module)))
                module.__class__ = fused
    try:
        yield
    finally:
        for module, plain in swapped:
            module.__class__ = plain


def swap_attention(model: nn.Module) -> None:
    """Use the attention kernel, which has a backward pass, in every U-ViT of `model` for good."""
    for network in (part for part in model.modules() if isinstance(part, UViT)):
        for module in network.modules() if _has_attention_kernel(network) else ():
            if type(module) is Attention and _can_fuse(module, attention_kernel=True):
                module.__class__ = FusedAttention


class FusedBlock(Block):
    """A block with its residual path in the dtype of its products, and an MLP of two kernels."""

    def forward(self, x: Tensor, skip: Tensor | None = None) -> Tensor:
        device = x.device.type
        x = x.to(torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype)
        if self.skip_linear is not None:
            x = self.skip_linear(x, skip)
        x = x + self.attn(self.norm1(x))
        hidden = linear_gelu(self.norm2(x).to(x.dtype), self.mlp.fc1)
        return add_product_((x + self.mlp.fc2.bias.to(x.dtype)).contiguous(), hidden, self.mlp.fc2.weight)


class FusedSkipLinear(SkipLinear):
    """x Wx + b, onto which coefficient * (skip Ws) is accumulated in place."""

    def forward(self, x: Tensor, skip: Tensor, coefficient: float | Tensor = 1.0) -> Tensor:  # type: ignore[override]
        if isinstance(coefficient, Tensor):
            return super().forward(x, skip, coefficient)
        weight_x, weight_skip = torch.split(self.weight, [x.shape[-1], skip.shape[-1]], dim=1)
        return add_product_(F.linear(x, weight_x, self.bias), skip, weight_skip, coefficient)


class FusedAttention(Attention):
    """Self-attention by the Triton kernel."""

    def forward(self, x: Tensor) -> Tensor:
        projected: Tensor = self.proj(attention(self.qkv(x), self.heads))
        return projected


_FUSED = {Block: FusedBlock, SkipLinear: FusedSkipLinear, Attention: FusedAttention}


def attention(qkv: Tensor, heads: int) -> Tensor:
    """softmax(query key / sqrt(D)) value of each head: (B, T, 3 H D) -> (B, T, H D)."""
    found: Tensor = _attention(qkv, heads)[0]
    return found


def linear_gelu(x: Tensor, linear: nn.Linear) -> Tensor:
    """gelu(linear(x)) in the dtype of x."""
    found: Tensor = _linear_gelu(x, linear.weight.to(x.dtype), linear.bias.to(x.dtype))
    return found


def add_product_(onto: Tensor, x: Tensor, weight: Tensor, factor: float = 1.0) -> Tensor:
    """onto += factor * x weight^T, in place and in the dtype of `onto`."""
    _add_product_(onto, x.to(onto.dtype), weight.to(onto.dtype), factor)
    return onto


def _can_fuse(module: nn.Module, attention_kernel: bool) -> bool:
    """False for a block if bypassing the calls of its MLP's layers would miss hooks, adapters or replaced forwards."""
    if isinstance(module, Attention):
        return attention_kernel and module.scale is None  # the kernel has 1 / sqrt(head size) only
    if not isinstance(module, Block):
        return _has_plain_parameters(module)
    mlp = module.mlp
    if type(mlp) is not Mlp or modules._global_forward_hooks or modules._global_forward_pre_hooks:
        return False
    if any(part._forward_hooks or part._forward_pre_hooks or "forward" in vars(part) for part in mlp.modules()):
        return False
    return all(type(layer) is nn.Linear and _has_plain_parameters(layer) for layer in (mlp.fc1, mlp.fc2))


def _has_plain_parameters(module: nn.Module) -> bool:
    """False for quantised and sharded tensors, which are subclasses, and for an absent bias."""
    return all(type(parameter) in (Tensor, nn.Parameter) for parameter in module._parameters.values())


def _has_attention_kernel(network: UViT) -> bool:
    """True for 16 x 16 patches, one or two extra tokens and heads of 64 channels, as in every preset without text."""
    measured = network.num_tokens in (257, 258) and network.config.dim == 64 * network.config.heads
    return measured and network.pos_embed.is_cuda and _gpu_has_kernel()


def _gpu_has_kernel() -> bool:
    """Measured on an H200; older GPUs and AMD's keep torch's kernel. Triton comes with torch's GPU builds only."""
    return find_spec("triton") is not None and torch.version.hip is None and torch.cuda.get_device_capability()[0] >= 9


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
def _attention(qkv: Tensor, heads: int) -> tuple[Tensor, Tensor]:
    """The output, and log2 of the sums of exponentials (B, H, T) for the backward pass.

    Falls back to torch's operations, with a warning, where the kernel does not compile.
    """
    if not _failures:
        try:
            found: tuple[Tensor, Tensor] = importlib.import_module(_KERNEL).attend(qkv.contiguous(), heads)
            return found
        except torch.cuda.OutOfMemoryError:
            raise
        except Exception as error:  # noqa: BLE001  # no C compiler, no Python headers, a GPU that Triton does not support
            _failures.append(str(error))
            warnings.warn(f"the fused attention kernel failed ({error}); using torch's instead", stacklevel=2)
    query, key, value = _heads(qkv, heads)
    out = F.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2)
    return out, qkv.new_zeros(len(qkv), heads, qkv.shape[1], dtype=torch.float32)


@torch.library.custom_op("scalelong::attention_backward", mutates_args=())
def _attention_backward(qkv: Tensor, out: Tensor, stats: Tensor, grad: Tensor, heads: int) -> Tensor:
    """The gradient of qkv."""
    if not _failures:
        kernel = importlib.import_module(_KERNEL)
        found: Tensor = kernel.attend_backward(qkv.contiguous(), out, stats, grad.contiguous(), heads)
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
