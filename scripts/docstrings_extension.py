"""For mkdocstrings: doctests as code, and lines of a docstring that describe an argument as a list."""

from __future__ import annotations

import re
from typing import Any

import griffe


class Docstrings(griffe.Extension):
    """Rewrite docstrings as Markdown before they are rendered."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = as_markdown(obj.docstring.value)


def as_markdown(text: str) -> str:
    parts = []
    for paragraph in re.split(r"\n\s*\n", text):
        if paragraph.lstrip().startswith(">>>"):
            parts.append(f"```pycon\n{paragraph}\n```")
        else:
            parts.append(re.sub(r"^(\w+(?:, \w+)*): ", r"\n- `\1`: ", paragraph, flags=re.M))
    return "\n\n".join(parts)
