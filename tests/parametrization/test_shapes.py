"""Roles and initial sizes of modules of many kinds, and what is refused."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations

from scalelong import mup
from scalelong.parametrization.attach import plan_of
from tests.parametrization.networks import meta, mlp


@pytest.mark.parametrize("norm", [parametrizations.weight_norm, parametrizations.spectral_norm, nn.utils.weight_norm])
@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
def test_weights_that_are_computed_are_refused(norm) -> None:
    def make(width: int, bias: bool = True) -> nn.Module:
        return nn.Sequential(nn.Linear(3, width), norm(nn.Linear(width, 2, bias=bias)))

    for bias in (True, False):
        model = make(64, bias)
        before, attributes = copy.deepcopy(model.state_dict()), set(vars(model))
        with pytest.raises(ValueError, match=r"model: 1\..* weight is computed from other tensors.* without it"):
            mup.parametrize(model, make(16, bias))
        assert set(vars(model)) == attributes
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


class Standardized(nn.Conv2d):
    """A convolution with weights of unit size, as in BiT and EDM2."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.weight / self.weight.square().mean(dim=(1, 2, 3), keepdim=True).sqrt()
        return F.conv2d(x, weight, self.bias)


class Doubled(nn.Conv2d):
    """A layer of another class that uses its weight as it is."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x)


def test_weights_that_are_normalized_in_the_forward_pass_are_refused() -> None:
    def make(layer: type[nn.Module], width: int) -> nn.Module:
        return nn.Sequential(nn.Conv2d(3, width, 1), layer(width, width, 3), nn.Conv2d(width, 3, 1))

    with pytest.raises(
        ValueError, match=r"model: 1\.weight is normalized in the forward pass of Standardized.* standard"
    ):
        mup.parametrize(make(Standardized, 64), meta(make, Standardized, 16))
    assert mup.roles(mup.parametrize(make(Doubled, 64), meta(make, Doubled, 16)))["1.weight"].role == "hidden"


def test_a_router_that_returns_indices_first_is_not_taken_for_a_normalized_layer() -> None:
    class Router(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, width) / width**0.5)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            scores, indices = F.linear(x, self.weight).softmax(-1).topk(2)
            return indices, scores

    assert mup.roles(mup.parametrize(Router(64), meta(Router, 16)))["weight"].role == "output"


def test_lazy_modules_are_refused() -> None:
    def make(width: int) -> nn.Module:
        return nn.Sequential(nn.LazyLinear(width), nn.Linear(width, 1))

    with pytest.raises(ValueError, match=r"model: 0\.weight has no shape yet; run the model once"):
        mup.parametrize(make(64), make(16))


def test_a_norm_over_several_dimensions_is_not_a_readout() -> None:
    def make(width: int) -> nn.Module:
        return nn.Sequential(nn.Linear(3, width), nn.LayerNorm([5, width]), nn.Linear(width, 2))

    model, x = mup.parametrize(make(64), make(16)), torch.randn(2, 5, 3)
    assert list(plan_of(model).inputs) == ["2"]
    expected = model(x)
    torch.testing.assert_close(mup.fold(model)(x), expected)


class Table(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.positions = nn.Parameter(nn.init.trunc_normal_(torch.empty(1, 17, width), std=0.02))


def test_a_table_of_constant_size_is_not_taken_for_one_that_shrinks() -> None:
    """0.02 is near Xavier's size for 17 positions at this width."""
    torch.manual_seed(0)
    assert mup.roles(mup.parametrize(Table(256), meta(Table, 32)))["positions"].initial == 1


def test_a_constant_size_is_not_taken_for_a_law_that_gives_nearly_the_same() -> None:
    """Xavier's size for a depthwise 7 x 7 convolution over 96 channels is 0.0205."""

    def make(width: int) -> nn.Module:
        layer = nn.Conv2d(width, width, 7, groups=width)
        nn.init.normal_(layer.weight, std=0.02)
        return layer

    torch.manual_seed(0)
    assert {mup.roles(mup.parametrize(make(96), meta(make, 64)))["weight"].initial for _ in range(20)} == {1}


def orthogonal(width: int) -> nn.Module:
    model = nn.Sequential(nn.Linear(3, width), nn.Linear(width, 4 * width), nn.Linear(4 * width, 2))
    for layer in model:
        nn.init.orthogonal_(layer.weight)
    return model


def fan_out(width: int) -> nn.Module:
    model = nn.Sequential(nn.Conv2d(3, width, 3), nn.Conv2d(width, 4 * width, 3), nn.Conv2d(4 * width, 2, 1))
    for layer in model:
        nn.init.kaiming_normal_(layer.weight, mode="fan_out")
    return model


def gain(width: int) -> nn.Module:
    model = mlp(width)
    for layer in (model[0], model[2], model[4]):
        nn.init.xavier_uniform_(layer.weight, gain=5 / 3)
    return model


@pytest.mark.parametrize("make", [orthogonal, fan_out, gain, lambda width: nn.LSTM(3, width)])
def test_other_initial_sizes_are_measured_if_the_base_has_values(make) -> None:
    torch.manual_seed(0)
    model, base = make(256), make(32)
    mup.parametrize(model, base)
    for name, role in mup.roles(model).items():
        size = [float(each.get_parameter(name).detach().square().mean().sqrt()) for each in (model, base)]
        expected = 8**-0.5 if role.role == "hidden" else 1
        if "bias" not in name or isinstance(model, nn.LSTM):
            assert size[0] / size[1] == pytest.approx(expected, rel=0.25), name


def test_measured_sizes_overrule_a_law_that_fits_by_chance() -> None:
    def make(width: int) -> nn.Module:
        model = nn.Sequential(nn.Linear(3, width), nn.Linear(width, width), nn.Linear(width, 2))
        nn.init.normal_(model[1].weight, std=256**-0.5)  # constant: at 256, the size of 1 / sqrt(fan-in)
        return model

    torch.manual_seed(0)
    assert mup.roles(mup.parametrize(make(256), make(64)))["1.weight"].initial == pytest.approx(0.5)


@pytest.mark.parametrize("base", [16, 256])
def test_a_depthwise_transposed_convolution_is_not_a_readout(base: int) -> None:
    """Its first dimension is both fan-out and number of groups; with a fixed number of groups it is a readout."""

    def make(width: int, groups: int = 0) -> nn.Module:
        layers = [nn.Conv2d(3, width, 1), nn.ConvTranspose2d(width, groups or width, 2, 2, groups=groups or width)]
        return nn.Sequential(*layers)

    found = mup.roles(mup.parametrize(make(64), meta(make, base)))["1.weight"]
    assert (found.role, found.multiplier, found.lr) == ("input", 1, 1)
    found = mup.roles(mup.parametrize(make(64, 2), meta(make, base, 2)))["1.weight"]
    assert (found.role, found.multiplier) == ("output", base / 64)


def test_embeddings_and_scales_of_other_names_are_not_readouts() -> None:
    class Tokens(nn.Embedding):
        pass

    class Gain(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.full((1, width, 1), 0.5))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x.mT * self.weight).mT

    model = mup.parametrize(nn.Sequential(Tokens(5, 64), Gain(64)), nn.Sequential(Tokens(5, 16), Gain(16)))
    assert {role.role for role in mup.roles(model).values()} == {"input"}
    torch.testing.assert_close(model(torch.tensor([[2, 4]])), model[0].weight[[2, 4]][None] / 2)


def test_quantized_weights_are_refused() -> None:
    def make(width: int) -> nn.Module:
        model = nn.Linear(width, width)
        model.weight = nn.Parameter(torch.ones(width, width, dtype=torch.int8), requires_grad=False)
        return model

    with pytest.raises(ValueError, match=r"model: weight is torch\.int8 and cannot be rescaled; .* initialize=False"):
        mup.parametrize(make(64), make(16))


class Transposed(nn.Module):
    """A layer with its weight as fan-in x fan-out, as transformers' Conv1D."""

    def __init__(self, fan_in: int, fan_out: int) -> None:
        super().__init__()
        self.weight, self.bias = (
            nn.Parameter(torch.randn(fan_in, fan_out) / fan_in**0.5),
            nn.Parameter(torch.zeros(fan_out)),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight + self.bias


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_layer_with_its_weight_transposed(device: str) -> None:
    def make(width: int) -> nn.Module:
        return nn.Sequential(Transposed(3, width), nn.GELU(), Transposed(width, 2 * width), Transposed(2 * width, 5))

    torch.manual_seed(0)
    with torch.device(device):
        model = mup.parametrize(make(64), meta(make, 16), initialize=device == "cpu")
    found = [mup.roles(model)[f"{at}.weight"] for at in (0, 2, 3)]
    assert [role.role for role in found] == ["input", "hidden", "output"]
    assert list(plan_of(model).inputs.items()) == [("3", 0.25)]
    if device == "cpu":
        assert [role.initial for role in found] == pytest.approx([1, 1, 2])  # 1 / sqrt(fan-in) is recognized
        x = torch.randn(2, 3)
        expected = model(x)
        torch.testing.assert_close(mup.fold(model)(x), expected)


class Recurrent(nn.Module):
    """The fan-in of an LSTM, its projection, or the keys of attention grows; what it gives is of fixed size."""

    def __init__(self, width: int, kind: str) -> None:
        super().__init__()
        self.first, self.kind = nn.Linear(3, width), kind
        if kind == "attention":
            self.query, self.last = (
                nn.Linear(3, 8),
                nn.MultiheadAttention(8, 2, kdim=width, vdim=width, batch_first=True),
            )
        else:
            self.last = nn.LSTM(width, 8, batch_first=True) if kind == "input" else nn.LSTM(3, width, proj_size=8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x).relu()
        if self.kind == "attention":
            return self.last(self.query(x), hidden, hidden)[0]
        return self.last(hidden if self.kind == "input" else x)[0]


@pytest.mark.filterwarnings("ignore:LSTM with projections:UserWarning")
@pytest.mark.parametrize(
    "kind, name", [("input", "weight_ih_l0"), ("projection", "weight_hr_l0"), ("attention", "v_proj_weight")]
)
def test_readouts_without_a_layer_get_their_multiplier_as_initial_size_and_rate(kind: str, name: str) -> None:
    torch.manual_seed(0)
    model, base = Recurrent(256, kind), Recurrent(64, kind)
    mup.parametrize(model, base)
    found = mup.roles(model)[f"last.{name}"]
    assert (found.role, found.multiplier, found.lr, found.decay) == ("output", 1, 0.25, 4)
    sizes = [float(getattr(each.last, name).detach().std()) for each in (model, base)]
    assert sizes[0] / sizes[1] == pytest.approx(0.25, rel=0.1)
    make, x = partial(Recurrent, kind=kind), torch.randn(2, 5, 3, generator=torch.Generator().manual_seed(0))
    check = mup.coordinate_check(make, (48, 96, 192, 288), example=x)
    assert check.flat, str(check)


@pytest.mark.parametrize("sizes", [(1, 1, 0), (0, 1, 0), (0, 1, 1)])
def test_a_bilinear_layer_with_a_second_input_that_grows_is_refused(sizes: tuple[int, ...]) -> None:
    def make(width: int) -> nn.Module:
        return nn.Bilinear(*(width if grows else 3 for grows in sizes))

    with pytest.raises(ValueError, match=r"model: weight is \(.*\) at base width: .* keep the other dimensions fixed"):
        mup.parametrize(make(64), make(16))


def test_complex_initial_sizes_are_measured() -> None:
    class Spectral(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.modes = nn.Parameter(torch.randn(width, width, 3, dtype=torch.cfloat) / width)

    torch.manual_seed(0)
    model = Spectral(128)
    found = mup.roles(mup.parametrize(model, Spectral(32)))["modes"]
    assert found.initial == pytest.approx(2, rel=0.05)  # a quarter where it should be a half
