"""One palette."""

from __future__ import annotations

from scalelong.report.colours import METHODS, PALETTE, assign, colour
from scalelong.report.html import write_report
from scalelong.runs.reader import read_run
from tests.report.runs import write_run


def test_a_method_has_its_colour_whatever_else_is_shown() -> None:
    assert assign(["none", "cs", "ls"]) == [METHODS[name] for name in ("none", "cs", "ls")]
    assert assign(["ls", "none"]) == [METHODS["ls"], METHODS["none"]]


def test_several_of_a_method_are_told_apart_and_grey_is_for_none() -> None:
    found = assign(["none", "cs", "cs", "cs", "ls", "layernorm"])
    assert len(set(found)) == 6
    assert 0 not in assign(["cs"] * 20)
    assert found[4] == METHODS["ls"]


def test_the_report_has_the_colours_of_the_plots(tmp_path) -> None:
    page = write_report([read_run(write_run(tmp_path / "a", "cs"))], tmp_path / "report.html").read_text()
    for i, (light, dark) in enumerate(PALETTE):
        assert f"--c{i}: light-dark({light}, {dark});" in page
    assert f"var(--c{METHODS['cs']})" in page
    assert colour("cs 0.5") == PALETTE[METHODS["cs"]][0]
