"""scalelong report, as it is typed."""

import subprocess
import sys
from pathlib import Path

import pytest

from scalelong.cli.main import main
from tests.report.runs import write_run


def test_one_folder_gets_its_own_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path / "runs" / "a")
    write_run(tmp_path / "runs" / "b", "cs")
    assert main(["report", str(tmp_path / "runs")]) == 0
    assert (tmp_path / "runs" / "report.html").is_file()
    assert "2 run(s)" in capsys.readouterr().out


def test_several_folders_are_reported_where_asked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [str(write_run(tmp_path / name)) for name in ("a", "b")]
    bad = tmp_path / "c"
    assert main(["report", *runs, str(bad), "--out", str(tmp_path / "r.html")]) == 0
    assert "c: is not a run folder" in capsys.readouterr().err
    assert "c: is not a run folder" in (tmp_path / "r.html").read_text()


def test_the_file_of_a_probe_is_reported_in_the_current_folder(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "probe.jsonl").write_text('{"step": 1, "loss": 0.5, "norm/mid": 1.0}\n{"step": 2, "norm/mid": 1.5}\n')
    monkeypatch.chdir(tmp_path)
    assert main(["report", "probe.jsonl"]) == 0
    assert {path.name for path in tmp_path.iterdir()} == {"probe.jsonl", "report.html"}


@pytest.mark.parametrize("arguments", [[], ["nowhere"]])
def test_nothing_to_show_is_one_clear_line(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", *arguments]) == 1
    message = capsys.readouterr().err
    assert message.startswith("error: runs: ")
    assert len(message.splitlines()) == 1


def test_a_run_without_metrics_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_run(tmp_path / "a")
    (folder / "metrics.jsonl").unlink()
    assert main(["report", str(folder)]) == 1
    assert "has no metrics.jsonl" in capsys.readouterr().err


@pytest.mark.parametrize("verb", ["report", "compare", "diagnose"])
def test_runs_are_shown_without_torch(verb: str, tmp_path: Path) -> None:
    runs = [write_run(tmp_path / name, method, norms=[1.0, 2.0]) for name, method in (("a", "none"), ("b", "cs"))]
    arguments = [verb, *map(str, runs[: 1 if verb == "diagnose" else 2])]
    program = f"""if True:
        import sys
        from scalelong.cli.main import main
        assert main({arguments!r}) == 0
        assert not {{"torch", "diffusers", "accelerate"}} & set(sys.modules)
        ours = [name for name in sys.modules if name.partition(".")[0] == "scalelong"]
        assert len(ours) <= 30, sorted(ours)
    """
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
