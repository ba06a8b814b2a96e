"""A refactoring leaves training as it was: losses and gradient norms of short runs, recorded once."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.golden.runs import CASES, LOSSES, STEPS, curves


@pytest.mark.parametrize("case", CASES)
def test_losses_and_gradient_norms_are_those_recorded(case: str, tmp_path: Path) -> None:
    found, expected = curves(case, tmp_path), json.loads(LOSSES.read_text())[case]
    assert len(expected["loss"]) == STEPS
    assert found["loss"] == pytest.approx(expected["loss"], rel=1e-4)
    assert found["gradient_norm"] == pytest.approx(expected["gradient_norm"], rel=1e-4)
