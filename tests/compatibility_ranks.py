"""What runs on each of two ranks: every subject under DDP or FSDP2, against one process that sees both ranks' inputs.

torchrun --nproc-per-node 2 -m tests.compatibility_ranks ddp found.json
"""

from __future__ import annotations

import copy
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from tests.compatibility import Subject, subjects
from tests.ranks import leave


def inputs_of(subject: Subject, rank: int) -> dict[str, Any]:
    """The ranks see different images: the first argument is scaled."""
    inputs = subject.inputs()
    first = next(iter(inputs))
    return {**inputs, first: inputs[first] * (1 + 0.3 * rank)}


def blocks(module: nn.Module) -> Iterator[nn.Module]:
    """The outermost parts that have a forward of their own and weights."""
    for name, child in module.named_children():
        if name == "scalelong":
            continue
        if isinstance(child, (nn.ModuleList, nn.ModuleDict)):
            yield from blocks(child)
        elif any(True for _ in child.parameters()):
            yield child


def wrapped(model: nn.Module, wrapper: str) -> nn.Module:
    if wrapper == "ddp":
        return DistributedDataParallel(model)
    mesh = init_device_mesh("cpu", (2,))
    for block in blocks(model):
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def check(subject: Subject, wrapper: str) -> None:
    rank = dist.get_rank()
    model = subject.scaled()
    alone = copy.deepcopy(model)
    outputs = [subject.run(alone, inputs_of(subject, r)) for r in (0, 1)]
    ((outputs[0].square().mean() + outputs[1].square().mean()) / 2).backward()
    outer = wrapped(model, wrapper)
    got = subject.run(outer, inputs_of(subject, rank))
    got.square().mean().backward()
    torch.testing.assert_close(got, outputs[rank], rtol=1e-4, atol=1e-5)
    for (name, parameter), (_, other) in zip(model.named_parameters(), alone.named_parameters(), strict=True):
        if other.grad is None or parameter.grad is None:
            assert other.grad is None or not other.grad.any(), name
            continue
        gradient: Tensor = parameter.grad.full_tensor() if hasattr(parameter.grad, "full_tensor") else parameter.grad
        torch.testing.assert_close(gradient, other.grad, rtol=1e-3, atol=1e-6, msg=name)


def main() -> None:
    wrapper, path = sys.argv[1], Path(sys.argv[2])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    found = {}
    for name, subject in subjects().items():
        try:
            check(subject, wrapper)
            found[name] = ""
        except Exception as error:  # noqa: BLE001 - every error is a result here
            found[name] = f"{type(error).__name__}: {error}"[:500]
    everyone: list[Any] = [None, None]
    dist.all_gather_object(everyone, found)
    if dist.get_rank() == 0:
        merged = {name: everyone[0][name] or everyone[1][name] for name in found}
        path.write_text(json.dumps(merged))
    leave()


if __name__ == "__main__":
    main()
