"""Drawing with the products that take their neighbours in: the same images, nothing overwritten, nothing unheard.

On a CPU the fused forms are switched on in float32, where they must equal the plain ones; on a GPU they run as they are.
"""

from __future__ import annotations

import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from accelerate.hooks import ModelHook, add_hook_to_module
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.modules.module import register_module_forward_hook
from torch.utils.flop_counter import FlopCounterMode

import scalelong
from scalelong.backbones import UViT, UViTConfig, fused, uvit
from scalelong.backbones.fused import add_product_, attention
from scalelong.scaling.registry import METHODS

ROOT = Path(__file__).parents[2]
_SMALL = UViTConfig(image_size=8, patch_size=2, dim=32, depth=4, heads=2)


@pytest.fixture
def fused_on_a_cpu(monkeypatch) -> None:
    monkeypatch.setattr(fused, "_DEVICE", "cpu")
    monkeypatch.setattr(fused, "_TYPES", (torch.float32,))


def _model() -> tuple[UViT, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    model = UViT(_SMALL).eval()
    for part in model.parameters():
        part.data.add_(0.1 * torch.randn_like(part))
    return model, torch.randn(3, 3, 8, 8), torch.tensor([10.0, 500.0, 990.0])


def test_the_product_is_added_in_place() -> None:
    onto, x, weight = torch.randn(2, 5, 8), torch.randn(2, 5, 6), torch.randn(8, 6)
    want = onto + 0.3 * x @ weight.T
    assert add_product_(onto, x, weight, 0.3) is onto
    torch.testing.assert_close(onto, want)


@pytest.mark.parametrize("method", [method for method in METHODS if method != "freeu"])  # which filters images
@pytest.mark.usefixtures("fused_on_a_cpu")
def test_a_network_draws_what_it_computes_with_gradients(method: str) -> None:
    """And every call anew, so no call writes into what another one needs."""
    model, x, time = _model()
    scalelong.apply(model, method)
    want = model(x, time).detach()
    with torch.no_grad():
        first, again = model(x, time), model(x, time)
    assert torch.equal(first, again)
    torch.testing.assert_close(first, want, atol=1e-5, rtol=1e-5)


@pytest.mark.usefixtures("fused_on_a_cpu")
def test_the_second_product_is_fused_and_the_skips_stay_as_they_were(monkeypatch) -> None:
    """4 + 1 blocks add their MLP in place, and 2 of them their skip; what a block was given is not written to."""
    model, x, time = _model()
    targets: list[torch.Tensor] = []
    plain = uvit.add_product_
    monkeypatch.setattr(uvit, "add_product_", lambda onto, *rest: targets.append(onto) or plain(onto, *rest))
    given: list[tuple[torch.Tensor, torch.Tensor]] = []

    def keep(_module: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        given.extend((tensor, tensor.clone()) for tensor in inputs)

    for block in (*model.in_blocks, model.mid_block, *model.out_blocks):
        block.register_forward_pre_hook(keep)
    with torch.no_grad():
        model(x, time)
    assert len(targets) == 5 + 2
    assert len(given) == 5 + 2
    assert all(torch.equal(tensor, before) for tensor, before in given)


@pytest.mark.usefixtures("fused_on_a_cpu")
@pytest.mark.parametrize("where", ["mlp", "mlp.fc2"])
def test_hooks_on_the_mlp_are_heard(where: str) -> None:
    model, x, time = _model()
    with torch.no_grad():
        before = model(x, time)
        hook = model.mid_block.get_submodule(where).register_forward_hook(lambda _module, _inputs, output: 2 * output)
        assert not torch.allclose(model(x, time), before)
        hook.remove()
        assert torch.equal(model(x, time), before)


@pytest.mark.usefixtures("fused_on_a_cpu")
@pytest.mark.parametrize("where", ["mlp", "mlp.fc1", "mlp.fc2"])
def test_a_forward_put_in_its_place_is_called(where: str) -> None:
    """As accelerate does to bring offloaded weights back before a layer runs."""
    model, x, time = _model()
    called: list[nn.Module] = []

    class Listen(ModelHook):  # type: ignore[misc]
        def pre_forward(self, module: nn.Module, *args: object, **kwargs: object) -> tuple[object, object]:
            called.append(module)
            return args, kwargs

    listened = model.mid_block.get_submodule(where)
    add_hook_to_module(listened, Listen())
    with torch.no_grad():
        model(x, time)
    assert called == [listened]


@pytest.mark.usefixtures("fused_on_a_cpu")
def test_hooks_on_all_modules_are_heard() -> None:
    model, x, time = _model()
    heard: list[nn.Module] = []
    hook = register_module_forward_hook(lambda module, _inputs, _output: heard.append(module))
    with torch.no_grad():
        model(x, time)
    hook.remove()
    assert {type(module) for module in heard} >= {uvit.Mlp, uvit.SkipLinear, nn.Linear}
    assert sum(module is model.mid_block.mlp.fc1 for module in heard) == 1


@pytest.mark.usefixtures("fused_on_a_cpu")
def test_other_parts_may_stand_in() -> None:
    model, x, time = _model()
    with torch.no_grad():
        before = model(x, time)
        mlp, model.mid_block.mlp = model.mid_block.mlp, nn.Linear(32, 32)
        assert not torch.allclose(model(x, time), before)
        model.mid_block.mlp = mlp
        for bare in ("fc1", "fc2"):
            setattr(mlp, bare, nn.Linear(*reversed(getattr(mlp, bare).weight.shape), bias=False))
            model(x, time)


@pytest.mark.usefixtures("fused_on_a_cpu")
def test_tokens_may_lie_in_memory_as_they_like() -> None:
    model, x, time = _model()
    with torch.no_grad():
        before = model(x, time)
        model.in_blocks[0].register_forward_hook(lambda _module, _inputs, output: output.mT.contiguous().mT)
        torch.testing.assert_close(model(x, time), before)


@pytest.mark.usefixtures("fused_on_a_cpu")
def test_who_looks_at_every_operation_sees_the_plain_ones() -> None:
    """Long skips are found by their joins, FLOPs by their products, forward derivatives by their rules."""
    model, x, time = _model()

    class Wrapper(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model

        def forward(self, x: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
            return self.inner(x, time)

    assert len(scalelong.find_skips(Wrapper(), x, time)) == 2
    flops = []
    for context in (torch.enable_grad(), torch.no_grad()):
        with context, FlopCounterMode(display=False) as counter:
            model(x, time)
        flops.append(counter.get_total_flops())
    assert flops[0] == flops[1] > 0
    with torch.no_grad(), torch.device("cpu"):  # a default device watches nothing
        assert fused.drawing_type(x) == torch.float32

    def f(image: torch.Tensor) -> torch.Tensor:
        with sdpa_kernel(SDPBackend.MATH):
            return model(image, time)

    want = torch.func.jvp(f, (x,), (x,))[1]
    with torch.no_grad():
        torch.testing.assert_close(torch.func.jvp(f, (x,), (x,))[1], want)


def test_a_kernel_that_does_not_run_is_told_once_and_replaced(monkeypatch) -> None:
    """A container without a C compiler, for example: Triton needs one."""
    monkeypatch.setattr(fused, "_failures", [])
    monkeypatch.setattr(fused, "_KERNEL", "scalelong.no_such_kernel")
    qkv = torch.randn(2, 257, 3 * 64)
    with pytest.warns(UserWarning, match="does not run here"):
        found = fused._attention(qkv, 1)
    torch.testing.assert_close(found, attention(qkv, 1))
    assert len(fused._failures) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.library.opcheck(fused._attention, (qkv, 1))


@pytest.mark.slow
@pytest.mark.usefixtures("fused_on_a_cpu")
def test_compiled_it_stays_one_graph_and_equal() -> None:
    model, x, time = _model()
    scalelong.apply(model, "cs", kappa=0.5)
    compiled = torch.compile(model, fullgraph=True)
    with torch.no_grad():
        torch.testing.assert_close(compiled(x, time), model(x, time), atol=1e-5, rtol=1e-5)


def test_only_sizes_that_were_measured_take_the_kernel(monkeypatch) -> None:
    monkeypatch.setattr(fused, "_gpu_runs_it", lambda: True)
    sizes = {(257, 64), (258, 64), (256, 64), (334, 64), (1025, 64), (257, 32)}
    taken = {(t, d) for t, d in sizes if fused._has_kernel(torch.empty(1, t, 3 * 2 * d), heads=2)}
    assert taken == {(257, 64), (258, 64)}


_IN_THE_INTERPRETER = """
import sys, torch
from scalelong.backbones.fused import attention
sys.path.append(sys.argv[1])
from scalelong.backbones.attention_kernel import attend
torch.manual_seed(0)
for tokens, heads, channels in ((257, 2, 64), (258, 3, 32), (256, 1, 64), (65, 2, 16)):
    qkv = 2 * torch.randn(2, tokens, 3 * heads * channels)
    torch.testing.assert_close(attend(qkv, heads), attention(qkv, heads), atol=1e-5, rtol=1e-5)
    print("equal", tokens)
"""


@pytest.mark.slow
def test_the_kernel_computes_attention(monkeypatch) -> None:
    """Triton's own interpreter runs the kernel's code, program by program, on the CPU."""
    packages = ROOT / ".venv" / "packages"
    if not (packages / ".installed").exists():
        pytest.skip("make test-slow installs tests/packages.txt")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    command = [sys.executable, "-c", _IN_THE_INTERPRETER, str(packages)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=600)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["equal", "257", "equal", "258", "equal", "256", "equal", "65"]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("tokens", [256, 257, 258])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_on_a_gpu_attention_is_exact_to_its_type(tokens: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    qkv = (2 * torch.randn(5, tokens, 3 * 512, device="cuda")).to(dtype)
    with torch.no_grad():
        want, found = attention(qkv.double(), 8), attention(qkv, 8)
        ours = torch.cuda.get_device_capability()[0] >= 9 and tokens > 256
        assert fused._has_kernel(qkv, 8) == ours
    assert not fused._failures
    assert found.dtype == dtype
    assert (found - want).abs().max() <= 2 * torch.finfo(dtype).eps * want.abs().max()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("method", ["none", "cs", "ls"])
def test_on_a_gpu_a_network_draws_what_it_computes(method: str, compiled: bool) -> None:
    torch.manual_seed(0)
    model = UViT.from_preset("cifar10-s2").cuda().eval()
    for part in model.parameters():
        part.data.add_(0.02 * torch.randn_like(part))
    scalelong.apply(model, method)
    x, time = torch.randn(8, 3, 32, 32, device="cuda"), torch.full((8,), 500.0, device="cuda")
    run = torch.compile(model) if compiled else model
    with torch.no_grad():
        exact = model(x, time)
        with torch.autocast("cuda", torch.bfloat16):
            drawn = run(x, time)
    assert (drawn - exact).norm() <= 0.02 * exact.norm()
