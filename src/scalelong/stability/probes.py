"""Feature and gradient oscillation (Fig. 1), measured in any training loop."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from scalelong.backbones.unet import unwrapped
from scalelong.errors import did_you_mean
from scalelong.files import open_inside
from scalelong.runs.reader import PROBE_EVERY, relative_oscillation, relative_spread
from scalelong.skips.example import as_call, tensors_in, uncompiled, undisturbed
from scalelong.skips.families import stages
from scalelong.training.step import is_main_rank

__all__ = ["OscillationProbe", "relative_oscillation", "relative_spread", "stages"]


class OscillationProbe:
    """Per block, the mean norm of its output on a fixed batch and the norm of its parameters' gradient.

    Call `step` in the training loop, after backward and before zero_grad.

    >>> from scalelong.backbones import UViT, UViTConfig
    >>> model = UViT(UViTConfig(image_size=8, patch_size=4, dim=16, depth=2, heads=2))
    >>> probe = OscillationProbe(model, (torch.zeros(2, 3, 8, 8), torch.zeros(2)), every=1)
    >>> list(probe.step())
    ['norm/in_blocks.0', 'norm/mid_block', 'norm/out_blocks.0']
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
        if every < 1:
            raise ValueError(f"every: must be at least 1, got {every}")
        self.model = unwrapped(model)
        self.blocks = list(blocks) if blocks is not None else stages(self.model)
        modules = dict(self.model.named_modules())
        for name in self.blocks:
            if name not in modules:
                raise ValueError(f"blocks: no module {name!r}; {did_you_mean(name, modules)}see model.named_modules()")
        self._modules = {name: modules[name] for name in self.blocks}
        self._call = as_call(inputs)
        self.every = every
        self.path = Path(path) if path is not None else None
        if self.path is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
        self.count = 0
        try:  # reject a batch or blocks that cannot be measured before training starts
            norms = self.norms()
        except (RuntimeError, ValueError, TypeError, IndexError) as error:
            shapes = [tuple(tensor.shape) for tensor in tensors_in(self._call)]
            what = f"inputs: the forward of {type(self.model).__name__} fails on a probe batch of shapes {shapes}"
            raise ValueError(f"{what} ({error}); pass its arguments, on its device") from error
        if missing := [name for name in self.blocks if name not in norms]:
            raise ValueError(f"blocks: {missing} returned no tensor when the model ran on the probe batch; omit them")

    def step(self) -> dict[str, float] | None:
        """Count a training step; measure and write at every `every`-th."""
        self.count += 1
        return self(self.count, self.model)

    def __call__(self, step: int, _model: nn.Module) -> dict[str, float] | None:
        """`norm/BLOCK` and `gradient/BLOCK` if `step` is a multiple of `every`, else None."""
        if step % self.every:
            return None
        measured = (("norm", self.norms()), ("gradient", self.gradient_norms()))
        values = {f"{what}/{name}": norm for what, norms in measured for name, norm in norms.items()}
        if self.path is not None and is_main_rank():
            with open_inside(self.path.parent, self.path.name, mode="a") as file:
                file.write(json.dumps({"step": step, **values}) + "\n")
        return values

    @torch.no_grad()
    def norms(self) -> dict[str, float]:
        """The mean over the batch of ||h||_2 of each block's output."""
        found: dict[str, Tensor] = {}

        def keep(name: str, _module: nn.Module, _args: Any, output: Any) -> None:
            tensor = output if isinstance(output, Tensor) else output[0]
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


def _as_floats(values: dict[str, Tensor]) -> dict[str, float]:
    """All values in one transfer from the device."""
    return dict(zip(values, torch.stack(list(values.values())).tolist(), strict=True)) if values else {}
