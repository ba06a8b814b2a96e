"""Saving and loading: what is refused, and that a refusal leaves the model as it was."""

from __future__ import annotations

import json

import pytest
import torch

import scalelong
from tests.families import FAMILIES, build, output

UNET = FAMILIES[0]


@pytest.fixture
def saved(tmp_path):
    model = build(UNET)
    scalelong.apply(model, "cs", kappa=0.6)
    return scalelong.save(model, tmp_path / "model")


def test_nothing_but_the_two_files_is_written(saved) -> None:
    assert sorted(file.name for file in saved.iterdir()) == ["model.safetensors", "scalelong.json"]
    stored = json.loads((saved / "scalelong.json").read_text())
    assert stored == {"method": "cs", "options": {"kappa": 0.6, "allow_amplify": False}, "num_skips": 6}


def test_another_number_of_skips_is_refused(saved) -> None:
    other = build(FAMILIES[1])
    with pytest.raises(ValueError, match="num_skips: the saved scaling is of 6 skips, this UNet2DModel has 4"):
        scalelong.load(other, saved)
    assert "scalelong" not in other._modules


def test_another_scaling_is_refused(saved) -> None:
    other = build(UNET)
    scalelong.apply(other, "cs", kappa=0.5)
    with pytest.raises(ValueError, match=r"carries cs\(kappa=0\.5\), the saved one is cs\(kappa=0\.6\)"):
        scalelong.load(other, saved)
    assert scalelong.coefficients(other)[1] == 0.5


def test_damaged_weights_leave_the_model_unscaled(saved) -> None:
    other = build(UNET, seed=2)
    before = output(other, UNET.inputs())
    (saved / "model.safetensors").write_bytes(b"not a tensor file")
    with pytest.raises(Exception, match="header"):
        scalelong.load(other, saved)
    assert "scalelong" not in other._modules
    assert torch.equal(output(other, UNET.inputs()), before)


@pytest.mark.parametrize("missing", ["model.safetensors", "scalelong.json"])
def test_a_missing_file_is_named(saved, missing: str) -> None:
    (saved / missing).unlink()
    with pytest.raises(FileNotFoundError, match=missing):
        scalelong.load(build(UNET), saved)


def test_a_description_without_its_keys_is_refused(saved) -> None:
    (saved / "scalelong.json").write_text('{"method": "cs"}')
    with pytest.raises(ValueError, match="must hold method, options and num_skips"):
        scalelong.load(build(UNET), saved)


def test_saving_a_model_without_scaling_is_refused(tmp_path) -> None:
    with pytest.raises(ValueError, match="not scaled"):
        scalelong.save(build(UNET), tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_from_pretrained_of_an_unscaled_folder_says_what_to_do(tmp_path) -> None:
    model = build(UNET)
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"saved without a scaling, use UNet2DModel\.from_pretrained"):
        scalelong.from_pretrained(type(model), tmp_path)


def test_a_detected_model_is_saved_and_loaded_with_an_example(tmp_path) -> None:
    from tests.standins import AdditiveUNet, image

    model, other = AdditiveUNet(), AdditiveUNet()
    scalelong.apply(model, "ls", module="ie", example=image())
    scalelong.save(model, tmp_path)
    with pytest.raises(ValueError, match="no example input"):
        scalelong.load(other, tmp_path)
    scalelong.load(other, tmp_path, example=image())
    assert torch.equal(other(*image()), model(*image()))
    scalelong.load(other, tmp_path)  # scaled already: no example needed
