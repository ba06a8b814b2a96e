"""The fused GELU equals the plain one to less than its type rounds, and is used only for drawing on a GPU."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model
from torch import nn
from torch.autograd import forward_ad
from torch.nn import functional as F

from scalelong.backbones import uvit
from scalelong.backbones.fused import drawing_type, linear_gelu


def test_it_is_gelu_of_the_linear_layer() -> None:
    torch.manual_seed(0)
    linear, x = nn.Linear(16, 64), 3 * torch.randn(5, 7, 16)
    with torch.no_grad():
        exact, found = F.gelu(linear(x)), linear_gelu(x, linear, torch.float32)
    assert found.shape == (5, 7, 64)
    assert (found - exact).abs().max() <= 6e-4


def test_the_compiler_keeps_it_in_one_piece() -> None:
    linear, x = nn.Linear(8, 8), torch.randn(2, 3, 8)
    with torch.no_grad():
        traced = torch.export.export(_Fused(linear), (x,))
        assert "scalelong.linear_gelu" in str(traced.graph)
        assert torch.equal(traced.module()(x), linear_gelu(x, linear, torch.float32))


def test_gradients_and_cpus_take_the_exact_form() -> None:
    x = torch.randn(2, 3)
    assert drawing_type(x) is None
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert drawing_type(x) is None


def test_derivatives_by_other_means_take_the_exact_form() -> None:
    """The fused operations have no forward derivative: torch would take it for zero."""
    on_a_gpu, x, seen = SimpleNamespace(device=torch.device("cuda"), dtype=torch.bfloat16), torch.ones(2), []

    def look(row: torch.Tensor) -> torch.Tensor:
        seen.append(drawing_type(on_a_gpu))  # type: ignore[arg-type]
        return row

    with torch.no_grad():
        look(x)
        torch.func.jvp(look, (x,), (x,))
        torch.func.vmap(look)(x)
        with forward_ad.dual_level():
            look(x)
        look(x)
    assert seen == [torch.bfloat16, None, None, None, torch.bfloat16]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_it_follows_autocast_and_the_weights() -> None:
    x = torch.randn(2, 3, device="cuda")
    with torch.autocast("cuda", torch.bfloat16):
        assert drawing_type(x) is None
        with torch.no_grad():
            assert drawing_type(x) == torch.bfloat16
    with torch.no_grad():
        assert drawing_type(x) is None
        assert drawing_type(x.half()) == torch.float16
        linear, wide = nn.Linear(16, 64, device="cuda"), torch.randn(5, 7, 16, device="cuda")
        exact, found = F.gelu(linear(wide)), linear_gelu(wide, linear, torch.bfloat16)
    assert found.dtype == torch.bfloat16
    assert (found - exact).abs().max() <= 6e-4 + torch.finfo(torch.bfloat16).eps * exact.abs().max()


def test_adapters_and_hooks_are_heard_when_drawing(monkeypatch) -> None:
    """What stands in for the first layer, or hooks it, does its work; the plain layer takes the fused form."""
    monkeypatch.setattr(uvit, "drawing_type", lambda _: torch.float32)
    fused: list[nn.Module] = []
    monkeypatch.setattr(uvit, "linear_gelu", lambda x, linear, _: fused.append(linear) or F.gelu(linear(x)))
    mlp, x = uvit.Mlp(8, 16), torch.randn(2, 3, 8)
    plain = mlp(x)
    assert fused == [mlp.fc1]
    mlp.fc1.register_forward_hook(lambda _module, _inputs, output: 2 * output)
    assert not torch.allclose(mlp(x), plain)
    inject_adapter_in_model(LoraConfig(target_modules=["fc1"], init_lora_weights=False), mlp)
    assert not torch.allclose(mlp(x), plain)
    assert len(fused) == 1


class _Fused(nn.Module):
    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.linear = linear

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return linear_gelu(x, self.linear, torch.float32)
