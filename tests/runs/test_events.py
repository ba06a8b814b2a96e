"""Records in metrics.jsonl."""

from __future__ import annotations

import json
import math

import pytest

from scalelong.runs.events import Events, append_event, check_fingerprint, cut_after, fingerprint, read_events


def test_records_are_one_json_object_per_line(tmp_path) -> None:
    events = Events(tmp_path, 0)
    events.write(1, "train", {"loss": 0.5, "kappa": [1.0, 0.7]})
    events.write(2, "train", {"loss": math.nan, "kappa": [math.nan, 1.0]})
    events.write(3, "evaluation", {"sampling": {"guidance_interval": (0.0, math.inf)}})
    events.close()
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert lines == [
        {"step": 1, "kind": "train", "loss": 0.5, "kappa": [1.0, 0.7]},
        {"step": 2, "kind": "train", "loss": None, "kappa": [None, 1.0]},
        {"step": 3, "kind": "evaluation", "sampling": {"guidance_interval": [0.0, None]}},
    ]
    assert list((tmp_path / "tensorboard").glob("events.*"))


def test_a_record_after_an_incomplete_line_is_read(tmp_path) -> None:
    append_event(tmp_path, 1, "evaluation", {"value": 3.0})
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2, "ki')  # killed here
    append_event(tmp_path, 3, "evaluation", {"value": float("nan")})
    records, damaged = read_events(tmp_path)
    assert [(record["step"], record["value"]) for record in records] == [(1, 3.0), (3, None)]
    assert damaged == 1


def test_records_after_a_step_and_an_incomplete_line_are_removed(tmp_path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n{"step": 3}\n{"ste')
    cut_after(tmp_path, 2)
    assert path.read_text() == '{"step": 1}\n{"step": 2}\n'


def test_damaged_lines_are_counted(tmp_path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\nrubbish\n{"no": 1}\n[1]\n{"step": "x"}\n{"step": 2}\n')
    records, damaged = read_events(tmp_path)
    assert [r["step"] for r in records] == [1, 2]
    assert damaged == 4


def test_rewinding_removes_the_records_of_the_steps_that_are_run_again(tmp_path) -> None:
    events = Events(tmp_path, 0)
    for step in (1, 2, 3):
        events.write(step, "train", {})
    events.rewind(1)
    events.write(2, "train", {"loss": 0.5})
    events.close()
    assert [(record["step"], record.get("loss")) for record in read_events(tmp_path)[0]] == [(1, None), (2, 0.5)]


@pytest.mark.parametrize(
    ("content", "damaged"),
    [
        ('{"step": 1, "loss": 1.5}\n', False),
        ('{"step": 1, "loss": 1.5}\n{"step": 2}\n', False),  # a record was added since
        ('{"step": 1, "loss": 2.5}\n', True),
        ('{"step": 1', True),
        (None, True),
    ],
)
def test_records_that_changed_since_a_checkpoint_are_noticed(
    content: str | None, damaged: bool, tmp_path, caplog
) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "loss": 1.5}\n')
    stored = fingerprint(tmp_path)
    path.unlink()
    if content is not None:
        path.write_text(content)
    check_fingerprint(tmp_path, stored)
    assert (str(path) in caplog.text) == damaged
