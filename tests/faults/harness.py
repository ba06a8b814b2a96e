"""The registry of fault cases, and what they share.

A case injects one kind of fault into the real program and raises if it is not survived as promised:

    @case(3, "damaged checkpoints", passes_when="detected, named, falls back", protections=["checkpoint.verify"])
    def damaged(folder: Path, protect: bool) -> str:
        ...
        return "40 of 40 damages detected"

It is called with an empty folder, once as it is and once per protection with that one switched off by
`off/sitecustomize.py` (`protect` is False, SCALELONG_FAILPOINT=checkpoint.verify=off): then it has to raise. Where one
protection stands in for another, they are switched off together ("a + b"). Every call has a process of its own.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import pkgutil
import re
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from scalelong.failpoints import VARIABLE

ROOT = Path(__file__).parents[2]
SHORT = "FAULTS_SHORT"  # in the environment: fewer repetitions, as in the slow tests
PATIENCE = float(os.environ.get("FAULTS_PATIENCE", "1"))  # time limits are this many times longer: for a busy machine

Function = Callable[[Path, bool], str | None]


@dataclass(frozen=True)
class Case:
    number: int
    title: str
    passes_when: str
    protections: tuple[str, ...]
    run: Function
    short: bool  # part of the slow tests
    limit: float  # seconds, after which it has failed


CASES: dict[int, Case] = {}


def case(
    number: int,
    title: str,
    *,
    passes_when: str,
    protections: Sequence[str],
    short: bool = True,
    limit: float = 900.0,
) -> Callable[[Function], Function]:
    """Register a case; its function returns what was seen, for the table."""

    def register(run: Function) -> Function:
        if number in CASES:
            raise ValueError(f"case {number} is registered twice: {CASES[number].title}, {title}")
        CASES[number] = Case(number, title, passes_when, tuple(protections), run, short, limit)
        return run

    return register


def load_cases() -> dict[int, Case]:
    """All cases of this folder by number."""
    for module in pkgutil.iter_modules([str(Path(__file__).parent)]):
        if module.name not in ("harness", "__main__") and not module.name.startswith("test_"):
            importlib.import_module(f"tests.faults.{module.name}")
    return dict(sorted(CASES.items()))


def times(full: int, short: int) -> int:
    """How often to repeat: `full` in the scorecard, `short` in the slow tests."""
    return short if os.environ.get(SHORT) else full


def save_points(prefix: str) -> list[str]:
    """The names of all failpoints in src/ that start with `prefix`."""
    files = (ROOT / "src").rglob("*.py")
    found = {name for file in files for name in re.findall(r"failpoint\(\"([\w.]+)\"\)", file.read_text())}
    return sorted(name for name in found if name.startswith(prefix))


def environment(*failpoints: str, **more: str) -> dict[str, str]:
    """The environment of a process under test: one thread, no GPU, these failpoints beside those already set."""
    points = [point for point in (os.environ.get(VARIABLE, ""), *failpoints) if point]
    added = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONWARNINGS": "ignore"}
    added |= {VARIABLE: ",".join(points)} if points else {}
    if any("=off" in point for point in points):
        added["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent / "off"), os.environ.get("PYTHONPATH", "")])
    return {**os.environ, **added, **more}


def family(pid: int) -> list[psutil.Process]:
    """A process and all its descendants."""
    with contextlib.suppress(psutil.NoSuchProcess):
        parent = psutil.Process(pid)
        return [parent, *parent.children(recursive=True)]
    return []


def kill_family(pid: int) -> None:
    """kill -9 of a process and of every process below it."""
    members = family(pid)
    for member in members:
        with contextlib.suppress(psutil.NoSuchProcess):
            member.send_signal(signal.SIGKILL)
    psutil.wait_procs(members, timeout=30)


def wait_until(holds: Callable[[], bool], seconds: float, what: str) -> float:
    """Wait until `holds()` and return for how long; raise after `seconds` (times PATIENCE)."""
    started = time.monotonic()
    while not holds():
        if time.monotonic() - started > seconds * PATIENCE:
            raise AssertionError(f"{what}: not within {seconds:g} s")
        time.sleep(0.005)
    return time.monotonic() - started


@contextlib.contextmanager
def expect(error: type[BaseException], *words: str) -> Iterator[None]:
    """Demand that the block raises `error` with all these words in its message."""
    try:
        yield
    except error as found:
        missing = [word for word in words if word not in str(found)]
        assert not missing, f"{missing} not in: {found}"
    else:
        raise AssertionError(f"no {error.__name__} was raised")
