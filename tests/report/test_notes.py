"""Caveats of a comparison."""

from pathlib import Path

from scalelong.report import Comparison, compare_runs, read_runs
from scalelong.report.notes import notes
from tests.report.runs import write_run

STEADY = [10.0, 11.0, 10.0, 11.0]


def compare(tmp_path: Path) -> Comparison:
    return compare_runs(read_runs([tmp_path])[0])


def test_damage_and_gaps_are_noted(tmp_path: Path) -> None:
    write_run(tmp_path / "a", "none", losses=[1.0, None, 0.5], training_steps=100)
    folder = write_run(tmp_path / "b", "cs", data_name="emoji32", evaluations=[(10, 1.0)])
    with (folder / "metrics.jsonl").open("a") as file:
        file.write("{torn\n")
    text = "\n".join(notes(compare(tmp_path), ["c: is not a run folder"]))
    assert "Left out: c: is not a run folder." in text
    assert "trained on different data (digits and emoji32): losses, oscillations and quality cannot be " in text
    assert "b: 1 damaged line in metrics.jsonl, ignored." in text
    assert "a: at step 30 of 100." in text
    assert "a: 1 of 3 records have no finite loss" in text
    assert "numbers are taken up to step 30" in text


def test_what_does_not_compare_is_noted(tmp_path: Path) -> None:
    write_run(tmp_path / "a", "none", norms=STEADY, evaluations=[(40, 1.0)])
    write_run(tmp_path / "b", "cs", norms=STEADY, every=5, losses=[1.0] * 8, evaluations=[(40, 1.0)], metric={"n": 7})
    write_run(tmp_path / "c", "cs", diffusion_prediction="x0")
    text = "\n".join(notes(compare(tmp_path)))
    assert "minimise different losses (vp, predicting the default and vp, predicting x0)" in text
    assert "probed at different intervals (5 and 10 steps)" in text
    assert "measured in 2 ways that do not compare" in text
    assert "No oscillation was recorded in" in text


def test_runs_at_the_same_time_and_repeated_seeds_are_noted(tmp_path: Path) -> None:
    for name, start in (("a", "2026-01-01 10:00:00"), ("b", "2026-01-01 10:00:02")):
        path = write_run(tmp_path / name) / "metrics.jsonl"  # four seconds long
        path.write_text(path.read_text().replace('"device"', f'"time": "{start}", "device"', 1))
    text = "\n".join(notes(compare(tmp_path)))
    assert "trained at the same time" in text
    assert "none: seed 0 was given more than once" in text
    path.write_text(path.read_text().replace("10:00:02", "11:00:00"))
    assert "trained at the same time" not in "\n".join(notes(compare(tmp_path)))


def test_a_long_start_up_is_noted(tmp_path: Path) -> None:
    path = write_run(tmp_path / "a", losses=[1.0] * 4) / "metrics.jsonl"  # seconds 1, 2, 3, 4
    for i in (4, 3, 2, 1):
        path.write_text(path.read_text().replace(f'"seconds": {i}.0', f'"seconds": {i + 6}.0'))
    assert any("a: 60% of its time was start-up" in note for note in notes(compare(tmp_path)))


def test_a_sound_comparison_needs_no_notes(tmp_path: Path) -> None:
    write_run(tmp_path / "a", "none", norms=STEADY)
    write_run(tmp_path / "b", "cs", norms=STEADY)
    assert notes(compare(tmp_path)) == []


def test_different_data_of_one_name_are_named_by_fingerprint(tmp_path: Path) -> None:
    write_run(tmp_path / "a", data="0123456789")
    write_run(tmp_path / "b", "cs", data="012345abcd")
    text = "\n".join(notes(compare(tmp_path)))
    assert "different data (digits, fingerprint 01234567 and digits, fingerprint 012345ab)" in text
