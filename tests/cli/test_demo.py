"""The demo: what it says of runs made by hand, and what it writes."""

from __future__ import annotations

import pytest
from PIL import Image

from scalelong.cli.demo import statements
from scalelong.cli.main import main
from scalelong.report import compare_runs, read_runs
from tests.report.runs import write_run


def said(tmp_path, cs: float, ratio: float, kappa: float) -> str:
    """The statements on two seeds of none and cs (of this loss and start) and ls (of this coefficient)."""
    for seed in (0, 1):
        write_run(tmp_path / f"none{seed}", "none", seed, losses=[1.0, 0.5])
        write_run(tmp_path / f"cs{seed}", "cs", seed, losses=[1.0, cs if seed else 0.5])
        write_run(tmp_path / f"ls{seed}", "ls", seed, losses=[1.0, 0.5], kappa=[0.5, kappa])
    runs, _ = read_runs([tmp_path])
    return "\n".join(statements(compare_runs(runs), {"none": [1.0, 1.0], "cs": [9.0, ratio], "ls": [9.0, 9.0]}))


def test_only_what_holds_in_every_seed_is_said(tmp_path) -> None:
    text = said(tmp_path / "clear", cs=0.51, ratio=2.0, kappa=0.46)
    assert "cs 0.7 and ls: at the start" in text
    assert "the losses are on par" in text and "gates have hardly moved" in text
    text = said(tmp_path / "unclear", cs=0.52, ratio=1.2, kappa=0.44)
    assert "- ls: at the start" in text  # cs not in every seed
    assert "level" not in text and "hardly" not in text


@pytest.mark.slow
def test_the_demo_writes_its_pictures_and_report(tmp_path, capfd) -> None:
    assert main(["demo", "--steps", "10", "--seeds", "0", "--out", str(tmp_path)]) == 0
    out = capfd.readouterr().out
    assert "3 U-ViTs of 12 blocks, 10 steps" in out and "ls: the gates have hardly moved" in out
    assert Image.open(tmp_path / "samples.png").size == (110 + 10 * 78, 4 * 78 - 6)
    assert (tmp_path / "comparison.png").is_file() and (tmp_path / "report.html").is_file()
