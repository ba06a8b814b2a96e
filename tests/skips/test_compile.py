"""torch.compile: same outputs and gradients in one graph, and a scaling put on or taken off afterwards is not missed."""

from __future__ import annotations

import copy

import pytest
import torch

import scalelong
from tests.families import FAMILIES, build, output
from tests.standins import FOUND

FAMILY = {family.name: family for family in FAMILIES}


@pytest.mark.parametrize("in_place", [True, False])
def test_code_compiled_before_is_recompiled(in_place: bool) -> None:
    family = FAMILY["UViT"]
    model, scaled = build(family), build(family)
    scalelong.apply(scaled, "universal", kappa=0.1)
    plain, expected = output(model, family.inputs()), output(scaled, family.inputs())
    assert not torch.allclose(plain, expected, rtol=1e-2)
    if in_place:
        model.compile(backend="eager")
    called = model if in_place else torch.compile(model, backend="eager")
    torch.testing.assert_close(output(called, family.inputs()), plain)
    scalelong.apply(model, "universal", kappa=0.1)
    torch.testing.assert_close(output(called, family.inputs()), expected)
    scalelong.remove(model)
    torch.testing.assert_close(output(called, family.inputs()), plain)


def test_removal_drops_compiled_code(monkeypatch) -> None:
    """This torch would notice that the hooks are gone; older ones do not look at a module's attributes."""
    import torch._dynamo

    dropped: list[bool] = []
    model = build(FAMILY["UViT"])
    scalelong.apply(model, "cs")
    monkeypatch.setattr(torch.compiler, "reset", lambda: dropped.append(True))
    scalelong.remove(model)
    assert dropped


@pytest.mark.slow
@pytest.mark.parametrize("method", ["cs", "ls"])
@pytest.mark.parametrize("name", ["UNet2DModel", "UViT"])
def test_compiled_equals_eager(name: str, method: str) -> None:
    family = FAMILY[name]
    eager = build(family)
    scalelong.apply(eager, method)
    compiled = copy.deepcopy(eager)
    fast = torch.compile(compiled, fullgraph=True)
    results = []
    for call, model in ((eager, eager), (fast, compiled)):
        result = output(call, family.inputs())
        result.square().mean().backward()
        results.append((result, {name: p.grad for name, p in model.named_parameters()}))
    (expected, expected_gradients), (got, got_gradients) = results
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
    for parameter, gradient in expected_gradients.items():
        if gradient is not None:
            torch.testing.assert_close(got_gradients[parameter], gradient, rtol=1e-3, atol=1e-5, msg=parameter)
    assert scalelong.coefficients(compiled) == pytest.approx(scalelong.coefficients(eager), rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stand_in", "options"),
    [
        ("guided-diffusion style", {"method": "ls"}),
        ("tutorial UNet", {"method": "cs"}),
        ("guided-diffusion style", {"method": "cs", "placement": "after_norm"}),
    ],
)
def test_a_detected_model_compiled_equals_eager(stand_in: str, options: dict[str, str]) -> None:
    chosen = {each.name: each for each in FOUND}[stand_in]
    torch.manual_seed(0)
    eager = chosen.build().eval()
    scalelong.apply(eager, **options, example=chosen.inputs())
    compiled = copy.deepcopy(eager)
    expected, got = eager(*chosen.inputs()), torch.compile(compiled, fullgraph=True)(*chosen.inputs())
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
    expected.square().mean().backward()
    got.square().mean().backward()
    for (name, p), (_, q) in zip(eager.named_parameters(), compiled.named_parameters(), strict=True):
        if p.grad is not None:
            torch.testing.assert_close(q.grad, p.grad, rtol=1e-3, atol=1e-5, msg=name)
