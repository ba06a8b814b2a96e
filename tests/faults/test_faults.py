"""The scorecard with fewer repetitions, and that the page is the one its results give."""

from __future__ import annotations

import json

import pytest

from tests.faults.__main__ import PAGE, RESULTS, attempt, page, succeeded
from tests.faults.harness import SHORT, load_cases


@pytest.mark.slow
@pytest.mark.parametrize("number", [case.number for case in load_cases().values() if case.short])
def test_the_fault_is_survived(number: int, monkeypatch) -> None:
    monkeypatch.setenv(SHORT, "1")
    found = attempt(load_cases()[number])
    assert found["passed"], found["seen"]


def test_the_page_shows_the_results_and_every_case_passes() -> None:
    results = json.loads(RESULTS.read_text())
    assert PAGE.read_text() == page(results)
    rows, cases = results["cases"], load_cases()
    assert [row["number"] for row in rows] == list(cases)
    assert all(map(succeeded, rows))
    for row, case in zip(rows, cases.values(), strict=True):
        assert (row["fault"], row["passes_when"]) == (case.title, case.passes_when)
        assert tuple(row["without"]) == case.protections
