"""`scalelong inspect` on presets, runs, diffusers folders and callables."""

from __future__ import annotations

import pytest
import torch

import scalelong
from scalelong.cli.main import main
from scalelong.training import to_yaml
from tests.families import FAMILIES, build
from tests.training.tiny import tiny

UNET = FAMILIES[0]

MODULE = """
import torch
from torch import nn
from tests.standins import TutorialUNet

def net():
    return TutorialUNet()

def net_and_example():
    return TutorialUNet(), torch.zeros(1, 3, 8, 8)

def number():
    return 3
"""


@pytest.fixture
def module(tmp_path, monkeypatch) -> str:
    (tmp_path / "my_nets_to_inspect.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    return "my_nets_to_inspect"


def test_a_preset_is_drawn_as_text_and_picture(capsys, tmp_path) -> None:
    out = tmp_path / "u.png"
    assert main(["inspect", "digits-demo", "--method", "cs", "--kappa", "0.5", "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    assert "UViT: 0.7M parameters, 6 long skips" in printed
    assert "6: κ = 0.0312 full" in printed
    assert out.stat().st_size > 10_000


def test_a_large_preset_is_inspected_without_values(capsys) -> None:
    assert main(["inspect", "imagenet64-uvit-m4", "--method", "ls"]) == 0
    printed = capsys.readouterr().out
    assert "8 long skips" in printed
    assert "κ = ? full" in printed


def test_a_diffusers_folder_is_drawn_with_the_scaling_it_was_saved_with(capsys, tmp_path) -> None:
    model = build(UNET)
    model.save_pretrained(tmp_path / "plain")
    scalelong.apply(model, "cs", kappa=0.5, placement="after_norm")
    model.save_pretrained(tmp_path / "pipeline" / "unet")
    assert main(["inspect", str(tmp_path / "plain")]) == 0
    assert "not scaled: every κ is 1" in capsys.readouterr().out
    assert main(["inspect", str(tmp_path / "pipeline")]) == 0
    printed = capsys.readouterr().out
    assert "cs(kappa=0.5)" in printed
    assert "6: κ = 0.0312 full" in printed
    assert "8 × 8" in printed


def test_a_callable_is_drawn_on_its_own_example_or_on_a_given_shape(module: str, capsys) -> None:
    for arguments in ([f"{module}:net_and_example"], [f"{module}:net", "--shape", "1,3,8,8"]):
        assert main(["inspect", *arguments, "--method", "rsqrt2"]) == 0
        printed = capsys.readouterr().out
        assert "TutorialUNet: 25,811 parameters, 3 long skips" in printed
        assert "κ = 0.707" in printed


def test_a_run_shows_the_output_of_its_gates(capsys, tmp_path) -> None:
    (tmp_path / "tiny.yaml").write_text(to_yaml(tiny(training_steps=2, scaling_method="ls")))
    run = str(tmp_path / "run")
    assert main(["train", "digits-demo", "--config", str(tmp_path / "tiny.yaml"), "--out", run]) == 0
    capsys.readouterr()
    state = torch.get_rng_state()
    assert main(["inspect", run]) == 0
    printed = capsys.readouterr().out
    assert "κ = 0." in printed
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["digit-demo"], "did you mean 'digits-demo'?"),
        (["{module}:net"], "TutorialUNet is not a known class; pass its inputs"),
        (["{module}:missing"], "has no callable 'missing'"),
        (["{module}:number"], "returned a int, not a torch.nn.Module"),
        (["{module}:net", "--shape", "1,x"], "must be numbers with commas such as 1,3,32,32"),
        (["{module}:net", "--shape", "1,5,8,8"], "the forward of TutorialUNet fails on it"),
        (["digits-demo", "--out", "u.txt"], "must end in .png, .svg or .pdf"),
        (["digits-demo", "--method", "ls", "--kappa", "0.5"], "'ls' has none; leave it out"),
        (["{folder}"], "has no config.json"),
    ],
)
def test_what_cannot_be_inspected_is_one_clear_line(arguments, message, module, capsys, tmp_path) -> None:
    (tmp_path / "empty").mkdir()
    filled = [each.format(module=module, folder=tmp_path / "empty") for each in arguments]
    assert main(["inspect", *filled]) == 1
    assert message in capsys.readouterr().err
