"""Situations that a scaled model must work in: one function each, run on every family; and the known limitations.

Each function takes a subject, builds its own models and raises if the scaled model does not work. LS is applied: its gates
have weights and depend on the data, so they are the hardest to support.
"""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import scalelong
from tests.families import FAMILIES, assert_close, assert_same_weights, build, output
from tests.standins import FOUND

STANDINS = ("guided-diffusion style", "EDM style", "EDM2 style", "tutorial UNet")


@dataclass(frozen=True)
class Subject:
    """A model to put through it; detected ones need an example."""

    name: str
    make: Callable[[], nn.Module]
    inputs: Callable[[], dict[str, Any]]
    run: Callable[[nn.Module, dict[str, Any]], Tensor]
    detected: bool = False
    diffusers: bool = False
    leave: bool = False  # put no scaling on it: a limit of the model or the tool shows without ours too

    def model(self, seed: int = 0) -> nn.Module:
        torch.manual_seed(seed)
        return self.make().eval()

    def scale(self, model: nn.Module, method: str = "ls", **options: Any) -> nn.Module:
        if self.leave:
            return model
        torch.manual_seed(1)
        example = tuple(self.inputs().values()) if self.detected else None
        scalelong.apply(model, method, example=example, **options)
        return model

    def scaled(self) -> nn.Module:
        return self.scale(self.model())

    def loss(self, model: nn.Module) -> Tensor:
        torch.manual_seed(0)
        return self.run(model, self.inputs()).square().mean()

    def gradients(self, model: nn.Module) -> dict[str, Tensor]:
        model.zero_grad()
        self.loss(model).backward()
        return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def _noisy(make: Callable[[], nn.Module]) -> nn.Module:
    model = make()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
    return model


def subjects() -> dict[str, Subject]:
    """Every known family, and stand-ins whose skips are detected."""
    found = [
        Subject(family.name, lambda family=family: build(family), family.inputs, output, diffusers=family.diffusers)
        for family in FAMILIES
    ]
    for each in FOUND:
        if each.name in STANDINS:
            found.append(
                Subject(
                    each.name,
                    lambda each=each: _noisy(each.build),
                    lambda each=each: {str(i): value for i, value in enumerate(each.inputs())},
                    lambda model, inputs: model(*inputs.values()),
                    detected=True,
                )
            )
    return {subject.name: subject for subject in found}


def close(got: dict[str, Tensor], expected: dict[str, Tensor], rtol: float = 1e-3, atol: float = 1e-5) -> None:
    assert got.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(got[name], gradient, rtol=rtol, atol=atol, msg=name)


# ------------------------------------------------------------------------------------------------------------ situations


def compiled(subject: Subject) -> None:
    """torch.compile(fullgraph=True) traces it in one graph, with the same output and gradients; no kernels are made here."""
    eager = subject.scaled()
    other = copy.deepcopy(eager)
    torch._dynamo.reset()
    graph = torch.compile(other, fullgraph=True, backend="eager")
    expected = subject.gradients(eager)
    subject.loss(graph).backward()
    close({name: p.grad for name, p in other.named_parameters() if p.grad is not None}, expected)
    assert torch.allclose(subject.run(graph, subject.inputs()), subject.run(eager, subject.inputs()), atol=1e-5)


def checkpointed(subject: Subject) -> None:
    """Recomputed activations give the same gradients."""
    plain = subject.scaled().train()
    model = copy.deepcopy(plain)
    expected = subject.gradients(plain)
    if getattr(model, "_supports_gradient_checkpointing", False):
        model.enable_gradient_checkpointing()
        got = subject.gradients(model)
    else:
        checkpoint(lambda: subject.loss(model), use_reentrant=False).backward()
        got = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    close(got, expected, rtol=1e-4, atol=1e-6)


def autocast(subject: Subject) -> None:
    """Under bf16 autocast kappa = 1 changes no bit, and gates get gradients in their own precision."""
    kept, model = subject.model(), subject.scaled()
    with torch.backends.mkldnn.flags(enabled=False), torch.autocast("cpu", dtype=torch.bfloat16):
        before = subject.run(kept, subject.inputs())
    subject.scale(kept, "cs", kappa=1.0)
    with torch.backends.mkldnn.flags(enabled=False), torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(subject.run(kept, subject.inputs()), before)
        got = subject.gradients(model)
    expected = subject.gradients(model)
    gates = [name for name in expected if name.startswith("scalelong.")]
    assert gates
    for name in gates:
        assert got[name].dtype == torch.float32
        assert torch.isfinite(got[name]).all()


def deep_copied(subject: Subject) -> None:
    """A copy has gates of its own."""
    model = subject.scaled()
    before = subject.loss(model)
    average = copy.deepcopy(model)
    assert_close(subject.loss(average), before)
    with torch.no_grad():
        for parameter in average.scalelong.parameters():
            parameter.add_(1.0)
    assert torch.equal(subject.loss(model), before)
    assert not torch.allclose(subject.loss(average), before)


def exported(subject: Subject) -> None:
    """torch.export keeps the scaling in the graph."""
    model = subject.scaled()
    if subject.detected:
        args, kwargs = tuple(subject.inputs().values()), {}
    else:
        args, kwargs = (), subject.inputs()
    with torch.no_grad():
        program = torch.export.export(model, args, kwargs)
    expected = subject.run(model, subject.inputs())
    assert torch.allclose(subject.run(program.module(), subject.inputs()), expected, rtol=1e-4, atol=1e-5)
    assert any(name.startswith("scalelong.") for name in program.state_dict)


def _add_lora(model: nn.Module) -> None:
    from peft import LoraConfig, inject_adapter_in_model

    layers = [
        name
        for name, module in model.named_modules()
        if type(module) in (nn.Linear, nn.Conv2d)
        and not name.startswith("scalelong")
        and getattr(module, "groups", 1) == 1
    ]
    inject_adapter_in_model(LoraConfig(r=2, target_modules=layers), model)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))


def lora_before(subject: Subject) -> None:
    """Adapters first, scaling second: as if the adapters had always been there."""
    plain = subject.model()
    _add_lora(plain)
    adapted = subject.loss(plain)
    subject.scale(plain, "cs", kappa=1.0)
    assert torch.equal(subject.loss(plain), adapted)
    if not subject.leave:
        scalelong.remove(plain)
    subject.scale(plain)
    assert not torch.allclose(subject.loss(plain), adapted)
    got = subject.gradients(plain)
    assert any("lora_" in name and gradient.abs().sum() > 0 for name, gradient in got.items())


def lora_after(subject: Subject) -> None:
    """Scaling first, adapters second: equal to the other order."""
    first, second = subject.scaled(), subject.model()
    scaled = subject.loss(first)
    _add_lora(first)
    assert not torch.allclose(subject.loss(first), scaled)
    _add_lora(second)
    subject.scale(second)
    torch.testing.assert_close(subject.loss(first), subject.loss(second), rtol=1e-5, atol=1e-7)


def pipeline(subject: Subject) -> None:
    """A diffusers pipeline is saved with the scaled model and read back with it."""
    from diffusers import DDPMScheduler, DiffusionPipeline

    class OneModel(DiffusionPipeline):
        def __init__(self, unet: nn.Module, scheduler: Any) -> None:
            super().__init__()
            self.register_modules(unet=unet, scheduler=scheduler)

    model = subject.scaled()
    with tempfile.TemporaryDirectory() as folder:
        OneModel(model, DDPMScheduler()).save_pretrained(folder)
        read = type(model).from_pretrained if subject.leave else partial(scalelong.from_pretrained, type(model))
        unet = read(folder, subfolder="unet").eval()
        loaded = OneModel.from_pretrained(folder, unet=unet)
    assert loaded.unet.scalelong.config == model.scalelong.config
    assert_same_weights(loaded.unet, model)
    assert_close(subject.loss(loaded.unet), subject.loss(model))


@cache
def _on_ranks(wrapper: str) -> dict[str, str]:
    """The error of each subject on two gloo ranks, empty where there was none; one launch for all."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    with tempfile.TemporaryDirectory() as folder:
        found = Path(folder) / "found.json"
        done = subprocess.run(
            [*launch, "-m", "tests.compatibility_ranks", wrapper, str(found)],
            env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=900,
            cwd=Path(__file__).parents[1],
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-3000:]
        return json.loads(found.read_text())  # type: ignore[no-any-return]


def ddp(subject: Subject) -> None:
    """DistributedDataParallel on two ranks: gradients are the mean over the ranks' inputs."""
    error = _on_ranks("ddp")[subject.name]
    assert not error, error


def fsdp2(subject: Subject) -> None:
    """fully_shard on two ranks: outputs and gradients are those of one process."""
    error = _on_ranks("fsdp2")[subject.name]
    assert not error, error


@dataclass(frozen=True)
class Limit:
    """Why a cell does not come through; none of these is due to the scaling, and without it the same error comes."""

    reason: str
    error: str  # part of the message


def limits() -> dict[tuple[str, str], Limit]:
    """The known limits by subject and situation."""
    found = {
        ("EDM2 style", "FSDP2"): Limit(
            "FSDP2 does not support scalar parameters, such as its gain", "scalar parameters"
        ),
    }
    for when in ("LoRA before", "LoRA after"):
        found["EDM2 style", when] = Limit("peft does not support its weight-normalized layers", "target_modules")
        found["UNetMotionModel", when] = Limit(
            "it calls linear layers by keyword, which peft does not support", "argument: 'x'"
        )
    for name, subject in subjects().items():
        if not subject.diffusers:
            found[name, "pipeline"] = Limit(
                "not a diffusers model, so not part of a pipeline", "No such file|no attribute 'from_pretrained'"
            )
    name = "UniDiffuser UTransformer2DModel"
    found[name, "pipeline"] = Limit(
        "diffusers' pipelines contain UniDiffuserModel, not this part", "no attribute UTransformer2DModel"
    )
    return found


SITUATIONS: dict[str, Callable[[Subject], None]] = {
    "compile": compiled,
    "checkpointing": checkpointed,
    "DDP": ddp,
    "FSDP2": fsdp2,
    "autocast": autocast,
    "deepcopy": deep_copied,
    "export": exported,
    "LoRA before": lora_before,
    "LoRA after": lora_after,
    "pipeline": pipeline,
}
