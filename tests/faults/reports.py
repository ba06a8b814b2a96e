"""Reports of many and of hostile records: fast, small, counted, escaped."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path

from scalelong.report import read_runs
from scalelong.report.card import model_card
from scalelong.runs.config import to_yaml
from scalelong.runs.events import append_event
from scalelong.runs.settings import Conditioning
from tests.faults.harness import case, environment, times
from tests.training.tiny import tiny

SECONDS, MEGABYTES = 10, 300
STARTER = """
import json, resource, subprocess, sys
done = subprocess.run(sys.argv[1:], stdout=subprocess.DEVNULL)
used = resource.getrusage(resource.RUSAGE_CHILDREN)
print(json.dumps([done.returncode, used.ru_utime + used.ru_stime, used.ru_maxrss]))
"""
BLOCKS = [*(f"in_blocks.{i}" for i in range(3)), "mid_block", *(f"out_blocks.{i}" for i in range(3))]
MARKUP = "<script>alert(1)</script> [x](javascript:alert(1)) `y` \x1b[2J"
HOSTILE: list[bytes] = [
    b"[" * 100_000,
    b'{"step":' * 50_000,
    b'{"step": 1, "kind": "train", "loss": ' + b"9" * 5000 + b"}",
    b'{"step": 99999999999999999999999, "kind": "train", "loss": 1}',
    b'{"step": -1, "kind": "train", "loss": 1}',
    b'{"step": true, "kind": "train", "loss": 1}',
    b'{"step": 5, "kind": "start", "data": {"a": 1}}',
    b'{"step": 5, "kind": "evaluation", "metric": ["x"], "value": "1", "n": -3}',
    b'{"step": 5, "kind": "start", "device": "\\ud800"}',
    b"\xff\xfe\x00\x00",
    b"\x00" * 1000,
    b"null",
    b"x" * 3_000_000,
]


def write_runs(folder: Path, runs: int, records: int) -> None:
    """Runs with this many records together, half of training and half of the probe, and hostile lines in the first."""
    for number in range(runs):
        method, home, count = (
            ("none", "cs", "ls", "rsqrt2")[number % 4],
            folder / f"run{number:02}",
            records // runs // 2,
        )
        draw = random.Random(number)
        home.mkdir(parents=True)
        config = tiny(scaling_method=method, training_seed=number // 4, training_steps=count * 10)
        (home / "config.yaml").write_text(to_yaml(config))
        with (home / "metrics.jsonl").open("wb") as file:
            for i in range(1, count + 1):
                loss = i**-0.5 + 0.01 * draw.random()
                train = {
                    "loss": loss,
                    "gradient_norm": 2 * loss,
                    "seconds": 0.1 * i,
                    "images_per_second": draw.random(),
                }
                kappa = [1.0, 0.7, draw.random()]
                probe = {f"{what}/{block}": draw.random() for what in ("norm", "gradient") for block in BLOCKS}
                for record in ({"kind": "train", **train, "kappa": kappa}, {"kind": "probe", **probe}):
                    file.write(json.dumps({"step": 10 * i, **record}).encode() + b"\n")
            if number == 0:
                file.write(b"\n".join(HOSTILE) + b"\n")
                file.write(json.dumps({"step": 0, "kind": "start", "device": MARKUP, "data": ""}).encode() + b"\n")


def measured(*arguments: str) -> tuple[float, float]:
    """Seconds of computing and peak megabytes of a command line, started by a small process: Linux counts the size of the
    one that forks as the child's."""
    command = [sys.executable, "-c", STARTER, sys.executable, "-m", "scalelong.cli.main", *arguments]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, check=True)
    status, seconds, kilobytes = json.loads(done.stdout)
    assert status == 0, f"exit {status}: {done.stderr[-300:]!r}"
    return seconds, kilobytes / 1024


@case(
    18,
    "reports: 200,000 records in 20 runs and in one, deep nesting, hostile lines, markup in the page and the model card",
    passes_when="under 10 s (of one core) and 300 MB; damaged lines counted; markup escaped",
    protections=["report.escape"],
)
def reports(folder: Path, protect: bool) -> str:
    seen = []
    for runs in (20, 1):
        write_runs(folder / f"{runs}", runs, times(200_000, 40_000) if protect else 2_000)
        seconds, megabytes = measured("report", str(folder / f"{runs}"), "--out", str(folder / "report.html"))
        assert seconds < SECONDS and megabytes < MEGABYTES, f"{runs} runs: {seconds:.1f} s, {megabytes:.0f} MB"
        seen.append(f"{runs} runs: {seconds:.1f} s, {megabytes:.0f} MB")
    page = (folder / "report.html").read_text()
    assert f"{len(HOSTILE)} damaged lines" in page, "the damaged lines are not counted"
    assert "<script>alert" not in page and "\x1b" not in page, "markup in the page"
    home = folder / "1" / "run00"
    config = tiny(data_name=f"folder:{MARKUP[:-4]}", condition_encoder=MARKUP[:-4])
    (home / "config.yaml").write_text(to_yaml(config))
    how = {"metric": MARKUP, "value": 1.0, "n": 10, "extractor": MARKUP}
    append_event(home, 20, "evaluation", how)
    (run,), _ = read_runs([home])
    card = model_card(run, 20, "ema", (1, 8, 8), Conditioning())
    for markup in ("<script>", "[x](", " `y` ", "\x1b"):
        assert markup not in card.partition("```python")[0], f"{markup!r} in the model card"
    return "; ".join(seen)
