"""Many small networks trained at once: same sizes, other seeds and kappas, one stacked forward (torch.func.vmap).

Each member sees the data, times, noises and initial weights that `scalelong train` would give it, and takes AdamW's steps
with the same rates, so its losses are those of a run of its own; a small network alone leaves a core idle most of the time.

Shapes: E members, B batch.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from settings import FIXED_SEED
from torch import Tensor, nn
from torch.func import functional_call, stack_module_state, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel
from tqdm import tqdm

from scalelong.backbones import as_network
from scalelong.data import Source, make_loader, to_float
from scalelong.data.loader import Loader
from scalelong.diffusion import draw_time_and_noise
from scalelong.scaling.constant import ConstantScaling, constant_coefficients
from scalelong.skips import scaling_of
from scalelong.stability import stages
from scalelong.training import RunConfig
from scalelong.training.build import build_model, build_objective
from scalelong.training.step import learning_rate

FIXED_COUNT = 1024  # images, times and noises of the final loss


@dataclass(frozen=True)
class Member:
    """One network: its kappa, its seed, and over how many steps its coefficients go from 1 to those of CS."""

    kappa: float
    seed: int
    warm_steps: int = 0


@dataclass(frozen=True)
class Course:
    """What was seen: losses (steps, E), norms of each block on a fixed batch (records, E), final loss (E,)."""

    losses: Tensor
    norm_steps: list[int]
    norms: dict[str, Tensor]
    fixed_loss: Tensor


class StackedKappa(ConstantScaling):
    """Reads its coefficients from the buffer, which differs from member to member."""

    def coefficient(self, index: int, skip: Tensor) -> Tensor:  # noqa: ARG002
        return self.kappa[index - 1]


class Ensemble:
    """The members' weights, stacked, and how to run them."""

    def __init__(self, config: RunConfig, source: Source, members: Sequence[Member]) -> None:
        self.config, self.source, self.members = config, source, members
        self.objective = build_objective(config)
        models = [build_model(for_member(config, member), source.shape) for member in members]
        parameters, buffers = stack_module_state(models)
        self.parameters = {name: nn.Parameter(value.detach()) for name, value in parameters.items()}
        self.buffers: dict[str, Tensor] = dict(buffers)
        self.average = {name: value.detach().clone() for name, value in parameters.items()}
        self.base = copy.deepcopy(models[0])
        scaling_of(self.base).__class__ = StackedKappa
        self.blocks = stages(self.base)
        self.num_skips = scaling_of(self.base).num_skips

    def set_kappas(self, step: int) -> None:
        """The coefficients before step `step`, counted from 0."""
        rows = []
        for member in self.members:
            share = min(1.0, step / member.warm_steps) if member.warm_steps else 1.0
            rows.append([1 + share * (kappa - 1) for kappa in constant_coefficients(self.num_skips, member.kappa)])
        self.buffers["scalelong.kappa"] = torch.tensor(rows)

    def losses(
        self, parameters: dict[str, Any], images: Tensor, noise: Tensor, t: Tensor, dim: int | None = 0
    ) -> Tensor:
        """(E, B) for inputs of (E, B, ...), or of (B, ...) with dim=None: the same for all."""

        def one(weights: Any, buffers: Any, x: Tensor, n: Tensor, time: Tensor) -> Tensor:
            net = as_network(_Called(self.base, weights, buffers))
            return self.objective.loss(net, x, n, time)

        return vmap(one, in_dims=(0, 0, dim, dim, dim))(parameters, self.buffers, images, noise, t)

    @torch.no_grad()
    def norms(self, x: Tensor, time: Tensor) -> dict[str, Tensor]:
        """(E,) for each block: the mean over the batch of its output's norm."""

        def one(weights: Any, buffers: Any) -> dict[str, Tensor]:
            found: dict[str, Tensor] = {}
            handles = [
                self.base.get_submodule(name).register_forward_hook(
                    lambda _m, _a, output, name=name: found.__setitem__(name, output.flatten(1).norm(dim=1).mean())
                )
                for name in self.blocks
            ]
            try:
                functional_call(self.base, (weights, buffers), (x, time))
            finally:
                for handle in handles:
                    handle.remove()
            return found

        found: dict[str, Tensor] = vmap(one)(self.parameters, self.buffers)
        return found


class _Called(nn.Module):
    """The base network with one member's weights."""

    def __init__(self, base: nn.Module, weights: Any, buffers: Any) -> None:
        super().__init__()
        self.call = lambda *args: functional_call(base, (weights, buffers), args)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        output: Tensor = self.call(x, time)
        return output


def train_together(
    config: RunConfig, source: Source, members: Sequence[Member], probe_every: int = 10, name: str = ""
) -> Course:
    """Train all members for the configuration's steps."""
    with sdpa_kernel(SDPBackend.MATH):  # the only one that can be stacked
        return _train(Ensemble(config, source, members), probe_every, name)


def _train(ensemble: Ensemble, probe_every: int, name: str) -> Course:
    config, source, members = ensemble.config, ensemble.source, ensemble.members
    seeds = list(dict.fromkeys(member.seed for member in members))
    loaders = {seed: make_loader(source, seed, "cpu", flip=config.data.flip) for seed in seeds}
    optimizer = torch.optim.AdamW(
        ensemble.parameters.values(), betas=config.optimizer.betas, weight_decay=config.optimizer.weight_decay
    )
    x, time = _probe_batch(ensemble)
    losses, norm_steps, norms = [], [], []
    for step in tqdm(range(1, config.training.steps + 1), desc=name, disable=None):
        ensemble.set_kappas(step - 1)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(config, step)
        batch = _batches(ensemble, loaders, step)
        loss = ensemble.losses(ensemble.parameters, *batch).mean(1)
        optimizer.zero_grad()
        loss.sum().backward()
        optimizer.step()
        _average(ensemble, step)
        losses.append(loss.detach())
        if step % probe_every == 0:
            norm_steps.append(step)
            norms.append(ensemble.norms(x, time))
    ensemble.set_kappas(config.training.steps)
    stacked = {block: torch.stack([record[block] for record in norms]) for block in ensemble.blocks}
    return Course(torch.stack(losses), norm_steps, stacked, _fixed_loss(ensemble))


def for_member(config: RunConfig, member: Member) -> RunConfig:
    """The single run that this member corresponds to."""
    scaling = dataclasses.replace(config.scaling, method="cs", kappa=member.kappa)
    return dataclasses.replace(config, scaling=scaling, training=dataclasses.replace(config.training, seed=member.seed))


def _batches(ensemble: Ensemble, loaders: dict[int, Loader], step: int) -> tuple[Tensor, Tensor, Tensor]:
    """Images, noises and times, (E, B, ...); members of one seed see the same."""
    size = ensemble.config.training.batch_size
    index = torch.arange((step - 1) * size, step * size)
    sampled = {}
    for seed, loader in loaders.items():
        images = next(iter(loader.batches([index]))).images
        t, noise = draw_time_and_noise(ensemble.objective.process, seed, index, ensemble.source.shape)
        sampled[seed] = images, noise, t
    rows = [sampled[member.seed] for member in ensemble.members]
    images, noise, t = (torch.stack(parts) for parts in zip(*rows, strict=True))
    return images, noise, t


@torch.no_grad()
def _average(ensemble: Ensemble, step: int) -> None:
    """The warmed-up average of the weights."""
    decay = min(ensemble.config.training.ema_decay, (1 + step) / (10 + step))
    torch._foreach_lerp_(list(ensemble.average.values()), [p.detach() for p in ensemble.parameters.values()], 1 - decay)


def _probe_batch(ensemble: Ensemble, size: int = 16) -> tuple[Tensor, Tensor]:
    """A fixed batch of noisy images and their times."""
    index, process = torch.arange(size), ensemble.objective.process
    images = to_float(ensemble.source.read_many(range(size)))
    t, noise = draw_time_and_noise(process, FIXED_SEED, index, ensemble.source.shape)
    x_t, _, _ = process.diffuse(images, noise, t)
    return process.network_input(x_t, t)


@torch.no_grad()
def _fixed_loss(ensemble: Ensemble, chunk: int = 64) -> Tensor:
    """(E,): the averaged weights' loss on the same images, times and noises for all."""
    found = []
    for start in range(0, FIXED_COUNT, chunk):
        index = torch.arange(start, start + chunk)
        images = to_float(ensemble.source.read_many((index % len(ensemble.source)).tolist()))
        t, noise = draw_time_and_noise(ensemble.objective.process, FIXED_SEED, index, ensemble.source.shape)
        found.append(ensemble.losses(ensemble.average, images, noise, t, dim=None))
    return torch.cat(found, dim=1).mean(1)
