"""scalelong compare, as it is typed."""

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import pytest

from scalelong.cli import compare
from scalelong.cli.main import main
from scalelong.runs.events import read_events
from tests.report.runs import write_run
from tests.training.tiny import losses, tiny


def test_runs_are_tabulated_raced_and_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for seed in (0, 1):
        write_run(tmp_path / f"n{seed}", "none", seed, losses=[1.0, 0.8, 0.6, 0.4])
        write_run(tmp_path / f"c{seed}", "cs", seed, losses=[0.9, 0.5, 0.4, 0.3])
    written = ["--csv", str(tmp_path / "t.csv"), "--report", str(tmp_path / "r.html")]
    assert main(["compare", str(tmp_path), *written]) == 0
    text = capsys.readouterr().out
    assert "0.4000 ± 0.0000" in text
    assert "To reach loss 0.4000" in text
    assert "1.33×" in text
    assert "Mean ± sd over 2 seeds" in text
    assert all((tmp_path / name).is_file() for name in ("t.csv", "t-pairs.csv", "r.html"))


def test_a_loss_that_is_not_reached_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path / "a", "none")
    write_run(tmp_path / "b", "cs", evaluations=[(40, 9.0)])
    assert main(["compare", str(tmp_path), "--loss", "0.01", "--metric-value", "5"]) == 0
    text = capsys.readouterr().out
    assert "To reach loss 0.01000 (running mean over 2 steps):" in text
    assert "not reached" in text
    assert "It does not reach loss 0.01000" in text
    assert "FID of 10,000 images was not measured for none" in text


def test_the_report_uses_the_given_targets(tmp_path: Path) -> None:
    for name, method in (("a", "none"), ("b", "cs")):
        write_run(tmp_path / name, method, evaluations=[(20, 30.0), (40, 20.0)])
    asked = ["--loss", "0.7", "--metric-value", "25"]
    assert main(["compare", str(tmp_path), *asked, "--report", str(tmp_path / "r.html")]) == 0
    page = (tmp_path / "r.html").read_text()
    assert "How soon loss 0.7000 is reached" in page
    assert "How soon FID 25.00 is reached" in page
    assert page.count("The given value") == 2
    assert "It reaches loss 0.7000 after" in page


def test_a_method_without_a_measurement_takes_no_part_in_the_race(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, method in (("a", "none"), ("b", "cs")):
        write_run(tmp_path / name, method, evaluations=[(20, 30.0), (40, 20.0)])
    write_run(tmp_path / "c", "ls", diffusion_prediction="x0")  # no loss race, and not measured
    assert main(["compare", str(tmp_path)]) == 0
    assert "ls: none of its records can be compared." in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ([], "runs: none given"),
        (["RUN", "--metric-value", "5"], "metric-value: no run has an evaluation"),
        (["RUN", "--loss", "nan"], "loss: must be a finite number, got nan"),
        (["RUN", "--loss", "-inf"], "loss: must be a finite number, got -inf"),
        (["RUN", "--metric-value", "inf"], "metric-value: must be a finite number, got inf"),
        (["--preset", "digit-demo"], "did you mean 'digits-demo'?"),
        (["--preset", "digits-demo", "--methods", "cs:half"], "methods: 'cs:half' has no number"),
        (["--preset", "digits-demo", "--methods", "sc"], "scaling.method: unknown 'sc'"),
        (["--preset", "digits-demo", "--steps", "0"], "training.steps: must be at least 1"),
    ],
)
def test_bad_input_is_one_clear_line(
    arguments: list[str], why: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = str(write_run(tmp_path / "a"))
    assert main(["compare", *(folder if a == "RUN" else a for a in arguments)]) == 1
    message = capsys.readouterr().err
    assert why in message
    assert len(message.splitlines()) == 1


def test_a_preset_is_trained_where_missing_and_then_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        compare,
        "get_preset",
        lambda _: dataclasses.replace(tiny(training_checkpoint_every=2, optimizer_warmup_steps=1)),
    )
    arguments = ["compare", "--preset", "tiny", "--methods", "none", "ls", "--seeds", "0", "1", "--out", str(tmp_path)]
    assert main([*arguments, "--steps", "4"]) == 0
    assert "feature oscillation" in capsys.readouterr().out
    folder = tmp_path / "ls-seed1"
    first = losses(folder)
    assert len(first) == 4
    assert main([*arguments, "--steps", "6"]) == 0  # continues
    assert losses(folder)[:4] == first
    assert len(losses(folder)) == 6
    assert "Mean ± sd over 2 seeds" in capsys.readouterr().out


def test_only_the_first_rank_prints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = str(write_run(tmp_path / "a"))
    monkeypatch.setenv("RANK", "1")
    assert main(["compare", folder]) == 0
    assert capsys.readouterr().out == ""
    monkeypatch.setenv("RANK", "0")
    assert main(["compare", folder]) == 0
    assert "final loss" in capsys.readouterr().out


@pytest.mark.slow
def test_ranks_train_together_and_one_of_them_reports(tmp_path: Path) -> None:
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    arguments = ["--preset", "digits-demo", "--methods", "none", "--seeds", "0", "--steps", "2", "--out", str(tmp_path)]
    done = subprocess.run(
        [*launch, "-m", "scalelong.cli.main", "compare", *arguments],
        env=os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("training time") == 1
    records, _ = read_events(tmp_path / "none-seed0")
    assert [record["ranks"] for record in records if record["kind"] == "start"] == [2]
