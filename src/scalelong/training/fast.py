"""The fast step (training.compile = "step"): flat weights, one update kernel, forward and backward pass as one CUDA graph.

Weights, gradients, moments and EMA become views of flat float32 tensors, which one kernel updates in one pass. The network
that runs is a copy of the model whose matrices are views of a flat 16-bit tensor, so a step casts no weights, and whose
parts are swapped for those of `backbones.fused`. Model, EMA and optimizer keep their names and shapes, so checkpoints are
those of the plain path. A CPU runs it eagerly.
"""

from __future__ import annotations

import copy
import functools
import importlib
import math
from collections.abc import Iterable, Mapping
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

from scalelong.backbones import UViT, as_network, fused
from scalelong.data import Batch
from scalelong.diffusion import draw_time_and_noise
from scalelong.parametrization import param_groups
from scalelong.runs.settings import RunConfig
from scalelong.training.optimizers import EMA
from scalelong.training.step import Pending, Stepper, autocast

_ALIGN = 64  # elements: every tensor starts at an aligned address
_PRODUCTS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)  # what autocast computes in 16 bits
_KERNEL = "scalelong.training.adamw_kernel"


def speed_up(stepper: Stepper, ema: EMA) -> tuple[Stepper, EMA]:
    """The fast step and the average for it, in place of the plain ones, on the same model and averaged model."""
    optimizer = FlatAdamW(stepper.config, stepper.model, ema.model, stepper.dtype)
    average = FlatEMA(ema, optimizer)
    return FastStepper(stepper, optimizer, average), average


class FlatAdamW(torch.optim.AdamW):
    """AdamW on flat tensors; its state and groups are torch's, with views as tensors."""

    def __init__(self, config: RunConfig, model: nn.Module, averaged: nn.Module, dtype: torch.dtype) -> None:
        settings = config.optimizer
        groups = param_groups(model, settings.lr, settings.weight_decay)
        super().__init__(groups, settings.lr, settings.betas, fused=True)
        self.parameters: list[nn.Parameter] = [p for group in self.param_groups for p in group["params"]]
        device = self.parameters[0].device
        sizes = [-(-p.numel() // _ALIGN) * _ALIGN for p in self.parameters]
        self._starts = [sum(sizes[:i]) for i in range(len(sizes) + 1)]
        flat = [torch.zeros(self._starts[-1], device=device) for _ in range(5)]
        self.weights, self.gradient, self.average, self._m, self._v = flat
        self.low = self.weights if dtype == torch.float32 else torch.zeros_like(self.weights, dtype=dtype)
        self._counts = torch.zeros(len(sizes), device=device)  # of the updates applied
        self._kernel: Any = None
        if device.type == "cuda" and find_spec("triton") is not None:
            self._kernel = importlib.import_module(_KERNEL)
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        for i, parameter in enumerate(self.parameters):
            for tensor, home in (
                (parameter, self.weights),
                (averaged.get_parameter(names[id(parameter)]), self.average),
            ):
                view = self.view(home, i)
                view.copy_(tensor.detach())
                tensor.data = view
            parameter.grad = self.view(self.gradient, i)
            moments = {"exp_avg": self.view(self._m, i), "exp_avg_sq": self.view(self._v, i)}
            self.state[parameter] = {"step": self._counts[i], **moments}
        self.refresh()

    def view(self, flat: Tensor, number: int) -> Tensor:
        """The part of a flat tensor that belongs to parameter `number`, in its shape."""
        parameter, start = self.parameters[number], self._starts[number]
        return flat[start : start + parameter.numel()].view(parameter.shape)

    def refresh(self) -> None:
        """Bring the 16-bit copy up to date with weights that were loaded."""
        if self.low is not self.weights:
            self.low.copy_(self.weights)

    @torch.no_grad()
    def advance(self, usable: Tensor, decay: float) -> None:
        """Apply the gradient where `usable`, and average the weights in any case: one pass over memory."""
        self._counts += usable
        done = 0
        for group in self.param_groups:
            first, done = done, done + len(group["params"])
            part = slice(self._starts[first], self._starts[done])
            flat = [t[part] for t in (self.weights, self.gradient, self._m, self._v, self.average)]
            low = None if self.low is self.weights else self.low[part]
            update: Any = update_flat if self._kernel is None else self._kernel.update_flat
            rates = (group["lr"], group["weight_decay"], *group["betas"], group["eps"])
            update(*flat, low, self._counts[first], usable, *rates, decay)

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Copy the moments into the flat tensors; call it after the weights are loaded."""
        stored = state_dict["state"]
        for i, parameter in enumerate(self.parameters):
            for key, tensor in self.state[parameter].items():
                given = stored.get(i, {}).get(key)  # none before the first step
                tensor.zero_() if given is None else tensor.copy_(given)
        self.refresh()


def update_flat(
    weights: Tensor, gradient: Tensor, m: Tensor, v: Tensor, average: Tensor, low: Tensor | None, count: Tensor,
    usable: Tensor, lr: float, weight_decay: float, beta1: float, beta2: float, eps: float, decay: float,
) -> None:  # fmt: skip
    """AdamW where `usable`, the average, and the 16-bit copy, in torch's operations; `count` includes this update."""
    options = {"lr": lr, "beta1": beta1, "beta2": beta2, "weight_decay": weight_decay, "eps": eps}
    skip = 1 - usable.float()
    torch._fused_adamw_([weights], [gradient], [m], [v], [], [count], amsgrad=False, maximize=False, grad_scale=None,
                        found_inf=skip, **options)  # fmt: skip
    average.lerp_(weights, 1 - decay)
    if low is not None:
        low.copy_(weights)


class FlatEMA(EMA):
    """The average of flat weights; `FastStepper.update` has made the pass already, unless the step was discarded."""

    def __init__(self, ema: EMA, optimizer: FlatAdamW) -> None:
        vars(self).update(vars(ema))
        self.optimizer = optimizer
        self.done_at = 0  # the step whose weights are averaged in

    @torch.no_grad()
    def update(self, step: int) -> None:
        if self.done_at != step:
            self.optimizer.average.lerp_(self.optimizer.weights, 1 - self.decay_at(step))
        self.copy_buffers()


class FastStepper(Stepper):
    """A step on flat weights; on a GPU its gradients are one CUDA graph, captured at the first call."""

    def __init__(self, plain: Stepper, optimizer: FlatAdamW, ema: FlatEMA) -> None:
        vars(self).update(vars(plain))
        self.optimizer, self.ema, self.step = optimizer, ema, 0
        self.optimizers = [optimizer]
        self.network = self.model if optimizer.low is optimizer.weights else low_precision_copy(self.model, optimizer)
        trained = dict(self.network.named_parameters())
        names = {id(parameter): name for name, parameter in self.model.named_parameters()}
        self.trained = [trained[names[id(parameter)]] for parameter in optimizer.parameters]
        same: dict[torch.dtype, list[int]] = {}  # torch copies many tensors at once only from one dtype
        for i, parameter in enumerate(self.trained):
            same.setdefault(parameter.dtype, []).append(i)
        self._homes = [([optimizer.view(optimizer.gradient, i) for i in part], part) for part in same.values()]
        self.net = as_network(self.network)
        self._losses: Any = torch.compile(self._loss, dynamic=False) if self.device.type == "cuda" else self._loss
        self._graph: torch.cuda.CUDAGraph | None = None

    def compute(
        self, step: int, micro_batches: Iterable[Batch], stop: bool = False, limit: float = math.inf
    ) -> Pending:
        self.prepare(step)
        self.step = step
        (batch,) = micro_batches
        inputs = {"images": batch.images, "index": batch.index, **self.condition.for_batch(batch)}
        losses, times, norm = self._run(**inputs) if self.device.type == "cpu" else self._replay(inputs)
        values = torch.stack([losses.mean(), torch.full((), float(stop), device=self.device), norm])
        suspects = functools.partial(self._suspects, [(losses.clone(), batch, times.clone())])
        return Pending(values, suspects, False, limit)

    def update(self, pending: Pending) -> None:
        self.optimizer.advance(pending.usable, self.ema.decay_at(self.step))
        self.ema.done_at = self.step

    def discard(self) -> None:
        self.ema.done_at = 0

    def clear(self) -> None:
        """Gradients are overwritten by the next step."""

    def _loss(self, images: Tensor, index: Tensor, **condition: Tensor) -> tuple[Tensor, Tensor]:
        shape, seed = images.shape[1:], self.config.training.seed
        t, noise = draw_time_and_noise(self.objective.process, seed, index, shape)
        with autocast(self.device, self.dtype):
            return self.objective.loss(self.net, images, noise, t, **condition), t

    def _run(self, images: Tensor, index: Tensor, **condition: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(losses (B,), times (B,), norm of the gradient); the gradient is left in its flat tensor."""
        losses, t = self._losses(images, index, **condition)
        found = torch.autograd.grad(losses.mean(), self.trained, materialize_grads=True)
        flat = self.optimizer.gradient
        with torch.no_grad():
            for homes, numbers in self._homes:
                torch._foreach_copy_(homes, [found[i] for i in numbers])
            norm = torch.linalg.vector_norm(flat)
            if self.config.optimizer.clip_norm:
                flat.mul_((self.config.optimizer.clip_norm / (norm + 1e-6)).clamp(max=1.0))
        return losses.detach(), t, norm

    def _replay(self, inputs: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        if self._graph is None:
            self._capture(inputs)
        for name, tensor in inputs.items():
            self._inputs[name].copy_(tensor, non_blocking=True)
        assert self._graph is not None
        self._graph.replay()
        return self._outputs

    def _capture(self, inputs: dict[str, Tensor]) -> None:
        self._inputs = {name: tensor.clone() for name, tensor in inputs.items()}
        with torch.no_grad():
            self._loss(**self._inputs)  # what is computed once and kept, such as random keys, is not compiled
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):  # compiles, and lets libraries allocate what they need
                self._run(**self._inputs)
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        self._graph = torch.cuda.CUDAGraph()
        # thread_local: threads that read data may pin memory meanwhile
        with torch.cuda.graph(self._graph, stream=stream, capture_error_mode="thread_local"):
            self._outputs = self._run(**self._inputs)


def low_precision_copy(model: nn.Module, optimizer: FlatAdamW) -> nn.Module:
    """The model on the same weights and buffers, with those of linear layers and convolutions in 16 bits."""
    number = {id(parameter): i for i, parameter in enumerate(optimizer.parameters)}
    made: dict[int, nn.Parameter] = {}
    network = copy.deepcopy(model)
    for mine, theirs in zip(network.modules(), model.modules(), strict=True):
        home = optimizer.low if isinstance(theirs, _PRODUCTS) else optimizer.weights
        for key, parameter in theirs._parameters.items():
            if parameter is not None:
                new = nn.Parameter(optimizer.view(home, number[id(parameter)]), parameter.requires_grad)
                mine._parameters[key] = made.setdefault(id(parameter), new)
        mine._buffers.update(theirs._buffers)
        if isinstance(theirs, UViT):
            mine.in_blocks[0].register_forward_pre_hook(_to_low_precision)  # type: ignore[union-attr, index]
    fused.for_training(network)
    return network


def _to_low_precision(_module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Forward-pre-hook: tokens in the dtype of autocast, as its products leave them behind the first join anyway."""
    return inputs[0].to(fused.product_dtype(inputs[0])), *inputs[1:]
