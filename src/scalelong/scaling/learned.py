"""LS, learnable scaling: kappa_i = gate_i(GAP(x_i)), predicted per sample by a small network (Eq. 9 to 13).

Shapes: B batch, T tokens, C channels, N the gated size (T or C). Gates map pooled skips (B, N) to coefficients (B, N).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from scalelong.scaling.constant import Coefficient, Scaling, SkipSize

logger = logging.getLogger("scalelong")

ACTIVATIONS: Mapping[str, Callable[[], nn.Module]] = {"relu": nn.ReLU, "elu": nn.ELU, "mish": nn.Mish}


class SqueezeExcite(nn.Module):
    """module="se": sigmoid(zeta(p)), Eq. 10 and 11. Skips of d different sizes share one zeta of size N_min, each size
    with its own encoder to N_min and decoder back (Eq. 12 and 13)."""

    def __init__(self, sizes: Sequence[int], reduction: int, activation: str, start: float | None = None) -> None:
        super().__init__()
        smallest, distinct = min(sizes), sorted(set(sizes))
        self.zeta = _bottleneck(smallest, max(1, smallest // reduction), smallest, activation)
        self.encoders, self.decoders = nn.ModuleDict(), nn.ModuleDict()
        for size in distinct if len(distinct) > 1 else []:
            hidden = size // max(1, size // 4)  # N_i / r_i with r_i = floor(N_i / 4)
            self.encoders[str(size)] = _bottleneck(size, hidden, smallest, activation)
            self.decoders[str(size)] = _bottleneck(smallest, hidden, size, activation)
        outputs: list[Any] = list(self.decoders.values()) or [self.zeta]
        for network in outputs:
            _shift_bias(network[-1].bias, start)

    def forward(self, pooled: Tensor) -> Tensor:
        dtype: Any = self.zeta[0].weight.dtype  # float32 if activations are half precision but weights are not
        pooled = pooled.to(dtype)
        if not self.encoders:
            return torch.sigmoid(self.zeta(pooled))
        size = str(int(pooled.shape[1]))  # a tensor under torch.jit.trace
        return torch.sigmoid(self.decoders[size](self.zeta(self.encoders[size](pooled))))


class InstanceEnhance(nn.Module):
    """module="ie": sigmoid(w * p + b) with a scale and a shift per pooled value; starts at 1/2, like "se"."""

    def __init__(self, size: int, start: float | None = None) -> None:
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.zeros(size)), nn.Parameter(torch.zeros(size))
        _shift_bias(self.shift, start)

    def forward(self, pooled: Tensor) -> Tensor:
        return torch.sigmoid(self.scale * pooled + self.shift)


class LearnableKappa(nn.Module):
    """module="learnable": one parameter per skip, independent of the input; starts at 1 or `start`."""

    def __init__(self, start: float | None = None) -> None:
        super().__init__()
        self.kappa = nn.Parameter(torch.full((), 1.0 if start is None else start))

    def forward(self, pooled: Tensor) -> Tensor:
        return self.kappa.expand_as(pooled)


class TimeGate(nn.Module):
    """module="time": sigmoid(W1 act(W2 p)) of the skip's time token p (B, C), one coefficient per token."""

    def __init__(self, size: SkipSize, reduction: int, activation: str, start: float | None = None) -> None:
        super().__init__()
        self.zeta = _bottleneck(size.channels, max(1, size.channels // reduction), size.tokens or 0, activation)
        last: Any = self.zeta[-1]
        _shift_bias(last.bias, start)

    def forward(self, token: Tensor) -> Tensor:
        weight: Any = self.zeta[0].weight
        return torch.sigmoid(self.zeta(token.to(weight.dtype)))


def _bottleneck(inputs: int, hidden: int, outputs: int, activation: str) -> nn.Sequential:
    """zeta(x) = W1 act(W2 x) with biases (Eq. 11; Eq. 12 and 13 have the same form)."""
    return nn.Sequential(nn.Linear(inputs, hidden), ACTIVATIONS[activation](), nn.Linear(hidden, outputs))


def _shift_bias(bias: Tensor, start: float | None) -> None:
    """Set a bias so that its sigmoid starts around `start`; None keeps the initialization."""
    if start is not None:
        with torch.no_grad():
            bias += math.log(start / (1 - start))


class LearnedScaling(Scaling):
    """LS: pool each skip, predict its coefficients with gate number `gate_of[i]`, broadcast them.

    axis="tokens" averages over channels and gates tokens, as the paper does on transformers, for a fixed number of tokens.
    axis="channels" averages over positions and gates channels, at any resolution.
    axis="time" gates tokens by the time token of the skip instead of averages.
    """

    _checked = False  # frozen gates are reported once

    def __init__(self, sizes: Sequence[SkipSize], axis: str, gates: list[nn.Module], gate_of: list[int]) -> None:
        super().__init__(len(sizes), records=True)
        self.sizes, self.axis, self.gate_of = tuple(sizes), axis, tuple(gate_of)
        self.gates = nn.ModuleList(gates)

    def coefficient(self, index: int, skip: Tensor) -> Coefficient:
        if self.training and not self._checked and not torch.compiler.is_compiling():
            self._report_frozen(skip)
        size = self.sizes[index - 1]
        batch, channel = size.batch_dim, skip.ndim - 1 if size.channels_last else 1
        if self.axis in ("tokens", "time") and skip.shape[1 - batch] != size.tokens:
            given = f"{size.tokens} tokens, skip {index} has {skip.shape[1 - batch]}"
            raise ValueError(f"scaling.axis: the gates were built for {given}; pass axis='channels' for any resolution")
        gated = channel if self.axis == "channels" else 1 - batch
        averaged, transposed = [d for d in range(skip.ndim) if d not in (batch, gated)], gated < batch
        if self.axis == "time":
            pooled = skip.select(1 - batch, size.time_token or 0)  # (B, C)
        else:
            pooled = skip.mean(dim=averaged) if averaged else skip  # GAP: (B, N), or (N, B)
            pooled = pooled.t() if transposed else pooled
        kappa: Tensor = self.gates[self.gate_of[index - 1]](pooled).to(skip.dtype)
        self.record(index, kappa.mean())
        shape = [skip.shape[d] if d in (batch, gated) else 1 for d in range(skip.ndim)]
        return (kappa.t() if transposed else kappa).reshape(shape)

    def _report_frozen(self, skip: Tensor) -> None:
        """Warn once if other parameters are trained but the gates are frozen."""
        if skip.requires_grad:
            self._checked = True
            if not any(parameter.requires_grad for parameter in self.parameters()):
                unfreeze = "call model.scalelong.requires_grad_(True) before the optimizer is built to train them"
                logger.warning(
                    "scaling: the gates of %s are frozen while the model is trained; %s", self.config, unfreeze
                )


def learned_scaling(
    sizes: Sequence[SkipSize],
    shared: bool = True,
    reduction: int = 16,
    module: str = "se",
    activation: str = "relu",
    axis: str = "auto",
    start: float | None = None,
) -> LearnedScaling:
    """Build LS; with `shared`, skips of equal size share a gate. `start`: initial kappa (None: 1/2, or 1 for learnable)."""
    one_each = list(range(len(sizes)))
    if module == "learnable":  # independent of the input: any number of tokens
        return LearnedScaling(sizes, "channels", [LearnableKappa(start) for _ in sizes], one_each)
    if module == "time":
        if any(size.time_token is None or not size.tokens for size in sizes):
            reason = "the skips of this model hold no time token, or it is not known where"
            raise ValueError(f"scaling.module: 'time' reads a token of scalelong.UViT; {reason}; use module='se'")
        count = 1 if shared else len(sizes)
        gates: list[nn.Module] = [TimeGate(size, reduction, activation, start) for size in sizes[:count]]
        return LearnedScaling(sizes, "time", gates, [0] * len(sizes) if shared else one_each)
    if axis == "auto":  # the paper's choice: tokens on transformers, channels on convolutional networks
        axis = "tokens" if all(size.channels_last and size.tokens for size in sizes) else "channels"
    if axis == "tokens" and not all(size.tokens and size.channels_last for size in sizes):
        raise ValueError("scaling.axis: 'tokens' needs a transformer with a fixed number of them; use axis='channels'")
    gated = [(size.tokens or 0) if axis == "tokens" else size.channels for size in sizes]
    if module == "se":
        groups, gate_of = ([gated], [0] * len(sizes)) if shared else ([[size] for size in gated], one_each)
        return LearnedScaling(
            sizes, axis, [SqueezeExcite(each, reduction, activation, start) for each in groups], gate_of
        )
    distinct = sorted(set(gated)) if shared else gated
    gate_of = [distinct.index(size) for size in gated] if shared else one_each
    return LearnedScaling(sizes, axis, [InstanceEnhance(size, start) for size in distinct], gate_of)
