"""The runs of a sweep."""

from __future__ import annotations

from pathlib import Path

from scalelong.runs.presets import get_preset
from scalelong.runs.reader import read_run
from scalelong.stability.sweep import sweep, train_in_parallel
from tests.training.tiny import tiny


def test_a_sweep_is_the_preset_with_each_method_and_seed() -> None:
    preset = get_preset("digits-demo")
    configs = sweep(preset, ("none", "cs:0.5"), (3, 4), steps=9)
    assert list(configs) == ["none-seed3", "none-seed4", "cs0.5-seed3", "cs0.5-seed4"]
    last = configs["cs0.5-seed4"]
    assert (last.scaling.method, last.scaling.kappa, last.training.seed, last.training.steps) == ("cs", 0.5, 4, 9)
    assert sweep(preset, ["ls"], [0])["ls-seed0"].training.steps == preset.training.steps


def test_runs_in_parallel_are_trained_with_a_probe(tmp_path: Path) -> None:
    train_in_parallel(sweep(tiny(training_steps=2), ["none", "ls"], [0]), tmp_path)
    for name in ("none-seed0", "ls-seed0"):
        run = read_run(tmp_path / name)
        assert (run.last_step, bool(run.probe)) == (2, True)
