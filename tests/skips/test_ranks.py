"""Scaled models on two real ranks: DDP and FSDP2, as the docs say, give the outputs and gradients of one process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import copy, sys, torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
import scalelong
from scalelong.backbones import UViT, UViTConfig
from tests.ranks import leave

dist.init_process_group("gloo")
torch.set_num_threads(1)
torch.manual_seed(0)
model = UViT(UViTConfig(image_size=8, patch_size=2, dim=16, depth=8, heads=2))
scalelong.apply(model, sys.argv[1], **({"module": "ie"} if sys.argv[1] == "ls" else {}))
alone = copy.deepcopy(model)
wrapped = model
if sys.argv[2] == "fsdp2":
    mesh = init_device_mesh("cpu", (2,))
    for block in [*model.in_blocks, model.mid_block, *model.out_blocks]:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
else:
    wrapped = DistributedDataParallel(model)
x, t, rank = torch.randn(4, 3, 8, 8), torch.rand(4) * 999, dist.get_rank()
mine = slice(2 * rank, 2 * rank + 2)
output, expected = wrapped(x[mine], t[mine]), alone(x, t)
output.square().mean().backward()
expected.square().mean().backward()
torch.testing.assert_close(output, expected[mine], rtol=1e-5, atol=1e-6)
for (name, parameter), (_, other) in zip(model.named_parameters(), alone.named_parameters(), strict=True):
    gradient = parameter.grad.full_tensor() if hasattr(parameter.grad, "full_tensor") else parameter.grad
    torch.testing.assert_close(gradient, other.grad, rtol=1e-4, atol=1e-7, msg=name)
print("equal")
leave()
"""


@pytest.mark.slow
@pytest.mark.parametrize("method", ["cs", "ls"])
@pytest.mark.parametrize("wrapper", ["ddp", "fsdp2"])
def test_two_ranks_equal_one_process(wrapper: str, method: str, tmp_path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*launch, tmp_path / "script.py", method, wrapper], capture_output=True, text=True, timeout=120,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2])},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("equal") == 2  # the two lines may run into each other
