"""`scalelong inspect --roles` and `scalelong coordcheck`."""

from __future__ import annotations

import re

import pytest

from scalelong.cli.coordcheck import default_widths
from scalelong.cli.main import main
from scalelong.runs.presets import get_preset

MODULE = """
from torch import nn

def net(width=64):
    return nn.Sequential(nn.Linear(3, width), nn.Linear(width, width), nn.Linear(width, 2))

def narrow():
    return net(16)
"""


def test_roles_of_presets(capsys) -> None:
    assert main(["inspect", "digits-demo", "--roles", "--base", "16"]) == 0
    lines = capsys.readouterr().out.splitlines()
    found = {line.split()[0]: line.split() for line in lines}
    assert found["decoder_pred.weight"][1] == "output"
    assert found["decoder_pred.weight"][-3:] == ["1", "0.25", "1"]
    assert found["out_blocks.*.skip_linear.weight"][-3:] == ["0.5", "1", "0.25"]
    assert main(["inspect", "digits-demo", "--roles", "--base", "wide"]) == 1
    assert "base: must be a width, such as 128, got 'wide'" in capsys.readouterr().err


def test_roles_of_any_model(capsys, tmp_path, monkeypatch) -> None:
    (tmp_path / "my_nets_to_parametrize.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    assert main(["inspect", "my_nets_to_parametrize:net", "--roles", "--base", "my_nets_to_parametrize:narrow"]) == 0
    assert re.search(r"1\.weight +hidden +64 x 64 +16 x 16 +1 +1 +0\.25", capsys.readouterr().out)
    assert main(["inspect", "my_nets_to_parametrize:net", "--roles"]) == 1
    assert "base: the model at base width is not known; pass --base MODEL" in capsys.readouterr().err


def test_coordcheck_prints_both_parametrizations_and_a_plot(capsys, tmp_path) -> None:
    command = [
        "coordcheck",
        "digits-demo",
        "--widths",
        "32",
        "64",
        "--seeds",
        "1",
        "--steps",
        "2",
        "--out",
        str(tmp_path),
    ]
    main(command)  # two widths and one seed are too few to be flat
    out = capsys.readouterr().out
    assert re.search(r"^mup +(not )?flat: at most", out, flags=re.M)
    assert re.search(r"^standard +not flat: at most \+", out, flags=re.M)
    assert (tmp_path / "coordinates-digits-demo.png").stat().st_size > 1000


@pytest.mark.slow
def test_coordcheck_of_a_unet_is_flat(capsys, tmp_path) -> None:
    """Its seeds are different networks; of one network, noise is taken for a slope."""
    assert main(["coordcheck", "cifar10-unet", "--out", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert re.search(r"^mup +flat: at most", out, flags=re.M)
    assert re.search(r"^standard +not flat: at most \+", out, flags=re.M)


def test_default_widths_keep_the_head_size() -> None:
    assert default_widths(get_preset("digits-demo")) == (32, 64, 128, 256, 512)
    assert default_widths(get_preset("cifar10-uvit-s2")) == (64, 128, 256, 384, 512)
    assert default_widths(get_preset("cifar10-unet")) == (32, 64, 96, 128, 160)
