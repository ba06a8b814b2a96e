"""The transfer grid: its runs, the best values, and how far they move."""

from __future__ import annotations

import json
import re

import matplotlib
import pytest

from scalelong.cli.main import main
from scalelong.stability.transfer import Point, loss_of, optima, plot, summary, transfer_grid
from tests.training.tiny import tiny


def test_the_grid_differs_in_what_is_swept_only() -> None:
    grid = transfer_grid(tiny(), (16, 32), (1e-3, 2e-3), kappas=(0.5, 0.7), seeds=(0, 1))
    assert len(grid) == 2 * 2 * 2 * 2 * 2
    for point, config in grid.items():
        assert (config.model.dim, config.optimizer.lr, config.scaling.kappa) == (point.width, point.lr, point.kappa)
        assert config.model.dim // config.model.heads == 8  # heads keep their size
        assert config.mup.base_width == (16 if point.parametrization == "mup" else 0)
    with pytest.raises(ValueError, match="widths: must be at least two"):
        transfer_grid(tiny(), (16,), (1e-3,))
    with pytest.raises(ValueError, match="unknown 'mub'; did you mean 'mup'"):
        transfer_grid(tiny(), (16, 32), (1e-3,), parametrizations=("mub",))
    with pytest.raises(ValueError, match="widths: must be even and a multiple of 2 heads, got 15"):
        transfer_grid(tiny(), (16, 15), (1e-3,))


def test_best_values_and_how_far_they_move() -> None:
    rates = (1e-4, 4e-4, 1.6e-3)
    best = {("mup", 64): 4e-4, ("mup", 256): 4e-4, ("standard", 64): 1.6e-3, ("standard", 256): 1e-4}
    points = [
        Point(kind, width, lr, 0.7, seed, 100 * abs(lr - target) + 1 / width)
        for (kind, width), target in best.items() for lr in rates for seed in (0, 1)
    ]  # fmt: skip
    points.append(Point("standard", 256, 2e-4, 0.7, 0, None))  # diverged: does not count
    assert {(found.parametrization, found.width): found.best for found in optima(points)} == best
    lines = summary(points).splitlines()
    assert "factor of 1; at 0.0004, wider is never worse" in lines[3]
    assert "factor of 16; at 0.0016, wider is sometimes worse" in lines[6]


def test_plotting_keeps_the_backend_of_matplotlib(tmp_path) -> None:
    matplotlib.use("svg")
    try:
        plot([Point("mup", width, 1e-3, 0.7, 0, 0.5) for width in (16, 32)], tmp_path / "rates.png")
        assert matplotlib.get_backend() == "svg"
    finally:
        matplotlib.use("agg")


def test_the_command_trains_resumes_and_reports(tmp_path, capsys) -> None:
    command = ["transfer", "digits-demo", "--widths", "16", "32", "--rates", "1e-3", "1e-2", "--steps", "4"]
    command += ["--batch-size", "4", "--parametrizations", "mup", "--out", str(tmp_path)]
    assert main(command) == 0
    first = capsys.readouterr().out
    assert re.search(r"mup +the best lr moves by a factor of", first)
    numbers = json.loads((tmp_path / "transfer.json").read_text())
    assert len(numbers) == 4
    assert all(point["loss"] > 0 for point in numbers)
    assert (tmp_path / "transfer-lr.png").stat().st_size > 1000
    assert main(command) == 0
    assert capsys.readouterr().out == first


def test_a_diverged_run_has_no_loss_and_is_not_trained_again(tmp_path) -> None:
    config = tiny(optimizer_lr=1e30, optimizer_warmup_steps=0)
    assert loss_of(config, tmp_path / "run") is None
    before = (tmp_path / "run" / "metrics.jsonl").stat()
    assert loss_of(config, tmp_path / "run") is None
    assert (tmp_path / "run" / "metrics.jsonl").stat() == before
