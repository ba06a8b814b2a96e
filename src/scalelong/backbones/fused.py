"""Fused kernels for U-ViT (bf16/fp16, CUDA), swapped in for sampling (`inference`) and for the fast step (`for_training`).

Without gradients a matrix product can apply the GELU that follows it (the tanh approximation, off by at most 5e-4) or
accumulate in place, and the residual path can stay in 16 bits. Each kernel is one custom operator, since torch.compile would
decompose it otherwise. Measured by benchmarks/generate.py and benchmarks/fused_kernels.py.
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

from scalelong.backbones.uvit import Attention, Block, Mlp, PatchEmbed, SkipLinear, UViT

_failures: dict[str, str] = {}  # Triton modules that failed, with the error; they are not tried again


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


def for_training(model: nn.Module) -> None:
    """Use what is faster and has a backward pass in every U-ViT of `model`, for good."""
    for network in (part for part in model.modules() if isinstance(part, UViT)):
        attention_kernel, mlp_kernel = _has_attention_kernel(network), _gpu_has_kernels(network)
        for module in network.modules():
            if type(module) is Attention and _can_fuse(module, attention_kernel):
                module.__class__ = FusedAttention
            elif type(module) is Block and mlp_kernel and _has_mlp_kernel(module):
                module.mlp.__class__ = FusedMlp
            elif type(module) is SkipLinear and _has_plain_parameters(module):
                module.__class__ = TrainedSkipLinear
            elif type(module) is PatchEmbed and _is_plain(module.proj):
                module.__class__ = FusedPatchEmbed


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


class FusedPatchEmbed(PatchEmbed):
    """The convolution as a matrix product over the pixels of each patch: no changes of the memory layout."""

    def forward(self, image: Tensor) -> Tensor:
        size, weight = self.proj.kernel_size[0], self.proj.weight
        patches = torch.unflatten(torch.unflatten(image, 3, (-1, size)), 2, (-1, size)).permute(0, 2, 4, 1, 3, 5)
        return F.linear(patches.flatten(3).flatten(1, 2).to(weight.dtype), weight.flatten(1), self.proj.bias)


class TrainedSkipLinear(SkipLinear):
    """x Wx + b, onto which coefficient * (skip Ws) is accumulated in place; for tensors in the dtype of the weights."""

    def forward(self, x: Tensor, skip: Tensor, coefficient: float | Tensor = 1.0) -> Tensor:  # type: ignore[override]
        if isinstance(coefficient, Tensor):  # gates: the compiler joins this product with its neighbours
            skip, coefficient = skip * coefficient.to(skip.dtype), 1.0
        rows, skip_rows = (each.flatten(0, -2).to(self.weight.dtype) for each in (x, skip))
        found: Tensor = _Join.apply(rows, skip_rows, self.weight, self.bias, coefficient)  # type: ignore[no-untyped-call]
        return found.view(*x.shape[:-1], -1)


class _Join(torch.autograd.Function):
    """x Wx^T + factor * skip Ws^T + bias on rows, where weight is [Wx, Ws]."""

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


class FusedMlp(Mlp):
    """An MLP with GELU inside its products; weights and biases have one dtype."""

    def forward(self, x: Tensor) -> Tensor:
        fc1, fc2 = self.fc1, self.fc2
        rows = x.flatten(0, -2).to(fc1.weight.dtype)
        found: Tensor = _MlpProducts.apply(rows, fc1.weight, fc1.bias, fc2.weight, fc2.bias)  # type: ignore[no-untyped-call]
        return found.view(*x.shape[:-1], -1)


class _MlpProducts(torch.autograd.Function):
    """y = GELU(x w1^T + b1) w2^T + b2 on rows."""

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
    return _has_plain_mlp(module) if isinstance(module, Block) else _has_plain_parameters(module)


def _has_plain_mlp(block: Block) -> bool:
    mlp = block.mlp
    if type(mlp) is not Mlp or modules._global_forward_hooks or modules._global_forward_pre_hooks:
        return False
    if any(part._forward_hooks or part._forward_pre_hooks or "forward" in vars(part) for part in mlp.modules()):
        return False
    return all(type(layer) is nn.Linear and _has_plain_parameters(layer) for layer in (mlp.fc1, mlp.fc2))


def _is_plain(layer: nn.Module) -> bool:
    """False if bypassing its call would miss hooks, adapters or a replaced forward."""
    hooked = layer._forward_hooks or layer._forward_pre_hooks or "forward" in vars(layer)
    return type(layer) is nn.Conv2d and not hooked and _has_plain_parameters(layer)


def _has_plain_parameters(module: nn.Module) -> bool:
    """False for quantised and sharded tensors, which are subclasses, and for an absent bias."""
    return all(type(parameter) in (Tensor, nn.Parameter) for parameter in module._parameters.values())


def _has_mlp_kernel(block: Block) -> bool:
    """True where its tiles divide width and hidden channels."""
    hidden, width = block.mlp.fc1.weight.shape
    return _has_plain_mlp(block) and width % 64 == 0 and hidden % 128 == 0


def _has_attention_kernel(network: UViT) -> bool:
    """True for 16 x 16 patches, one or two extra tokens and heads of 64 channels, as in every preset without text."""
    measured = network.num_tokens in (257, 258) and network.config.dim == 64 * network.config.heads
    return measured and _gpu_has_kernels(network)


def _gpu_has_kernels(network: UViT) -> bool:
    """Measured on an H200; older GPUs and AMD's keep torch's kernels. Triton comes with torch's GPU builds only."""
    on_gpu = network.pos_embed.is_cuda and find_spec("triton") is not None and torch.version.hip is None
    return on_gpu and torch.cuda.get_device_capability()[0] >= 9


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


@torch.library.custom_op("scalelong::join", mutates_args=())
def _join(x: Tensor, skip: Tensor, weight: Tensor, bias: Tensor, factor: float) -> Tensor:
    weight_x, weight_skip = torch.split(weight, [x.shape[1], skip.shape[1]], dim=1)
    return F.linear(x, weight_x, bias).addmm_(skip, weight_skip.t(), alpha=factor)


@_join.register_fake
def _(x: Tensor, _skip: Tensor, weight: Tensor, _bias: Tensor, _factor: float) -> Tensor:
    return x.new_empty(len(x), len(weight))


def _try_kernel(module: str, function: str, *arguments: Any) -> Any:
    """What the function of a Triton module returns; None, with one warning, where it does not compile.

    No C compiler, no Python headers, a GPU or a feature that this Triton does not support.
    """
    if module in _failures:
        return None
    try:
        return getattr(importlib.import_module(f"scalelong.backbones.{module}"), function)(*arguments)
    except torch.cuda.OutOfMemoryError:
        raise
    except Exception as error:  # noqa: BLE001
        _failures[module] = str(error)
        warnings.warn(f"the kernel {module}.{function} failed ({error}); using torch's instead", stacklevel=2)
    return None


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
