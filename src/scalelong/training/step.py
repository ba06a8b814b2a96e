"""One optimizer step: forward, backward, and the update if all is finite."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from scalelong.backbones import as_network
from scalelong.data import Batch
from scalelong.diffusion import Objective, draw_time_and_noise
from scalelong.runs.settings import RunConfig
from scalelong.training.condition import Condition
from scalelong.training.nonfinite import Suspects, find_suspects


@dataclass(frozen=True)
class StepResult:
    """What one step found."""

    loss: float
    gradient_norm: float
    stop: bool  # some rank was asked to stop
    overflow: bool  # fp16 only: the loss scale was too high, which is no fault of the run
    suspects: list[Suspects]

    @property
    def finite(self) -> bool:
        return math.isfinite(self.loss) and (math.isfinite(self.gradient_norm) or self.overflow)


class Pending:
    """A step's numbers on their way from the device: reading them waits for the device, so it is done a step later."""

    def __init__(self, values: Tensor, scaled: bool, losses: Tensor, index: Tensor, t: Tensor) -> None:
        self.values, self.scaled = values, scaled
        self._samples = (losses, index, t)
        self.sound = torch.isfinite(values).all()  # on the device: decides there whether the update happens
        self._host = values.to("cpu", non_blocking=True)
        self._arrived = torch.cuda.Event() if values.is_cuda else None  # type: ignore[no-untyped-call]
        if self._arrived is not None:
            self._arrived.record()

    def read(self, world_size: int) -> StepResult:
        """Wait for the numbers."""
        if self._arrived is not None:
            self._arrived.synchronize()
        loss, stops, gradient_norm = self._host.tolist()
        overflow = self.scaled and math.isfinite(loss) and not math.isfinite(gradient_norm)
        sound = math.isfinite(loss) and (math.isfinite(gradient_norm) or overflow)
        suspects = [] if sound else _gather(find_suspects(*self._samples), world_size)
        return StepResult(loss, gradient_norm, stops > 0, overflow, suspects)


class Stepper:
    """The model under training with its optimizer, on one rank of `world_size`."""

    def __init__(
        self,
        config: RunConfig,
        model: nn.Module,
        objective: Objective,
        device: torch.device,
        world_size: int,
        condition: Condition | None = None,  # None: the network is told nothing
    ) -> None:
        self.config, self.objective, self.device, self.world_size = config, objective, device, world_size
        self.condition = condition or Condition(device)
        self.model = model
        self.optimizer = torch.optim.AdamW(
            model.parameters(),
            lr=config.optimizer.lr,
            betas=config.optimizer.betas,
            weight_decay=config.optimizer.weight_decay,
            fused=device.type == "cuda",
        )
        self.precision = resolve_precision(config, device)
        self.scaler = self._make_scaler()
        self.wrapped: Any = model
        if world_size > 1:
            self.wrapped = nn.parallel.DistributedDataParallel(
                model, device_ids=[device.index] if device.type == "cuda" else None
            )
        if config.training.compile != "off":
            mode = None if config.training.compile == "default" else config.training.compile
            self.wrapped = torch.compile(self.wrapped, mode=mode)
        self.net = as_network(self.wrapped)

    def compute(self, step: int, micro_batches: Iterable[Batch], stop: bool) -> Pending:
        """Gradients of step `step` (from 1) over all ranks' micro-batches."""
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(self.config, step)
        parts = self.config.training.accumulate
        losses, indices, times = [], [], []
        for part, batch in enumerate(micro_batches):
            with self._sync_only_at(part == parts - 1), self._autocast():
                t, noise = draw_time_and_noise(
                    self.objective.process, self.config.training.seed, batch.index, batch.images.shape[1:]
                )
                given = self.condition.of_batch(batch)
                torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]
                loss = self.objective.loss(self.net, batch.images, noise, t, **given)
            with self._sync_only_at(part == parts - 1):
                self.scaler.scale(loss.mean() / parts).backward()  # type: ignore[no-untyped-call]
            losses.append(loss.detach())
            indices.append(batch.index)
            times.append(t)
        return self._pending(torch.cat(losses), torch.cat(indices), torch.cat(times), stop)

    def update(self, pending: Pending) -> None:
        """Apply the gradients that `compute` found, unless they are not finite; no waiting for the device."""
        if self.scaler.is_enabled():
            self.scaler.step(self.optimizer)
            self.scaler.update()
        elif self.device.type == "cuda":
            self.optimizer.found_inf = (~pending.sound).float()  # type: ignore[attr-defined]  # fused AdamW reads it
            self.optimizer.step()
        elif pending.sound:
            self.optimizer.step()

    def leave_out(self) -> None:
        """Go on without applying the gradients that `compute` found: the next ones may be unscaled again."""
        if self.scaler.is_enabled():
            state = self.scaler.state_dict()
            self.scaler = self._make_scaler()
            self.scaler.load_state_dict(state)

    def _make_scaler(self) -> torch.amp.GradScaler:
        return torch.amp.GradScaler(self.device.type, enabled=self.precision == torch.float16)

    def clear(self) -> None:
        """Forget the gradients."""
        self.optimizer.zero_grad(set_to_none=True)

    def _pending(self, losses: Tensor, index: Tensor, t: Tensor, stop: bool) -> Pending:
        self.scaler.unscale_(self.optimizer)
        limit = self.config.optimizer.clip_norm or math.inf
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), limit)
        stops = torch.full((), float(stop), device=self.device)
        shared = torch.stack([losses.mean() / self.world_size, stops])
        if self.world_size > 1:
            dist.all_reduce(shared)
        return Pending(torch.cat([shared, norm.reshape(1)]), self.scaler.is_enabled(), losses, index, t)

    def _sync_only_at(self, last: bool) -> contextlib.AbstractContextManager[Any]:
        """DDP averages gradients once per step, at the last micro-batch."""
        ddp = getattr(self.wrapped, "_orig_mod", self.wrapped)
        return contextlib.nullcontext() if last or self.world_size == 1 else ddp.no_sync()

    def _autocast(self) -> contextlib.AbstractContextManager[Any]:
        enabled = self.precision != torch.float32
        return torch.autocast(self.device.type, dtype=self.precision, enabled=enabled)


def _gather(mine: Suspects, world_size: int) -> list[Suspects]:
    if world_size == 1:
        return [mine]
    everyone: list[Any] = [None] * world_size
    dist.all_gather_object(everyone, mine)
    return everyone


def learning_rate(config: RunConfig, step: int) -> float:
    """Linear warm-up over the first steps, then constant."""
    return config.optimizer.lr * min(1.0, step / max(1, config.optimizer.warmup_steps))


def resolve_precision(config: RunConfig, device: torch.device) -> torch.dtype:
    """The type that matrix products are computed in."""
    chosen = config.training.precision
    if chosen == "auto":
        chosen = "bf16" if device.type == "cuda" else "fp32"
    return {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[chosen]


def sample_indices(config: RunConfig, step: int, part: int, rank: int, world_size: int) -> Tensor:
    """The global sample indices of one micro-batch: step `step` (from 1) covers the next batch_size samples."""
    settings = config.training
    size = settings.batch_size // (world_size * settings.accumulate)
    first = (step - 1) * settings.batch_size + (part * world_size + rank) * size
    return torch.arange(first, first + size)


def index_batches(config: RunConfig, first_step: int, rank: int, world_size: int) -> Iterator[Tensor]:
    """The micro-batches of one rank from a step on to the last."""
    for step in range(first_step, config.training.steps + 1):
        for part in range(config.training.accumulate):
            yield sample_indices(config, step, part, rank, world_size)
