"""Flat weights, AdamW with both averages as one pass over them, and Muon beside it."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from scalelong.runs.settings import OptimizerSettings

BETAS, EPS, WEIGHT_DECAY = (0.99, 0.999), 1e-8, 0.03
EMA_DECAY, SHORT_DECAY = 0.9999, 0.999


class Weights:
    """A network's parameters in two flat tensors: float32 `master`, and `low`, what matrix products and convolutions use.

    Parameters become views: of `low` in linear layers and convolutions, of `master` everywhere else.
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype) -> None:
        kinds = (nn.Linear, nn.Conv2d)
        products = {id(p) for m in model.modules() if isinstance(m, kinds) for p in m.parameters(recurse=False)}
        self.parameters = sorted(model.parameters(), key=lambda p: id(p) not in products)
        sizes = [-(-p.numel() // 64) * 64 for p in self.parameters]  # every tensor starts at an aligned address
        device = self.parameters[0].device
        self.master = torch.zeros(sum(sizes), device=device)
        low_size = sum(s for p, s in zip(self.parameters, sizes, strict=True) if id(p) in products)
        self.low = torch.zeros(low_size, dtype=dtype, device=device)
        self.padding, self.places, start = [], {}, 0
        for parameter, size in zip(self.parameters, sizes, strict=True):
            place = self.places[id(parameter)] = slice(start, start + parameter.numel())
            self.master[place].copy_(parameter.detach().flatten())
            used = self.low if id(parameter) in products else self.master
            parameter.data = used[place].view(parameter.shape)
            self.padding.append(used.new_zeros(size - parameter.numel()))
            start += size
        self.leaves: list[Tensor] = list(
            self.parameters
        )  # what gradients are taken of, in the order of the flat tensors
        self.load(self.master.clone())

    def leaf(self, parameters: Sequence[Tensor]) -> Tensor:
        """One flat tensor in place of neighbouring parameters: gradients are then taken of it."""
        first = next(i for i, known in enumerate(self.leaves) if known is parameters[0])
        place = slice(first, first + len(parameters))
        size = sum(parameter.numel() for parameter in parameters)
        neighbours = all(a is b for a, b in zip(self.leaves[place], parameters, strict=True))
        if not neighbours or any(len(padding) for padding in self.padding[place]):
            raise ValueError("parameters: must be neighbours in the flat tensors, without padding between them")
        flat = torch.as_strided(parameters[0].detach(), (size,), (1,)).requires_grad_(parameters[0].requires_grad)
        self.leaves[place] = [flat]
        self.padding[place] = [self.padding[first]]
        return flat

    @torch.no_grad()
    def load(self, values: Tensor) -> None:
        """Set all parameters from a flat float32 tensor."""
        self.master.copy_(values)
        self.low.copy_(self.master[: len(self.low)])

    def flatten(self, gradients: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Gradients of all parameters as two flat tensors: those of `low`, in its dtype, and the rest."""
        flat: dict[bool, list[Tensor]] = {True: [], False: []}
        count = 0
        for gradient, padding in zip(gradients, self.padding, strict=True):
            flat[count < len(self.low)] += [gradient.reshape(-1), padding]
            count += gradient.numel() + padding.numel()
        return torch.cat(flat[True]), torch.cat(flat[False])


def adamw(master, low, gradient, m, v, ema, short, step, lr, warmup, sizes=1.0, update=0.0):
    """AdamW on flat tensors, both EMAs and the low-precision copy: one pass over memory once compiled.

    sizes: what Adam's step of each weight is multiplied by. update: what to add to the weights, at rate 1.
    """
    gradient = gradient.float()
    rate = lr * (step / warmup).clamp(max=1.0)
    m.lerp_(gradient, 1 - BETAS[0])
    v.lerp_(gradient.square(), 1 - BETAS[1])
    m_hat = m / -torch.expm1(step * math.log(BETAS[0]))
    v_hat = v / -torch.expm1(step * math.log(BETAS[1]))
    master.copy_(master * (1 - rate * WEIGHT_DECAY) - rate * (sizes * m_hat / (v_hat.sqrt() + EPS) - update))
    ema.lerp_(master, 1 - ((1 + step) / (10 + step)).clamp(max=EMA_DECAY))
    short.lerp_(master, 1 - ((1 + step) / (10 + step)).clamp(max=SHORT_DECAY))
    low.copy_(master[: len(low)])


class Muon:
    """torch's Muon at rate 1 and without weight decay, on the matrices that the library's trainer gives it.

    `update` is for `adamw`, in the order of `Weights.low`; `sizes` lets Adam move all weights but those.
    """

    def __init__(self, model: nn.Module, weights: Weights) -> None:
        from scalelong.training.optimizers import make_optimizers  # imports tyro, which other runs do without

        _, self.optimizer = make_optimizers(OptimizerSettings("muon", lr=1.0, weight_decay=0.0), model)
        (group,) = self.optimizer.param_groups
        self.update = torch.zeros(len(weights.low), device=weights.low.device)
        self.sizes = torch.ones_like(self.update)
        self.places = [weights.places[id(matrix)] for matrix in group["params"]]
        for place in self.places:
            self.sizes[place] = 0.0
        shaped = zip(self.places, group["params"], strict=True)
        group["params"] = [nn.Parameter(self.update[place].view(matrix.shape)) for place, matrix in shaped]

    @torch.no_grad()
    def step(self, gradient: Tensor) -> None:
        """Compute `update` from the gradient of `Weights.low`."""
        self.update.zero_()
        gradient = gradient.float()
        for place, matrix in zip(self.places, self.optimizer.param_groups[0]["params"], strict=True):
            matrix.grad = gradient[place].view(matrix.shape)
        self.optimizer.step()

    def reset(self) -> None:
        for state in self.optimizer.state.values():
            state["momentum_buffer"].zero_()
