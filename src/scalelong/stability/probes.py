"""Feature and gradient oscillation (Fig. 1): two lines in any training loop.

probe = OscillationProbe(model, (x, t), path="probe.jsonl")   # before the loop
probe.step()                                                  # in it, after backward and before zero_grad
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from scalelong.backbones.unet import unwrapped
from scalelong.runs.oscillation import relative_oscillation, relative_spread
from scalelong.skips.example import uncompiled, undisturbed

__all__ = ["DEFAULT_EVERY", "OscillationProbe", "relative_oscillation", "relative_spread", "stages"]

DEFAULT_EVERY = 50  # steps; keeps the probe below 2% of the step time (benchmarks/probe_overhead.py)


_STAGES = (
    ("in_blocks", "mid_block", "out_blocks"),
    ("down_blocks", "mid_block", "up_blocks"),
    ("down_blocks", "middle_block", "up_blocks"),
    ("input_blocks", "middle_block", "output_blocks"),
    ("transformer_in_blocks", "transformer_mid_block", "transformer_out_blocks"),
    ("a", "middle", "b"),
    ("blocks",),
)


def stages(model: nn.Module) -> list[str]:
    """The stages of the U, by name: encoder blocks, the middle, decoder blocks; else the entries of the model's lists."""
    for names in _STAGES:
        if all(isinstance(getattr(model, name, None), nn.Module) for name in names):
            return [stage for name in names for stage in _parts(model, name)]
    lists = [name for name, child in model.named_children() if isinstance(child, (nn.ModuleList, nn.ModuleDict))]
    found = [stage for name in lists for stage in _parts(model, name)]
    if not found:
        raise ValueError(
            f"blocks: the stages of {type(model).__name__} are not known; pass blocks=[names], for example from "
            f"{[name for name, _ in model.named_children()]}"
        )
    return found


def _parts(model: nn.Module, name: str) -> list[str]:
    module = getattr(model, name)
    if isinstance(module, (nn.ModuleList, nn.ModuleDict)):
        return [f"{name}.{part}" for part, _ in module.named_children()]
    return [name]


class OscillationProbe:
    """Per block: the mean norm of its output on a fixed batch, and the norm of its parameters' gradient."""

    def __init__(
        self,
        model: nn.Module,
        inputs: Tensor | tuple[Any, ...] | Mapping[str, Any],  # arguments of the model's forward: the fixed batch
        *,
        blocks: Sequence[str] | None = None,  # default: the stages of the U
        every: int = DEFAULT_EVERY,
        path: str | Path | None = None,  # JSON lines are appended here
    ) -> None:
        if every < 1:
            raise ValueError(f"every: must be at least 1, got {every}")
        self.model = unwrapped(model)
        self.blocks = list(blocks) if blocks is not None else stages(self.model)
        self._modules = {name: self._module(name) for name in self.blocks}
        self.inputs: tuple[Any, ...] | Mapping[str, Any] = (inputs,) if isinstance(inputs, Tensor) else inputs
        self.every = every
        self.path = Path(path) if path is not None else None
        if self.path is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
        self.count = 0
        self._try()

    def _try(self) -> None:
        """Measure once, so that a batch that does not fit is found before the training."""
        try:
            norms = self.norms()
        except (RuntimeError, ValueError, TypeError, IndexError) as error:
            shapes = [tuple(v.shape) for v in _values(self.inputs) if isinstance(v, Tensor)]
            raise ValueError(
                f"inputs: a probe batch of shapes {shapes} does not go through {type(self.model).__name__} ({error}); pass "
                "what its forward takes, on its device"
            ) from error
        if missing := [name for name in self.blocks if name not in norms]:
            raise ValueError(f"blocks: {missing} gave no tensor when the model ran on the probe batch; leave them out")

    def step(self) -> dict[str, float] | None:
        """Call once per training step; measures and writes at every `every`-th."""
        self.count += 1
        return self(self.count, self.model)

    def __call__(self, step: int, _model: nn.Module) -> dict[str, float] | None:
        """The values at this step, if it is one to measure at: `norm/BLOCK` and `gradient/BLOCK`."""
        if step % self.every:
            return None
        values = {f"norm/{name}": norm for name, norm in self.norms().items()}
        values |= {f"gradient/{name}": norm for name, norm in self.gradient_norms().items()}
        if self.path is not None and _is_main_rank():
            with self.path.open("a") as file:
                file.write(json.dumps({"step": step, **values}) + "\n")
        return values

    @torch.no_grad()
    def norms(self) -> dict[str, float]:
        """The mean over the batch of ||h||_2 of each block's output, in the order of the blocks."""
        found: dict[str, Tensor] = {}

        def keep(name: str) -> Any:
            def hook(_module: nn.Module, _args: Any, output: Any) -> None:
                tensor = output if isinstance(output, Tensor) else output[0]
                found[name] = tensor.flatten(1).float().norm(dim=1).mean()

            return hook

        handles = [module.register_forward_hook(keep(name)) for name, module in self._modules.items()]
        try:
            with undisturbed(self.model), uncompiled():
                if isinstance(self.inputs, Mapping):
                    self.model(**self.inputs)
                else:
                    self.model(*self.inputs)
        finally:
            for handle in handles:
                handle.remove()
        names = [name for name in self.blocks if name in found]
        return dict(zip(names, torch.stack([found[name] for name in names]).tolist(), strict=True)) if names else {}

    @torch.no_grad()
    def gradient_norms(self) -> dict[str, float]:
        """The norm of the gradient of each block's parameters; blocks without one are left out."""
        found = {}
        for name, module in self._modules.items():
            gradients = [p.grad for p in module.parameters() if p.grad is not None]
            if gradients:
                found[name] = torch.stack(torch._foreach_norm(gradients)).float().norm()
        return dict(zip(found, torch.stack(list(found.values())).tolist(), strict=True)) if found else {}

    def _module(self, name: str) -> nn.Module:
        modules: dict[str, nn.Module] = dict(self.model.named_modules())
        if name not in modules:
            near = difflib.get_close_matches(name, modules, n=3)
            raise ValueError(f"blocks: there is no {name!r} in {type(self.model).__name__}; near are {near}")
        return modules[name]


def _values(inputs: tuple[Any, ...] | Mapping[str, Any]) -> list[Any]:
    return list(inputs.values() if isinstance(inputs, Mapping) else inputs)


def _is_main_rank() -> bool:
    return not (dist.is_available() and dist.is_initialized()) or dist.get_rank() == 0
