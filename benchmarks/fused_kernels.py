"""The fused attention and MLP kernels against torch's on a GPU: milliseconds per block of U-ViT-S/2.

python benchmarks/fused_kernels.py --out benchmarks/results/fused_kernels.json
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
import tyro
from measure import about, windows, write
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from triton.runtime.errors import OutOfResources, PTXASError

from scalelong.backbones import attention_kernel, mlp_kernel

BACKENDS = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}
Call = Callable[[], Tensor]


@dataclass(frozen=True)
class Benchmark:
    images: int = 128
    tokens: tuple[int, ...] = (257,)
    heads: int = 8
    channels: int = 64  # per head
    repeats: int = 20
    tune: bool = False  # also time other ways to launch the kernels
    out: str = ""


@dataclass(frozen=True)
class Candidate:
    """A computation whose first image is compared with a result in float64."""

    kernel: str
    what: str
    call: Call
    exact: Tensor


def main() -> None:
    command = tyro.cli(Benchmark, description=__doc__)
    if not torch.cuda.is_available():
        raise SystemExit("benchmarks/fused_kernels.py: needs a GPU")
    result: dict[str, Any] = {**about(torch.device("cuda")), "rows": []}
    for tokens in command.tokens:
        for each in itertools.chain(attention(command, tokens), mlp(command, tokens)):
            row: dict[str, Any] = {"tokens": tokens, "kernel": each.kernel, "what": each.what}
            try:
                row["milliseconds"] = milliseconds(each.call, command.repeats)
                found = each.call()[: len(each.exact)].double()
                row["relative_error"] = float((found - each.exact).norm() / each.exact.norm())
            except (
                OutOfResources,
                PTXASError,
                RuntimeError,
            ) as error:  # too little shared memory or registers; no such backend
                row["failed"] = str(error)[:100]
            result["rows"].append(row)
            print(row, flush=True)
            write(command.out, result)


def attention(command: Benchmark, tokens: int) -> Iterator[Candidate]:
    torch.manual_seed(0)
    heads, width = command.heads, command.heads * command.channels
    qkv, grad = (normal(command.images, tokens, size) for size in (3 * width, width))
    exact = qkv[:1].double().requires_grad_()
    exact_out = torch_attention(exact, heads)
    (exact_grad,) = torch.autograd.grad(exact_out, exact, grad[:1].double())
    exact_out = exact_out.detach()
    for name, backend in BACKENDS.items():
        with sdpa_kernel(backend):
            yield Candidate("attention", f"torch, {name}", lambda: torch_attention(qkv, heads), exact_out)
            tracked = qkv.detach().requires_grad_()
            out = torch_attention(tracked, heads)

            def backward(out: Tensor = out, tracked: Tensor = tracked) -> Tensor:
                return torch.autograd.grad(out, tracked, grad, retain_graph=True)[0]

            if name == "cudnn":  # torch's flash cannot be captured
                yield Candidate("attention backward", f"torch, {name}", backward, exact_grad)
    out, stats = attention_kernel.attend(qkv, heads)
    for what, tiling in tilings(attention_kernel.Tiling, attention_kernel.FORWARD, command.tune):
        call: Call = lambda t=tiling: attention_kernel.attend(qkv, heads, t)[0]  # noqa: E731
        yield Candidate("attention", what, call, exact_out)
    for part, used in (("queries", attention_kernel.QUERIES), ("keys", attention_kernel.KEYS)):
        for what, tiling in tilings(attention_kernel.Tiling, used, command.tune):
            chosen = {part: tiling}  # the other one as it is
            call = lambda c=chosen: attention_kernel.attend_backward(qkv, out, stats, grad, heads, **c)  # noqa: E731
            yield Candidate("attention backward", f"{part}: {what}", call, exact_grad)


def mlp(command: Benchmark, tokens: int) -> Iterator[Candidate]:
    torch.manual_seed(0)
    rows, width = command.images * tokens, command.heads * command.channels
    x, dy, w1, bias, w2 = (
        normal(*shape) for shape in ((rows, width), (rows, width), (4 * width, width), (4 * width,), (width, 4 * width))
    )
    w1, w2 = w1 * 0.02, w2 * 0.02
    pre = F.linear(x, w1, bias)
    exact_pre = F.linear(x[:tokens].double(), w1.double(), bias.double())
    slope = torch.ops.aten.gelu_backward(torch.ones_like(pre), pre)
    exact_dpre = (dy[:tokens].double() @ w2.double()) * slope[:tokens].double()
    gelu, backward = torch.compile(lambda p: F.gelu(p)), torch.compile(torch_gelu_backward)
    yield Candidate("mlp", "torch", lambda: gelu(F.linear(x, w1, bias)), F.gelu(exact_pre))
    yield Candidate("mlp backward", "torch", lambda: backward(dy @ w2, pre)[0], exact_dpre)
    for what, tiling in tilings(mlp_kernel.Tiling, mlp_kernel.FORWARD, command.tune):
        call: Call = lambda t=tiling: mlp_kernel.linear_gelu(x, w1, bias, t)[0]  # noqa: E731
        yield Candidate("mlp", what, call, F.gelu(exact_pre))
    for what, tiling in tilings(mlp_kernel.Tiling, mlp_kernel.BACKWARD, command.tune):
        call = lambda t=tiling: mlp_kernel.gelu_backward(dy, w2, slope, t)[0]  # noqa: E731
        yield Candidate("mlp backward", what, call, exact_dpre)


def tilings(kind: Any, used: Any, tune: bool) -> list[tuple[str, Any]]:
    """How the kernel is launched, and with `tune` other ways."""
    found = [("as used", used)]
    if tune and kind is attention_kernel.Tiling:
        found += [("", kind(4, stages, registers)) for stages in (2, 3) for registers in (None, 168)]
    elif tune:
        sizes = (
            (128, 128, 64, 8, 3),
            (128, 128, 64, 8, 4),
            (128, 256, 64, 8, 3),
            (128, 64, 64, 4, 4),
            (256, 128, 64, 8, 3),
        )
        found += [("", kind(*size, registers)) for size in sizes for registers in (128, 255)]
    return [(what or str(tiling), tiling) for what, tiling in found]


def torch_attention(qkv: Tensor, heads: int) -> Tensor:
    query, key, value = qkv.unflatten(-1, (3, heads, -1)).permute(2, 0, 3, 1, 4)
    return F.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2)


def torch_gelu_backward(dact: Tensor, pre: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """As torch.compile does it: the gradient, the activation again, which it does not keep, and the sums over rows."""
    dpre = torch.ops.aten.gelu_backward(dact, pre)
    return dpre, F.gelu(pre), dpre.sum(0, dtype=torch.float32)


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


def milliseconds(call: Call, repeats: int) -> float:
    """Per call, replayed as a CUDA graph: without the time to launch it."""
    for _ in range(2):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(5):
            call()
    return windows([lambda _: graph.replay()], torch.device("cuda"), count=1, size=repeats // 5, warm_up=2)[0][0] / 5


if __name__ == "__main__":
    main()
