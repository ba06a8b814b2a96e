"""Triton kernels for attention over 65 tokens.

Libraries pad 65 tokens to 128. Here 64 are one tile and the last one is a vector; a whole head fits one program, so the
backward pass needs neither atomics nor saved statistics.

Shapes: B images, T = 65 tokens, H heads of D = 64 channels; qkv is (B, T, 3 H D) as the linear layer writes it.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from products import begin
from torch import Tensor, nn

from scalelong.backbones.fused import FusedPatchEmbed
from scalelong.backbones.uvit import Attention, PatchEmbed

TILE = 64
TOKENS = TILE + 1


def speed_up(model: nn.Module) -> None:
    """Use the kernels in every block of a U-ViT with 65 tokens and heads of 64 channels; any other is left alone."""
    for module in model.modules():
        if type(module) is Attention and module.qkv.in_features == module.heads * TILE and module.scale is None:
            module.__class__ = FastAttention
        elif type(module) is PatchEmbed:
            module.__class__ = FusedPatchEmbed
        elif type(module) is nn.Conv2d and module.kernel_size == (3, 3) and module.padding == (1, 1):
            module.__class__ = FastConv


class FastAttention(Attention):
    def forward(self, x: Tensor) -> Tensor:
        if x.shape[1] != TOKENS:
            return super().forward(x)
        return self.proj(attention(self.qkv(x), self.heads))


class SmallLinear(nn.Linear):
    """A linear layer of a gate, too small for a matrix product."""

    def forward(self, x: Tensor) -> Tensor:
        return (x.to(self.weight.dtype)[..., None, :] * self.weight).sum(-1) + self.bias


class FastConv(nn.Conv2d):
    """A 3 x 3 convolution of few channels, in float32."""

    def forward(self, image: Tensor) -> Tensor:
        return _Convolution.apply(image.float(), self.weight.float()) + self.bias.float()[:, None, None]


def _neighbours(image: Tensor) -> Tensor:
    """(B, C, H, W) -> (B, C, H, W, 3, 3), zeros outside."""
    return F.pad(image, (1, 1, 1, 1)).unfold(2, 3, 1).unfold(3, 3, 1)


def _convolve(image: Tensor, weight: Tensor) -> Tensor:
    return (_neighbours(image)[:, None] * weight[:, :, None, None]).sum((2, 5, 6))


class _Convolution(torch.autograd.Function):
    """Sums of products that the compiler fuses; the gradient at the image is a convolution too."""

    @staticmethod
    def forward(ctx, image: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(image, weight)
        return _convolve(image, weight)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor]:
        image, weight = ctx.saved_tensors
        dweight = (_neighbours(image)[:, None] * grad[:, :, None, :, :, None, None]).sum((0, 3, 4))
        return _convolve(grad, weight.flip(2, 3).transpose(0, 1)), dweight


# ------------------------------------------------------------------------------------------------------------ attention

FORWARD = {"num_warps": 4, "launch_pdl": True}
BACKWARD = {"num_warps": 4, "launch_pdl": True}


@triton.jit
def _load(base, stride, D: tl.constexpr, N: tl.constexpr):  # noqa: N803
    """Rows 0..N-1 as a tile, and row N as a float32 vector."""
    row, column = tl.arange(0, N), tl.arange(0, D)
    return tl.load(base + row[:, None] * stride + column[None, :]), tl.load(base + N * stride + column).to(tl.float32)


@triton.jit
def _store(base, stride, tile, last, D: tl.constexpr, N: tl.constexpr):  # noqa: N803
    row, column = tl.arange(0, N), tl.arange(0, D)
    tl.store(base + row[:, None] * stride + column[None, :], tile.to(base.dtype.element_ty))
    tl.store(base + N * stride + column, last.to(base.dtype.element_ty))


@triton.jit
def _weights(q, q_last, k, k_last, scale):
    """Softmax of the scores: tile on tile (N, N), tile on last key (N,), last query on tile (N,) and on the last key."""
    scores = tl.dot(q, tl.trans(k)) * scale
    on_last = tl.sum(q.to(tl.float32) * k_last[None, :], 1) * scale
    top = tl.maximum(tl.max(scores, 1), on_last)
    scores, on_last = tl.exp(scores - top[:, None]), tl.exp(on_last - top)
    total = tl.sum(scores, 1) + on_last
    of_last = tl.sum(k.to(tl.float32) * q_last[None, :], 1) * scale
    itself = tl.sum(q_last * k_last, 0) * scale
    top_last = tl.maximum(tl.max(of_last, 0), itself)
    of_last, itself = tl.exp(of_last - top_last), tl.exp(itself - top_last)
    total_last = tl.sum(of_last, 0) + itself
    return scores / total[:, None], on_last / total, of_last / total_last, itself / total_last


@triton.jit
def _forward(qkv, out, scale, HEADS: tl.constexpr, D: tl.constexpr, N: tl.constexpr):  # noqa: N803
    begin()
    program = tl.program_id(0).to(tl.int64)
    image, head = program // HEADS, program % HEADS
    width: tl.constexpr = HEADS * D
    base = qkv + image * (N + 1) * 3 * width + head * D
    q, q_last = _load(base, 3 * width, D, N)
    k, k_last = _load(base + width, 3 * width, D, N)
    v, v_last = _load(base + 2 * width, 3 * width, D, N)
    p, on_last, of_last, itself = _weights(q, q_last, k, k_last, scale)
    mixed = tl.dot(p.to(v.dtype), v) + on_last[:, None] * v_last[None, :]
    mixed_last = tl.sum(of_last[:, None] * v.to(tl.float32), 0) + itself * v_last
    _store(out + image * (N + 1) * width + head * D, width, mixed, mixed_last, D, N)


@triton.jit
def _backward(qkv, grad, out, scale, HEADS: tl.constexpr, D: tl.constexpr, N: tl.constexpr):  # noqa: N803
    begin()
    program = tl.program_id(0).to(tl.int64)
    image, head = program // HEADS, program % HEADS
    width: tl.constexpr = HEADS * D
    offset = image * (N + 1) * 3 * width + head * D
    base, target = qkv + offset, out + offset
    q, q_last = _load(base, 3 * width, D, N)
    k, k_last = _load(base + width, 3 * width, D, N)
    v, v_last = _load(base + 2 * width, 3 * width, D, N)
    g, g_last = _load(grad + image * (N + 1) * width + head * D, width, D, N)
    p, on_last, of_last, itself = _weights(q, q_last, k, k_last, scale)

    g32 = g.to(tl.float32)
    dv = tl.dot(tl.trans(p.to(g.dtype)), g) + of_last[:, None] * g_last[None, :]
    dv_last = tl.sum(on_last[:, None] * g32, 0) + itself * g_last
    _store(target + 2 * width, 3 * width, dv, dv_last, D, N)

    dp, dp_on = tl.dot(g, tl.trans(v)), tl.sum(g32 * v_last[None, :], 1)
    dp_of, dp_itself = tl.sum(v.to(tl.float32) * g_last[None, :], 1), tl.sum(g_last * v_last, 0)
    mean, mean_last = tl.sum(p * dp, 1) + on_last * dp_on, tl.sum(of_last * dp_of, 0) + itself * dp_itself
    ds, ds_on = (p * (dp - mean[:, None]) * scale).to(q.dtype), on_last * (dp_on - mean) * scale
    ds_of, ds_itself = of_last * (dp_of - mean_last) * scale, itself * (dp_itself - mean_last) * scale

    dq = tl.dot(ds, k) + ds_on[:, None] * k_last[None, :]
    dq_last = tl.sum(ds_of[:, None] * k.to(tl.float32), 0) + ds_itself * k_last
    _store(target, 3 * width, dq, dq_last, D, N)
    dk = tl.dot(tl.trans(ds), q) + ds_of[:, None] * q_last[None, :]
    dk_last = tl.sum(ds_on[:, None] * q.to(tl.float32), 0) + ds_itself * q_last
    _store(target + width, 3 * width, dk, dk_last, D, N)


def attention_into(qkv: Tensor, out: Tensor, heads: int) -> None:
    """Write softmax(q k / 8) v of each head to out: (B * 65, 3 H 64) -> (B * 65, H 64), contiguous."""
    programs = qkv.numel() // (3 * TILE * TOKENS)
    _forward[(programs,)](qkv, out, TILE**-0.5, heads, TILE, TILE, **FORWARD)


def attention_backward_into(qkv: Tensor, grad: Tensor, out: Tensor, heads: int) -> None:
    """Write the gradient at qkv to out."""
    programs = qkv.numel() // (3 * TILE * TOKENS)
    _backward[(programs,)](qkv, grad, out, TILE**-0.5, heads, TILE, TILE, **BACKWARD)


@torch.library.custom_op("study::attention", mutates_args=())
def attention(qkv: Tensor, heads: int) -> Tensor:
    """(B, 65, 3 H 64) -> (B, 65, H 64)."""
    out = qkv.new_empty(*qkv.shape[:2], heads * TILE)
    attention_into(qkv.contiguous(), out, heads)
    return out


@torch.library.custom_op("study::attention_backward", mutates_args=())
def attention_backward(qkv: Tensor, grad: Tensor, heads: int) -> Tensor:
    qkv = qkv.contiguous()
    out = torch.empty_like(qkv)
    attention_backward_into(qkv, grad.contiguous(), out, heads)
    return out


@attention.register_fake
def _(qkv: Tensor, heads: int) -> Tensor:
    return qkv.new_empty(*qkv.shape[:2], heads * TILE)


@attention_backward.register_fake
def _(qkv: Tensor, _grad: Tensor, _heads: int) -> Tensor:
    return qkv.new_empty(qkv.shape)


def _save(ctx, inputs, output) -> None:  # noqa: ARG001
    ctx.save_for_backward(inputs[0])
    ctx.heads = inputs[1]


attention.register_autograd(
    lambda ctx, grad: (attention_backward(*ctx.saved_tensors, grad, ctx.heads), None), setup_context=_save
)
