"""The pages of figures hold what the files of results hold."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def test_the_tables_and_pictures_are_those_of_the_results() -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "scripts" / "figures_table.py", "--check"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def test_the_table_of_rates_follows_the_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "scripts")
    import figures_table

    before = figures_table.transfer_table("lr")
    assert "| muP | 1024 | 2^-10 | 0.0503 | 1 |" in before
    shutil.copytree(figures_table.STORED, tmp_path, dirs_exist_ok=True)
    runs = tmp_path / "rates" / "mup-w1024.jsonl"
    rows = [json.loads(line) for line in runs.read_text().splitlines()]
    rows[0]["loss"] = 0.01
    runs.write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.setattr(figures_table, "STORED", tmp_path)
    assert figures_table.transfer_table("lr") != before
