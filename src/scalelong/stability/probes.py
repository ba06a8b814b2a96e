"""Measure feature and gradient oscillation (Fig. 1) in any training loop."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from scalelong.backbones.unet import unwrapped
from scalelong.errors import did_you_mean, require
from scalelong.files import open_inside
from scalelong.report.plots import finish, panels, save_figure
from scalelong.runs.reader import MIDDLE, PROBE_EVERY, middle_of, relative_oscillation, relative_spread
from scalelong.skips.example import as_call, independent_copy, tensors_in, uncompiled, undisturbed
from scalelong.skips.families import has_known_stages, stages
from scalelong.skips.hooks import detach, is_scaled, scaling_of
from scalelong.skips.long_skip import Call
from scalelong.skips.tracing.detect import detect, made_names
from scalelong.skips.tracing.paths import SkipPath
from scalelong.skips.tracing.trace import Trace
from scalelong.training.ranks import is_main_rank

__all__ = ["OscillationProbe", "relative_oscillation", "relative_spread", "stages"]


class OscillationProbe:
    """Record per block the mean output norm on a fixed batch and the norm of the parameters' gradient.

    Call `step` in the training loop, after backward and before zero_grad; `trainer_callback` and `lightning_callback` do so.

    >>> from scalelong.backbones import UViT, UViTConfig
    >>> model = UViT(UViTConfig(image_size=8, patch_size=4, dim=16, depth=2, heads=2))
    >>> probe = OscillationProbe(model, (torch.zeros(2, 3, 8, 8), torch.zeros(2)), every=1)
    >>> list(probe.step())
    ['norm/in_blocks.0', 'norm/mid_block', 'norm/out_blocks.0']
    >>> probe
    OscillationProbe(UViT, 3 blocks, middle mid_block, every 1 steps, 1 records)
    """

    def __init__(
        self,
        model: nn.Module,
        inputs: Any,  # arguments of the model's forward, the fixed batch: a tensor, a tuple, a dict or (args, kwargs)
        *,
        blocks: Sequence[str] | None = None,  # default: the stages of the U
        every: int = PROBE_EVERY,
        path: str | Path | None = None,  # JSON lines are appended here
    ) -> None:
        require(every >= 1, "every", "at least 1", every)
        self.model = unwrapped(model)
        self._call = as_call(inputs)
        self.blocks = list(blocks) if blocks is not None else find_stages(self.model, self._call)
        modules = dict(self.model.named_modules())
        for name in self.blocks:
            if name not in modules:
                raise ValueError(f"blocks: no module {name!r}; {did_you_mean(name, modules)}see model.named_modules()")
        self._modules = {name: modules[name] for name in self.blocks}
        self.every = every
        self.path = Path(path) if path is not None else None
        if self.path is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
        self.count, self._started = 0, time.monotonic()
        self.history: list[dict[str, Any]] = []  # the records, as in the file
        try:  # reject a batch or blocks that cannot be measured before training starts
            norms = self.norms()
        except (RuntimeError, ValueError, TypeError, IndexError) as error:
            shapes = [tuple(tensor.shape) for tensor in tensors_in(self._call)]
            what = f"inputs: the forward of {type(self.model).__name__} fails on a probe batch of shapes {shapes}"
            raise ValueError(f"{what} ({error}); pass its arguments, on its device") from error
        if missing := [name for name in self.blocks if name not in norms]:
            raise ValueError(f"blocks: {missing} returned no tensor when the model ran on the probe batch; omit them")

    def step(self, loss: Tensor | float | None = None) -> dict[str, float] | None:
        """Count a training step; measure and write every `every` steps, with the optional loss."""
        self.count += 1
        return self(self.count, self.model, loss)

    def __call__(self, step: int, _model: nn.Module, loss: Tensor | float | None = None) -> dict[str, float] | None:
        """`norm/BLOCK` and `gradient/BLOCK` if `step` is a multiple of `every`, else None."""
        if step % self.every:
            return None
        measured = (("norm", self.norms()), ("gradient", self.gradient_norms()))
        values = {f"{what}/{name}": norm for what, norms in measured for name, norm in norms.items()}
        record: dict[str, Any] = {"step": step, "seconds": time.monotonic() - self._started, **values}
        if loss is not None:
            record["loss"] = loss.item() if isinstance(loss, Tensor) else float(loss)
        if is_scaled(self.model):
            record["scaling"] = scaling_of(self.model).config.to_json()
        self.history.append(record)
        if self.path is not None and is_main_rank():
            with open_inside(self.path.parent, self.path.name, mode="a") as file:
                file.write(json.dumps(record) + "\n")
        return values

    @property
    def middle(self) -> str:
        """The middle block."""
        return middle_of(self.blocks)

    def oscillation(self, block: str = "", what: str = "norm") -> float:
        """`relative_oscillation` of a block's norm or gradient; default: the middle block. nan for fewer than 2 records."""
        norms = [record[key] for record in self.history if (key := f"{what}/{block or self.middle}") in record]
        return relative_oscillation(norms) if len(norms) > 1 else math.nan

    def __repr__(self) -> str:
        moved = f", the middle moves by {self.oscillation():.1%}" if len(self.history) > 1 else ""
        about = f"{type(self.model).__name__}, {len(self.blocks)} blocks, middle {self.middle}"
        return f"OscillationProbe({about}, every {self.every} steps, {len(self.history)} records{moved})"

    def plot(self, path: str | Path | None = None) -> Any:
        """Plot output and gradient norms over steps, the middle block in bold; returns a matplotlib figure."""
        if not self.history:
            raise ValueError(f"plot: no records yet; the first comes at step {self.every}")
        figure, both = panels(2)
        for axes, what in zip(both, ("norm", "gradient"), strict=True):
            for block in self.blocks:
                key = f"{what}/{block}"
                points = [(record["step"], record[key]) for record in self.history if key in record]
                style: dict[str, Any] = {"color": "0.75", "lw": 1}
                if block == self.middle:
                    style = {"color": "tab:blue", "lw": 2, "label": block, "zorder": 3}
                if points:
                    axes.plot(*zip(*points, strict=True), **style)
            moved = self.oscillation(what=what)
            finish(axes, what if math.isnan(moved) else f"{what}, moves by {moved:.1%}", "step", "", log="y")
        if path is not None:
            save_figure(figure, path, dpi=150)
        return figure

    @torch.no_grad()
    def norms(self) -> dict[str, float]:
        """The mean over the batch of ||h||_2 of each block's output."""
        found: dict[str, Tensor] = {}

        def keep(name: str, _module: nn.Module, _args: Any, output: Any) -> None:
            if (tensor := next(tensors_in(output), None)) is not None:
                found[name] = tensor.flatten(1).float().norm(dim=1).mean()

        handles = [module.register_forward_hook(partial(keep, name)) for name, module in self._modules.items()]
        args, kwargs = self._call
        try:
            with undisturbed(self.model), uncompiled():
                self.model(*args, **kwargs)
        finally:
            for handle in handles:
                handle.remove()
        return _as_floats({name: found[name] for name in self.blocks if name in found})

    @torch.no_grad()
    def gradient_norms(self) -> dict[str, float]:
        """The norm of the gradient of each block's parameters; blocks without gradients are omitted."""
        found = {}
        for name, module in self._modules.items():
            if gradients := [p.grad for p in module.parameters() if p.grad is not None]:
                found[name] = torch.stack(torch._foreach_norm(gradients)).float().norm()
        return _as_floats(found)


def find_stages(model: nn.Module, call: Call) -> list[str]:
    """The stages of the U: by class or names if known, else by tracing.

    >>> from torch.nn import Conv2d
    >>> class Net(nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.a, self.b, self.bottom, self.c, self.d = (Conv2d(n, 2, 1) for n in (1, 2, 2, 4, 4))
    ...     def forward(self, x):
    ...         a = self.a(x).relu()
    ...         b = self.b(a).relu()
    ...         return self.d(torch.cat([self.c(torch.cat([self.bottom(b), b], 1)), a], 1))
    >>> find_stages(Net(), ((torch.zeros(1, 1, 4, 4),), {}))
    ['a', 'b', 'bottom', 'c', 'd']
    """
    if has_known_stages(model):
        return stages(model)
    plain = model
    if is_scaled(model):
        plain = independent_copy(model)
        detach(plain)
    try:
        found = detect(plain, call)
        skips = found.skips()
    except ValueError:
        return stages(model)
    modules, names = dict(model.named_modules()), []
    for number in dict.fromkeys(path.nest for path in found.paths):
        paths = [path for path in found.paths if path.nest == number]
        names += [made_names(found.trace, path.source)[-1] for path in paths] + _middle(found.trace, paths[-1])
        names += [skip.consumer or skip.used_in for skip in reversed(skips) if skip.size.nest == number]
    return list(dict.fromkeys(name for name in names if modules.get(name) not in (None, model)))


def _middle(trace: Trace, innermost: SkipPath) -> list[str]:
    """The module between the ends of the innermost skip: by name, or the one with the most weights."""
    inside = [call for call in trace.calls if innermost.source < call.start < call.end <= innermost.join]
    outer = [call for call in inside if call.parent < 0 or trace.calls[call.parent] not in inside]
    main = [call for call in outer if any(trace.leads_to(node, innermost.join) for node in call.returned)]
    size = {call.name: sum(p.numel() for p in call.module.parameters()) for call in main}
    return [max(size, key=lambda name: (bool(MIDDLE.search(name)), size[name]))] if size else []


def _as_floats(values: dict[str, Tensor]) -> dict[str, float]:
    """All values in one transfer from the device."""
    return dict(zip(values, torch.stack(list(values.values())).tolist(), strict=True)) if values else {}
