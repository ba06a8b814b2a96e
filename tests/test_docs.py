"""What the README and the docs say is what happens."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from scalelong.cli.main import VERBS
from scalelong.training import PRESETS

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def test_the_readmes_python_runs_as_written(capsys) -> None:
    (block,) = re.findall(r"```python\n(.*?)```", README, flags=re.S)
    exec(block, {})
    printed = capsys.readouterr().out
    assert printed.startswith("cs(kappa=0.7) on UNet2DModel")
    assert "conv_in" in printed


def test_the_python_of_the_page_on_mup_runs_as_written(capsys) -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "mup.md").read_text(), flags=re.S)
    assert len(blocks) == 2
    for block in blocks:
        exec(block, {})
    assert capsys.readouterr().out.startswith("[(0.001, ")


def test_every_command_in_the_docs_is_a_verb_with_known_presets() -> None:
    pages = [README, *(page.read_text() for page in (ROOT / "docs").glob("*.md"))]
    for page in pages:
        for line in re.findall(r"^scalelong .*$", page, flags=re.M):
            words = line.split()
            assert words[1] in VERBS, line
            if words[1] == "train":
                assert words[2] in PRESETS, line


def test_the_docs_name_every_preset() -> None:
    page = (ROOT / "docs" / "train.md").read_text()
    assert all(f"`{name}`" in page for name in PRESETS)


@pytest.mark.slow
def test_the_table_of_families_is_up_to_date() -> None:
    subprocess.run([sys.executable, ROOT / "scripts" / "families_table.py", "--check", "--known"], check=True)


@pytest.mark.slow
def test_the_tables_of_what_was_tried_are_up_to_date() -> None:
    if not (ROOT / ".venv" / "packages" / ".installed").exists():
        pytest.skip("make test-slow installs tests/packages.txt")
    subprocess.run([sys.executable, ROOT / "scripts" / "families_table.py", "--check"], check=True)
