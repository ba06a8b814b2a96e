"""The fast step: equal to the plain one over 200 steps, after resuming and at bad steps; its kernel in the interpreter."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from scalelong.backbones import as_network, fused, fused_ops
from scalelong.training import Trainer, get_preset, train
from scalelong.training.build import build_model, build_objective, check_config, resolve_compile
from scalelong.training.fast import FastStepper, FlatAdamW, low_precision_copy, update_flat
from scalelong.training.optimizers import EMA
from tests.interpreter import run_interpreted
from tests.training.test_loop import Poison
from tests.training.tiny import assert_same_run, losses, newest, tiny


def fast(**changes):
    return tiny(training_compile="step", **changes)


def assert_close_runs(one: Path, other: Path) -> None:
    one_losses, other_losses = ([loss or 0.0 for _, loss in losses(folder)] for folder in (one, other))  # None: skipped
    assert other_losses == pytest.approx(one_losses, rel=1e-4)
    for name in ("model", "ema", "optimizer"):
        first, second = (load_file(newest(folder) / f"{name}.safetensors") for folder in (one, other))
        assert first.keys() == second.keys()
        for key, value in first.items():
            torch.testing.assert_close(second[key], value, rtol=1e-3, atol=2e-4)


@pytest.mark.parametrize("method", ["none", "cs_annealed", "ls"])
def test_it_equals_the_plain_step_over_200_steps(method, tmp_path) -> None:
    length = {"training_steps": 200, "training_checkpoint_every": 100, "training_log_every": 20}
    plain = train(tiny(scaling_method=method, **length), tmp_path / "plain")
    assert_close_runs(plain, train(fast(scaling_method=method, **length), tmp_path / "fast"))


@pytest.mark.slow
@pytest.mark.parametrize("method", ["cs", "ls"])
@pytest.mark.parametrize("fused_parts", [False, True])
def test_with_weights_in_16_bits_it_equals_autocast_over_200_steps(fused_parts, method, tmp_path, monkeypatch) -> None:
    """With fused_parts also attention and MLP are those of the GPU, in torch's operations."""
    if fused_parts:
        monkeypatch.setattr(fused, "_has_attention_kernel", lambda _: True)
        monkeypatch.setattr(fused, "_has_mlp_kernel", lambda _: True)
        monkeypatch.setattr(fused_ops, "failures", {"attention_kernel": "no GPU", "mlp_kernel": "no GPU"})
    length = {"training_steps": 200, "training_checkpoint_every": 100, "training_log_every": 20}
    changes = {"scaling_method": method, "training_precision": "bf16", "model_dim": 64, **length}
    plain = train(tiny(**changes), tmp_path / "plain")
    trainer = Trainer(fast(**changes), tmp_path / "fast")
    swapped = {type(module) for module in trainer.stepper.network.modules()}
    assert {fused.FusedSkipLinear, fused.FusedPatchEmbed} <= swapped
    assert ({fused.FusedAttention, fused.FusedMlp} <= swapped) == fused_parts
    found = trainer.run()
    assert [loss for _, loss in losses(found)] == pytest.approx([loss for _, loss in losses(plain)], rel=0.02)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_resuming_is_bit_identical(precision, tmp_path) -> None:
    whole = train(fast(training_precision=precision), tmp_path / "whole")
    train(fast(training_precision=precision, training_steps=6), tmp_path / "parts")
    assert_same_run(whole, train(fast(training_precision=precision), tmp_path / "parts"))


def test_a_run_of_the_plain_step_continues_with_the_fast_one(tmp_path) -> None:
    whole = train(tiny(), tmp_path / "whole")
    train(tiny(training_steps=6), tmp_path / "parts")
    assert_close_runs(whole, train(fast(), tmp_path / "parts"))


@pytest.mark.parametrize("policy", ["skip", "rewind"])
def test_a_bad_step_is_handled_as_in_the_plain_step(policy, tmp_path) -> None:
    folders = []
    for config in (tiny, fast):
        trainer = Trainer(config(training_on_nonfinite=policy), tmp_path / config.__name__)
        Poison(trainer, step=6)
        folders.append(trainer.run())
    assert isinstance(trainer.stepper, FastStepper)
    assert_close_runs(*folders)


def test_gradients_are_there_for_observers(tmp_path) -> None:
    seen = {}
    for name, config in (("plain", tiny(training_steps=1)), ("fast", fast(training_steps=1))):

        def keep(_step, model, name=name) -> None:
            seen[name] = [parameter.grad.clone() for parameter in model.parameters()]

        train(config, tmp_path / name, [keep])
    for one, other in zip(seen["plain"], seen["fast"], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"optimizer_name": "muon"}, "optimizer.name = muon"),
        ({"training_accumulate": 2}, r"training.accumulate = 2"),
        ({"training_precision": "fp16"}, "fp16"),
        ({"distillation_weight": 0.1}, r"distillation\.weight"),
    ],
)
def test_what_it_does_not_support_is_refused(changes, name) -> None:
    with pytest.raises(ValueError, match=rf"training\.compile: step does not support .*{name}"):
        check_config(fast(**changes), on_gpu=True)
    with pytest.raises(ValueError, match="2 ranks"):
        check_config(fast(), world_size=2)


def test_auto_is_the_fast_step_where_it_is_supported() -> None:
    config = tiny(training_compile="auto")
    assert resolve_compile(config, 1, on_gpu=True) == "step"
    assert resolve_compile(config, 1, on_gpu=False) == "off"
    assert resolve_compile(config, 2, on_gpu=True) == "default"
    assert resolve_compile(tiny(training_compile="auto", distillation_weight=0.1), 1, on_gpu=True) == "default"
    assert get_preset("cifar10-uvit-s2").training.compile == "auto"


def test_the_flat_update_is_torch_s_adamw_and_our_average_and_skips_bad_steps() -> None:
    torch.manual_seed(0)
    weights = torch.randn(100)
    model = nn.Linear(100, 1, bias=False)
    model.weight.data.copy_(weights)
    optimizer = torch.optim.AdamW(model.parameters(), 0.1, (0.9, 0.99), weight_decay=0.03)
    ema, average = EMA(model, 0.99), weights.clone()
    m, v, low, count = torch.zeros(100), torch.zeros(100), torch.zeros(100, dtype=torch.bfloat16), torch.zeros(())
    for step in range(1, 201):
        gradient, usable = torch.randn(100), torch.tensor(step not in (1, 50))
        model.weight.grad = gradient.clone()[None]
        if usable:
            optimizer.step()
        else:
            gradient[3] = float("nan")
        ema.update(step)
        count += usable
        update_flat(
            weights, gradient, m, v, average, low, count, usable, 0.1, 0.03, 0.9, 0.99, 1e-8, ema.decay_at(step)
        )
    torch.testing.assert_close(weights, model.weight.detach()[0])
    torch.testing.assert_close(average, ema.model.weight[0])
    assert torch.equal(low, weights.bfloat16())


@pytest.mark.parametrize("backbone", ["uvit", "unet"])
def test_the_copy_in_16_bits_has_the_outputs_and_gradients_of_autocast(backbone) -> None:
    config = tiny(model_backbone=backbone, model_channels=(32, 32))
    model, objective = build_model(config, (1, 8, 8)), build_objective(config)
    plain = copy.deepcopy(model)
    optimizer = FlatAdamW(config, model, EMA(model).model, torch.bfloat16)
    network = low_precision_copy(model, optimizer)
    linear = next(m for m in network.modules() if isinstance(m, nn.Linear))
    assert (
        linear.weight.dtype == torch.bfloat16 and linear.weight.untyped_storage().data_ptr() == optimizer.low.data_ptr()
    )
    torch.manual_seed(0)
    inputs = torch.randn(4, 1, 8, 8), torch.randn(4, 1, 8, 8), torch.rand(4)
    found = []
    for each in (plain, network):
        with torch.autocast("cpu", torch.bfloat16):
            loss = objective.loss(as_network(each), *inputs).mean()
        gradients = torch.autograd.grad(loss, list(each.parameters()), materialize_grads=True)
        found.append((loss, torch.cat([g.float().flatten() for g in gradients])))
    (loss, gradient), (other_loss, other_gradient) = found
    torch.testing.assert_close(other_loss, loss, rtol=1e-3, atol=1e-3)
    assert (other_gradient - gradient).norm() <= 0.02 * gradient.norm()


_IN_THE_INTERPRETER = """
import torch
from scalelong.training.adamw_kernel import update_flat as kernel
from scalelong.training.fast import update_flat as plain
torch.manual_seed(0)
for n, low in ((5000, True), (1024, False)):
    ours = [torch.randn(n), torch.zeros(n), torch.zeros(n), torch.zeros(n), torch.randn(n)]
    ours.append(torch.zeros(n, dtype=torch.bfloat16) if low else None)
    theirs, count = [None if t is None else t.clone() for t in ours], torch.zeros(())
    for step in range(1, 21):
        usable = torch.tensor(step not in (1, 7))
        count += usable
        gradient = torch.randn(n)
        if not usable:
            gradient[3] = float("nan")
        for tensors, update in ((ours, kernel), (theirs, plain)):
            tensors[1].copy_(gradient)
            update(*tensors, count, usable, 0.1 * min(1, step / 5), 0.03, 0.9, 0.999, 1e-8, 0.9)
    for one, other in zip(ours, theirs):
        if one is not None:
            torch.testing.assert_close(one, other, rtol=2e-5 if one.dtype == torch.float32 else 1e-2, atol=1e-5)
    print("equal", n)
"""


@pytest.mark.slow
def test_the_kernel_is_the_plain_update() -> None:
    """Triton's interpreter runs the kernel, program by program, on the CPU."""
    assert run_interpreted(_IN_THE_INTERPRETER).split() == ["equal", "5000", "equal", "1024"]


needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@needs_gpu
@pytest.mark.parametrize("method", ["none", "cs", "cs_annealed", "ls"])
def test_on_a_gpu_it_equals_the_plain_step_to_bf16_accuracy_and_resumes(method, tmp_path) -> None:
    length = {
        "training_steps": 200,
        "training_checkpoint_every": 100,
        "training_log_every": 20,
        "scaling_method": method,
    }
    plain = train(tiny(**length), tmp_path / "plain")
    whole = train(fast(**length), tmp_path / "whole")
    train(fast(**{**length, "training_steps": 100}), tmp_path / "parts")
    assert_same_run(whole, train(fast(**length), tmp_path / "parts"))
    assert [loss for _, loss in losses(whole)] == pytest.approx([loss for _, loss in losses(plain)], rel=0.02)
