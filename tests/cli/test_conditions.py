"""Conditional runs from the command line: samples, records, refusals."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest

from scalelong.cli.main import main
from scalelong.training import to_yaml
from tests.data.encoders import make_bert
from tests.training.tiny import tiny


def train(folder, **changes):
    """A tiny run, made by the command."""
    (folder / "tiny.yaml").write_text(to_yaml(tiny(training_steps=4, **changes)))
    arguments = ["train", "digits-demo", "--config", str(folder / "tiny.yaml"), "--out", str(folder / "run")]
    assert main([*arguments, "--probe-every", "4"]) == 0
    return folder / "run"


def sampled(run, name: str, *arguments: str):
    assert main(["sample", str(run), "--num", "4", "--out", str(run / name), *arguments]) == 0
    return np.load(run / f"{name}.npz")["images"].astype(int)


def refused(capsys, *arguments: str) -> str:
    capsys.readouterr()
    assert main(list(arguments)) == 1
    return capsys.readouterr().err


def test_classes(tmp_path, capsys, monkeypatch) -> None:
    run = train(tmp_path, condition_kind="class", diffusion_prediction="x0")
    threes = sampled(run, "threes", "--classes", "3")
    assert (threes != sampled(run, "sevens", "--classes", "7")).any()
    mixed = sampled(run, "mixed", "--classes", "3,7")
    assert np.load(run / "mixed.npz")["labels"].tolist() == [3, 7, 3, 7]
    assert np.abs(mixed[::2] - threes[::2]).max() <= 1
    assert (sampled(run, "guided", "--classes", "3", "--guidance", "5") != threes).any()
    nowhere = sampled(run, "nowhere", "--classes", "3", "--guidance", "5", "--guidance-interval", "1e8", "1e9")
    assert np.array_equal(nowhere, threes)
    assert np.abs(sampled(run, "null", "--classes", "null,3")[1::2] - threes[1::2]).max() <= 1
    assert (sampled(run, "none", "--classes", "null") != threes).any()
    assert "classes: there is no 'nul'; did you mean 'null'?" in refused(capsys, "sample", str(run), "--classes", "nul")
    assert "classes: there is no '12'; give 0 .. 9" in refused(capsys, "sample", str(run), "--classes", "12")
    assert "the run's condition is class, not text" in refused(capsys, "sample", str(run), "--prompt", "a red apple")
    measure = ["evaluate", str(run), "--extractor", "random-conv", "--num-samples", "70", "--guidance", "2"]
    assert main(measure) == 0
    assert "guidance 2" in capsys.readouterr().out
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [record["sampling"]["guidance"] for record in records if record["kind"] == "evaluation"] == [2.0]
    assert [record["step"] for record in records if record["kind"] == "probe"] == [4]
    assert main(["export", str(run), "--out", str(tmp_path / "exported")]) == 0
    card = (tmp_path / "exported" / "README.md").read_text()
    assert "- **Condition**: class; dropped for 10% of the samples" in card
    monkeypatch.chdir(tmp_path / "exported")
    exec(re.findall(r"```python\n(.*?)```", card, flags=re.S)[0], {})


def test_prompts(tmp_path, capsys) -> None:
    bert = make_bert(tmp_path / "bert")
    run = train(
        tmp_path,
        data_name="emoji32",
        data_split="unseen",
        data_root=str(tmp_path / "cache"),
        model_patch_size=16,
        condition_kind="text",
        condition_encoder=str(bert),
        condition_max_tokens=6,
        sampling_guidance=2.0,
    )
    apples = sampled(run, "apples", "--prompt", "a red apple")
    assert (apples != sampled(run, "flags", "--prompt", "a green flag")).any()
    assert np.load(run / "apples.npz")["prompts"].tolist() == ["a red apple"] * 4
    null = sampled(run, "null", "--prompt", "", "--guidance", "1")
    assert np.abs(sampled(run, "null-guided", "--prompt", "", "--guidance", "6") - null).max() <= 1
    sampled(run, "captions")
    wide = make_bert(tmp_path / "wide", width=32)
    arguments = ["sample", str(run), "--prompt", "a face", "--encoder", str(wide)]
    assert "has width 32, the run was trained with 16" in refused(capsys, *arguments)
    assert "the run's condition is text" in refused(capsys, "sample", str(run), "--classes", "1")


def test_an_unconditional_run_takes_neither(tmp_path, capsys) -> None:
    run = train(tmp_path)
    assert "the run's condition is none" in refused(capsys, "sample", str(run), "--classes", "1")
    assert "the run's condition is none, not text" in refused(capsys, "sample", str(run), "--prompt", "x")
    assert "guidance: 2.0, but the run has no condition" in refused(capsys, "sample", str(run), "--guidance", "2")
    assert not (run / "samples").exists()


@pytest.mark.parametrize("preset", [pytest.param("imagenet64-unet", marks=pytest.mark.slow), "coco-uvit-s2"])
def test_a_dry_run_prints_the_size_without_the_data(preset, capsys, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["train", preset, "--dry-run"]) == 0
    printed = capsys.readouterr().out
    assert re.search(r"^data        \S+: not available; assuming images of", printed, re.M)
    assert {"imagenet64-unet": "parameters  144,394,723", "coco-uvit-s2": "parameters  44,692,644"}[preset] in printed
