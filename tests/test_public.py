"""The public surface of the package."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from diffusers import UNet1DModel

import scalelong
from tests.standins import TutorialUNet, image


def run(code: str) -> str:
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return result.stdout.strip()


def test_the_import_loads_neither_torch_nor_diffusers() -> None:
    code = "import sys, scalelong; print([name for name in ('torch', 'diffusers', 'numpy') if name in sys.modules])"
    assert run(code) == "[]"


def test_subpackages_are_found_after_the_import() -> None:
    assert run("import scalelong; print(scalelong.skips.is_scaled.__name__, scalelong.scaling.__name__)") == (
        "is_scaled scalelong.scaling"
    )


@pytest.mark.parametrize("name", scalelong.__all__)
def test_every_name_is_there(name: str) -> None:
    assert getattr(scalelong, name).__name__ == name
    assert name in dir(scalelong)


def test_other_names_are_not() -> None:
    with pytest.raises(AttributeError, match="module 'scalelong' has no attribute 'aply'"):
        scalelong.aply  # noqa: B018


def test_the_example_is_given_as_one_argument_or_as_the_models_own() -> None:
    model, (x,) = TutorialUNet(), image()
    expected = scalelong.find_skips(model, example=(x,))
    for found in (
        scalelong.find_skips(model, x),
        scalelong.find_skips(model, x=x),
        scalelong.find_skips(model, example={"x": x}),
        scalelong.find_skips(model, example=((), {"x": x})),
    ):
        assert found == expected
    with pytest.raises(TypeError, match="example: pass either example= or the arguments"):
        scalelong.find_skips(model, x, example=x)


def test_a_handle_fits_a_notebook_cell() -> None:
    handle = scalelong.apply(UNet1DModel(), "cs", kappa=0.5)
    assert repr(handle) == str(handle)
    assert len(repr(handle).splitlines()) == 3 + 3
    handle.remove()
    assert repr(handle) == "cs(kappa=0.5), removed"
    deep = scalelong.UViT(scalelong.UViTConfig(image_size=4, patch_size=2, dim=8, depth=60, heads=1))
    lines = repr(scalelong.apply(deep, "cs", kappa=0.9)).splitlines()
    assert len(lines) == 3 + 17
    assert lines[11] == "... 14 more"
    assert (lines[10].split()[0], lines[12].split()[0], lines[-1].split()[0]) == ("8", "23", "30")


def test_known_models_need_no_example_to_be_verified() -> None:
    torch.manual_seed(0)
    model = scalelong.UViT(scalelong.UViTConfig(image_size=4, patch_size=2, dim=8, depth=4, heads=1))
    scalelong.apply(model, "ls")
    assert len(scalelong.verify(model).checks) == 2
