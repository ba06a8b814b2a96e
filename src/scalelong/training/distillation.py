"""Contrastive self-distillation: an extra loss on the features of one block; inspired by DDAE++.

The student sees the training sample itself. The teacher (the EMA weights) sees the image with a different augmentation, noise
and t. Heads project the pooled features; the teacher's head is part of the EMA.

All randomness is a function of seed and sample index, so resuming is bit-exact.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from scalelong.backbones import as_network
from scalelong.data import Batch
from scalelong.data.loader import augmented
from scalelong.diffusion import Process
from scalelong.errors import did_you_mean, require
from scalelong.random import normal, uniform
from scalelong.runs.settings import DistillationSettings
from scalelong.skips.families import stages
from scalelong.skips.feature_conditioning import Passing
from scalelong.skips.feature_layout import as_tokens, extra_tokens

HEAD = "distillation_head"  # attribute of the model, so that optimizer, average and checkpoints contain it


class DistillationHead(nn.Module):
    """Project pooled features onto the unit sphere; `predictor` is used by the student without negatives."""

    def __init__(self, width: int, settings: DistillationSettings) -> None:
        super().__init__()
        self.passing = Passing()
        self.projector = _mlp(width, settings.dim)
        self.predictor = _mlp(settings.dim, settings.dim) if settings.form == "negative_free" else nn.Identity()

    def forward(self, features: Tensor, student: bool) -> Tensor:
        projected = self.projector(features)
        return F.normalize((self.predictor(projected) if student else projected).float(), dim=-1)


def _mlp(width: int, out: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(width, 2 * out), nn.GELU(), nn.Linear(2 * out, out))


def attach_head(model: nn.Module, settings: DistillationSettings, width: int) -> None:
    """Register a head on the model, and keep the output of its tap."""
    tap = settings.tap or middle_block(model)
    modules = dict(model.named_modules())
    if tap not in modules:
        raise ValueError(f"distillation.tap: no module {tap!r}; {did_you_mean(tap, modules)}see model.named_modules()")
    head = DistillationHead(width, settings)
    model.add_module(HEAD, head)
    object.__setattr__(modules[tap], _KEPT, head.passing)
    modules[tap].register_forward_hook(keep_output)


_KEPT = "_scalelong_distillation"  # attribute of the tapped module


def keep_output(module: nn.Module, _args: Any, output: Any) -> None:
    passing: Passing = getattr(module, _KEPT)
    passing.change = output if isinstance(output, Tensor) else output[0]


def remove_head(model: nn.Module) -> None:
    """Remove the head of a trained model, if any."""
    if HEAD not in model._modules:
        return
    delattr(model, HEAD)
    for module in [part for part in model.modules() if _KEPT in vars(part)]:
        delattr(module, _KEPT)
        for key in [key for key, hook in module._forward_hooks.items() if hook is keep_output]:
            del module._forward_hooks[key]


def middle_block(model: nn.Module) -> str:
    names = stages(model)
    return next((name for name in names if name.startswith("mid")), names[len(names) // 2])


class Distillation:
    """The loss of a batch whose student has just been run."""

    def __init__(
        self, settings: DistillationSettings, model: nn.Module, teacher: nn.Module, process: Process, seed: int
    ) -> None:
        self.settings, self.model, self.teacher, self.process, self.seed = settings, model, teacher, process, seed
        self.network = as_network(teacher)  # `Stepper` compiles it

    def __call__(self, batch: Batch, condition: dict[str, Tensor]) -> Tensor:
        """weight * loss; gradients flow into the student only."""
        student = self._embed(self.model, student=True)
        with torch.no_grad():
            low, high = self.settings.t_range
            t = self.process.time_from_uniform(low + (high - low) * uniform(self.seed, "distill-time", batch.index))
            view = augmented(batch.images.float(), self.seed, batch.index)
            noise = normal(self.seed, "distill-noise", batch.index, view.shape[1:])
            self.network(*self.process.network_input(self.process.diffuse(view, noise, t)[0], t), **condition)
            teacher = self._embed(self.teacher, student=False)
        return self.settings.weight * contrast(student, teacher, self.settings)

    def _embed(self, model: nn.Module, student: bool) -> Tensor:
        head: DistillationHead = getattr(model, HEAD)
        features, head.passing.change = head.passing.change, None
        assert features is not None
        patches = as_tokens(features)[:, extra_tokens(model, features) :]
        embedded: Tensor = head(patches.mean(dim=1), student=student)
        return embedded


def contrast(student: Tensor, teacher: Tensor, settings: DistillationSettings) -> Tensor:
    """InfoNCE against the other images of the batch, or 2 - 2 cos without negatives; (B, D) each, of length 1.

    >>> settings = DistillationSettings(weight=1.0, temperature=0.1)
    >>> same = F.normalize(torch.eye(4), dim=1)
    >>> float(contrast(same, same, settings)) < float(contrast(same, same.roll(1, 0), settings))
    True
    """
    if settings.form == "negative_free":
        return (2 - 2 * (student * teacher).sum(dim=1)).mean()
    scores = student @ teacher.T / settings.temperature
    return F.cross_entropy(scores, torch.arange(len(scores), device=scores.device))


def check_distillation(settings: DistillationSettings, batch_size: int) -> None:
    """Raise a ValueError that names the key."""
    low, high = settings.t_range
    require(low < high, "distillation.t_range", "two quantiles 0 <= low < high <= 1", settings.t_range)
    if settings.weight and settings.form == "infonce" and batch_size < 2:
        lone = f"micro-batches of {batch_size} image have no negatives"
        raise ValueError(f"distillation.form: {lone}; use negative_free or a larger training.batch_size")
