"""AdamW or Muon with muP learning rates, and EMA of the weights."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from scalelong.parametrization import param_groups
from scalelong.runs.settings import OptimizerSettings


def make_optimizers(settings: OptimizerSettings, model: nn.Module) -> list[torch.optim.Optimizer]:
    """AdamW for all parameters; or Muon for linear weights, with updates matched to AdamW's size, and AdamW for embeddings,
    convolutions, norms, biases and the output layer of U-ViT."""
    decay = settings.weight_decay
    if settings.name == "adamw":
        groups = param_groups(model, settings.lr, decay)
        return [torch.optim.AdamW(groups, settings.lr, settings.betas, fused=True)]
    layers = [(name, module) for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    matrices = {id(module.weight) for name, module in layers if name != "decoder_pred"}
    muon, other = ([p for p in model.parameters() if (id(p) in matrices) == chosen] for chosen in (True, False))
    adamw = torch.optim.AdamW(other, settings.lr, settings.betas, weight_decay=decay, fused=True)
    return [adamw, torch.optim.Muon(muon, settings.lr, decay, adjust_lr_fn="match_rms_adamw")]


class EMA:
    """Exponential moving average of the weights with warm-up; unlike torch's AveragedModel it never syncs the device.

    >>> model = nn.Linear(2, 1)
    >>> ema = EMA(model, decay=0.9999)
    >>> ema.update(step=1)  # after each optimizer step, counted from 1
    >>> ema.model(torch.zeros(1, 2)).requires_grad
    False
    """

    def __init__(self, model: nn.Module, decay: float = 0.9999) -> None:
        self.source, self.decay = model, decay
        self.model = copy.deepcopy(model).eval().requires_grad_(False)
        self._weights: tuple[list[Tensor], list[Tensor]] = ([*self.model.parameters()], [*model.parameters()])
        pairs = zip(self.model.modules(), model.modules(), strict=True)
        self._buffers = [
            (mine, theirs, key) for mine, theirs in pairs for key, b in theirs._buffers.items() if b is not None
        ]

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Update the average after optimizer step `step`; buffers are copied."""
        torch._foreach_lerp_(*self._weights, 1 - self.decay_at(step))
        self.copy_buffers()

    def gather(self) -> None:
        """Update `model` if the average is sharded; a collective operation."""

    def scatter(self) -> None:
        """Inverse of `gather`, after loading `model`."""

    def decay_at(self, step: int) -> float:
        return min(self.decay, (1 + step) / (10 + step))

    def copy_buffers(self) -> None:
        for mine, theirs, name in self._buffers:
            mine.get_buffer(name).copy_(theirs.get_buffer(name))
