"""The coordinate check tells muP from the standard parametrization and from broken variants of muP."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch
from settings import load
from torch import nn

from scalelong.parametrization.attach import INPUT, plan_of
from scalelong.parametrization.coordinates import CoordinateCheck, coordinate_check, plot
from scalelong.parametrization.mup import apply_plan, param_groups, parametrize, plan_for

CHECKS = load("coordinate-checks").measure
CLASSES = CHECKS.CLASSES


def net(width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(3, width), nn.GELU(), nn.Linear(width, width), nn.GELU(), nn.Linear(width, 2))


def broken(variant: str):
    """muP with one mistake."""

    def prepare(model: nn.Module, base: nn.Module, lr: float):
        apply_plan(model, plan_for(model, base, same_width=True))
        plan, groups = plan_of(model), param_groups(model, lr)
        for path in plan.inputs if variant == "no output multiplier" else ():
            setattr(model.get_submodule(path), INPUT, 1.0)
        for path in plan.scales if variant == "1 / sqrt(d) attention" else ():
            model.get_submodule(path).scale = None
        for group in groups if variant == "hidden rate not divided" else ():
            group["lr"] = lr
        for name, role in plan.roles.items() if variant == "initial size not divided" else ():
            if role.role == "hidden":
                model.get_parameter(name).data.div_(role.initial)
        return groups

    return prepare


@pytest.mark.parametrize("kind, flat", [("mup", True), ("standard", False)])
def test_any_module(kind: str, flat: bool) -> None:
    found = coordinate_check(net, (32, 64, 128, 192, 256), example=torch.ones(2, 3), parametrization=kind)
    assert found.flat is flat, str(found)


@pytest.mark.parametrize(
    "variant, where",
    [
        ("no output multiplier", "decoder_pred"),
        ("hidden rate not divided", "attn"),
        ("initial size not divided", "mlp"),
        ("1 / sqrt(d) attention", "logits"),
    ],
)
def test_broken_variants_are_caught_where_they_are(variant: str, where: str) -> None:
    make, example = CLASSES["UViT"]
    found = coordinate_check(make, (32, 64, 128, 192), example=example, parametrization=broken(variant), seeds=1)
    name, _, slope = found.worst
    assert slope > 0.2, str(found)  # what is left of muP's own at these widths and with one seed is negative
    assert where in name, str(found)


def test_plots_tables_and_errors(tmp_path) -> None:
    options = {"example": torch.ones(1, 3), "seeds": 1}
    found = [coordinate_check(net, (16, 32), parametrization=kind, **options) for kind in ("mup", "standard")]
    assert plot(found, "net", tmp_path / "net.png").stat().st_size > 1000
    assert "step 3" in str(found[0])
    assert str(found[1]).splitlines()[-1].startswith("not flat")
    with pytest.raises(ValueError, match="unknown 'mub'; did you mean 'mup'"):
        coordinate_check(net, (16, 32), parametrization="mub", **options)
    for widths in ((16,), (16, 32.5), "wide"):
        with pytest.raises(ValueError, match="widths: must be at least two different widths"):
            coordinate_check(net, widths, **options)
    for wrong, message in (
        ({"base_width": 0}, "base_width: must be a width, got 0"),
        ({"parametrization": None}, "parametrization: unknown None"),
        ({"loss": lambda output: output}, r"loss: must be a function that returns a single number, got \(1, 2\)"),
    ):
        with pytest.raises(ValueError, match=message):
            coordinate_check(net, (16, 32), **{**options, **wrong})
    with pytest.raises(TypeError, match=r"make_model: must return a torch\.nn\.Module, got int"):
        coordinate_check(lambda width: width, (16, 32), **options)
    with pytest.raises(ValueError, match="example: the forward of Sequential fails on it"):
        coordinate_check(net, (16, 32), example=torch.ones(1, 7))
    with pytest.raises(ValueError, match="make_model: no tensor of this Linear depends on the width"):
        coordinate_check(lambda _: nn.Linear(3, 4), (16, 32), **options)


class WithNumbers(nn.Module):
    """Returns integers before its output."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.net = net(width)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.arange(3), self.net(x)


def test_the_first_output_with_a_gradient_is_trained() -> None:
    options = {"widths": (16, 32), "example": torch.ones(1, 3), "seeds": 1}
    assert coordinate_check(WithNumbers, **options).activations["net.4"][1:].all()
    with pytest.raises(ValueError, match="the forward of Sequential returns no tensor of real numbers that depends on"):
        coordinate_check(lambda width: net(width).requires_grad_(False), **options)


def test_an_output_that_is_normalized_cannot_start_at_0() -> None:
    class Normalized(nn.Sequential):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = super().forward(x)
            return x / x.norm(dim=-1, keepdim=True)

    with pytest.raises(
        ValueError, match=r"Normalized is not finite before training, .* norm of 4\.weight, check it without"
    ):
        coordinate_check(lambda width: Normalized(*net(width)), (16, 32), example=torch.ones(1, 3))


def test_a_make_model_with_a_seed_of_its_own_is_refused() -> None:
    def seeded(width: int) -> nn.Module:
        torch.manual_seed(0)
        return net(width)

    with pytest.raises(ValueError, match=r"make_model: gives the same weights for every seed; .* seeds=1"):
        coordinate_check(seeded, (16, 32), example=torch.ones(1, 3))
    assert coordinate_check(seeded, (16, 32), example=torch.ones(1, 3), seeds=1).steps == 3


class Attention(nn.Module):
    """Two heads behind projections named as in diffusers, with a random readout of fixed width behind the muP one."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads, self.to_in = 2, nn.Linear(3, width)
        self.to_q, self.to_k, self.to_v = (nn.Linear(width, width) for _ in range(3))
        self.to_out, self.last = nn.Linear(width, 4), nn.Linear(4, 1, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.to_in(x)
        q, k, v = (f(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for f in (self.to_q, self.to_k, self.to_v))
        mixed = nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        return self.last(self.to_out(x + mixed))


def test_scaled_queries_and_layers_of_fixed_size_have_no_slope_of_their_own() -> None:
    """The multiplier of queries belongs to the logits; the values of the last layer are the same at every width."""
    example = torch.randn(2, 5, 3, generator=torch.Generator().manual_seed(0))
    found = coordinate_check(Attention, (64, 128, 256), example=example, seeds=2)
    assert abs(found.slopes()["to_q"]) < 0.1, str(found)
    assert abs(found.slopes(1)["last"] - found.slopes(1)["to_out"]) < 0.1, str(found)


def test_fewer_heads_of_keys_than_of_queries() -> None:
    class Grouped(Attention):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.to_in(x)
            q, k, v = (f(x).unflatten(-1, (-1, 8)).transpose(1, 2) for f in (self.to_q, self.to_k, self.to_v))
            k, v = k[:, ::2], v[:, ::2]
            mixed = nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True).transpose(1, 2).flatten(2)
            return self.last(self.to_out(x + mixed))

    found = coordinate_check(Grouped, (32, 64), example=torch.randn(1, 3, 3), seeds=1, steps=1)
    assert found.activations[".logits"].all()


def test_a_make_model_that_parametrizes_is_refused_for_mup() -> None:
    def make(width: int) -> nn.Module:
        return parametrize(net(width), net(16), same_width=True)

    with pytest.raises(ValueError, match="model: this Sequential is parametrized already"):
        coordinate_check(make, (16, 32), example=torch.ones(1, 3))


def test_the_random_state_is_left_alone() -> None:
    before = torch.get_rng_state()
    coordinate_check(net, (16, 32), example=torch.ones(1, 3), seeds=1, steps=1)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.slow
@pytest.mark.parametrize("name", CLASSES)
def test_every_supported_class(name: str) -> None:
    make, example = CLASSES[name]
    found = coordinate_check(make, CHECKS.WIDTHS, example=example)
    assert found.flat, str(found)
    standard = coordinate_check(make, (32, 64, 128, 256), example=example, parametrization="standard", seeds=1)
    assert standard.worst[2] > 0.5, str(standard)


@pytest.mark.slow
@pytest.mark.parametrize("method", CHECKS.SCALINGS)
def test_u_vit_with_every_scaling(method: str) -> None:
    options = {"example": CHECKS.SCALED, "lr": CHECKS.SCALED_LR, "seeds": max(CHECKS.SEEDS.get(method, (3,)))}
    found = coordinate_check(partial(CHECKS.scaled_uvit, method), CHECKS.WIDTHS, **options)
    assert found.flat, str(found)


def test_the_error_of_a_slope_is_its_scatter_over_groups_of_seeds() -> None:
    generator = np.random.default_rng(0)
    values = np.exp(0.3 * generator.standard_normal((400, 1, 4, 6)))  # flat, with noise
    checks = [CoordinateCheck((32, 64, 128, 256), {"net": each}) for each in values]
    scatter = np.std([check.slopes()["net"] for check in checks])
    assert np.mean([check.error("net") for check in checks]) == pytest.approx(scatter, rel=0.15)
    assert np.isnan(CoordinateCheck((32, 64), {"net": values[0, :, :2, :1]}).error("net"))
