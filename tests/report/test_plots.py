"""The U as text and as a picture, and pictures of several runs."""

from __future__ import annotations

import pytest
from PIL import Image

from scalelong.report.plots import Rung, UShape, as_text, draw, plot_comparison, stack_grids
from scalelong.runs.reader import read_run
from tests.report.runs import draw_grid, write_run

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


def test_runs_are_pictured_side_by_side(tmp_path) -> None:
    runs = []
    for name, method, colour in (("a", "none", "red"), ("b", "cs", "blue")):
        folder = write_run(tmp_path / name, method, norms=[1.0, 2.0], kappa=[1.0, 0.7])
        draw_grid(folder, 10, "white")
        draw_grid(folder, 20, colour)  # the last one is shown
        runs.append(read_run(folder))
    plot_comparison(runs, tmp_path / "curves.png")
    assert min(Image.open(tmp_path / "curves.png").size) > 300
    stack_grids(runs, tmp_path / "grids.png")
    grids = Image.open(tmp_path / "grids.png")
    assert [grids.getpixel((x, grids.height - 1)) for x in (0, grids.width - 1)] == [(255, 0, 0), (0, 0, 255)]
