"""What the command line writes: checked before the work, nothing of others overwritten."""

from __future__ import annotations

import os

import pytest

from scalelong.cli.main import main
from scalelong.training.run import TrainedRun


def test_the_suffix_of_a_sample_is_not_doubled(run, tmp_path) -> None:
    assert main(["sample", str(run), "--num-samples", "2", "--out", str(tmp_path / "new" / "two.png")]) == 0
    assert {path.name for path in (tmp_path / "new").iterdir()} == {"two.png", "two.npz"}


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["sample", "run", "--out", "file/grid"], "out: cannot create file: file is a file; choose another folder"),
        (["report", "run", "--out", "file/r.html"], "file/r.html: cannot be written (File exists: file)"),
        (["compare", "run", "--csv", "run"], "run: is a folder; give the name of a file"),
        (["export", "run", "--out", "file"], "file/scalelong.json: cannot be written (File exists: file)"),
        (["evaluate", "run", "--num-samples", "1"], "sampling.count: must be at least 2 for a distance, got 1"),
        (["evaluate", "run", "--guidance", "2"], "sampling.guidance: 2.0, but the run has no condition"),
        (["evaluate", "run", "--sampler", "dimm"], "sampling.sampler: unknown 'dimm'; did you mean 'ddim'?"),
    ],
)
def test_outputs_and_counts_are_checked_before_the_work(run, arguments, told, monkeypatch, tmp_path, capsys) -> None:
    def too_late(*_: object, **__: object) -> None:
        raise AssertionError

    monkeypatch.setattr("scalelong.cli.evaluate.reference_statistics", too_late)
    monkeypatch.setattr(TrainedRun, "sample", too_late)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    extractor = ["--extractor", "random-conv"] if arguments[0] == "evaluate" else []
    assert main([*arguments, *extractor]) == 1
    assert told in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize(
    ("verb", "work"),
    [
        (["theory"], "scalelong.lab.verify_theory"),
        (["kappa", "digits-demo"], "scalelong.cli.kappa.recommend_kappa"),
        (["coordcheck", "digits-demo"], "scalelong.cli.coordcheck.coordinate_check"),
    ],
)
def test_folders_of_pictures_are_checked_first(verb, work, tmp_path, monkeypatch, capsys) -> None:
    def too_late(*_: object, **__: object) -> None:
        raise AssertionError

    monkeypatch.setattr(work, too_late)
    (tmp_path / "file").touch()
    assert main([*verb, "--out", str(tmp_path / "file")]) == 1
    assert capsys.readouterr().err.endswith("file is a file; choose another folder\n")


def test_a_run_that_cannot_be_written_to_is_not_evaluated(run, monkeypatch, capsys) -> None:
    monkeypatch.setattr(os, "access", lambda *_: False)  # root may write anywhere
    assert main(["evaluate", str(run), "--extractor", "random-conv", "--num-samples", "4"]) == 1
    assert f"run: no permission to write to {run}; copy the run" in capsys.readouterr().err


def test_an_export_overwrites_no_other_files(run, tmp_path, capsys) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "README.md").write_text("my project")
    for out in (tmp_path / "mine", run):
        before = {path.name: path.stat().st_mtime_ns for path in out.iterdir() if path.is_file()}
        assert main(["export", str(run), "--out", str(out)]) == 1
        assert f"out: {out} is not empty and holds no export; choose another folder" in capsys.readouterr().err
        assert before == {path.name: path.stat().st_mtime_ns for path in out.iterdir() if path.is_file()}
