"""The page of speeds, what it computes, and the benchmark behind it."""

from __future__ import annotations

import importlib
import json
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def test_the_page_is_that_of_the_results() -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "scripts" / "speed_page.py", "--check"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def test_the_cost_at_scale_is_the_measured_step_and_a_ring_all_reduce(monkeypatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "scripts")
    cost = runpy.run_path(str(ROOT / "scripts" / "speed_page.py"))["cost_at_scale"]
    rows = [
        {"factor": "preset", "batch": batch, "method": "none", "ms": ms, "parameters": 300e6}
        for batch, ms in ((128, 200.0), (16, 30.0))
    ]
    one_machine, many, scaled = cost(rows, 8), cost(rows, 512), cost(rows[1:], 8)
    assert (one_machine["measured"], scaled["measured"]) == (True, False)
    assert scaled["compute_ms"] == pytest.approx(8 * 30)  # 128 images, from the step with 16
    assert one_machine["communication_ms"] == pytest.approx(2 * 7 / 8 * 4 * 300e6 / 450e9 * 1e3)
    assert one_machine["hours"] == pytest.approx(300_000 * (200 + one_machine["communication_ms"]) / 3.6e6)
    assert one_machine["hours_low"] == pytest.approx(300_000 * 200 / 3.6e6)
    assert many["batch"] == 8192
    assert many["communication_ms"] == pytest.approx(2 * 511 / 512 * 4 * 300e6 / 50e9 * 1e3)
    assert many["hours_low"] == pytest.approx(
        300_000 / 8 * many["communication_ms"] / 3.6e6
    )  # the network is the limit


_WORKER = """
import json, sys, time
print("compiling")
print("warm", flush=True)
input()
started = time.time()
time.sleep(0.1)
print(json.dumps({"started": started, "ended": time.time()}))
print("a late warning", file=sys.stderr)
"""


def test_workers_warm_up_at_once_and_measure_in_turn() -> None:
    in_turn = runpy.run_path(str(ROOT / "benchmarks" / "measure.py"))["in_turn"]
    commands = [[sys.executable, "-c", _WORKER], [sys.executable, "-c", "raise SystemExit('no GPU')"]]
    first, failed, second = in_turn([*commands, commands[0]])
    assert failed is None
    assert first["ended"] <= second["started"]


def test_growth_measures_a_network_of_several_factors_once_in_groups_that_fit(monkeypatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    growth = importlib.import_module("growth")
    groups = []

    def measured(commands: list[list[str]]) -> list[dict[str, float] | None]:
        groups.append([json.loads(command[-1].removeprefix("--worker=")) for command in commands])
        return [None if case["depth"] == 32 else {"ms": case["batch"]} for case in groups[-1]]

    monkeypatch.setattr(growth, "in_turn", measured)
    base, factors = growth.Case(), ("batch", "depth")
    wanted = [(name, value, case) for name in factors for value, case in growth.cases(name, base, small=False).items()]
    rows = [row for group in growth.gpu_rows(wanted, growth.Benchmark(memory=50, at_once=4)) for row in group]
    cases = [json.dumps(case) for group in groups for case in group]
    assert len(cases) == len(set(cases)) == 3 * 6  # four batch sizes and two more depths, three methods
    assert [len(group) for group in groups[:3]] == [4, 4, 2]  # a third network would make 72 GiB
    assert [row["value"] for row in rows if row["factor"] == "depth" and row["method"] == "ls"] == [12, 20]
    assert all(row["ms"] == row["batch"] for row in rows)


@pytest.mark.slow
def test_the_benchmark_of_a_step_runs_on_a_cpu(tmp_path) -> None:
    out = tmp_path / "step.json"
    command = [
        sys.executable,
        ROOT / "benchmarks" / "step.py",
        "--cpu",
        "--windows",
        "2",
        "--steps",
        "1",
        "--no-startup",
    ]
    done = subprocess.run([*command, "--methods", "ls", "--out", out], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    found = json.loads(out.read_text())
    assert found.keys() >= {"commit", "device", "torch", "command", "matmul_tflops"}
    assert [(row["case"], row.get("compile")) for row in found["rows"]] == [
        ("recipe", None), ("loop", None), ("trainer", "off"), ("recipe", None), ("loop", None), ("trainer", "step"),
    ]  # fmt: skip
    assert all(row["ms"] > 0 and row["ms_low"] <= row["ms"] <= row["ms_high"] for row in found["rows"])
