"""Fused parts of U-ViT (bf16/fp16, CUDA), swapped in for sampling (`inference`) and for the fast step (`for_training`).

Without gradients a matrix product can apply the GELU that follows it or accumulate in place, and the residual path can stay
in 16 bits. Measured by benchmarks/generate.py, step.py and fused_kernels.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules import module as modules

from scalelong.backbones import fused_ops
from scalelong.backbones.uvit import Attention, Block, Mlp, PatchEmbed, SkipLinear, UViT
from scalelong.scaling.learned import SqueezeExcite


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
    """Use the parts that are faster and have a backward pass in every U-ViT of `model`, for good.

    For training in bf16 on CUDA, with weights in 16 bits or under autocast; call it before torch.compile.

    >>> from scalelong.backbones import UViT, UViTConfig
    >>> model = UViT(UViTConfig(image_size=8, patch_size=2, dim=32, depth=2, heads=2))
    >>> for_training(model)
    >>> type(model.out_blocks[0].skip_linear).__name__
    'FusedSkipLinear'
    """
    for network in (part for part in model.modules() if isinstance(part, UViT)):
        attention_kernel, mlp_kernel = _has_attention_kernel(network), _has_mlp_kernel(network)
        for module in network.modules():
            if type(module) is Attention and _can_fuse(module, attention_kernel):
                module.__class__ = FusedAttention
            elif type(module) is Block and mlp_kernel and _has_plain_mlp(module):
                module.mlp.__class__ = FusedMlp
            elif type(module) is SkipLinear and _has_plain_parameters(module):
                module.__class__ = FusedSkipLinear
            elif type(module) is PatchEmbed and _is_plain(module.proj, nn.Conv2d):
                module.__class__ = FusedPatchEmbed
            elif type(module) is SqueezeExcite and _is_plain_gate(module):
                module.__class__ = FusedSqueezeExcite


def product_dtype(x: Tensor) -> torch.dtype:
    """The dtype of matrix products of x: that of autocast, if it is on."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype


class FusedBlock(Block):
    """For inference: the residual path in the dtype of the products, and an MLP of two kernels."""

    def forward(self, x: Tensor, skip: Tensor | None = None) -> Tensor:
        x = x.to(product_dtype(x))
        if self.skip_linear is not None:
            x = self.skip_linear(x, skip)
        x = x + self.attn(self.norm1(x))
        fc1, fc2 = self.mlp.fc1, self.mlp.fc2
        hidden = fused_ops.linear_gelu(self.norm2(x).to(x.dtype), fc1.weight, fc1.bias)
        return fused_ops.add_product_((x + fc2.bias.to(x.dtype)).contiguous(), hidden, fc2.weight)


class FusedAttention(Attention):
    """Self-attention by the Triton kernels."""

    def forward(self, x: Tensor) -> Tensor:
        projected: Tensor = self.proj(fused_ops.attention(self.qkv(x), self.heads))
        return projected


class FusedSkipLinear(SkipLinear):
    """x Wx + b, onto which coefficient * (skip Ws) is accumulated in place."""

    def forward(self, x: Tensor, skip: Tensor, coefficient: float | Tensor = 1.0) -> Tensor:  # type: ignore[override]
        if isinstance(coefficient, Tensor):  # gates: the compiler joins this product with its neighbours
            skip, coefficient = skip * coefficient.to(skip.dtype), 1.0
        tensors = (x.flatten(0, -2), skip.flatten(0, -2), self.weight, self.bias)
        x_rows, skip_rows, weight, bias = (tensor.to(product_dtype(x)) for tensor in tensors)
        return fused_ops.join(x_rows, skip_rows, weight, bias, coefficient).view(*x.shape[:-1], -1)


class FusedMlp(Mlp):
    """For training: GELU inside the products."""

    def forward(self, x: Tensor) -> Tensor:
        tensors = (x.flatten(0, -2), self.fc1.weight, self.fc1.bias, self.fc2.weight, self.fc2.bias)
        return fused_ops.mlp(*(tensor.to(product_dtype(x)) for tensor in tensors)).view(*x.shape[:-1], -1)


class FusedPatchEmbed(PatchEmbed):
    """For training: the convolution as a matrix product over the pixels of each patch, without changes of the layout."""

    def forward(self, image: Tensor) -> Tensor:
        size, weight = self.proj.kernel_size[0], self.proj.weight
        patches = torch.unflatten(torch.unflatten(image, 3, (-1, size)), 2, (-1, size)).permute(0, 2, 4, 1, 3, 5)
        return F.linear(patches.flatten(3).flatten(1, 2).to(weight.dtype), weight.flatten(1), self.proj.bias)


class FusedSqueezeExcite(SqueezeExcite):
    """For training: matrix products too small for a GPU's libraries, as sums that torch.compile fuses."""

    def forward(self, pooled: Tensor) -> Tensor:
        first, activation, last = self.zeta
        return torch.sigmoid(_as_sum(activation(_as_sum(pooled, first)), last))


def _as_sum(x: Tensor, layer: nn.Module) -> Tensor:
    weight, bias = (parameter.float() for parameter in layer.parameters())
    total: Tensor = (x.float()[:, None] * weight).sum(-1) + bias
    return total


_FUSED = {Block: FusedBlock, SkipLinear: FusedSkipLinear, Attention: FusedAttention}


def _can_fuse(module: nn.Module, attention_kernel: bool) -> bool:
    """False for a block if bypassing the calls of its MLP's layers would miss hooks, adapters or replaced forwards."""
    if isinstance(module, Attention):
        return attention_kernel and module.scale is None  # the kernel has 1 / sqrt(head size) only
    return _has_plain_mlp(module) if isinstance(module, Block) else _has_plain_parameters(module)


def _has_plain_mlp(block: Block) -> bool:
    mlp, hooked = block.mlp, modules._global_forward_hooks or modules._global_forward_pre_hooks
    return not hooked and _is_plain(mlp, Mlp) and all(_is_plain(layer, nn.Linear) for layer in (mlp.fc1, mlp.fc2))


def _is_plain(module: nn.Module, kind: type[nn.Module]) -> bool:
    """False if bypassing its call would miss hooks, adapters or a replaced forward."""
    hooked = module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module)
    return type(module) is kind and not hooked and _has_plain_parameters(module)


def _is_plain_gate(gate: SqueezeExcite) -> bool:
    layers = gate.zeta[0], gate.zeta[2]
    plain = _is_plain(gate.zeta, nn.Sequential) and all(_is_plain(layer, nn.Linear) for layer in layers)
    return plain and not gate.encoders


def _has_plain_parameters(module: nn.Module) -> bool:
    """False for quantised and sharded tensors, which are subclasses, and for an absent bias."""
    return all(type(parameter) in (Tensor, nn.Parameter) for parameter in module._parameters.values())


def _has_mlp_kernel(network: UViT) -> bool:
    """True where its tiles divide width and hidden channels, with the tensor descriptors of Triton 3.4."""
    width, hidden = network.config.dim, int(network.config.dim * network.config.mlp_ratio)
    divided = width % 64 == 0 and hidden % 128 == 0
    return divided and _gpu_has_kernels(network) and find_spec("triton.tools.tensor_descriptor") is not None


def _has_attention_kernel(network: UViT) -> bool:
    """True for 16 x 16 patches, one or two extra tokens and heads of 64 channels, as in every preset without text."""
    measured = network.num_tokens in (257, 258) and network.config.dim == 64 * network.config.heads
    return measured and _gpu_has_kernels(network)


def _gpu_has_kernels(network: UViT) -> bool:
    """Measured on an H200; older GPUs and AMD's keep torch's kernels. Triton comes with torch's GPU builds only."""
    on_gpu = network.pos_embed.is_cuda and find_spec("triton") is not None and torch.version.hip is None
    return on_gpu and torch.cuda.get_device_capability()[0] >= 9
