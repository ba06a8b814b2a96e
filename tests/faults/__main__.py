"""Run the scorecard and write docs/faults.json and docs/faults.md: python -m tests.faults [--only 1,2,3] [--one N]."""

# ruff: noqa: T201
from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from scalelong.failpoints import VARIABLE
from tests.faults.harness import PATIENCE, ROOT, Case, environment, kill_family, load_cases

RESULTS, PAGE = ROOT / "docs" / "faults.json", ROOT / "docs" / "faults.md"

INTRODUCTION = """# Faults

What happens to a run when something around it fails. `make faults` injects every fault below into the real program on
two CPU cores (ranks talk over gloo) and writes this page; a shorter version is part of `make test-slow`. The cases are
in `tests/faults/`. The last column shows that a case can fail: the protection it checks is switched off
(`SCALELONG_FAILPOINT=NAME=off`), and the case has to fail then.
"""


def attempt(case: Case, protection: str = "") -> dict[str, Any]:
    """Run a case in a process of its own; `passed`, `seen` and `seconds`."""
    command = [sys.executable, "-m", "tests.faults", "--one", str(case.number)]
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix=f"fault{case.number}-") as folder:
        env = environment(*(f"{name}=off" for name in protection.split(" + ") if name), TMPDIR=folder)
        process = subprocess.Popen(
            command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        try:
            output, _ = process.communicate(timeout=case.limit * PATIENCE)
            passed = process.returncode == 0
        except subprocess.TimeoutExpired:
            kill_family(process.pid)
            passed = False
            output = process.communicate()[0] + f"\nnot finished within {case.limit:g} s"
    seen = output.strip().splitlines()[-1] if output.strip() else ""
    found = {"passed": passed, "seen": seen, "seconds": round(time.monotonic() - started, 1)}
    as_expected = found["passed"] != bool(protection)
    name = f"case {case.number}{protection and f', {protection} off'}"
    print(f"{name}: {seen[:150] if as_expected else 'NOT AS EXPECTED'} ({found['seconds']} s)", flush=True)
    if not as_expected:
        print(output, flush=True)
    return found


def one(number: int) -> None:
    """Run one case in this process; the last line printed is what was seen."""
    protect = "=off" not in os.environ.get(VARIABLE, "")
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:  # there may be mounts
        try:
            seen = load_cases()[number].run(Path(folder), protect)
        except Exception as error:
            if protect:
                raise
            said = str(error).strip() or str(traceback.extract_tb(error.__traceback__)[-1].line)
            lines = said.splitlines()
            line = next((line for line in lines if line.startswith("error: ")), lines[0])  # of a whole log
            sys.exit(f"{type(error).__name__}: {without_paths(line)[:200]}")
    print(seen or "as it should be")


def without_paths(text: str) -> str:
    """The text without temporary folders and places in the source of torch."""
    return re.sub(r"\[/__w/\S+\] |/tmp/[^/\s]+/[^/\s]+/", "", text)


def scorecard(cases: list[Case]) -> dict[str, Any]:
    """Run all cases, two at a time, each with and without its protections."""
    started, before = time.monotonic(), os.times()
    jobs = [(case, name) for case in cases for name in ("", *case.protections)]
    jobs.sort(key=lambda job: -job[0].limit)
    with ThreadPoolExecutor(2) as pool:
        results = dict(zip(((c.number, name) for c, name in jobs), pool.map(lambda j: attempt(*j), jobs), strict=True))
    seconds, cpu = time.monotonic() - started, sum(os.times()[2:4]) - sum(before[2:4])
    rows = [
        {
            "number": case.number,
            "fault": case.title,
            "passes_when": case.passes_when,
            **results[case.number, ""],
            "without": {name: results[case.number, name] for name in case.protections},
        }
        for case in cases
    ]
    return {"seconds": round(seconds), "cpu_seconds": round(cpu), "cases": rows}


def succeeded(result: dict[str, Any]) -> bool:
    """True if the case passes, and fails without each of its protections."""
    return result["passed"] and not any(without["passed"] for without in result["without"].values())


def page(results: dict[str, Any]) -> str:
    """The docs page."""
    rows = results["cases"]
    took = (
        f"The last run took {results['seconds'] / 60:.1f} minutes and {results['cpu_seconds'] / 60:.1f} minutes of CPU"
    )
    lines = [INTRODUCTION, f"**{sum(map(succeeded, rows))} of {len(rows)} pass.** {took}.\n"]
    lines += ["| # | fault | passes when | result | seen | fails when switched off |", "|---|---|---|---|---|---|"]
    for r in rows:
        without = "; ".join(
            f"`{name}`: {'**passes**' if w['passed'] else 'yes'} ({w['seen']})" for name, w in r["without"].items()
        )
        cells = [r["number"], r["fault"], r["passes_when"], "pass" if r["passed"] else "**fail**", r["seen"], without]
        lines.append("| " + " | ".join(str(cell).replace("|", "\\|").replace("<", "&lt;") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument("--only", default="", help="numbers of cases, as 1,2,3; nothing is written then")
    parser.add_argument("--one", type=int, help="run this case in this process")
    arguments = parser.parse_args()
    if arguments.one is not None:
        one(arguments.one)
        return
    cases = load_cases()
    chosen = [cases[int(number)] for number in arguments.only.split(",") if number] or [*cases.values()]
    results = scorecard(chosen)
    for result in results["cases"]:
        print(f"{'pass' if succeeded(result) else 'FAIL'}  {result['number']:2}  {result['fault']}: {result['seen']}")
        for name, without in result["without"].items():
            print(f"          {name} off: {'PASSES' if without['passed'] else 'fails'}, {without['seen']}")
    good = [*map(succeeded, results["cases"])]
    print(f"{sum(good)} of {len(good)} in {results['seconds']} s, {results['cpu_seconds']} s of CPU")
    if not arguments.only:
        RESULTS.write_text(json.dumps(results, indent=1) + "\n")
        PAGE.write_text(page(results))
    sys.exit(0 if all(good) else 1)


if __name__ == "__main__":
    main()
