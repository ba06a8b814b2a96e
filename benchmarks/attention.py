"""The fused attention kernels for 257 tokens against torch's, on a GPU: milliseconds per block, by how they are launched.

python benchmarks/attention.py --out benchmarks/results/attention.json
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
import tyro
from measure import about, windows, write
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from triton.runtime.errors import OutOfResources

from scalelong.backbones.attention_kernel import Tiling, attend, attend_backward

BACKENDS = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}


@dataclass(frozen=True)
class Benchmark:
    images: int = 128
    tokens: tuple[int, ...] = (257, 258)
    heads: int = 8
    channels: int = 64  # per head
    repeats: int = 20
    registers: tuple[int, ...] = (0, 168, 128)  # at most, per thread; 0: as many as it takes
    out: str = ""


def main() -> None:
    command = tyro.cli(Benchmark, description=__doc__)
    if not torch.cuda.is_available():
        raise SystemExit("benchmarks/attention.py: needs a GPU")
    rows = [row for tokens in command.tokens for row in _rows(command, tokens)]
    write(command.out, {**about(torch.device("cuda")), "rows": rows})


def _rows(command: Benchmark, tokens: int) -> list[dict[str, object]]:
    torch.manual_seed(0)
    heads, width = command.heads, command.heads * command.channels
    qkv = torch.randn(command.images, tokens, 3 * width, device="cuda", dtype=torch.bfloat16)
    grad = torch.randn(command.images, tokens, width, device="cuda", dtype=torch.bfloat16)
    exact = qkv[:8].double().requires_grad_()
    exact_out = _torch(exact, heads)
    (exact_grad,) = torch.autograd.grad(exact_out, exact, grad[:8].double())
    rows: list[dict[str, object]] = []

    def measure(which: str, what: str, call: Callable[[], Tensor], want: Tensor) -> None:
        row: dict[str, object] = {"tokens": tokens, "pass": which, "what": what}
        try:
            row["milliseconds"] = _milliseconds(call, command.repeats)
            row["relative error"] = float((call()[:8].double() - want).norm() / want.norm())
        except (OutOfResources, RuntimeError) as error:  # more shared memory than the GPU has, or no such backend
            row["failed"] = str(error)[:100]
        rows.append(row)
        print(row, flush=True)

    for name, backend in BACKENDS.items():
        with sdpa_kernel(backend):
            tracked = qkv.detach().requires_grad_()
            try:
                out = _torch(tracked, heads)
            except RuntimeError as error:
                print(name, str(error)[:100])
                continue
            measure("forward", f"torch, {name}", lambda: _torch(qkv, heads), exact_out)

            def backward(out: Tensor = out, tracked: Tensor = tracked) -> Tensor:
                return torch.autograd.grad(out, tracked, grad, retain_graph=True)[0]

            measure("backward", f"torch, {name}", backward, exact_grad)
    out, stats = attend(qkv, heads)
    for warps, stages, registers in itertools.product((4, 8), (1, 2, 3, 4), command.registers):
        tiling = Tiling(warps, stages, registers or None)
        what = f"{warps} warps, {stages} stages, {registers or 'any'} registers"
        measure("forward", what, lambda t=tiling: attend(qkv, heads, t)[0], exact_out)
        for name in ("queries", "keys"):  # the other one as it is
            chosen = {name: tiling}
            call = lambda c=chosen: attend_backward(qkv, out, stats, grad, heads, **c)  # noqa: E731
            measure("backward", f"{name}: {what}", call, exact_grad)
    return rows


def _torch(qkv: Tensor, heads: int) -> Tensor:
    query, key, value = qkv.unflatten(-1, (3, heads, -1)).permute(2, 0, 3, 1, 4)
    return F.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2)


def _milliseconds(call: Callable[[], object], repeats: int) -> float:
    return windows([lambda _: call()], torch.device("cuda"), count=1, size=repeats, warm_up=2)[0][0]


if __name__ == "__main__":
    main()
