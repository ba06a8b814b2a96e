"""What a study of one statement returns: rows of the table, and the numbers behind its picture."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

HOLDS = "holds"
UP_TO_CONSTANTS = "holds up to constants"


def fails(why: str) -> str:
    """The verdict on a statement that is not true as it is printed."""
    return f"fails as printed: {why}"


def judged(true: bool, verdict: str = HOLDS) -> str:
    """The verdict if the measurement bears it out; otherwise a plain contradiction, never silence."""
    return verdict if true else "contradicted by this measurement"


@dataclass(frozen=True)
class Finding:
    """One row: what is claimed, what it predicts, what was measured, and whether they agree."""

    statement: str
    prediction: str
    measurement: str
    verdict: str


@dataclass(frozen=True)
class Study:
    """All rows about one statement of the paper; `data` is what its picture shows."""

    name: str
    findings: tuple[Finding, ...]
    data: Mapping[str, Any]
