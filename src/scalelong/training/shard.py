"""Sharded training with FSDP2 (training.shard = "full"): weights, gradients, optimizer state and EMA.

Checkpoints contain full tensors, as without sharding, so a run can continue on any number of ranks, sharded or not. Every
rank also keeps the full EMA model for sampling.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from scalelong.skips.families import stages
from scalelong.training.checkpoint import Tensors
from scalelong.training.optimizers import EMA
from scalelong.training.step import Pending, Stepper


def shard(model: nn.Module, ema: EMA) -> ShardedEMA:
    """Shard the model in place, blocks first and the root last, and return its sharded EMA."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(next(model.parameters()).device.type, (dist.get_world_size(),))
    for name in stages(model):
        fully_shard(model.get_submodule(name), mesh=mesh)
    fully_shard(model, mesh=mesh)  # includes the gates, which every block uses
    return ShardedEMA(ema)


def gathered(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Full tensors on the CPU of the main rank, {} on the others; a collective operation."""
    found = {}
    for name, tensor in tensors.items():
        whole = _whole(tensor)
        if dist.get_rank() == 0:
            found[name] = whole.cpu()
    return found


def scattered(tensors: Mapping[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """Shard full tensors, named as parameters or parameter/entry, like the parameters; a collective operation."""
    like, found = model.state_dict(), {}
    for name, tensor in tensors.items():
        target: Any = like.get(name.rpartition("/")[0] or name)
        is_shard = hasattr(target, "placements") and tensor.shape == target.shape
        found[name] = _spread(tensor, target) if is_shard else tensor
    return found


class ShardedStepper(Stepper):
    """A step of a sharded model, with AdamW in float32 or bf16."""

    def parallel(self) -> nn.Module:
        self.no_sync = partial(_no_sync, self.model)
        return self.model

    def clip(self) -> Tensor:
        norm: Any = nn.utils.clip_grad_norm_(self.parameters, self.config.optimizer.clip_norm or math.inf)
        total: Tensor = norm.full_tensor()
        return total

    def update(self, pending: Pending) -> None:
        """Waits for the device."""
        if pending.usable:
            self.optimizers[0].step()

    def tensors(self, ema: EMA) -> Tensors:
        return {name: gathered(group) for name, group in super().tensors(ema).items()}

    def restore(self, tensors: Tensors, ema: EMA) -> None:
        own = {name: scattered(tensors[name], self.model) for name in ("model", "optimizer")}
        super().restore({**tensors, **own}, ema)


@contextmanager
def _no_sync(model: Any) -> Iterator[None]:
    model.set_requires_gradient_sync(False)
    try:
        yield
    finally:
        model.set_requires_gradient_sync(True)


class ShardedEMA(EMA):
    """EMA of a sharded model; the full `model` is up to date after `gather`."""

    def __init__(self, ema: EMA) -> None:
        vars(self).update(vars(ema))
        self._source: list[Any] = list(self.source.parameters())
        self._average: list[Any] = [parameter.detach().clone() for parameter in self._source]

    @torch.no_grad()
    def update(self, step: int) -> None:
        mine, theirs = ([tensor.to_local() for tensor in tensors] for tensors in (self._average, self._source))
        torch._foreach_lerp_(mine, theirs, 1 - self.decay_at(step))
        self.copy_buffers()

    @torch.no_grad()
    def gather(self) -> None:
        for whole, part in zip(self.model.parameters(), self._average, strict=True):
            whole.copy_(_whole(part))

    @torch.no_grad()
    def scatter(self) -> None:
        for whole, part in zip(self.model.parameters(), self._average, strict=True):
            part.copy_(_spread(whole.detach(), part))


def _whole(tensor: Any) -> Tensor:
    found: Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return found.detach()


def _spread(tensor: Tensor, like: Any) -> Tensor:
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(tensor.to(like.device), like.device_mesh, like.placements)
