"""The U as text and as a picture, and pictures of several runs."""

from __future__ import annotations

import numpy as np
import pytest
from matplotlib.axes import Axes
from PIL import Image

from scalelong.report import compare_runs, read_runs
from scalelong.report.plots import Rung, UShape, as_text, draw, image_rows, plot_seeds
from tests.report.runs import write_run

SIZES = ["32 × 32", "32 × 32", "16 × 16", "8 × 8"]
REACH = ["shortcut", "full", "partial", "none"]
RUNGS = [
    Rung(i + 1, f"down.{i}", f"up.{3 - i}", 8 * 2**i, size, 0.5**i, reach)
    for i, (size, reach) in enumerate(zip(SIZES, REACH, strict=True))
]


def test_every_skip_has_a_line_with_its_names_size_coefficient_and_reach() -> None:
    lines = as_text(UShape("Net", "cs", RUNGS)).splitlines()
    for rung, line in zip(RUNGS, lines[3:], strict=False):
        said = (
            rung.made_in,
            f"{rung.channels} ch, {rung.size}",
            f"κ = {rung.coefficient:.3g} {rung.reach}",
            rung.used_in,
        )
        assert all(part in line for part in said), line


def test_the_u_narrows_where_the_size_changes() -> None:
    assert UShape("Net", "cs", RUNGS).stages() == [0, 0, 1, 2]
    starts = [line.index("┝") for line in as_text(UShape("Net", "cs", RUNGS)).splitlines()[3:-1]]
    ends = [line.index("▶") for line in as_text(UShape("Net", "cs", RUNGS)).splitlines()[3:-1]]
    assert starts[0] == starts[1] < starts[2] < starts[3]
    assert ends[0] == ends[1] > ends[2] > ends[3]


def test_a_transformer_narrows_at_every_skip() -> None:
    rungs = [Rung(i, f"in.{i}", f"out.{i}", 64, "17 tokens", None, "full") for i in (1, 2, 3)]
    assert UShape("Net", "ls", rungs).stages() == [0, 1, 2]
    assert "κ = ?" in as_text(UShape("Net", "ls", rungs))


@pytest.mark.parametrize("ending", ["png", "svg"])
def test_the_suffix_sets_the_format(ending: str, tmp_path) -> None:
    path = draw(UShape("Net", "cs", RUNGS), tmp_path / "new" / f"u.{ending}")
    if ending == "png":
        assert min(Image.open(path).size) > 300
    else:
        assert "<svg" in path.read_text()


def test_runs_are_pictured_by_method(tmp_path) -> None:
    for seed in (0, 1):
        write_run(tmp_path / f"a{seed}", "none", seed, norms=[1.0, 2.0], kappa=[1.0, 1.0])
        write_run(tmp_path / f"b{seed}", "cs", seed, norms=[1.0, 2.0], kappa=[1.0, 0.7])
    plot_seeds(compare_runs(read_runs([tmp_path])[0]), tmp_path / "curves.png")
    assert min(Image.open(tmp_path / "curves.png").size) > 300


def test_losses_are_compared_by_seed(tmp_path, monkeypatch) -> None:
    for seed in (0, 1):
        write_run(tmp_path / f"a{seed}", "none", seed, losses=[1.0 + seed] * 4)
    write_run(tmp_path / "b1", "cs", 1, losses=[1.0] * 4)
    drawn: list[Axes] = []
    monkeypatch.setattr("scalelong.report.plots.save_figure", lambda figure, _path: drawn.extend(figure.axes))
    plot_seeds(compare_runs(read_runs([tmp_path])[0]), tmp_path / "curves.png")
    lines = {line.get_label(): list(line.get_ydata()) for line in drawn[1].get_lines()}
    assert lines["cs 0.7"] == pytest.approx([-50.0] * 4)


def test_small_images_become_large_ones_in_labelled_rows(tmp_path) -> None:
    black, white = np.zeros((8, 8), np.uint8), np.full((8, 8), 255, np.uint8)
    image_rows({"real": [black, white], "cs 0.7": [white, black]}, tmp_path / "rows.png", size=72)
    sheet = Image.open(tmp_path / "rows.png")
    assert [sheet.getpixel((x, y)) for y in (36, 36 + 78) for x in (110 + 36, 110 + 36 + 78)] == [0, 255, 255, 0]
    assert sheet.crop((0, 0, 100, sheet.height)).getextrema()[0] < 100  # the labels
