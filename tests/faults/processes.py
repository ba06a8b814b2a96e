"""Runs under test as real processes: forked from this one, which has imported everything, or started by torchrun."""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil
import torch

from scalelong.cli.main import main
from scalelong.runs.config import to_yaml
from scalelong.runs.settings import RunConfig
from tests.faults.harness import PATIENCE, environment, family, wait_until

Prepare = Callable[[], None]


def free_port() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return str(free.getsockname()[1])


def arguments(folder: Path, config: RunConfig, out: Path | None = None) -> list[str]:
    """The arguments of `scalelong` that train this configuration into `folder`, or into `out`."""
    file = folder.with_suffix(".yaml")
    file.write_text(to_yaml(config))
    return ["train", "--config", str(file), "--out", str(out or folder)]


class Launched:
    """The processes of a run, in a process group of their own; their output goes to folder.log."""

    def __init__(self, folder: Path, pids: list[int], launcher: subprocess.Popen[bytes] | None = None) -> None:
        self.folder, self.pids, self.launcher = folder, pids, launcher
        self.group = pids[0]
        self.members: list[psutil.Process] = []
        self.codes: dict[int, int] = {}

    @property
    def log(self) -> str:
        return self.folder.with_suffix(".log").read_text(errors="replace")

    def running(self, position: int = 0) -> bool:
        """True while the process at this position lives; its exit status is kept."""
        pid = self.pids[position]
        if pid in self.codes:
            return False
        if self.launcher is not None:
            if self.launcher.poll() is not None:
                self.codes[pid] = self.launcher.returncode
        else:
            found, status = os.waitpid(pid, os.WNOHANG)
            if found:
                self.codes[pid] = os.waitstatus_to_exitcode(status)
        return pid not in self.codes

    def wait(self, seconds: float = 120.0) -> list[int]:
        """Wait for all processes and return their exit codes."""
        everyone = range(len(self.pids))
        try:
            wait_until(lambda: sum(map(self.running, everyone)) == 0, seconds, "end of the run")
        except AssertionError:
            self.kill()
            raise
        return [self.codes[pid] for pid in self.pids]

    def finish(self, seconds: float = 120.0) -> None:
        """Wait for a successful end."""
        codes = self.wait(seconds)
        said = [line for line in self.log.splitlines() if line.startswith("error: ")]
        assert set(codes) == {0}, f"exit codes {codes}, {said[-1] if said else ''}\n{self.log[-3000:]}"

    def wait_for_step(self, step: int, seconds: float = 120.0) -> None:
        """Wait until the records reach `step`; note all processes that exist then."""
        metrics = self.folder / "metrics.jsonl"

        def reached() -> bool:
            text = metrics.read_text() if metrics.is_file() else ""
            assert self.running(), f"ended before step {step}: {self.log[-3000:]}"
            return any(f'"step": {number}, "kind": "train"' in text for number in range(step, step + 40))

        wait_until(reached, seconds, f"step {step}")
        self.members = [member for pid in self.pids for member in family(pid)]

    def workers(self, position: int = 0) -> list[psutil.Process]:
        return psutil.Process(self.pids[position]).children()

    def orphans(self) -> list[psutil.Process]:
        """Of the processes noted, those that are still there after five seconds."""
        return psutil.wait_procs(self.members, timeout=5 * PATIENCE)[1]

    def kill(self) -> None:
        """kill -9 of all processes of the run."""
        members = {member.pid: member for pid in self.pids for member in family(pid)}
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.group, signal.SIGKILL)
        for member in members.values():
            with contextlib.suppress(psutil.NoSuchProcess):
                member.kill()
        for position in range(len(self.pids)):
            while self.running(position):
                time.sleep(0.01)
        psutil.wait_procs([*members.values()], timeout=30)


def launch(
    folder: Path, config: RunConfig, ranks: int = 1, points: str = "", prepare: Prepare | None = None
) -> Launched:
    """`scalelong train` in one forked process per rank, with these failpoints beside those already set."""
    _warm_up()
    given, port, pids = arguments(folder, config), free_port(), []
    for rank in range(ranks):
        if (pid := os.fork()) == 0:
            code = 1
            try:
                os.setpgid(0, pids[0] if pids else 0)
                os.environ.update(environment(points))
                if ranks > 1:
                    world = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
                    os.environ.update({key: str(value) for key, value in world.items()})
                    os.environ.update({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port})
                output = os.open(folder.with_suffix(".log"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
                os.dup2(output, 1)
                os.dup2(output, 2)
                if prepare is not None:
                    prepare()
                code = main(given)
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
        with contextlib.suppress(OSError):  # the child has done it already, or is gone
            os.setpgid(pid, pids[0] if pids else pid)
        pids.append(pid)
    return Launched(folder, pids)


def torchrun(folder: Path, command: RunConfig | Sequence[str], points: str = "", restarts: int = 0) -> Launched:
    """Two ranks by torchrun, as a user starts it: of `scalelong train`, or of another module with its arguments."""
    given = ["scalelong.cli.main", *arguments(folder, command)] if isinstance(command, RunConfig) else command
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["--max-restarts", str(restarts), "-m", *given]
    with folder.with_suffix(".log").open("ab") as log:
        process = subprocess.Popen(command, env=environment(points), stdout=log, stderr=log, process_group=0)
    return Launched(folder, [process.pid], process)


def ranks_of(launched: Launched) -> list[psutil.Process]:
    """The ranks below a torchrun, by rank."""
    ranks = [child for child in psutil.Process(launched.pids[0]).children() if "RANK" in child.environ()]
    return sorted(ranks, key=lambda child: int(child.environ()["RANK"]))


def cold(folder: Path, config: RunConfig, points: str = "", out: Path | None = None) -> tuple[int, str, float, float]:
    """`scalelong train` as a new process: exit code, output, seconds and seconds of CPU."""
    command, started = [sys.executable, "-m", "scalelong.cli.main", *arguments(folder, config, out)], time.monotonic()
    before = os.times()
    done = subprocess.run(
        command, env=environment(points), capture_output=True, text=True, timeout=60 * PATIENCE, check=False
    )
    cpu = sum(os.times()[2:4]) - sum(before[2:4])
    return done.returncode, done.stdout + done.stderr, time.monotonic() - started, cpu


def mount_tmpfs(folder: Path, options: str) -> bool:
    """Mount a file system in memory, seen by this process and its children only; False where that is not allowed."""
    libc = ctypes.CDLL(None, use_errno=True)
    folder.mkdir(exist_ok=True)
    new_mounts, private, recursive = 0x00020000, 1 << 18, 0x4000
    if libc.unshare(new_mounts) or libc.mount(b"none", b"/", None, recursive | private, None):
        return False
    return not libc.mount(b"tmpfs", str(folder).encode(), b"tmpfs", 0, options.encode())


def _warm_up() -> None:
    """Import now what a run imports, so that a fork starts at once."""
    torch.set_num_threads(1)
    for name in ("cli.train", "training", "evaluation.evaluate", "stability", "data.embedded"):
        importlib.import_module(f"scalelong.{name}")
    for name in ("sklearn.datasets", "torch._dynamo", "torch.distributed.fsdp"):
        importlib.import_module(name)
    with contextlib.suppress(ImportError):
        importlib.import_module("torch.utils.tensorboard")
