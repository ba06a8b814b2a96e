"""What the data room raises when a file or a label is not what it should be."""

from __future__ import annotations

from typing import Literal

Kind = Literal["missing", "truncated", "wrong hash", "unreadable", "wrong channels", "invalid"]


class DataError(ValueError):
    """Bad data; the message names the file (or the row) and the remedy."""

    def __init__(self, message: str, kind: Kind = "invalid") -> None:
        super().__init__(message)
        self.kind: Kind = kind
