"""Run the code cells of a notebook in order, in one fresh process without Jupyter: python scripts/run_notebook.py FILE.

Lines that begin with "!" are commands; `scalelong` is this interpreter's.
"""

from __future__ import annotations

import ast
import json
import shlex
import subprocess
import sys
from pathlib import Path


def as_python(source: str) -> str:
    """A cell with its commands as calls."""
    lines = [f"shell({line[1:]!r})" if line.startswith("!") else line for line in source.splitlines()]
    return "\n".join(lines)


def shell(line: str) -> None:
    program, *words = shlex.split(line)
    if program != "scalelong":
        sys.exit(f"{line}: only commands of scalelong are run")
    subprocess.run([sys.executable, "-m", "scalelong.cli.main", *words], check=True)


def run_cell(source: str, where: str, names: dict[str, object]) -> None:
    """Run a cell and, as Jupyter does, show the value of its last line."""
    body = ast.parse(source).body
    last = body.pop() if body and isinstance(body[-1], ast.Expr) else None
    exec(compile(ast.Module(body, []), where, "exec"), names)
    if isinstance(last, ast.Expr):
        value = eval(compile(ast.Expression(last.value), where, "eval"), names)  # noqa: S307
        sys.stdout.write("" if value is None else f"{value!r}\n")


def main(path: str) -> None:
    names: dict[str, object] = {"__name__": "__main__", "shell": shell}
    for number, cell in enumerate(json.loads(Path(path).read_text())["cells"]):
        if cell["cell_type"] == "code":
            run_cell(as_python("".join(cell["source"])), f"cell {number}", names)


if __name__ == "__main__":
    main(sys.argv[1])
