"""One optimizer step: forward, backward, update if all gradients are finite, EMA.

pending = stepper.compute(step, batches)   # gradients
stepper.update(pending)                    # AdamW, or Muon and AdamW
ema.update(step)                           # EMA
stepper.clear()
result = pending.read()                    # loss and gradient norm; waits for the device
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from scalelong.backbones import as_network
from scalelong.data import Batch
from scalelong.diffusion import Network, Objective, draw_time_and_noise
from scalelong.runs.settings import RunConfig
from scalelong.skips.hooks import scaling_of
from scalelong.training.build import resolve_compile
from scalelong.training.checkpoint import Tensors, optimizer_tensors, restore_optimizer
from scalelong.training.condition import Condition
from scalelong.training.distillation import Distillation
from scalelong.training.optimizers import EMA, make_optimizers

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
Suspect = tuple[int, float]  # global sample index and t of a sample whose loss or gradient is not finite


class Stepper:
    """The model under training with its optimizer, on one rank of `world_size`."""

    def __init__(
        self,
        config: RunConfig,
        model: nn.Module,
        objective: Objective,
        device: torch.device,
        world_size: int = 1,
        condition: Condition | None = None,  # None: unconditional
        distillation: Distillation | None = None,  # an extra loss
    ) -> None:
        self.config, self.objective, self.device, self.world_size = config, objective, device, world_size
        self.model, self.condition, self.distillation = model, condition or Condition(device), distillation
        self.scaling = scaling_of(model)
        self.parameters = list(model.parameters())  # iterating over modules is slower than clipping
        self.optimizers = make_optimizers(config.optimizer, model)
        self.dtype = resolve_precision(config, device)
        self.autocast = autocast(device, self.dtype)
        self.scaler = self._make_scaler()
        self.compile = resolve_compile(config, world_size, device.type == "cuda")
        self.no_sync: Any = nullcontext
        self.net = _compiled(model if world_size == 1 else self.parallel(), self.compile)
        if distillation is not None:
            distillation.network = _compiled(distillation.teacher, self.compile)

    def parallel(self) -> nn.Module:
        """The model with gradients averaged over ranks, except inside `no_sync`."""
        device_ids = [self.device.index] if self.device.type == "cuda" else None
        wrapped = nn.parallel.DistributedDataParallel(self.model, device_ids=device_ids)
        self.no_sync = wrapped.no_sync
        return wrapped

    def compute(
        self, step: int, micro_batches: Iterable[Batch], stop: bool = False, limit: float = math.inf
    ) -> Pending:
        """Gradients of step `step` (from 1) over the micro-batches of all ranks.

        `stop`: this rank was asked to stop. `limit`: largest loss whose update is applied.
        """
        self.prepare(step)
        seed, parts = self.config.training.seed, self.config.training.accumulate
        samples = []
        for part, batch in enumerate(micro_batches, start=1):
            t, noise = draw_time_and_noise(self.objective.process, seed, batch.index, batch.images.shape[1:])
            condition = self.condition.for_batch(batch)
            with nullcontext() if part == parts else self.no_sync():  # all-reduce once per step
                with self.autocast:
                    loss = self.objective.loss(self.net, batch.images, noise, t, **condition)
                    extra = self.distillation(batch, condition) if self.distillation else 0.0
                self.scaler.scale((loss.mean() + extra) / parts).backward()  # type: ignore[no-untyped-call]
            samples.append((loss.detach(), batch, t))
        for optimizer in self.optimizers:
            self.scaler.unscale_(optimizer)
        norm = self.clip()
        loss = torch.cat([loss for loss, _, _ in samples]).mean() / self.world_size
        shared = torch.stack([loss, torch.full((), float(stop), device=self.device)])
        if self.world_size > 1:
            dist.all_reduce(shared)
        suspects = functools.partial(self._suspects, samples)
        return Pending(torch.cat([shared, norm.reshape(1)]), suspects, self.scaler.is_enabled(), limit)

    def _suspects(self, samples: list[tuple[Tensor, Batch, Tensor]]) -> list[Suspect]:
        """The samples with a non-finite loss or, if all are finite, a non-finite gradient; call before the update."""
        index, t = torch.cat([batch.index for _, batch, _ in samples]), torch.cat([t for _, _, t in samples])
        bad = ~torch.isfinite(torch.cat([loss for loss, _, _ in samples]))
        if found := find_suspects(bad, index, t, self.world_size):
            return found
        bad = torch.cat([self._bad_gradients(batch) for _, batch, _ in samples])
        return find_suspects(bad, index, t, self.world_size)

    def _bad_gradients(self, batch: Batch) -> Tensor:
        """(B,) mask of samples with a non-finite gradient, computed one by one."""
        shape, seed = batch.images.shape[1:], self.config.training.seed
        t, noise = draw_time_and_noise(self.objective.process, seed, batch.index, shape)
        condition, net, bad = self.condition.for_batch(batch), as_network(self.model), []
        for i in range(len(t)):
            given = {name: value[i : i + 1] for name, value in condition.items()}
            with self.autocast:
                loss = self.objective.loss(net, batch.images[i : i + 1], noise[i : i + 1], t[i : i + 1], **given)
            gradients = torch.autograd.grad(loss.sum(), [*self.model.parameters()], allow_unused=True)
            bad.append(not all(torch.isfinite(each).all() for each in gradients if each is not None))
        return torch.tensor(bad, device=t.device)

    def prepare(self, step: int) -> None:
        """Set the learning rates and the state of an annealed scaling for this step."""
        for group in (group for optimizer in self.optimizers for group in optimizer.param_groups):
            group["lr"] = learning_rate(self.config, step) * group.get("lr_multiplier", 1.0)
        self.scaling.advance(step)

    def clip(self) -> Tensor:
        """Clip the gradient if enabled and return its norm."""
        if clip_norm := self.config.optimizer.clip_norm:
            norm: Tensor = nn.utils.clip_grad_norm_(self.parameters, clip_norm)
        else:
            norm = torch.stack(torch._foreach_norm([p.grad for p in self.parameters if p.grad is not None])).norm()
        return norm

    def update(self, pending: Pending) -> None:
        """Apply the gradients unless they are not finite or the loss is above its limit.

        With AdamW alone and no limit this does not wait for the device.
        """
        if self.scaler.is_enabled():
            alone = len(self.optimizers) == 1 and math.isinf(pending.limit)
            if alone or pending.usable:  # the scaler detects no spikes, and non-finite values for each optimizer apart
                for optimizer in self.optimizers:
                    self.scaler.step(optimizer)
            self.scaler.update()
        elif self.device.type == "cuda" and len(self.optimizers) == 1:
            self.optimizers[0].found_inf = (~pending.usable).float()  # type: ignore[attr-defined]  # fused AdamW reads it
            self.optimizers[0].step()
        elif pending.usable:  # with Muon this waits for the device
            for optimizer in self.optimizers:
                optimizer.step()

    def discard(self) -> None:
        """Drop the gradients without applying them; afterwards `compute` may unscale again."""
        if self.scaler.is_enabled():
            state = self.scaler.state_dict()
            self.scaler = self._make_scaler()
            self.scaler.load_state_dict(state)
        self.clear()

    def clear(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)

    def tensors(self, ema: EMA) -> Tensors:
        """The contents of a checkpoint; a collective operation."""
        ema.gather()
        optimizers = (optimizer_tensors(each, self.model) for each in self.optimizers)
        return {
            "model": self.model.state_dict(),
            "ema": ema.model.state_dict(),
            "optimizer": {key: value for part in optimizers for key, value in part.items()},
        }

    def restore(self, tensors: Tensors, ema: EMA) -> None:
        """Inverse of `tensors`."""
        self.model.load_state_dict(tensors["model"])
        ema.model.load_state_dict(tensors["ema"])
        ema.scatter()
        for optimizer in self.optimizers:
            restore_optimizer(optimizer, self.model, tensors["optimizer"])

    def _make_scaler(self) -> torch.amp.GradScaler:
        return torch.amp.GradScaler(self.device.type, enabled=self.dtype == torch.float16)


@dataclass(frozen=True)
class StepResult:
    loss: float
    gradient_norm: float
    stop: bool  # some rank was asked to stop
    overflow: bool  # fp16 only: the loss scale was too high, which is normal

    @property
    def finite(self) -> bool:
        return math.isfinite(self.loss) and (math.isfinite(self.gradient_norm) or self.overflow)


class Pending:
    """Results of a step on the device; reading them syncs, so the loop does it one step later."""

    def __init__(
        self, values: Tensor, suspects: Callable[[], list[Suspect]], scaled: bool, limit: float = math.inf
    ) -> None:
        self.limit = limit  # of the loss
        self.usable = torch.isfinite(values).all() & (values[0] <= limit)  # decided on the device
        self.suspects, self._scaled = suspects, scaled  # suspects are computed on demand
        self._host = values.to("cpu", non_blocking=True)
        self._arrived = torch.cuda.Event() if values.is_cuda else None  # type: ignore[no-untyped-call]
        if self._arrived is not None:
            self._arrived.record()

    def read(self) -> StepResult:
        if self._arrived is not None:
            self._arrived.synchronize()
        loss, stops, gradient_norm = self._host.tolist()
        overflow = self._scaled and math.isfinite(loss) and not math.isfinite(gradient_norm)
        return StepResult(loss, gradient_norm, stops > 0, overflow)


def find_suspects(bad: Tensor, index: Tensor, t: Tensor, world_size: int = 1) -> list[Suspect]:
    """The marked samples of all ranks; the tensors (B,) are local."""
    parts: list[Any] = [list(zip(index[bad].tolist(), t[bad].double().tolist(), strict=True))] * world_size
    if world_size > 1:
        dist.all_gather_object(parts, parts[0])
    return [suspect for part in parts for suspect in part]


@dataclass
class Window:
    """Sums over the steps since the last record."""

    loss: float = 0.0
    gradient_norm: float = 0.0
    gradient_norm_max: float = 0.0
    count: int = 0
    since: float = 0.0  # training seconds at its start

    def add(self, result: StepResult) -> None:
        if result.finite and not result.overflow:
            self.loss += result.loss
            self.gradient_norm += result.gradient_norm
            self.gradient_norm_max = max(self.gradient_norm_max, result.gradient_norm)
            self.count += 1

    def record(self, seconds: float, batch_size: int) -> dict[str, float]:
        """Means of the window that ends after `seconds` of the run."""
        return {
            "loss": self.loss / self.count if self.count else math.nan,
            "gradient_norm": self.gradient_norm / self.count if self.count else math.nan,
            "gradient_norm_max": self.gradient_norm_max,
            "images_per_second": self.count * batch_size / max(seconds - self.since, 1e-9),
            "seconds": round(seconds, 3),
        }


def learning_rate(config: RunConfig, step: int) -> float:
    return config.optimizer.lr * min(1.0, step / max(1, config.optimizer.warmup_steps))  # linear warm-up


def resolve_precision(config: RunConfig, device: torch.device) -> torch.dtype:
    auto = "bf16" if device.type == "cuda" else "fp32"
    return DTYPES[auto if config.training.precision == "auto" else config.training.precision]


def autocast(device: torch.device, dtype: torch.dtype) -> torch.autocast:
    return torch.autocast(device.type, dtype, enabled=dtype != torch.float32)


def sample_indices(config: RunConfig, step: int, part: int, rank: int, world_size: int) -> Tensor:
    """The global sample indices of one micro-batch: step `step` (from 1) covers the next batch_size samples."""
    settings = config.training
    size = settings.batch_size // (world_size * settings.accumulate)
    first = (step - 1) * settings.batch_size + (part * world_size + rank) * size
    return torch.arange(first, first + size)


def _compiled(model: nn.Module, mode: str) -> Network:
    if mode in ("off", "step"):
        return as_network(model)
    net = as_network(torch.compile(model, mode=mode))  # type: ignore[arg-type]
    if mode == "default":
        return net

    def call(*args: Any, **kwargs: Any) -> Tensor:
        torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]
        return net(*args, **kwargs)

    return call
