"""Every example of docs/extending.md is applied to a copy of the sources and run."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "extending.md").read_text()
SECTIONS = dict(re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", PAGE, flags=re.M | re.S))
ONE_FILE = ("A constant method", "A sampler", "A model family")


def blocks(section: str) -> list[tuple[str, str, str]]:
    """(language, title, content) of every fenced block."""
    return re.findall(r'^```(\w+)(?: title="(.+?)")?\n(.*?)^```$', SECTIONS[section], flags=re.M | re.S)


def patch(text: str, diff: str) -> str:
    """Apply hunks separated by lines of "@@"; the old lines of each must occur exactly once."""
    for hunk in re.split(r"^@@\n", diff, flags=re.M):
        lines = hunk.splitlines()
        old = "".join(f"{line[1:]}\n" for line in lines if not line.startswith("+"))
        new = "".join(f"{line[1:]}\n" for line in lines if not line.startswith("-"))
        assert text.count(old) == 1 or not old, f"{text.count(old)} places match:\n{old}"
        text = text.replace(old, new) if old else new
    return text


@pytest.mark.parametrize("section", SECTIONS)
def test_example(section: str, tmp_path: Path) -> None:
    shutil.copytree(ROOT / "src" / "scalelong", tmp_path / "src" / "scalelong", ignore=shutil.ignore_patterns("*.pyc"))
    touched, commands = set(), []
    for language, title, content in blocks(section):
        if language == "diff":
            file = tmp_path / title
            file.write_text(patch(file.read_text() if file.exists() else "", content))
            touched.add(title)
        elif language == "python":
            commands.append([sys.executable, "-c", content])
        elif language == "bash":
            words = [line.split() for line in content.splitlines()]
            commands += [[sys.executable, "-m", "scalelong.cli.main", *each[1:]] for each in words]
    assert len(touched) <= (1 if section in ONE_FILE else 2)
    assert touched and commands
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "src"), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    for command in commands:
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
