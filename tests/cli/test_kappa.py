"""`scalelong kappa` on presets, callables and diffusers folders."""

from __future__ import annotations

import dataclasses
import re

import pytest
import torch
from diffusers import UNet2DModel

from scalelong.backbones import UViT, UViTConfig
from scalelong.cli.kappa import summary
from scalelong.cli.main import main
from scalelong.cli.open_model import count_skips
from scalelong.data import load_source
from scalelong.diffusion import VPSDE
from scalelong.runs.presets import get_preset
from scalelong.stability import recommend_kappa


def test_the_kappa_of_the_settings_is_shown_if_the_method_has_one() -> None:
    found, config = recommend_kappa(load_source("digits"), VPSDE(), 6, samples=200), get_preset("digits-demo")
    assert "kappa in the settings     0.7 (cs)" in summary(found, config)
    gated = dataclasses.replace(config, scaling=dataclasses.replace(config.scaling, method="ls"))
    assert "in the settings" not in summary(found, gated)


@pytest.mark.parametrize(
    ("preset", "shape", "skips"), [("digits-demo", (1, 8, 8), 6), ("fashion-mnist-unet", (1, 28, 28), 9)]
)
def test_skips_of_a_preset_are_counted_without_weights(preset: str, shape: tuple[int, int, int], skips: int) -> None:
    assert count_skips(preset, (), shape) == skips


def plain_uvit() -> torch.nn.Module:
    """The callable of the test below."""
    return UViT(UViTConfig(image_size=8, patch_size=4, in_channels=1, dim=16, depth=8, heads=2))


def test_the_command_serves_any_model_with_data(tmp_path, capsys) -> None:
    name = f"{__name__}:plain_uvit"
    assert main(["kappa", name, "--data", "digits", "--num-samples", "200", "--out", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "skips N                   4" in out
    assert "recommended  0.7" in out
    assert re.search(r"mean of ratios +\d\.\d{3}   kappa 0\.\d{3} \.\. [01]\.\d{3}\n", out)
    assert re.search(r"ratio of means +\d\.\d{3}   kappa 0\.\d{3} \.\. [01]\.\d{3}\n", out)
    assert re.search(r"Lemma 3\.2, uniform x_0 +1\.22", out)
    assert [path.suffix for path in tmp_path.iterdir()] == [".png"]
    assert main(["kappa", name, "--out", str(tmp_path)]) == 1
    assert "does not name its data; pass it" in capsys.readouterr().err
    assert main(["kappa", "digit-demo"]) == 1
    assert "did you mean 'digits-demo'?" in capsys.readouterr().err
    assert main(["kappa", "digits-demo", "--skips", "0", "--out", str(tmp_path)]) == 1
    assert "num_skips: must be an int of at least 1, got 0" in capsys.readouterr().err


def test_the_command_reads_a_diffusers_folder(tmp_path, capsys) -> None:
    UNet2DModel(
        sample_size=16, block_out_channels=(8, 8), norm_num_groups=4, layers_per_block=1,
        down_block_types=("DownBlock2D",) * 2, up_block_types=("UpBlock2D",) * 2, add_attention=False,
    ).save_pretrained(tmp_path / "unet")  # fmt: skip
    folder, out = str(tmp_path / "unet"), str(tmp_path / "out")
    assert main(["kappa", folder, "--data", "digits", "--num-samples", "200", "--out", out]) == 0
    assert "skips N                   4" in capsys.readouterr().out
