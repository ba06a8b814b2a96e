"""The runs of a sweep."""

from __future__ import annotations

import json
import re
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path

import pytest

from scalelong import progress
from scalelong.runs.presets import get_preset
from scalelong.runs.reader import read_run, read_runs
from scalelong.stability import sweep as module
from scalelong.stability.sweep import sweep, train_in_parallel, train_in_turn
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


def test_a_diverged_run_does_not_stop_the_others(tmp_path: Path, caplog) -> None:
    configs = sweep(tiny(training_steps=8), ["none"], [0, 1, 2])
    diverging = replace(configs["none-seed1"], optimizer=replace(tiny().optimizer, lr=1e30, warmup_steps=0))
    for _ in range(2):  # the same when it is repeated
        train_in_turn(configs | {"none-seed1": diverging}, tmp_path)
        assert "none-seed1 diverged, the other runs continue: step 2: the loss is not finite" in caplog.text
        runs = read_runs([tmp_path])[0]
        assert [(run.last_step, run.diverged) for run in runs] == [(8, None), (1, 2), (8, None)]


def test_a_kappa_is_refused_for_methods_without_one() -> None:
    with pytest.raises(ValueError, match=r"methods: 'ls:0\.5', but ls has no kappa; leave out :0\.5"):
        sweep(tiny(), ["ls:0.5"], [0])


@pytest.mark.parametrize(("methods", "seeds", "key"), [([], [0], "methods"), (["cs"], [], "seeds")])
def test_a_sweep_of_nothing_is_refused(methods: list[str], seeds: list[int], key: str) -> None:
    with pytest.raises(ValueError, match=rf"{key}: must be one or more, got \[\]"):
        sweep(tiny(), methods, seeds)


def test_progress_counts_from_the_start_of_a_run_and_ends_with_it(tmp_path: Path, capsys, monkeypatch) -> None:
    """The second run waits 1,000 s for a core, then takes 10 s a step."""
    configs = sweep(tiny(training_steps=10), ["none"], [0, 1])
    futures: list[Future[None]] = [Future(), Future()]
    now = 0.0

    def sleep(_: float) -> None:
        nonlocal now
        now += 10.0
        for name, start, future in zip(configs, (0.0, 1000.0), futures, strict=True):
            step = int((now - start) / 10)
            if 0 <= step <= 10:
                (tmp_path / name).mkdir(exist_ok=True)
                with (tmp_path / name / "metrics.jsonl").open("a") as file:
                    file.write(json.dumps({"step": step, "kind": "train" if step else "start", "loss": 1.0}) + "\n")
            if step == 10:
                future.set_result(None)

    monkeypatch.setattr("tqdm.std.time", lambda: now)
    monkeypatch.setattr(progress.time, "monotonic", lambda: now)
    monkeypatch.setattr(module.time, "sleep", sleep)
    module._show_progress(futures, configs, tmp_path)
    lines = capsys.readouterr().err.splitlines()
    assert [line.partition(":")[0] for line in lines] == ["none-seed0"] * 10 + ["none-seed1"] * 10
    assert re.match(r"none-seed1: 1 of 10 step, 00:[12]0 so far, 0[123]:\d\d left", lines[10]), lines[10]
    assert lines[9].startswith("none-seed0: 10 of 10 step, 01:")
