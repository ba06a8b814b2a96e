"""A transformer block of the U-ViT as two operations, forward and backward, made of the kernels in products.py.

The products of a block take bfloat16 copies of its weights, as under autocast; the path around them keeps the type it has.
The block's parameters are two tensors, `flat` and `norms`, in the order in which `Weights` lays them out:

    flat   qkv.weight, proj.weight, proj.bias, fc1.weight, fc1.bias, fc2.weight, fc2.bias
    norms  norm1.weight, norm1.bias, norm2.weight, norm2.bias

Of the hidden layer only the values before GELU are kept for the backward pass, of the norms only mean and deviation.
"""

from __future__ import annotations

from dataclasses import dataclass

import fast_uvit
import products
import torch
import triton
from fast_uvit import TILE, TOKENS, attention_backward_into, attention_into
from torch import Tensor, nn
from triton.tools.tensor_descriptor import TensorDescriptor
from weights import Weights

from scalelong.backbones.uvit import Block

WIDTHS = (128, 256)  # tiles span whole rows


@dataclass(frozen=True)
class Tiling:
    """Rows, columns (of those that do not span the width) and inner size of a tile; warps and stages of its loop."""

    rows: int = 128
    columns: int = 128
    inner: int = 64
    warps: int = 8
    stages: int = 3

    def options(self) -> dict[str, int]:
        return {"num_warps": self.warps, "num_stages": self.stages}


TILINGS = {
    "linear": Tiling(),  # qkv
    "linear_back": Tiling(),  # proj
    "gelu": Tiling(),
    "gelu_backward": Tiling(),
    "add_norm": Tiling(),
    "add": Tiling(),
    "norm_backward": Tiling(),
    "weights": Tiling(),
}
PARTS = 5  # of the rows, in gradients of weights: fills an H200 with 120 tiles at D = 256 and batch 128


def matrices(flat: Tensor, width: int) -> tuple[Tensor, ...]:
    """The views of `flat` as parameters."""
    d = width
    shapes = ((3 * d, d), (d, d), (d,), (4 * d, d), (4 * d,), (d, 4 * d), (d,))
    found, start = [], 0
    for shape in shapes:
        size = shape[0] * shape[-1] if len(shape) == 2 else shape[0]
        found.append(flat[start : start + size].view(shape))
        start += size
    return tuple(found)


def _tiles(tensor: Tensor, rows: int, columns: int) -> TensorDescriptor:
    return TensorDescriptor(tensor, list(tensor.shape), list(tensor.stride()), [rows, columns])


def _linear(a: Tensor, w: Tensor, t: Tiling, transposed: bool) -> Tensor:
    """a w^T if transposed, else a w."""
    (rows, inner), columns = a.shape, w.shape[0 if transposed else 1]
    bn = min(t.columns, columns)
    right = _tiles(w, bn, t.inner) if transposed else _tiles(w, t.inner, bn)
    out = a.new_empty(rows, columns)
    grid = (triton.cdiv(columns, bn), triton.cdiv(rows, t.rows))
    products._linear[grid](
        _tiles(a, t.rows, t.inner), right, out, rows, columns, inner, t.rows, bn, t.inner, transposed, **t.options()
    )
    return out


def _linear_gelu(a: Tensor, w: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """a w^T + bias, and GELU of it."""
    t, (rows, inner), columns = TILINGS["gelu"], a.shape, len(w)
    pre, out = a.new_empty(rows, columns), a.new_empty(rows, columns)
    products._linear_gelu[(columns // t.columns, triton.cdiv(rows, t.rows))](
        _tiles(a, t.rows, t.inner), _tiles(w, t.columns, t.inner), bias, pre, out, rows, columns, inner,
        t.rows, t.columns, t.inner, **t.options(),
    )  # fmt: skip
    return pre, out


def _linear_add(a: Tensor, w: Tensor, bias: Tensor, x: Tensor, gain: Tensor, shift: Tensor, n: Tensor, stats: Tensor,
                norm: bool) -> Tensor:  # fmt: skip
    """x + a w^T + bias; with norm, also its LayerNorm into n."""
    t, (rows, inner), d = TILINGS["add_norm" if norm else "add"], a.shape, len(w)
    out = torch.empty_like(x)
    products._linear_add[(triton.cdiv(rows, t.rows),)](
        _tiles(a, t.rows, t.inner), _tiles(w, d, t.inner), bias, x, out, gain, shift, n, stats, rows, inner,
        d, t.rows, t.inner, norm, **t.options(),
    )  # fmt: skip
    return out


def forward(x: Tensor, flat: Tensor, norms: Tensor, heads: int) -> tuple[Tensor, ...]:
    """The output, and what the backward pass needs: qkv, attention, middle, values before GELU, statistics of the norms."""
    d = x.shape[-1]
    qkv_w, proj_w, proj_b, fc1_w, fc1_b, fc2_w, fc2_b = matrices(flat, d)
    gain1, shift1, gain2, shift2 = norms.view(4, d)
    rows = x.numel() // d
    x = x.contiguous().view(rows, d)
    n, stats = flat.new_empty(rows, d), norms.new_empty(4, rows)
    products._norm[(triton.cdiv(rows, 16),)](x, gain1, shift1, n, stats, rows, d, 16, num_warps=4)
    qkv = _linear(n, qkv_w, TILINGS["linear"], transposed=True)
    mixed = flat.new_empty(rows, d)
    attention_into(qkv, mixed, heads)
    middle = _linear_add(mixed, proj_w, proj_b, x, gain2, shift2, n, stats[2:], norm=True)
    pre, hidden = _linear_gelu(n, fc1_w, fc1_b)
    out = _linear_add(hidden, fc2_w, fc2_b, middle, gain2, shift2, n, stats, norm=False)
    return out, qkv, mixed, middle, pre, stats


def _norm_backward(
    g: Tensor, w: Tensor, x: Tensor, stats: Tensor, gain: Tensor, shift: Tensor, up: Tensor, sums: Tensor, first: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradient at x, the same in low precision (with norm 2 only), LayerNorm(x)."""
    t, (rows, inner), d = TILINGS["norm_backward"], g.shape, w.shape[1]
    dx, n, biases = torch.empty_like(x), g.new_empty(rows, d), first == 8 * d
    low = dx if dx.dtype == g.dtype or not biases else g.new_empty(rows, d)
    products._norm_backward[(triton.cdiv(rows, t.rows),)](
        _tiles(g, t.rows, t.inner), _tiles(w, t.inner, d), x, stats, gain, shift, up, dx, low, n, sums,
        rows, first, 10 * d, inner, d, t.rows, t.inner, biases, **t.options(),
    )  # fmt: skip
    return dx, low, n


def backward(
    dy: Tensor, x: Tensor, flat: Tensor, norms: Tensor, qkv: Tensor, mixed: Tensor, middle: Tensor, pre: Tensor,
    stats: Tensor, heads: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients at x, flat and norms."""
    d = x.shape[-1]
    qkv_w, proj_w, _, fc1_w, _, fc2_w, _ = matrices(flat, d)
    gain1, shift1, gain2, shift2 = norms.view(4, d)
    rows = x.numel() // d
    x, dy = x.contiguous().view(rows, d), dy.contiguous().view(rows, d)
    dy_low = dy.to(flat.dtype)
    t = TILINGS["gelu_backward"]
    if t.rows != TILINGS["norm_backward"].rows:
        raise ValueError("sums over rows are shared: gelu_backward and norm_backward need tiles of as many rows")
    tiles = triton.cdiv(rows, t.rows)
    sums = norms.new_empty(tiles, 10 * d)
    dpre, hidden = torch.empty_like(pre), torch.empty_like(pre)
    products._linear_gelu_backward[(4 * d // t.columns, tiles)](
        _tiles(dy_low, t.rows, t.inner), _tiles(fc2_w, t.inner, t.columns), pre, dpre, hidden, sums,
        rows, 4 * d, d, 10 * d, d, t.rows, t.columns, t.inner, **t.options(),
    )  # fmt: skip
    dmiddle, low, n2 = _norm_backward(dpre, fc1_w, middle, stats[2:], gain2, shift2, dy, sums, 8 * d)
    dmixed = _linear(low, proj_w, TILINGS["linear_back"], transposed=False)
    dqkv = torch.empty_like(qkv)
    attention_backward_into(qkv, dmixed, dqkv, heads)
    dx, _, n1 = _norm_backward(dqkv, qkv_w, x, stats, gain1, shift1, dmiddle, sums, 6 * d)
    t = TILINGS["weights"]
    parts = norms.new_empty(PARTS, 12 * d * d)
    strip, steps = min(t.rows, d), triton.cdiv(rows, t.inner * PARTS)
    pairs = ((dqkv, n1), (low, mixed), (dpre, n2), (dy_low, hidden))
    operands = [_tiles(tensor, t.inner, size) for pair in pairs for tensor, size in zip(pair, (strip, d), strict=True)]
    products._weight_gradients[(12 * (d // strip) * PARTS,)](
        *operands, parts, steps, d, strip, t.inner, **t.options()
    )
    dflat, dnorms = torch.empty_like(flat), torch.empty_like(norms)
    products._gather[(12 * d * d // 1024 + 10,)](parts, sums, dflat, dnorms, tiles, PARTS, d, 1024, 16, num_warps=4)
    return dx, dflat, dnorms


# ----------------------------------------------------------------------------------------------------- as an operation


@torch.library.custom_op("study::block", mutates_args=())
def block(
    x: Tensor, flat: Tensor, norms: Tensor, heads: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(B, T, D) -> the output of the block (B, T, D), then what is kept for the backward pass."""
    out, *kept = forward(x, flat, norms, heads)
    return (out.view(x.shape), *kept)


@block.register_fake
def _(x: Tensor, flat: Tensor, norms: Tensor, heads: int) -> tuple[Tensor, ...]:  # noqa: ARG001
    d, rows = x.shape[-1], x.shape[0] * x.shape[1]
    kept = flat.new_empty(rows, 3 * d), flat.new_empty(rows, d), x.new_empty(rows, d), flat.new_empty(rows, 4 * d)
    return x.new_empty(x.shape), *kept, norms.new_empty(4, rows)


@torch.library.custom_op("study::block_backward", mutates_args=())
def block_backward(
    dy: Tensor, x: Tensor, flat: Tensor, norms: Tensor, qkv: Tensor, mixed: Tensor, middle: Tensor, pre: Tensor,
    stats: Tensor, heads: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    dx, dflat, dnorms = backward(dy, x, flat, norms, qkv, mixed, middle, pre, stats, heads)
    return dx.view(x.shape), dflat, dnorms


@block_backward.register_fake
def _(dy, x, flat, norms, *_kept):  # noqa: ARG001
    return x.new_empty(x.shape), flat.new_empty(flat.shape), norms.new_empty(norms.shape)


def _keep(ctx, inputs, output) -> None:
    ctx.save_for_backward(*inputs[:3], *output[1:])
    ctx.heads = inputs[3]


def _differentiate(ctx, dy, *_unused):
    return (*block_backward(dy, *ctx.saved_tensors, ctx.heads), None)


block.register_autograd(_differentiate, setup_context=_keep)


class FastBlock(Block):
    """A block whose parameters are read as two flat tensors; gradients go to these."""

    flat: Tensor
    norms: Tensor

    def forward(self, x: Tensor, skip: Tensor | None = None) -> Tensor:
        if self.skip_linear is not None:
            x = self.skip_linear(x, skip)
        return block(x, self.flat, self.norms, self.attn.heads)[0]


def speed_up(model: nn.Module, weights: Weights) -> None:
    """Use the kernels wherever they can compute what the network does; the rest is left alone."""
    fast_uvit.speed_up(model)
    if model.num_tokens != TOKENS:
        return
    for module in model.modules():
        if isinstance(module, Block) and _supported(module):
            inner = (module.attn.qkv.weight, *module.attn.proj.parameters(), *module.mlp.parameters())
            module.flat = weights.leaf(inner)
            module.norms = weights.leaf([*module.norm1.parameters(), *module.norm2.parameters()])
            module.__class__ = FastBlock


def _supported(module: Block) -> bool:
    attn, d = module.attn, module.norm1.weight.numel()
    branches = (attn, module.mlp, attn.qkv, attn.proj, module.norm1, module.norm2)
    hooked = any(part._forward_hooks or part._forward_pre_hooks for part in branches)
    sizes = d in WIDTHS and d == attn.heads * TILE and module.mlp.fc1.out_features == 4 * d
    return sizes and not hooked and attn.qkv.bias is None
