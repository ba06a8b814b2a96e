"""Run the code cells of a notebook in order, in one fresh process without Jupyter.

    python scripts/run_notebook.py docs/tutorial.ipynb            # prints what the cells print
    python scripts/run_notebook.py docs/tutorial.ipynb --store    # and keeps it, with figures, in the notebook
    python scripts/run_notebook.py docs/tutorial.ipynb --steps 50    # shorter trainings, to see that it runs

Lines that begin with "!" are commands; `scalelong` is this interpreter's.
"""

from __future__ import annotations

import argparse
import ast
import base64
import contextlib
import io
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("agg")
import matplotlib.pyplot as plt


def as_python(source: str, steps: int = 0) -> str:
    """A cell with its commands as calls, with this many steps if any."""
    source = re.sub(r"--steps \d+", f"--steps {steps}", source) if steps else source
    lines = [f"shell({line[1:]!r})" if line.startswith("!") else line for line in source.splitlines()]
    return "\n".join(lines)


def shell(line: str) -> None:
    program, *words = shlex.split(line)
    if program != "scalelong":
        sys.exit(f"{line}: only commands of scalelong are run")
    command = [sys.executable, "-m", "scalelong.cli.main", *words]
    sys.stdout.write(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)


def run_cell(source: str, where: str, names: dict[str, object]) -> list[dict[str, Any]]:
    """Run a cell; its outputs as Jupyter stores them: what it prints, the value of its last line, its figures."""
    body = ast.parse(source).body
    last = body.pop() if body and isinstance(body[-1], ast.Expr) else None
    printed, pictures = io.StringIO(), []
    with contextlib.redirect_stdout(printed):
        exec(compile(ast.Module(body, []), where, "exec"), names)
        value = eval(compile(ast.Expression(last.value), where, "eval"), names) if last is not None else None  # noqa: S307
        if hasattr(value, "_repr_png_"):
            pictures.append(value._repr_png_())
        elif value is not None:
            print(repr(value))  # noqa: T201
    for number in plt.get_fignums():
        file = io.BytesIO()
        plt.figure(number).savefig(file, dpi=80, metadata={"Software": None})
        pictures.append(file.getvalue())
    plt.close("all")
    sys.stdout.write(printed.getvalue())
    text = printed.getvalue().splitlines(keepends=True)
    outputs: list[dict[str, Any]] = [{"output_type": "stream", "name": "stdout", "text": text}] if text else []
    for picture in pictures:
        data = {"image/png": base64.b64encode(picture).decode()}
        outputs.append({"output_type": "display_data", "metadata": {}, "data": data})
    return outputs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("notebook", type=Path)
    parser.add_argument("--store", action="store_true", help="keep the outputs in the notebook")
    parser.add_argument("--steps", type=int, default=0, help="of all trainings; default: those of the notebook")
    arguments = parser.parse_args()
    notebook, names = json.loads(arguments.notebook.read_text()), {"__name__": "__main__", "shell": shell}
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    for number, cell in enumerate(code, start=1):
        cell["outputs"] = run_cell(as_python("".join(cell["source"]), arguments.steps), f"cell {number}", names)
        cell["execution_count"] = number
    if arguments.store:
        arguments.notebook.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
