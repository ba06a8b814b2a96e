"""The table, the figures and the files of real studies."""

import csv
import json
from dataclasses import replace
from pathlib import Path

import pytest
from PIL import Image

from scalelong.lab import STUDIES, Study, as_text, draw, judge, markdown_table, run_study, verdicts, write


@pytest.fixture(scope="module")
def studies() -> list[Study]:
    return [run_study(name, quick=True) for name in STUDIES]


def test_every_statement_has_rows_and_none_is_contradicted(studies: list[Study]) -> None:
    assert [study.name for study in studies] == list(STUDIES)
    for study in studies:
        assert study.findings
        for finding in study.findings:
            assert finding.verdict.startswith(("holds", "fails as printed: ")), finding


def test_there_is_a_verdict_for_each_lemma_and_theorem(studies: list[Study]) -> None:
    lines = verdicts(studies).splitlines()
    assert [line[:11].strip() for line in lines] == [
        "Lemma 3.2",
        "Theorem 3.1",
        "Theorem 3.3",
        "Theorem 3.4",
        "Mechanism",
    ]
    assert lines[0][13:] == "holds with corrections (2 of 4 findings hold, 2 fail as printed)"
    wrong = [replace(study, findings=(judge("a", "b", "c", supported=False), *study.findings)) for study in studies]
    assert all("contradicted by a measurement" in line for line in verdicts(wrong).splitlines())


def test_files_and_pictures(studies: list[Study], tmp_path: Path) -> None:
    findings = [finding for study in studies for finding in study.findings]
    write(studies, tmp_path)
    assert len(json.loads((tmp_path / "theory.json").read_text())) == len(STUDIES)
    with (tmp_path / "theory.csv").open() as file:
        assert [row["verdict"] for row in csv.DictReader(file)] == [finding.verdict for finding in findings]
    for study in studies:
        with Image.open(draw(study, tmp_path)) as picture:
            assert picture.width > 500
            assert picture.convert("L").getextrema()[0] < 100  # something is drawn


def test_texts_contain_every_word(studies: list[Study]) -> None:
    findings = studies[0].findings
    words = as_text(findings).split()
    for finding in findings:
        assert set(finding.measurement.split()) <= set(words)
    rows = markdown_table(findings).splitlines()
    assert len(rows) == 2 + len(findings)
    assert {row.count("|") for row in rows} == {5}
