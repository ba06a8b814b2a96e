"""Conditioning on features together with scaling, files, checkpointing and compile."""

from __future__ import annotations

import re
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import scalelong
from scalelong import UViT, UViTConfig
from scalelong.scaling.registry import METHODS
from scalelong.skips.feature_conditioning import is_conditioned
from tests.skips.conditioned import CASES, condition, dit, output, own, unet, uvit

every_case = pytest.mark.parametrize("make", CASES.values(), ids=CASES)


@every_case
@pytest.mark.parametrize("scaled", [False, True])
def test_save_and_load(make: Any, scaled: bool, tmp_path: Path) -> None:
    case = make()
    if scaled and make in (dit, own):
        pytest.skip("has no long skips")
    model = case[0].eval()
    conditioning = condition(case, pool="attention")
    if scaled:
        scalelong.apply(model, "cs", kappa=0.5)
    with torch.no_grad():
        conditioning.gate.fill_(1.0)
    before, folder = output(case), scalelong.save(model, tmp_path / "saved")
    loaded = scalelong.load(make()[0], folder).eval()
    assert torch.allclose(output(case, loaded), before, atol=1e-5)
    if hasattr(model, "save_pretrained"):
        model.save_pretrained(tmp_path / "diffusers")
        loaded = scalelong.from_pretrained(type(model), tmp_path / "diffusers").eval()
        assert torch.allclose(output(case, loaded), before, atol=1e-5)
    if make is uvit:  # nothing is left of a conditioning whose weights do not fit
        other = UViT(UViTConfig(image_size=8, patch_size=4, dim=32, depth=4, heads=2))
        with pytest.raises(ValueError, match="do not fit"):
            scalelong.load(other, folder)
        assert not is_conditioned(other)


OPTIONS = {"cs": {"kappa": 0.5}, "cs_annealed": {"anneal_steps": 10}, "subset": {"removed": "inner", "count": 1}}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("make", [uvit, unet])
def test_scaling_in_either_order(make: Any, method: str) -> None:
    """Every method: the same network, and what the plain model refuses the conditioned one refuses too."""
    options, outputs = OPTIONS.get(method, {}), []
    try:
        scalelong.apply(make()[0], method, **options)
    except ValueError as refusal:
        case = make()
        condition(case)
        with pytest.raises(type(refusal), match=re.escape(str(refusal))):
            scalelong.apply(case[0], method, **options)
        return
    for order in (("scaling", "features"), ("features", "scaling")):
        case = make()
        model = case[0].eval()
        plain = output(case)
        for step in order:
            torch.manual_seed(7 if step == "scaling" else 8)
            if step == "scaling":
                scalelong.apply(model, method, **options)
            else:
                conditioning = condition(case)
        with torch.no_grad():
            conditioning.gate.fill_(1.0)
        outputs.append(output(case))
        scalelong.remove(model, "scaling")
        assert is_conditioned(model)
        scalelong.remove(model, "features")
        assert torch.allclose(output(case), plain, atol=1e-6)
    assert torch.allclose(*outputs, atol=1e-6)


def test_unknown_models_are_traced_without_their_conditioning() -> None:
    """What a conditioned model adds from the middle to the decoder is not found as a long skip."""
    case = unet()
    conditioning = condition(case)
    with torch.no_grad():
        conditioning.gate.fill_(1.0)
    known = [skip.made_in for skip in scalelong.find_skips(case[0])]
    example = (case[1], case[2])
    assert [skip.made_in for skip in scalelong.find_skips(case[0], example=example)] == known
    assert conditioning.enabled
    scalelong.apply(case[0], "cs", example=example)
    assert scalelong.verify(case[0], example=example)


@pytest.mark.parametrize("make", [uvit, unet, dit, own])
def test_activation_checkpointing(make: Any) -> None:
    """The gradients are those without checkpoints."""
    gradients = []
    for recompute in (False, True):
        case = uvit(checkpointing=recompute) if make is uvit else make()
        model = case[0].eval()  # dropout of labels would differ
        if recompute and make in (unet, dit):
            model.train()
            model.enable_gradient_checkpointing()
            if make is dit:
                for module in model.modules():
                    if type(module).__name__ == "LabelEmbedding":
                        module.eval()
        torch.manual_seed(3)
        conditioning = condition(case)
        with torch.no_grad():
            conditioning.gate.fill_(1.0)
        if recompute and make is own:
            for layer in model.layers:
                run = layer.forward
                layer.forward = lambda x, emb, run=run: checkpoint(run, x, emb, use_reentrant=False)
        output(case).square().mean().backward()
        gradients.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    assert gradients[0].keys() == gradients[1].keys()
    for name, value in gradients[0].items():
        assert torch.allclose(value, gradients[1][name], rtol=1e-3, atol=1e-6), name


def test_two_forwards_before_a_backward_with_checkpoints_are_refused() -> None:
    case = dit()
    model = case[0].train()
    model.enable_gradient_checkpointing()
    condition(case)
    first, second = output(case).mean(), output(case).mean()
    second.backward()
    with pytest.raises(RuntimeError, match="another forward ran"):
        first.backward()


@pytest.mark.parametrize("make", [uvit, unet, dit])
@pytest.mark.slow
def test_compiles(make: Any) -> None:
    case = make()
    model = case[0].eval()
    conditioning = condition(case)
    with torch.no_grad():
        conditioning.gate.fill_(1.0)
    before = output(case)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    found = output(case, compiled)  # type: ignore[arg-type]
    assert torch.allclose(found, before, atol=1e-5)
    found.square().mean().backward()
    assert conditioning.gate.grad is not None


def checkpointed_dit() -> tuple[Any, Any]:
    """A conditioned DiT that recomputes its blocks, and its call."""
    case = dit()
    model = case[0].train()
    model.enable_gradient_checkpointing()
    with torch.no_grad():
        condition(case).gate.fill_(1.0)
    return model, case


@pytest.mark.slow
def test_a_compiled_model_with_activation_checkpoints() -> None:
    """Dynamo runs the checkpointed blocks eagerly, and again in the backward pass."""
    gradients = []
    for compiled in (False, True):
        model, case = checkpointed_dit()
        output(case, torch.compile(model, backend="aot_eager") if compiled else None).square().mean().backward()
        gradients.append([p.grad for p in model.parameters() if p.grad is not None])
    torch.testing.assert_close(*gradients, rtol=1e-3, atol=1e-6)


@pytest.mark.slow
def test_blocks_compiled_one_by_one() -> None:
    """Dynamo shares the code of equal blocks and does not guard on hooks that a block lacks."""
    case = dit()
    model = case[0].eval()
    conditioning = condition(case)
    with torch.no_grad():
        conditioning.gate.fill_(1.0)
    before = output(case)
    for block in model.transformer_blocks:
        block.compile(backend="eager")
    torch.testing.assert_close(output(case), before)


def test_a_forward_without_gradients_before_the_backward() -> None:
    """As in consistency training, whose targets are those of the network itself: the gradients stay the same."""
    gradients = []
    for between in (False, True):
        model, case = checkpointed_dit()
        loss = output(case).square().mean()
        if between:
            with torch.no_grad():
                model(torch.randn(2, 4, 8, 8), **case[2])
        loss.backward()
        gradients.append([p.grad for p in model.parameters() if p.grad is not None])
    torch.testing.assert_close(*gradients)


def test_a_model_in_several_threads_is_refused() -> None:
    case = own()
    condition(case)
    before = output(case)
    hook = case[0].layers[1].register_forward_pre_hook(lambda *_: other(), prepend=True)

    def other() -> None:
        hook.remove()
        thread = Thread(target=output, args=(case,))
        thread.start()
        thread.join()

    with pytest.raises(RuntimeError, match="another thread is running this model; use a copy of it in each thread"):
        output(case)
    assert torch.equal(output(case), before)


def test_linear_layers_that_store_their_weights_in_another_form() -> None:
    case = dit()
    if not hasattr(case[0].eval(), "enable_layerwise_casting"):
        pytest.skip("new in diffusers 0.33")
    conditioning = condition(case)
    with torch.no_grad():
        conditioning.gate.fill_(1.0)
    before = output(case)
    case[0].enable_layerwise_casting(storage_dtype=torch.float8_e4m3fn, compute_dtype=torch.float32)
    torch.testing.assert_close(output(case), before, rtol=0.1, atol=0.1)
