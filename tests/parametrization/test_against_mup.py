"""Roles, initial sizes and learning rates against the `mup` package, and where the two differ."""

from __future__ import annotations

import copy
import importlib
import importlib.util
import sys

import pytest
import torch
from settings import load
from torch import nn

from scalelong import mup as ours
from tests.packages import FOLDER

CLASSES = load("coordinate-checks").measure.CLASSES
NAMES = [name for name in CLASSES if name != "UTransformer2DModel"]  # which has no readout


@pytest.fixture(scope="module")
def theirs():
    """The package, without the folder it is in: others there import torchvision."""
    if importlib.util.find_spec("mup") is None:
        init = FOLDER / "mup" / "__init__.py"
        if not init.is_file():
            pytest.skip("make test-slow installs tests/packages.txt")
        spec = importlib.util.spec_from_file_location("mup", init, submodule_search_locations=[str(init.parent)])
        sys.modules["mup"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules["mup"])
    return importlib.import_module("mup")


def with_their_readouts(model: nn.Module, theirs, readouts) -> nn.Module:
    """Their readout is a class of its own; ours is found."""
    for path in readouts:
        layer = model.get_submodule(path)
        new = theirs.MuReadout(layer.in_features, layer.out_features)
        new.load_state_dict(layer.state_dict())
        parent, _, name = path.rpartition(".")
        setattr(model.get_submodule(parent), name, new)
    return model


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_the_same_on_the_same_modules(name: str, theirs) -> None:
    make, _ = CLASSES[name]
    torch.manual_seed(0)
    model, base = make(128), make(32)
    standard = copy.deepcopy(model)
    ours.parametrize(model, base)
    readouts = [path.removesuffix(".weight") for path, role in ours.roles(model).items() if role.role == "output"]
    assert readouts
    other = with_their_readouts(standard, theirs, readouts)
    theirs.set_base_shapes(other, with_their_readouts(base, theirs, readouts))
    optimizer = theirs.MuAdamW(other.parameters(), lr=1.0, weight_decay=1.0)
    rates = {id(p): (group["lr"], group["weight_decay"]) for group in optimizer.param_groups for p in group["params"]}
    differ = []
    for path, parameter in other.named_parameters():
        role = ours.roles(model)[path]
        assert (role.lr, role.decay) == rates[id(parameter)], path
        assert parameter.infshape.ninf() == {"finite": 0, "hidden": 2}.get(role.role, 1), path
        if path.removesuffix(".weight") in readouts:
            assert role.multiplier == 1 / parameter.infshape.width_mult(), path
        if not torch.allclose(model.get_parameter(path), parameter, rtol=1e-5):
            differ.append(path)
    assert {reason(name, path) for path in differ} == EXPECTED[name], differ


EXPECTED: dict[str, set[str]] = {
    "UViT": {"constant in width"},
    "DiTTransformer2DModel": set(),
    "PixArtTransformer2DModel": {"1 / sqrt(width)"},
    "SD3Transformer2DModel": set(),
}


def reason(name: str, path: str) -> str:
    """Why initial values differ. `mup.set_base_shapes` supposes torch's default, whose size falls with the fan-in.

    constant in width: U-ViT draws all linear weights with 0.02, so hidden ones must be divided by sqrt(m) and readouts must
    stay; users of `mup` call its own init functions. 1 / sqrt(width): PixArt's tables of shifts and scales are vectors, which
    must not shrink; `mup` leaves every raw parameter as it is.
    """
    if name == "UViT":
        return "constant in width"
    return "1 / sqrt(width)" if path.endswith("scale_shift_table") else path


@pytest.mark.slow
def test_what_the_package_loses_and_we_keep(theirs) -> None:
    def make(width: int) -> nn.Sequential:
        return nn.Sequential(nn.Conv2d(3, width, 1), nn.Conv2d(width, width, 1), nn.Conv2d(width, 2, 1))

    model = make(64)
    theirs.set_base_shapes(model, make(16))
    assert not hasattr(copy.deepcopy(model)[1].weight, "infshape")  # lost by a deep copy, so by an EMA
    x = torch.randn(1, 64, 2, 2)
    readout = model[2]
    torch.testing.assert_close(readout(x), nn.functional.conv2d(x, readout.weight, readout.bias))  # no multiplier
    mine = ours.parametrize(make(64), make(16))
    assert ours.roles(copy.deepcopy(mine)) == ours.roles(mine)
    torch.testing.assert_close(mine[2](x), nn.functional.conv2d(x / 4, mine[2].weight, mine[2].bias))


@pytest.mark.slow
def test_the_package_leaves_recurrent_biases_and_projections(theirs) -> None:
    """Biases within 1 / sqrt(width) must not shrink; a projection to a fixed size is a readout."""
    torch.manual_seed(0)
    mine, base = nn.LSTM(3, 256, proj_size=8), nn.LSTM(3, 64, proj_size=8)
    other = copy.deepcopy(mine)
    ours.parametrize(mine, base)
    theirs.set_base_shapes(other, base)
    for name, factor in (("bias_ih_l0", 2), ("weight_hr_l0", 0.5)):  # as at base width; the same, divided by m
        torch.testing.assert_close(getattr(mine, name), factor * getattr(other, name), rtol=0.2, atol=0)
    (hidden,) = [group["lr"] for group in ours.param_groups(mine, 1.0) if group["lr"] != 1]
    assert hidden == 0.25
    assert {group["lr"] for group in theirs.MuAdamW(other.parameters(), lr=1.0).param_groups} == {1.0}
