"""mkdocs hook that generates pages for the command line, the settings and the tutorial notebook."""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import inspect
import io
import json
import os
import re
import sys
import textwrap
import tokenize
import typing
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
NOTEBOOK = ROOT / "docs" / "tutorial.ipynb"
LARGE = 1e6
sys.path.insert(0, str(ROOT / "src"))


def on_files(files: Any, config: Any) -> Any:
    """mkdocs: add the generated pages; the notebook itself is shown as a page."""
    from mkdocs.structure.files import File

    for name, make in (("cli.md", command_line), ("settings.md", settings), ("tutorial.md", tutorial)):
        files.append(File.generated(config, name, content=make()))
    return files


def on_page_content(html: str, page: Any, config: Any, files: Any) -> str:
    """mkdocs: mark cells that hold sentences, which must not become narrow columns on a phone."""
    del page, config, files

    def cell(found: re.Match[str]) -> str:
        return f'<td class="sentence">{found[1]}</td>' if len(re.sub("<.*?>", "", found[1])) > 70 else found[0]

    return re.sub(r"<td>(.*?)</td>", cell, html, flags=re.S)


def tutorial() -> str:
    """The notebook as Markdown: text as it is, code in fences, with what it printed and drew."""
    parts = []
    for cell in json.loads(NOTEBOOK.read_text())["cells"]:
        source = "".join(cell["source"]).strip()
        if cell["cell_type"] == "markdown":
            parts.append(source)
        elif source.startswith("!"):
            parts.append("```bash\n" + re.sub(r"^!", "", source, flags=re.M) + "\n```")
        else:
            parts.append(f"```python\n{source}\n```")
        for output in cell.get("outputs", ()):
            if "text" in output:
                lines = "".join(output["text"]).rstrip().splitlines()
                lines = [line if "  " in line.strip() else textwrap.fill(line, 130) for line in lines]  # not tables
                parts.append("``` {.text .output}\n" + "\n".join(lines) + "\n```")
            else:
                parts.append(f'<img alt="" src="data:image/png;base64,{output["data"]["image/png"]}">')
    return "\n\n".join(parts) + "\n"


def command_line() -> str:
    """`--help` of every verb and of its sub-commands."""
    from scalelong.cli.main import USAGE, VERBS

    parts = ["# Command line\n\nOutput of `scalelong VERB --help`.\n", f"```text\n{USAGE}\n```\n"]
    for verb in VERBS:
        text = _help([verb])
        parts.append(f"## {verb}\n\n```text\n{text}\n```\n")
        found = re.match(r"usage: .*\{([a-z,-]+)\}", text)
        for each in found[1].split(",") if found else []:
            parts.append(f"### {verb} {each}\n\n```text\n{_help([verb, each])}\n```\n")
    return "\n".join(parts)


def _help(words: list[str]) -> str:
    from scalelong.cli.main import main

    before, printed = os.environ.get("COLUMNS"), io.StringIO()
    os.environ["COLUMNS"] = "96"
    try:
        with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
            main([*words, "--help"])
    finally:
        os.environ.pop("COLUMNS") if before is None else os.environ.update(COLUMNS=before)
    text = re.sub(r"\x1b\[[0-9;]*m", "", printed.getvalue()).strip()
    if words == ["train"]:  # settings have their own page
        text = text.partition("\n data options")[0].rstrip() + "\n\n and all settings listed on the page Settings."
    lines = (line.rstrip() for line in text.splitlines())
    return "\n".join(textwrap.fill(line, 96) if len(line) > 96 else line for line in lines)


def settings() -> str:
    """Every setting of a run, from the dataclasses, their comments and the table of bounds."""
    from scalelong.runs.settings import MAY_CHANGE, RunConfig
    from scalelong.runs.validation import BOUNDS

    intro = (
        "# Settings\n\nThe keys of `config.yaml`, and flags of `scalelong train` with dashes: `training.batch_size` is "
        "`--training.batch-size`. Defaults apply without a preset. "
        "Only settings marked ↻ may change when a run is resumed.\n"
    )
    parts = [intro]
    for part, group in vars(RunConfig()).items():
        about = (inspect.getdoc(type(group)) or "").partition("\n")[0]
        lines = [f"## {part}\n\n{about}\n", "| setting | values | default | description |", "|---|---|---|---|"]
        comments, hints = _comments(type(group)), typing.get_type_hints(type(group))
        for field in dataclasses.fields(group):
            key = f"{part}.{field.name}"
            values = _type(hints[field.name], _between(*BOUNDS.get(key, (-LARGE, LARGE))))
            mark = " ↻" if key in MAY_CHANGE else ""
            cells = (f"`{key}`{mark}", values, f"`{_shown(getattr(group, field.name))}`", comments.get(field.name, ""))
            lines.append("| " + " | ".join(cell.replace("|", "&#124;") for cell in cells) + " |")
        parts.append("\n".join(lines) + "\n")
    return "\n".join(parts)


def _comments(group: type) -> dict[str, str]:
    """The comment beside each field of a dataclass."""
    source = inspect.getsource(group)
    comments = {
        token.start[0]: token.string.lstrip("# ")
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type == tokenize.COMMENT
    }
    (node,) = ast.parse(source).body
    assert isinstance(node, ast.ClassDef)
    found = {}
    for field in node.body:
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
            lines = range(field.lineno, (field.end_lineno or field.lineno) + 1)
            found[field.target.id] = " ".join(comments[line] for line in lines if line in comments)
    return found


def _between(low: float, high: float) -> str:
    """Bounds in words; those that only keep numbers sane are left out."""
    ends = [f"from {low:g}"] * (low > -LARGE) + [f"to {high:g}"] * (high < LARGE)
    return "".join(f" {end}" for end in ends)


def _type(hint: Any, between: str = "") -> str:
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Literal:
        return ", ".join(f"`{value}`" for value in inner)
    if origin is tuple:
        return ("integers" if inner[0] is int else "two numbers") + between
    if inner:
        return " or ".join("`null`" if each is type(None) else _type(each, between) for each in inner)
    return {"int": "integer", "float": "number", "str": "text", "bool": "`true`, `false`"}[hint.__name__] + between


def _shown(value: Any) -> str:
    if isinstance(value, tuple):
        return ", ".join(map(_shown, value))
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    return f'"{value}"' if value == "" else str(value)
