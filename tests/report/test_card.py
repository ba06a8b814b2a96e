"""The model card says what was measured, and of which step."""

from __future__ import annotations

from pathlib import Path

from scalelong.report import read_runs
from scalelong.report.card import model_card
from scalelong.runs.events import append_event
from scalelong.runs.settings import Conditioning

from .runs import write_run


def test_quality_and_coefficients_are_those_of_the_step(tmp_path: Path) -> None:
    how = {"sampler": "ddim", "sampler_steps": 5, "sample_seed": 3, "guidance": 2.0, "precision": "bf16"}
    folder = write_run(tmp_path / "a", "ls", kappa=[0.5, 0.25], evaluations=[(20, 30.0), (40, 20.0)], metric=how)
    append_event(folder, 50, "train", {"loss": 0.3, "seconds": 5.0, "kappa": [0.9, 0.8]})
    (run,), _ = read_runs([folder])
    card = model_card(run, 20, "ema", (1, 8, 8), Conditioning())
    drawn = "10,000 images of seed 3, ddim with 5 steps in bf16, guidance 2, extractor inception"
    assert f"- FID = 30.000 ({drawn})" in card
    assert "20.000" not in card
    assert "outermost first: 0.5, 0.25" in card
    assert "Not measured at this step." in model_card(run, 20, "model", (1, 8, 8), Conditioning())
