"""Fused inference: equal to the plain network, swapped in only inside the context, and careful with what users attach.

On a CPU the operators run in float32, where they must equal the plain ones; on a GPU they run in 16 bits.
"""

from __future__ import annotations

import copy
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from accelerate.hooks import ModelHook, add_hook_to_module
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.module import register_module_forward_hook

import scalelong
from scalelong.backbones import UViT, UViTConfig, fused, fused_ops, uvit
from scalelong.backbones.fused_ops import add_product_, linear_gelu
from scalelong.scaling.registry import METHODS

ROOT = Path(__file__).parents[2]
_SMALL = UViTConfig(image_size=8, patch_size=2, dim=32, depth=4, heads=2)
_S2 = UViTConfig(image_size=32, patch_size=2, dim=512, depth=12, heads=8)


def _model() -> tuple[UViT, Tensor, Tensor]:
    torch.manual_seed(0)
    model = UViT(_SMALL).eval()
    for parameter in model.parameters():
        parameter.data.add_(0.1 * torch.randn_like(parameter))
    return model, torch.randn(3, 3, 8, 8), torch.tensor([10.0, 500.0, 990.0])


def _fused(model: nn.Module, x: Tensor, time: Tensor) -> Tensor:
    with torch.no_grad(), fused.inference(model):
        output: Tensor = model(x, time)
    return output


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


# ------------------------------------------------------------------------------------------------------- the operators


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


# -------------------------------------------------------------------------------------------------------- the networks


@pytest.mark.parametrize("method", [name for name in METHODS if not METHODS[name].sampling_only])
def test_fused_equals_plain(method: str) -> None:
    """And every call anew, so no call writes into what another one needs."""
    model, x, time = _model()
    scalelong.apply(model, method)
    want = model(x, time).detach()
    with torch.no_grad(), fused.inference(model):
        first, again = model(x, time), model(x, time)
    assert torch.equal(first, again)
    torch.testing.assert_close(first, want, atol=1e-5, rtol=1e-5)


def test_every_block_is_swapped_and_swapped_back() -> None:
    model, _, _ = _model()
    before = [type(module) for module in model.modules()]
    with pytest.raises(RuntimeError, match="inside"), fused.inference(model):
        inside = [type(module) for module in model.modules()]
        with fused.inference(model):  # nested: nothing left to swap
            assert [type(module) for module in model.modules()] == inside
        raise RuntimeError("inside")
    assert inside.count(fused.FusedBlock) == 5
    assert inside.count(fused.FusedSkipLinear) == 2
    assert [type(module) for module in model.modules()] == before
    with fused.inference(model, enabled=False), fused.inference(None):
        assert [type(module) for module in model.modules()] == before


@pytest.mark.parametrize(("precision", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 0.03)])
@pytest.mark.parametrize("method", ["none", "cs", "ls"])
def test_for_training_keeps_outputs_and_gradients(method, precision, tolerance, monkeypatch) -> None:
    """In a loop of one's own, with weights in float32; in torch's operations where there is no GPU."""
    monkeypatch.setattr(fused, "_has_attention_kernel", lambda _: True)
    monkeypatch.setattr(fused, "_has_mlp_kernel", lambda _: True)
    monkeypatch.setattr(fused_ops, "failures", {"attention_kernel": "no GPU", "mlp_kernel": "no GPU"})
    torch.manual_seed(0)
    plain = UViT(UViTConfig(image_size=8, patch_size=2, dim=64, depth=4, heads=1))
    scalelong.apply(plain, method)
    model = copy.deepcopy(plain)
    fused.for_training(model)
    assert {fused.FusedAttention, fused.FusedMlp, fused.FusedSkipLinear, fused.FusedPatchEmbed} <= set(
        map(type, model.modules())
    )
    x, time, found = torch.randn(3, 3, 8, 8), torch.tensor([10.0, 500.0, 990.0]), []
    for each in (plain, model):
        with torch.autocast("cpu", precision, enabled=precision != torch.float32):
            out = each(x, time)
        gradients = torch.autograd.grad(out.float().square().mean(), list(each.parameters()))
        found.append((out.float(), torch.cat([gradient.flatten() for gradient in gradients])))
    for want, result in zip(*found, strict=True):
        assert (result - want).norm() <= tolerance * want.norm()


def test_under_autocast_the_residual_path_is_16_bit() -> None:
    model, x, time = _model()
    seen: list[torch.dtype] = []
    for block in (*model.in_blocks, model.mid_block, *model.out_blocks):
        block.register_forward_hook(lambda _module, _inputs, output: seen.append(output.dtype))
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        plain = model(x, time)
        assert torch.float32 in seen  # of the in-blocks
        seen.clear()
        found = _fused(model, x, time)
    assert set(seen) == {torch.bfloat16}
    assert (found - plain).norm() <= 0.02 * plain.norm()


def test_inputs_of_blocks_are_not_overwritten(monkeypatch) -> None:
    """4 + 1 blocks accumulate their MLP in place."""
    model, x, time = _model()
    targets: list[Tensor] = []
    plain = fused_ops.add_product_
    monkeypatch.setattr(fused_ops, "add_product_", lambda onto, *rest: targets.append(onto) or plain(onto, *rest))
    given: list[tuple[Tensor, Tensor]] = []

    def keep(_module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        given.extend((tensor, tensor.clone()) for tensor in inputs)

    for block in (*model.in_blocks, model.mid_block, *model.out_blocks):
        block.register_forward_pre_hook(keep)
    _fused(model, x, time)
    assert len(targets) == 5
    assert len(given) == 5 + 2
    assert all(torch.equal(tensor, before) for tensor, before in given)


def test_non_contiguous_tokens() -> None:
    model, x, time = _model()
    before = _fused(model, x, time)
    model.in_blocks[0].register_forward_hook(lambda _module, _inputs, output: output.mT.contiguous().mT)
    torch.testing.assert_close(_fused(model, x, time), before)


# --------------------------------------------------------------------------- adapters, hooks, offloading, other modules


@pytest.mark.parametrize("where", ["mlp", "mlp.fc1", "mlp.fc2"])
def test_hooks_run(where: str) -> None:
    model, x, time = _model()
    before = _fused(model, x, time)
    hook = model.mid_block.get_submodule(where).register_forward_hook(lambda _module, _inputs, output: 2 * output)
    assert not torch.allclose(_fused(model, x, time), before)
    hook.remove()
    assert torch.equal(_fused(model, x, time), before)


def test_global_hooks_run() -> None:
    model, x, time = _model()
    heard: list[nn.Module] = []
    hook = register_module_forward_hook(lambda module, _inputs, _output: heard.append(module))
    _fused(model, x, time)
    hook.remove()
    assert sum(type(module) is uvit.Mlp for module in heard) == 5
    assert sum(module is model.mid_block.mlp.fc1 for module in heard) == 1


@pytest.mark.parametrize("where", ["mlp", "mlp.fc1", "mlp.fc2", "skip_linear", ""])
def test_a_replaced_forward_is_called(where: str) -> None:
    """As accelerate does to load offloaded weights before a layer runs."""
    model, x, time = _model()
    called: list[nn.Module] = []

    class Listen(ModelHook):  # type: ignore[misc]
        def pre_forward(self, module: nn.Module, *args: object, **kwargs: object) -> tuple[object, object]:
            called.append(module)
            return args, kwargs

    listened = model.out_blocks[0].get_submodule(where)
    add_hook_to_module(listened, Listen())
    found = _fused(model, x, time)
    assert called == [listened]
    torch.testing.assert_close(found, model(x, time).detach(), rtol=1e-5, atol=1e-5)


def test_adapters_are_applied() -> None:
    model, x, time = _model()
    before = _fused(model, x, time)
    from peft import LoraConfig, inject_adapter_in_model  # here: the process of the kernel's test cannot import it

    inject_adapter_in_model(LoraConfig(target_modules=["fc1"], init_lora_weights=False), model)
    found = _fused(model, x, time)
    assert not torch.allclose(found, before)
    torch.testing.assert_close(found, model(x, time).detach(), rtol=1e-5, atol=1e-5)


def test_other_modules_in_place_of_the_mlp() -> None:
    model, x, time = _model()
    before = _fused(model, x, time)
    mlp, model.mid_block.mlp = model.mid_block.mlp, nn.Linear(32, 32)
    assert not torch.allclose(_fused(model, x, time), before)
    model.mid_block.mlp = mlp
    for name in ("fc1", "fc2"):
        setattr(mlp, name, nn.Linear(*reversed(getattr(mlp, name).weight.shape), bias=False))
        torch.testing.assert_close(_fused(model, x, time), model(x, time).detach(), rtol=1e-5, atol=1e-5)


# ------------------------------------------------------------------------------------------------ imports and compilation


def test_importing_the_backbones_loads_no_compiler() -> None:
    program = "import sys, scalelong.backbones.fused; print(sorted({'torch._dynamo', 'triton'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=300)
    assert done.stdout.strip() == "[]"


@pytest.mark.slow
def test_compiled_it_stays_one_graph_and_equal() -> None:
    model, x, time = _model()
    scalelong.apply(model, "cs", kappa=0.5)
    want = model(x, time).detach()
    compiled = torch.compile(model, fullgraph=True)
    torch.testing.assert_close(_fused(compiled, x, time), want, atol=1e-5, rtol=1e-5)


def test_only_measured_sizes_use_the_attention_kernel(monkeypatch) -> None:
    monkeypatch.setattr(fused, "_gpu_has_kernels", lambda _: True)
    used = set()
    for size, classes, channels in ((32, 0, 64), (32, 7, 64), (16, 0, 64), (64, 0, 64), (32, 0, 32)):
        config = UViTConfig(image_size=size, patch_size=2, dim=2 * channels, depth=2, heads=2, num_classes=classes)
        with torch.device("meta"):
            model = UViT(config)
        with fused.inference(model):
            if type(model.mid_block.attn) is fused.FusedAttention:
                used.add((model.num_tokens, channels))
    assert used == {(257, 64), (258, 64)}


_IN_THE_INTERPRETER = """
import sys, torch
sys.path.append(sys.argv[1])
from scalelong.backbones import fused_ops
from tests.backbones.test_fused import _gradient, _plain_attention, _two_mlps, assert_same_mlps
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
def test_the_kernels_compute_attention_and_the_mlp(monkeypatch) -> None:
    """Triton's interpreter runs the kernel, program by program, on the CPU."""
    packages = ROOT / ".venv" / "packages"
    if not (packages / ".installed").exists():
        pytest.skip("make test-slow installs tests/packages.txt")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    command = [sys.executable, "-c", _IN_THE_INTERPRETER, str(packages)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=600)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["equal", "257", "equal", "258", "equal", "256", "equal", "65"]


# ------------------------------------------------------------------------------------------------------------- on a GPU

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


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


@needs_gpu
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("method", ["none", "cs", "ls"])
def test_on_a_gpu_fused_equals_plain(method: str, compiled: bool) -> None:
    torch.manual_seed(0)
    model = UViT(_S2).cuda().eval()
    for parameter in model.parameters():
        parameter.data.add_(0.02 * torch.randn_like(parameter))
    scalelong.apply(model, method)
    x, time = torch.randn(8, 3, 32, 32, device="cuda"), torch.full((8,), 500.0, device="cuda")
    run = torch.compile(model) if compiled else model
    with torch.no_grad():
        exact = model(x, time)
        with torch.autocast("cuda", torch.bfloat16), fused.inference(run):
            kernel = type(model.mid_block.attn) is fused.FusedAttention
            found = run(x, time)
    assert kernel == (torch.cuda.get_device_capability()[0] >= 9)
    assert (found - exact).norm() <= 0.02 * exact.norm()
