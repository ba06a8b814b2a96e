"""Fused inference: equal to the plain network, swapped in only inside the context, and careful with what users attach.

On a CPU the operators run in float32, where they must equal the plain ones; on a GPU they run in 16 bits.
"""

from __future__ import annotations

import copy
import subprocess
import sys

import pytest
import torch
from accelerate.hooks import ModelHook, add_hook_to_module
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

import scalelong
from scalelong.backbones import UViT, UViTConfig, fused, fused_ops, uvit
from scalelong.scaling.learned import SqueezeExcite
from scalelong.scaling.registry import METHODS

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
    parts = {fused.FusedAttention, fused.FusedMlp, fused.FusedSkipLinear, fused.FusedPatchEmbed}
    parts |= {fused.FusedSqueezeExcite} if method == "ls" else set()
    assert parts <= set(map(type, model.modules()))
    x, time, found = torch.randn(3, 3, 8, 8), torch.tensor([10.0, 500.0, 990.0]), []
    for each in (plain, model):
        with torch.autocast("cpu", precision, enabled=precision != torch.float32):
            out = each(x, time)
        gradients = torch.autograd.grad(out.float().square().mean(), list(each.parameters()))
        found.append((out.float(), torch.cat([gradient.flatten() for gradient in gradients])))
    for want, result in zip(*found, strict=True):
        assert (result - want).norm() <= tolerance * want.norm()


@pytest.mark.parametrize("where", ["zeta", "zeta.0", "zeta.1", "zeta.2"])
def test_hooks_on_gates_run_in_training(where: str) -> None:
    model, x, time = _model()
    scalelong.apply(model, "ls")
    calls: list[int] = []
    (gate,) = (module for module in model.modules() if isinstance(module, SqueezeExcite))
    gate.get_submodule(where).register_forward_hook(lambda *_: calls.append(1))
    fused.for_training(model)
    model(x, time)
    assert len(calls) == 2  # one per skip


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


# ------------------------------------------------------------------------------------------------------------- on a GPU

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


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
