"""The fused attention kernel for 257 tokens against torch's, on a GPU: milliseconds per block, by tile shape.

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
from triton.runtime.errors import OutOfResources

from scalelong.backbones.attention_kernel import attend


@dataclass(frozen=True)
class Benchmark:
    images: int = 1000
    tokens: tuple[int, ...] = (257, 258)
    heads: int = 8
    channels: int = 64  # per head
    repeats: int = 20
    out: str = ""


def main() -> None:
    command = tyro.cli(Benchmark, description=__doc__)
    if not torch.cuda.is_available():
        raise SystemExit("benchmarks/attention.py: needs a GPU")
    rows = [row for tokens in command.tokens for row in _rows(command, tokens)]
    write(command.out, {**about(torch.device("cuda")), "rows": rows})


def _rows(command: Benchmark, tokens: int) -> list[dict[str, object]]:
    torch.manual_seed(0)
    width = 3 * command.heads * command.channels
    qkv = torch.randn(command.images, tokens, width, device="cuda", dtype=torch.bfloat16)
    exact = _torch(qkv[:8].double(), command.heads)
    rows: list[dict[str, object]] = []

    def measure(what: str, attention: Callable[[Tensor], Tensor]) -> None:
        try:
            milliseconds = _milliseconds(lambda: attention(qkv), command.repeats)
        except OutOfResources as error:  # needs more shared memory than the GPU has
            rows.append({"tokens": tokens, "what": what, "failed": str(error)[:100]})
        else:
            off = float((attention(qkv[:8]).double() - exact).abs().max())
            rows.append({"tokens": tokens, "what": what, "milliseconds": milliseconds, "largest error": off})
        print(rows[-1], flush=True)

    measure("torch", lambda x: _torch(x, command.heads))
    for queries, keys, stages in itertools.product((64, 128), (32, 64), (2, 3, 4)):
        shape = (queries, keys, queries // 16, stages)
        what = f"{queries} queries, {keys} keys, {queries // 16} warps, {stages} stages"
        measure(what, lambda x, shape=shape: attend(x, command.heads, *shape))
    return rows


def _torch(qkv: Tensor, heads: int) -> Tensor:
    query, key, value = qkv.unflatten(-1, (3, heads, -1)).permute(2, 0, 3, 1, 4)
    return F.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2)


def _milliseconds(call: Callable[[], object], repeats: int) -> float:
    return windows([lambda _: call()], torch.device("cuda"), count=1, size=repeats, warm_up=2)[0][0]


if __name__ == "__main__":
    main()
