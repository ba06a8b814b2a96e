"""The diagnosis of runs made so that the answer is known."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from scalelong.cli.main import main
from scalelong.runs.config import to_yaml
from scalelong.runs.presets import get_preset
from scalelong.stability.diagnosis import Sentence, diagnose


def write_run(folder: Path, train: list[dict[str, Any]], probe: list[dict[str, Any]], method: str = "none") -> Path:
    """A run of digits-demo with these records; its warm-up ends at step 50."""
    folder.mkdir()
    preset = get_preset("digits-demo")
    preset = dataclasses.replace(
        preset,
        scaling=dataclasses.replace(preset.scaling, method=method),
        training=dataclasses.replace(preset.training, steps=300),
    )
    (folder / "config.yaml").write_text(to_yaml(preset))
    records = [{"kind": "train", **record} for record in train] + [{"kind": "probe", **record} for record in probe]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return folder


def calm(steps: range = range(10, 301, 10), **changes: Any) -> list[dict[str, Any]]:
    usual = {"gradient_norm": 1.0, "gradient_norm_max": 1.5, "skipped": 0}
    return [{"step": step, "loss": 10 / step, **usual, **changes} for step in steps]


def probes(swing: float, steps: range = range(10, 301, 10)) -> list[dict[str, Any]]:
    """mid_block's norm jumps between 1 - swing and 1 + swing after the warm-up, and wildly before it; out_blocks.0 rests."""
    size = {step: (swing if step > 50 else 0.9) * (-1) ** (step // 10) for step in steps}
    return [
        {"step": s, "norm/mid_block": 1 + size[s], "norm/out_blocks.0": 2.0, "gradient/mid_block": 1 + size[s] / 2}
        for s in steps
    ]


def about(found: list[Sentence], what: str) -> Sentence:
    return next(sentence for sentence in found if sentence.about == what)


def test_a_run_that_diverged_is_an_alarm_and_is_not_to_be_continued(tmp_path) -> None:
    run = write_run(tmp_path / "run", calm(range(10, 51, 10)), [])
    text = (run / "metrics.jsonl").read_text()
    (run / "metrics.jsonl").write_text(text + '{"step": 57, "kind": "diverged", "loss": NaN}\n')
    found = diagnose(run / "metrics.jsonl")  # as completed by a shell
    steps = about(found, "steps")
    assert steps.alarming
    assert steps.text == "The run ended at step 57 of 300: non-finite loss or gradient, or too many spikes."
    assert not any("repeat the training command" in sentence.text for sentence in found)
    advice = [sentence.text for sentence in found if sentence.about == "try"]
    assert "--optimizer.warmup-steps" in advice[0]
    assert "--optimizer.lr 0.0015 (now 0.003)" in advice[1]


def test_an_oscillating_block_is_named_with_its_number(tmp_path) -> None:
    found = diagnose(write_run(tmp_path / "run", calm(), probes(0.2)))
    features = about(found, "features")
    assert features.alarming
    assert features.number == pytest.approx(0.4, rel=0.01)  # |1.2 - 0.8| / 1, the warm-up left out
    assert "1 of 2 blocks oscillate" in features.text
    assert "mid_block 40%" in features.text
    assert "out_blocks.0" not in features.text
    advice = [sentence.text for sentence in found if sentence.about == "try"]
    assert "--scaling.method cs (now none)" in advice[0]
    assert "--optimizer.lr 0.0015 (now 0.003)" in advice[1]


def test_a_calm_run_has_no_alarm(tmp_path) -> None:
    found = diagnose(write_run(tmp_path / "run", calm(), probes(0.01)))
    assert not any(sentence.alarming for sentence in found)
    assert "No block oscillates: the least steady, mid_block, moves by 2.0%" in about(found, "features").text
    assert "do not spike: the largest norm, 1.5 by step" in about(found, "gradients").text
    assert about(found, "steps").text == "0 of 300 steps were skipped because their loss or gradient was not finite."
    assert about(found, "try").text == "Nothing here asks for a change (0 alarms)."


def test_scaling_is_not_advised_to_a_scaled_run(tmp_path) -> None:
    found = diagnose(write_run(tmp_path / "run", calm(), probes(0.2), method="ls"))
    assert not any("--scaling.method" in sentence.text for sentence in found)


def test_spikes_skips_and_a_rising_loss_are_reported(tmp_path) -> None:
    train = calm()
    train[20] |= {"gradient_norm_max": 8.0}
    train[-1] |= {"skipped": 3}
    for record in train:
        record["loss"] = record["step"]
    found = diagnose(write_run(tmp_path / "run", train, []))
    gradients = about(found, "gradients")
    assert (gradients.alarming, gradients.number) == (True, 8.0)
    assert "1 of 25 records" in gradients.text
    assert "8 by step 210" in gradients.text
    assert about(found, "steps").text.startswith("3 of 300 steps were skipped")
    assert about(found, "course").alarming
    advice = " ".join(sentence.text for sentence in found if sentence.about == "try")
    assert "--optimizer.clip-norm" in advice
    assert "--optimizer.warmup-steps" in advice
    assert "--optimizer.lr 0.0003" in advice


def test_without_probe_records_the_flag_for_them_is_named(tmp_path, capsys) -> None:
    run = write_run(tmp_path / "run", calm(range(10, 101, 10)), [])
    assert main(["diagnose", str(run)]) == 0
    out = capsys.readouterr().out
    assert "0 probe records; train with --probe-every 50" in out
    assert "step 100 of 300" in out
    few = diagnose(write_run(tmp_path / "few", calm(), probes(0.2)[:6]))
    assert "too few" in about(few, "features").text


def test_values_that_are_not_finite_are_ignored(tmp_path) -> None:
    found = diagnose(write_run(tmp_path / "run", calm(loss=None, gradient_norm=None), [], method="cs"))
    assert "No record has a finite loss" in about(found, "course").text
    assert "No record has a finite gradient norm" in about(found, "gradients").text


def test_a_run_that_does_not_learn_is_reported(tmp_path) -> None:
    still = diagnose(write_run(tmp_path / "run", calm(loss=0.0, gradient_norm=0.0, gradient_norm_max=0.0), []))
    assert "The loss stayed at 0 " in about(still, "course").text
    assert about(still, "course").alarming
    assert "Gradients are exactly zero in at least half of the" in about(still, "gradients").text


def test_json_has_the_numbers_and_other_folders_are_refused(tmp_path, capsys) -> None:
    run = write_run(tmp_path / "run", calm(), probes(0.2))
    assert main(["diagnose", str(run), "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert {"about", "text", "number", "alarming"} == rows[0].keys()
    assert main(["diagnose", str(tmp_path)]) == 1
    assert "is not a run folder (no config.yaml)" in capsys.readouterr().err
    empty = write_run(tmp_path / "empty", [], [])
    with pytest.raises(ValueError, match="has no training record"):
        diagnose(empty)
