"""The speed-up curve, against arrivals worked out by hand."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from scalelong.report import compare_runs, read_runs, write_report
from scalelong.report.charts import make_charts
from scalelong.report.speedup import Curve, describe, speed_up, table
from scalelong.report.tables import summary
from tests.report.runs import write_run

STEPS = [10, 20, 30, 40]
BASE = Curve(STEPS, [4.0, 3.0, 2.0, 1.0], [1.0, 2.0, 3.0, 4.0])


def test_arrivals_are_interpolated_between_records() -> None:
    assert BASE.arrival(3.0) == 20
    assert BASE.arrival(2.5) == 25
    assert BASE.arrival(2.5, timed=True) == 2.5
    assert BASE.arrival(9.0) == 10  # at the first record already
    assert math.isnan(BASE.arrival(0.9))
    assert Curve(STEPS, [4.0, 2.0, 3.0, 1.0]).arrival(2.0) == 20  # the first time counts


def test_a_method_that_draws_ahead() -> None:
    found = speed_up([(Curve(STEPS, [5.0, 3.5, 1.5, 0.5], [1.0, 3.0, 5.0, 7.0]), BASE)])
    assert found is not None
    assert found.lead.behind_until == pytest.approx(20 + 10 * (0.5 / 3) / (0.5 / 3 + 0.25))  # relative gaps +1/6, -1/4
    assert found.lead.ahead_at_end
    assert found.at(2.0).mean == pytest.approx(30 / 27.5)
    assert found.at(2.0, timed=True).mean == pytest.approx(3 / 4.5)
    assert found.final_speed_up().mean == pytest.approx(40 / 35)
    text = describe("cs 0.7", "none", "loss", found)
    assert text == (
        "cs 0.7, loss: behind none until step 24, then ahead (−50% at step 40); "
        "it reaches the best loss of none (1.000) 1.14× as fast in steps, 0.67× in time."
    )
    assert found.qualities[0] == pytest.approx(4.0) and found.qualities[-1] == pytest.approx(1.0)


def test_a_method_that_never_arrives_is_said_to() -> None:
    found = speed_up([(Curve(STEPS, [5.0, 4.0, 3.0, 2.0]), BASE)])
    assert found is not None
    assert found.lead.behind_until == found.lead.last == 40
    text = describe("ls", "none", "FID", found)
    assert (
        text
        == "ls, FID: behind none at the end (+100% at step 40); the best FID of none (1.000) is not reached in 40 steps."
    )
    assert table([("ls", found)], "none") == [
        ["method", "none at 10: 4.000", "none at 20: 3.000", "none at 30: 2.000", "none at 40: 1.000"],
        ["ls", "0.50×", "0.67×", "0.75×", "not reached"],
    ]


def test_seeds_make_a_band_and_late_ones_are_counted() -> None:
    ahead, late = Curve(STEPS, [4.0, 2.0, 1.0, 0.5]), Curve(STEPS, [4.0, 3.5, 3.0, 2.5])
    found = speed_up([(ahead, BASE), (late, BASE)])
    assert found is not None
    both = found.at(3.0)
    assert (both.n, both.mean) == (2, pytest.approx((20 / 15 + 20 / 30) / 2))
    assert found.at(1.0).n == 1
    text = describe("cs", "none", "loss", found)
    assert "is not reached by 1 of 2 seeds" in text and "by seed never and to the end" in text
    assert found.lead.within_noise and "not significant in a paired t-test" in describe("cs", "none", "loss", found)
    assert table([("cs", found)], "none")[1][-1] == "1.33× (1 of 2 seeds)"
    assert found.qualities[-1] == pytest.approx(2.5)  # the best that every run reaches


def test_never_behind() -> None:
    found = speed_up([(Curve(STEPS, [4.0, 2.9, 1.9, 0.9]), BASE)])
    assert found is not None and found.lead.behind_until == 0
    assert "never behind none" in describe("ls", "none", "loss", found)
    assert speed_up([(Curve([], []), BASE)]) is None


def test_compare_and_report_show_it(tmp_path: Path) -> None:
    for seed in (0, 1):
        none = [1.0 - 0.02 * i for i in range(40)]
        write_run(tmp_path / f"none{seed}", "none", seed, losses=none, evaluations=[(100, 9.0), (400, 5.0)])
        cs = [1.1 - 0.03 * i for i in range(40)]
        write_run(tmp_path / f"cs{seed}", "cs", seed, losses=cs, evaluations=[(100, 9.5), (400, 6.0)])
    runs, _ = read_runs([tmp_path])
    comparison = compare_runs(runs)
    text = summary(comparison, comparison.races())
    assert "Speed-up in steps over none, by loss:" in text
    assert "cs 0.7, loss: behind none until step 1" in text
    assert "cs 0.7, FID of 10,000 images: behind none at the end" in text and "is not reached by 2 of 2 seeds" in text
    charts = make_charts(comparison)
    (curve, reference) = charts["speedup-0"].series
    assert curve["marks"] and curve["x"] == sorted(curve["x"]) and len(curve["low"]) == len(curve["y"])
    assert reference["y"] == [1.0, 1.0] and reference["label"] == "none"
    assert "Speed-up over none" in write_report(runs, tmp_path / "report.html").read_text()
