"""The operators of the fused kernels: equal to torch's, with their gradients; the kernels themselves in the interpreter.

On a CPU the operators run in float32 and in torch's operations; on a GPU they run in 16 bits.
"""

from __future__ import annotations

import copy
import sys
import warnings
from collections.abc import Callable

import pytest
import torch
from tests.interpreter import run_interpreted
from torch import Tensor, nn
from torch.nn import functional as F

from scalelong.backbones import fused, fused_ops, uvit
from scalelong.backbones.fused_ops import add_product_, linear_gelu

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def _plain_attention(qkv: Tensor, heads: int) -> Tensor:
    query, key, value = qkv.unflatten(-1, (3, heads, -1)).permute(2, 0, 3, 1, 4)
    return F.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2)


def _gradient(function: Callable[[Tensor, int], Tensor], qkv: Tensor, heads: int, grad: Tensor) -> Tensor:
    qkv = qkv.detach().requires_grad_()
    return torch.autograd.grad(function(qkv, heads), qkv, grad)[0]


def _two_mlps(dtype: torch.dtype, device: str = "cpu") -> tuple[uvit.Mlp, uvit.Mlp]:
    """A plain and a fused MLP of the same weights."""
    torch.manual_seed(0)
    plain = uvit.Mlp(64, 256).to(device, dtype)
    mlp = copy.deepcopy(plain)
    mlp.__class__ = fused.FusedMlp
    return plain, mlp


def assert_same_mlps(plain: nn.Module, mlp: nn.Module, x: Tensor, tolerance: float) -> None:
    """The relative distance of outputs and of all gradients is at most `tolerance`."""
    x, grad, found = x.detach().requires_grad_(), torch.randn_like(x), []
    for each in (plain, mlp):
        out = each(x)
        found.append([out, *torch.autograd.grad(out, [x, *each.parameters()], grad)])
    for one, other in zip(*found, strict=True):
        assert (other - one).norm() <= tolerance * one.norm()


def test_linear_gelu_equals_gelu_of_the_linear_layer() -> None:
    torch.manual_seed(0)
    linear, x = nn.Linear(16, 64), 3 * torch.randn(5, 7, 16)
    with torch.no_grad():
        exact, found = F.gelu(linear(x)), linear_gelu(x, linear.weight, linear.bias)
    assert found.shape == (5, 7, 64)
    assert (found - exact).abs().max() <= 6e-4


def test_the_product_is_added_in_place() -> None:
    onto, x, weight = torch.randn(2, 5, 8), torch.randn(2, 5, 6), torch.randn(8, 6)
    want = onto + x @ weight.T
    assert add_product_(onto, x, weight) is onto
    torch.testing.assert_close(onto, want)


def test_the_compiler_keeps_an_operator_in_one_piece() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return linear_gelu(x, self.linear.weight, self.linear.bias)

    model, x = Model(), torch.randn(2, 3, 8)
    with torch.no_grad():
        traced = torch.export.export(model, (x,))
        assert "scalelong.linear_gelu" in str(traced.graph)
        torch.testing.assert_close(traced.module()(x), model(x), rtol=1e-5, atol=1e-5)


def test_a_kernel_that_fails_warns_once_and_falls_back(monkeypatch) -> None:
    """In a container without a C compiler, for example: Triton needs one."""
    monkeypatch.setattr(fused_ops, "failures", {})
    monkeypatch.setitem(sys.modules, "triton", None)  # importing it fails
    monkeypatch.delitem(sys.modules, "scalelong.backbones.attention_kernel", raising=False)
    qkv = torch.randn(2, 257, 3 * 64)
    with pytest.warns(UserWarning, match=r"attention_kernel\.attend failed .*; using torch's instead"):
        found = fused_ops.attention(qkv, 1)
    torch.testing.assert_close(found, _plain_attention(qkv, 1))
    assert len(fused_ops.failures) == 1
    grad = torch.randn_like(found)
    want, found = (_gradient(function, qkv, 1, grad) for function in (_plain_attention, fused_ops.attention))
    torch.testing.assert_close(found, want, atol=1e-5, rtol=1e-5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.library.opcheck(fused_ops._attention, (qkv, 1))


def test_the_fused_mlp_has_the_outputs_and_gradients_of_the_plain_one(monkeypatch) -> None:
    """In torch's operations; the kernels are compared in the interpreter and on a GPU."""
    monkeypatch.setattr(fused_ops, "failures", {"mlp_kernel": "not here"})
    plain, mlp, x = *_two_mlps(torch.float32), torch.randn(2, 5, 64)
    assert_same_mlps(plain, mlp, x, 1e-5)
    compiled = torch.compile(mlp, backend="aot_eager", fullgraph=True)
    assert_same_mlps(plain, compiled, x, 1e-5)


_IN_THE_INTERPRETER = """
import torch
from scalelong.backbones import fused_ops
from tests.backbones.test_fused_ops import _gradient, _plain_attention, _two_mlps, assert_same_mlps
torch.manual_seed(0)
for tokens, heads, channels in ((257, 2, 64), (258, 3, 32), (256, 1, 64), (65, 2, 16)):
    qkv = 2 * torch.randn(2, tokens, 3 * heads * channels)
    want = _plain_attention(qkv, heads)
    torch.testing.assert_close(fused_ops.attention(qkv, heads), want, atol=1e-5, rtol=1e-5)
    grad = torch.randn_like(want)
    want, found = (_gradient(each, qkv, heads, grad) for each in (_plain_attention, fused_ops.attention))
    torch.testing.assert_close(found, want, atol=1e-4, rtol=1e-5)
    print("equal", tokens)
for rows in (130, 65):
    assert_same_mlps(*_two_mlps(torch.float32), torch.randn(1, rows, 64), 1e-5)
assert not fused_ops.failures, fused_ops.failures
"""


@pytest.mark.slow
def test_the_kernels_compute_attention_and_the_mlp() -> None:
    """Triton's interpreter runs the kernels, program by program, on the CPU."""
    found = run_interpreted(_IN_THE_INTERPRETER).split()
    assert found == ["equal", "257", "equal", "258", "equal", "256", "equal", "65"]


@needs_gpu
def test_on_a_gpu_linear_gelu_is_exact_to_its_dtype() -> None:
    linear, x = nn.Linear(16, 64, device="cuda"), torch.randn(5, 7, 16, device="cuda")
    with torch.no_grad():
        exact, found = F.gelu(linear(x)), linear_gelu(x.bfloat16(), linear.weight, linear.bias)
    assert found.dtype == torch.bfloat16
    assert (found - exact).abs().max() <= 6e-4 + 2 * torch.finfo(torch.bfloat16).eps * exact.abs().max()


@needs_gpu
@pytest.mark.parametrize("tokens", [256, 257, 258])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_on_a_gpu_attention_is_exact_to_its_dtype(tokens: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    qkv = (2 * torch.randn(5, tokens, 3 * 512, device="cuda")).to(dtype)
    want, found = _plain_attention(qkv.double(), 8), fused_ops.attention(qkv, 8)
    assert found.dtype == dtype
    assert (found - want).abs().max() <= 2 * torch.finfo(dtype).eps * want.abs().max()
    grad = torch.randn_like(want)
    want = _gradient(_plain_attention, qkv.double(), 8, grad)
    found = _gradient(fused_ops.attention, qkv, 8, grad.to(dtype))
    again = _gradient(fused_ops.attention, qkv, 8, grad.to(dtype))
    assert not fused_ops.failures
    assert torch.equal(found, again)  # sums have a fixed order
    assert (found - want).norm() <= 2 * torch.finfo(dtype).eps * want.norm()


@needs_gpu
@pytest.mark.parametrize("rows", [257, 1000])
def test_on_a_gpu_the_mlp_is_exact_to_its_dtype(rows: int) -> None:
    plain, mlp = _two_mlps(torch.bfloat16, "cuda")
    assert_same_mlps(plain, mlp, torch.randn(3, rows, 64, device="cuda", dtype=torch.bfloat16), 0.02)
    assert not fused_ops.failures
