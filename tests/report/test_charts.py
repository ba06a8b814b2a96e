"""The numbers that the page draws."""

import json
from pathlib import Path

import numpy as np
import pytest

from scalelong.report import compare_runs, read_runs
from scalelong.report.charts import Chart, make_charts, thinned
from tests.report.runs import write_run


def charts(tmp_path: Path) -> dict[str, Chart]:
    return make_charts(compare_runs(read_runs([tmp_path])[0]))


def test_a_single_run_is_plotted_as_recorded_against_steps_and_time(tmp_path: Path) -> None:
    write_run(tmp_path / "a", losses=[3.0, 2.0, 1.0], seconds=2.0, norms=[1.0, 2.0], kappa=[1.0, 0.5])
    made = charts(tmp_path)
    (steps,), (time,) = made["loss-steps"].series, made["loss-time"].series
    assert (steps["x"], steps["y"], steps["rawY"]) == ([10, 20, 30], [3.0, 2.0, 1.0], [3.0, 2.0, 1.0])
    assert (time["x"], time["y"]) == ([2.0, 4.0, 6.0], [3.0, 2.0, 1.0])
    assert made["kappa"].series[0]["y"] == [1.0, 0.5]
    variants = made["norm-steps"].variants
    assert variants is not None
    assert variants["mid_block"][0]["y"] == [1.0, 2.0]
    assert made["norm-blocks"].series[0]["y"] == pytest.approx([2 / 3] * 3, rel=1e-4)
    assert not any(id.startswith("quality") for id in made)


def test_seeds_are_plotted_as_mean_and_band(tmp_path: Path) -> None:
    write_run(tmp_path / "a", seed=0, losses=[3.0, 1.0], seconds=1.0, evaluations=[(10, 8.0), (20, 4.0)])
    write_run(tmp_path / "b", seed=1, losses=[5.0, 1.0, 0.5], seconds=3.0, evaluations=[(10, 8.0), (20, 6.0)])
    made = charts(tmp_path)
    (series,) = made["loss-time"].series
    assert (series["x"], series["y"]) == ([2.0, 4.0], [4.0, 1.0])  # up to the last common step
    sd = np.std([3.0, 5.0], ddof=1)
    assert series["high"] == pytest.approx([4 + sd, 1.0], rel=1e-4)
    assert series["low"] == pytest.approx([4 - sd, 1.0], rel=1e-4)
    assert made["quality-0-steps"].series[0]["y"] == [8.0, 5.0]


def test_the_band_over_seeds_stays_positive(tmp_path: Path) -> None:
    write_run(tmp_path / "a", seed=0, losses=[1.0, 1.0])
    write_run(tmp_path / "b", seed=1, losses=[9.0, 1.0])
    (series,) = charts(tmp_path)["loss-steps"].series
    assert series["low"] == pytest.approx([1.0, 1.0])  # 5 - sd is below 0


def test_quality_of_different_data_is_not_plotted(tmp_path: Path) -> None:
    write_run(tmp_path / "a", evaluations=[(20, 4.0)])
    write_run(tmp_path / "b", data_name="emoji32", evaluations=[(20, 4.0)])
    made = charts(tmp_path)
    assert not any(id.startswith("quality") for id in made)
    assert len(made["loss-steps"].series) == 2


def test_learned_coefficients_are_plotted_with_the_constant_ones(tmp_path: Path) -> None:
    write_run(tmp_path / "a", "ls", kappa=[0.5, 0.5, 0.5])
    learned, reference = charts(tmp_path)["kappa"].series
    assert learned["y"] == [0.5, 0.5, 0.5]
    assert reference["label"] == "cs 0.7 (not run)"
    assert reference["y"] == pytest.approx([1.0, 0.7, 0.49])
    write_run(tmp_path / "b", "cs", kappa=[1.0, 0.7, 0.49])
    assert len(charts(tmp_path)["kappa"].series) == 2


def test_thinning_keeps_spikes_and_ends() -> None:
    values = [0.0] * 10_000
    values[1234], values[5678] = 9.0, -9.0
    kept = thinned(values, 100)
    assert len(kept) <= 100
    assert {0, 1234, 5678, 9999} <= set(kept)
    assert kept == sorted(kept)
    assert thinned([1.0, 2.0], 100) == [0, 1]


def test_many_long_runs_stay_small(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    for seed in range(8):
        losses = list(rng.random(2000))
        write_run(tmp_path / f"{seed}", "cs", losses=losses, norms=losses, optimizer_lr=0.001 * (seed + 1))
    size = len(json.dumps([vars(chart) for chart in charts(tmp_path).values()]))
    assert size < 2_000_000
