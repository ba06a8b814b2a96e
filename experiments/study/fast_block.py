"""A transformer block of the U-ViT, with the join of its skip, as two operations made of the kernels in products.py.

Products take bfloat16 copies of weights and values, as under autocast; the path around them keeps the type it has. The
block's parameters are two tensors, in the order in which `Weights` lays them out:

    flat   skip_linear.weight and .bias in an out-block, qkv.weight, proj.weight, proj.bias, fc1.weight, fc1.bias,
           fc2.weight, fc2.bias
    norms  norm1.weight, norm1.bias, norm2.weight, norm2.bias

The backward pass computes the outputs of the norms again; of the hidden layer it needs the values behind GELU and the slope.

Shapes: M rows (images x tokens), D width.
"""

from __future__ import annotations

import fast_uvit
import products
import tilings
import torch
import triton
from fast_uvit import TILE, TOKENS, attention_backward_into, attention_into
from tilings import TILINGS, Tiling, tiling
from torch import Tensor, nn
from triton.tools.tensor_descriptor import TensorDescriptor
from weights import Weights

from scalelong.backbones import fused
from scalelong.backbones.uvit import Block, SkipLinear
from scalelong.skips.hooks import is_scaled, scaling_of
from scalelong.skips.long_skip import ATTACHMENT, scale_output

WIDTHS = (128, 256)  # tiles span whole rows


def matrices(flat: Tensor, d: int, joins: bool) -> tuple[Tensor, ...]:
    """The parameters in `flat`, views."""
    shapes = [(d, 2 * d), (1, d)] if joins else []
    shapes += [(3 * d, d), (d, d), (1, d), (4 * d, d), (1, 4 * d), (d, 4 * d), (1, d)]
    parts = flat.split([rows * columns for rows, columns in shapes])
    return tuple(part.view(shape) for part, shape in zip(parts, shapes, strict=True))


def _tiles(tensor: Tensor, rows: int, columns: int) -> TensorDescriptor:
    return TensorDescriptor(tensor, list(tensor.shape), list(tensor.stride()), [rows, columns])


def _linear(a: Tensor, w: Tensor, t: Tiling, transposed: bool) -> Tensor:
    """a w^T if transposed, else a w."""
    (rows, inner), columns = a.shape, w.shape[0 if transposed else 1]
    bn = min(t.columns, columns)
    right = _tiles(w, bn, t.inner) if transposed else _tiles(w, t.inner, bn)
    out = a.new_empty(rows, columns)
    products._linear[columns // bn, triton.cdiv(rows, t.rows)](
        _tiles(a, t.rows, t.inner), right, out, rows, columns, inner, t.rows, bn, t.inner, transposed, **t.options
    )
    return out


def _low(x: Tensor, like: Tensor) -> Tensor:
    """x in the type of the weights."""
    return x if x.dtype == like.dtype else _scaled(x, like, None, 1.0)


def _scaled(x: Tensor, like: Tensor, coefficients: Tensor | None, factor: float) -> Tensor:
    """x times a number, or times one number per row, in the type of the weights."""
    (rows, d), out = x.shape, like.new_empty(x.shape)
    gated = coefficients is not None
    products._scale[(triton.cdiv(rows, 16),)](
        x, coefficients if gated else x, out, factor, rows, d, 16, gated, num_warps=4, launch_pdl=True
    )
    return out


# -------------------------------------------------------------------------------------------------------------- forward


def forward(
    x: Tensor, flat: Tensor, norms: Tensor, heads: int, skip: Tensor | None, coefficients: Tensor | None, factor: float,
    keep: bool = True,
) -> tuple[Tensor, ...]:  # fmt: skip
    """The output, then with `keep` what the backward pass needs.

    That is: qkv, attention, middle, hidden layer, slope of its GELU, statistics of the norms; with a skip also the scaled
    skip and the output of the join.
    """
    (rows, d), joined = x.shape, ()
    gain1, shift1, gain2, shift2 = norms.view(4, d)
    *join, qkv_w, proj_w, proj_b, fc1_w, fc1_b, fc2_w, fc2_b = matrices(flat, d, skip is not None)
    n, stats = flat.new_empty(rows, d), norms.new_empty(4, rows)

    def norm(x: Tensor, gain: Tensor, shift: Tensor, stats: Tensor) -> None:
        """LayerNorm(x) into n."""
        products._norm[(triton.cdiv(rows, 16),)](x, gain, shift, n, stats, rows, d, 16, num_warps=4, launch_pdl=True)

    if skip is None:
        norm(x, gain1, shift1, stats)
    else:
        t = tiling("join", flat)
        unscaled = not keep and coefficients is None and factor == 1.0
        scaled = _low(skip, flat) if unscaled else _scaled(skip, flat, coefficients, factor)
        out, bn = flat.new_empty(rows, d), min(t.columns, d)
        pair = (_tiles(_low(x, flat), t.rows, t.inner), _tiles(scaled, t.rows, t.inner))
        products._join[d // bn, triton.cdiv(rows, t.rows)](
            *pair, _tiles(join[0], bn, t.inner), join[1], out, gain1, shift1, n, stats, rows,
            d, t.rows, bn, t.inner, bn == d, **t.options,
        )  # fmt: skip
        if bn < d:
            norm(out, gain1, shift1, stats)
        x, joined = out, (scaled, out)
    qkv = _linear(n, qkv_w, tiling("qkv", flat), transposed=True)
    mixed = flat.new_empty(rows, d)
    attention_into(qkv, mixed, heads)

    def add(a: Tensor, w: Tensor, bias: Tensor, x: Tensor, t: Tiling, before_norm: bool) -> Tensor:
        """x + a w^T + bias; where a norm follows and the tile spans whole rows, also that, into n."""
        out, bn = torch.empty_like(x), min(t.columns, d)
        products._linear_add[d // bn, triton.cdiv(rows, t.rows)](
            _tiles(a, t.rows, t.inner), _tiles(w, bn, t.inner), bias, x, out, gain2, shift2, n, stats[2:], rows, d,
            a.shape[1], t.rows, bn, t.inner, before_norm and bn == d, **t.options,
        )  # fmt: skip
        if before_norm and bn < d:
            norm(out, gain2, shift2, stats[2:])
        return out

    middle = add(mixed, proj_w, proj_b, x, tiling("proj", flat), before_norm=True)
    t, hidden = tiling("fc1", flat), flat.new_empty(rows, 4 * d)
    slope = torch.empty_like(hidden) if keep else hidden
    products._linear_gelu[4 * d // t.columns, triton.cdiv(rows, t.rows)](
        _tiles(n, t.rows, t.inner), _tiles(fc1_w, t.columns, t.inner), fc1_b, hidden, slope, rows, 4 * d, d,
        t.rows, t.columns, t.inner, keep, **t.options,
    )  # fmt: skip
    out = add(hidden, fc2_w, fc2_b, middle, tiling("fc2", flat), before_norm=False)
    return (out, qkv, mixed, middle, hidden, slope, stats, *joined) if keep else (out,)


# ------------------------------------------------------------------------------------------------------------- backward


def backward(
    dy: Tensor, x: Tensor, flat: Tensor, norms: Tensor, heads: int, skip: Tensor | None, coefficients: Tensor | None,
    factor: float, qkv: Tensor, mixed: Tensor, middle: Tensor, hidden: Tensor,
    slope: Tensor, stats: Tensor, *joined: Tensor,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Gradients at x, flat, norms; with a skip also at the skip and at the coefficients (of no meaning without them)."""
    rows, d = x.shape
    gain1, shift1, gain2, shift2 = norms.view(4, d)
    *join, qkv_w, proj_w, _, fc1_w, _, fc2_w, _ = matrices(flat, d, skip is not None)
    dy_low, width = _low(dy, flat), 11 * d
    tiles = {key: triton.cdiv(rows, TILINGS[key].rows) for key in ("fc2_backward", "norm_backward", "join_backward")}
    sums = norms.new_empty(max(tiles.values()), width)

    t, dpre = tiling("fc2_backward", flat), torch.empty_like(slope)
    products._gelu_backward[4 * d // t.columns, tiles["fc2_backward"]](
        _tiles(dy_low, t.rows, t.inner), _tiles(fc2_w, t.inner, t.columns), slope, dpre, sums,
        rows, 4 * d, d, width, d, t.rows, t.columns, t.inner, **t.options,
    )  # fmt: skip

    def norm_backward(
        g: Tensor, w: Tensor, x: Tensor, stats: Tensor, gain: Tensor, shift: Tensor, up: Tensor, second: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradient at x, for norm 2 also in low precision; and LayerNorm(x)."""
        dn = _linear(g, w, tiling("fc1_backward" if second else "qkv_backward", flat), transposed=False)
        t, dx, n = TILINGS["norm_backward"], torch.empty_like(x), torch.empty_like(mixed)
        low = torch.empty_like(n) if second and dx.dtype != n.dtype else dx
        products._norm_backward[(tiles["norm_backward"],)](
            dn, x, stats, gain, shift, up, dx, low, n, sums, rows, (8 if second else 6) * d, width,
            d, t.inner, t.rows // t.inner, second, **t.options,
        )  # fmt: skip
        return dx, low, n

    dmiddle, dmiddle_low, n2 = norm_backward(dpre, fc1_w, middle, stats[2:], gain2, shift2, dy, second=True)
    dmixed, dqkv = _linear(dmiddle_low, proj_w, tiling("proj_backward", flat), transposed=False), torch.empty_like(qkv)
    attention_backward_into(qkv, dmixed, dqkv, heads)
    first = x if skip is None else joined[1]
    dx, _, n1 = norm_backward(dqkv, qkv_w, first, stats, gain1, shift1, dmiddle, second=False)

    found: tuple[Tensor, ...] = ()
    pairs = [(dqkv, n1), (dmiddle_low, mixed), (dpre, n2), (dy_low, hidden)]
    if skip is not None:
        t, g, gated = tiling("join_backward", flat), dx, coefficients is not None
        dx, dskip, dcoefficients = torch.empty_like(x), torch.empty_like(skip), norms.new_empty(rows)
        products._join_backward[tiles["join_backward"], 2](
            _tiles(g, t.rows, t.inner), _tiles(join[0], t.inner, d), g, skip, coefficients if gated else dcoefficients,
            dx, dskip, dcoefficients, sums, factor, rows, 10 * d, width, d, t.rows, t.inner, gated, **t.options,
        )  # fmt: skip
        found = (dskip, dcoefficients)
        pairs += [(g, _low(x, flat)), (g, joined[0])]

    t, count = tiling("weights", flat), tilings.PARTS[skip is not None]
    strip, steps = min(t.rows, d), triton.cdiv(rows, t.inner * count)
    size, number = (12 + len(join)) * d * d, (12 + len(join)) * (d // strip)
    parts = norms.new_empty(count, size)
    operands = [each for g, a in pairs for each in (_tiles(g, t.inner, strip), _tiles(a, t.inner, d))]
    operands = [*operands[:10], operands[11]] if join else [*operands, *operands[:2], operands[1]]  # those are not read
    products._weight_gradients[(number * count,)](*operands, parts, size, steps, d, strip, t.inner, number, **t.options)
    dflat, dnorms = torch.empty_like(flat), torch.empty_like(norms)
    products._gather[(size // 1024 + (10 + bool(join)) * d // 32,)](
        parts, sums, dflat, dnorms, size, width, 2 * d * d + d if join else 0, *tiles.values(),
        len(sums), count, d, 1024, 64, 32, num_warps=4, launch_pdl=True,
    )  # fmt: skip
    return dx, dflat, dnorms, *found


# -------------------------------------------------------------------------------------------------------- as operations


@torch.library.custom_op("study::block", mutates_args=())
def block(
    x: Tensor, flat: Tensor, norms: Tensor, heads: int, skip: Tensor | None, coefficients: Tensor | None, factor: float,
    keep: bool,
) -> list[Tensor]:  # fmt: skip
    """(M, D) -> the output of the block (M, D), then with `keep` what the backward pass needs."""
    skip = None if skip is None else skip.contiguous()
    return list(forward(x.contiguous(), flat, norms, heads, skip, coefficients, factor, keep))


@block.register_fake
def _(x, flat, norms, heads, skip, coefficients, factor, keep):  # noqa: ARG001
    rows, d = x.shape
    path = x if skip is None else flat
    if not keep:
        return [path.new_empty(rows, d)]
    kept = [like.new_empty(rows, n * d) for like, n in ((flat, 3), (flat, 1), (path, 1), (flat, 4), (flat, 4))]
    joined = [] if skip is None else [flat.new_empty(rows, d) for _ in range(2)]
    return [path.new_empty(rows, d), *kept, norms.new_empty(4, rows), *joined]


@torch.library.custom_op("study::block_backward", mutates_args=())
def block_backward(
    dy: Tensor, x: Tensor, flat: Tensor, norms: Tensor, heads: int, skip: Tensor | None, coefficients: Tensor | None,
    factor: float, kept: list[Tensor],
) -> list[Tensor]:  # fmt: skip
    skip = None if skip is None else skip.contiguous()
    return list(backward(dy.contiguous(), x.contiguous(), flat, norms, heads, skip, coefficients, factor, *kept))


@block_backward.register_fake
def _(dy, x, flat, norms, heads, skip, coefficients, factor, kept):  # noqa: ARG001
    found = [] if skip is None else [skip.new_empty(skip.shape), norms.new_empty(len(x))]
    return [x.new_empty(x.shape), flat.new_empty(flat.shape), norms.new_empty(norms.shape), *found]


def _keep(ctx, inputs, output) -> None:
    x, flat, norms, ctx.heads, skip, coefficients, ctx.factor, _ = inputs
    ctx.save_for_backward(x, flat, norms, skip, coefficients, *output[1:])


def _differentiate(ctx, grads):
    x, flat, norms, skip, coefficients, *kept = ctx.saved_tensors
    found = block_backward(grads[0], x, flat, norms, ctx.heads, skip, coefficients, ctx.factor, kept)
    dskip, dcoefficients = (*found[3:], None, None)[:2]
    return *found[:3], None, dskip, None if coefficients is None else dcoefficients.to(coefficients.dtype), None, None


block.register_autograd(_differentiate, setup_context=_keep)


class DeferredJoin(SkipLinear):
    """Returns its inputs, the coefficient of a hook among them: the block computes the join."""

    def forward(self, x, skip, coefficient=1.0):
        return x, skip, coefficient


class FastBlock(Block):
    """A block whose parameters are read as two flat tensors; gradients go to these."""

    flat: Tensor
    norms: Tensor

    def forward(self, x: Tensor, skip: Tensor | None = None) -> Tensor:
        shape, coefficients, factor = x.shape, None, 1.0
        if self.skip_linear is not None:
            x, skip, factor = self.skip_linear(x, skip)
            if isinstance(factor, Tensor):
                if factor.ndim == 0 or factor.shape[-1] == 1:
                    coefficients = factor.expand(*shape[:2], 1).reshape(-1).contiguous()
                else:
                    skip = skip * factor
                factor = 1.0
            skip = skip.flatten(0, 1)
        keep, flat, x = self.flat.requires_grad, self.scaled_flat(), x.flatten(0, 1)
        return block(x, flat, self.norms, self.attn.heads, skip, coefficients, factor, keep)[0].view(shape)

    def scaled_flat(self) -> Tensor:
        """`flat`; if a method scales the outputs of attention and MLP, with their last layers scaled instead."""
        attachment = vars(self.attn).get(ATTACHMENT)
        if attachment is None:
            return self.flat
        d = self.attn.proj.in_features
        proj, fc1, fc2 = d * d + d, 4 * d * d + 4 * d, 4 * d * d + d
        first, proj, fc1, fc2 = self.flat.split([len(self.flat) - proj - fc1 - fc2, proj, fc1, fc2])
        proj, fc2 = (
            attachment.scaling.scale_branch(attachment.block, part.float()).to(part.dtype) for part in (proj, fc2)
        )
        return torch.cat([first, proj, fc1, fc2])


def speed_up(model: nn.Module, weights: Weights) -> None:
    """Use the kernels wherever they can compute what the network does; the rest is left alone."""
    fast_uvit.speed_up(model)
    for module in scaling_of(model).modules() if is_scaled(model) else ():
        if type(module) is nn.Linear:
            module.__class__ = fast_uvit.SmallLinear
    if model.num_tokens != TOKENS:
        if weights.low.dtype == torch.bfloat16:
            fused.for_training(model)
        return
    for module in list(model.modules()):
        if isinstance(module, Block) and _supported(module):
            join = () if module.skip_linear is None else tuple(module.skip_linear.parameters())
            inner = (*join, *module.attn.parameters(), *module.mlp.parameters())
            module.flat = weights.leaf(inner)
            module.norms = weights.leaf([*module.norm1.parameters(), *module.norm2.parameters()])
            module.__class__ = FastBlock
            if join:
                module.skip_linear.__class__ = DeferredJoin


def _supported(module: Block) -> bool:
    attn, d = module.attn, module.norm1.weight.numel()
    inner = (attn.qkv, attn.proj, module.mlp.fc1, module.mlp.fc2, module.norm1, module.norm2)
    hooked = any(part._forward_hooks or part._forward_pre_hooks for part in inner)
    hooked |= any(branch._forward_pre_hooks or not _is_plain_or_scaled(branch) for branch in (attn, module.mlp))
    sizes = d in WIDTHS and d == attn.heads * TILE and module.mlp.fc1.out_features == 4 * d
    return sizes and not hooked and attn.qkv.bias is None and attn.scale is None


def _is_plain_or_scaled(branch: nn.Module) -> bool:
    """True if no forward hook does anything but scale what a residual block adds to its input."""
    return all(getattr(hook, "func", hook) is scale_output for hook in branch._forward_hooks.values())
