"""Checkpoints and their folder: killed while saving, damaged on disk, no space left, not to be written to."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import re
import resource
import shutil
import signal
import time
from pathlib import Path

import torch

from scalelong.cli.main import main
from scalelong.files import remove_leftovers
from scalelong.runs import CONFIG, METRICS
from scalelong.runs.folder import read_config
from scalelong.training.checkpoint import load_checkpoint, load_newest, save_checkpoint
from tests.faults.harness import case, environment, save_points, times
from tests.faults.processes import cold, launch, mount_tmpfs
from tests.training.tiny import assert_same_run, assert_same_weights, newest, tiny


class Heard(logging.Handler):
    """Collects what is logged."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.text = ""
        logging.getLogger("scalelong").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.text += record.getMessage() + "\n"


def flipped(data: bytes) -> bytes:
    middle = len(data) // 2
    return data[:middle] + bytes([data[middle] ^ 4]) + data[middle + 1 :]


DAMAGES = {
    "bit flip": flipped,
    "truncation": lambda data: data[: len(data) // 2],
    "zero bytes": lambda data: bytes(len(data)),
    "empty": lambda data: b"",
    "{}": lambda data: b"{}",
    "[]": lambda data: b"[]",
    "deletion": None,
}


@case(
    3,
    "bit flip, truncation, zero bytes, deletion, `{}` or `[]` as content, of each file of a checkpoint, of config.yaml and "
    "metrics.jsonl; a stray `step-abc`",
    passes_when="detected, file named, falls back to the checkpoint before, to its copy of config.yaml; identical result",
    protections=["checkpoint.verify"],
)
def damaged_files(folder: Path, protect: bool) -> str:
    from scalelong.training import train

    run = train(tiny(training_steps=8), folder / "run")
    names = sorted(path.name for path in newest(run).iterdir())
    assert len(names) == 6, names
    heard, count = Heard(), 0
    for name in names:
        for damage, change in DAMAGES.items():
            copy = folder / "copy"
            shutil.copytree(run / "checkpoints", copy)
            stray = copy / "step-abc"
            stray.mkdir()
            file = copy / "step-00000008" / name
            if change is None:
                file.unlink()
            else:
                file.write_bytes(change(file.read_bytes()))
            heard.text = ""
            found = load_newest(copy)
            assert found is not None
            assert found[0].name == "step-00000004", f"{name}, {damage}: not detected"
            assert str(file) in heard.text or (damage == "deletion" and name in heard.text), (
                f"{name}, {damage}: unnamed"
            )
            assert str(stray) in heard.text, "the stray folder is not named"
            assert json.loads((found[0] / "state.json").read_text()) == found[2]
            shutil.rmtree(copy)
            count += 1
    whole = train(tiny(training_steps=12), folder / "whole")
    for name in (CONFIG, METRICS):
        for damage, change in DAMAGES.items():
            copy = folder / "copy"
            shutil.copytree(run, copy)
            file = copy / name
            if change is None:
                file.unlink()
            else:
                file.write_bytes(change(file.read_bytes()))
            heard.text = ""
            assert read_config(copy) == tiny(training_steps=8), f"{name}, {damage}: other settings"
            train(tiny(training_steps=12), copy)  # resumes
            assert str(file) in heard.text, f"{name}, {damage}: not detected"
            assert_same_weights(whole, copy)
            assert read_config(copy) == tiny(training_steps=12)
            shutil.rmtree(copy)
            count += 1
    return f"{count} of {count} damages detected, named and passed over"


def temporaries(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if "staging" in path.name]


def save_again(folder: Path, point: str) -> None:
    """Save the only checkpoint again in a process that is killed at a failpoint."""
    if (pid := os.fork()) == 0:
        try:
            os.environ.update(environment(f"{point}=kill"))
            save_checkpoint(folder, 4, {"model": {"w": torch.ones(3)}}, {"step": 4, "again": True}, keep=1)
        finally:
            os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert code == -signal.SIGKILL or point == "save.while_dropping", f"{point} was not reached"


@case(
    2,
    "`kill -9` at every save failpoint, also while a checkpoint is saved again",
    passes_when="the newest whole checkpoint loads, leftovers are removed at restart, identical result",
    protections=["files.leftovers"],
)
def killed_while_saving(folder: Path, protect: bool) -> str:
    points, count = save_points("save."), 0
    assert len(points) >= 7, points
    for point in points:
        again = folder / point
        save_checkpoint(again, 4, {"model": {"w": torch.zeros(3)}}, {"step": 4}, keep=1)
        save_again(again, point)
        remove_leftovers(again)  # as a restart does
        found = load_newest(again)
        assert found is not None, f"{point}: nothing is left"
        assert found[2]["step"] == 4
        assert not temporaries(again), f"{point}: leftovers {temporaries(again)}"
        count += 1
    config = tiny(training_steps=16, training_on_nonfinite="rewind")  # saves step 0 as well
    whole = folder / "whole"
    launch(whole, config).finish()
    reached = [point for point in points if point != "save.between_renames"]
    for point in reached if times(1, 0) else reached[:2]:
        for visit in (1, 2, 3)[: times(3, 1)]:
            killed = folder / f"{point}{visit}"
            run = launch(killed, config, points=f"{point}=kill@{visit}")
            assert run.wait() == [-signal.SIGKILL], f"{point} was not reached {visit} times: {run.log[-500:]}"
            for path in (killed / "checkpoints").glob("step-*"):
                load_checkpoint(path)
            launch(killed, config).finish()
            assert not temporaries(killed), temporaries(killed)
            assert_same_run(whole, killed)
            count += 1
    return f"{count} kills at {len(points)} points of a save, nothing lost, nothing left behind"


@case(
    7,
    "disk full while saving (file system of 14 MB, RLIMIT_FSIZE), and while a report, samples or an export are written",
    passes_when="the checkpoint before is intact, one clear line that names the file, leftovers removed",
    protections=["files.staging"],
)
def disk_full(folder: Path, protect: bool) -> str:
    def check(run: Path, log: str) -> None:
        assert [path.name for path in (run / "checkpoints").glob("step-*")] == ["step-00000004"], "not as before"
        load_checkpoint(run / "checkpoints" / "step-00000004")
        assert not temporaries(run), temporaries(run)
        errors = [line for line in log.splitlines() if "Traceback" in line or "rror" in line]
        assert len(errors) == 1, log[-2000:]
        assert errors[0].startswith("error: step "), errors
        assert "free" in errors[0] and "intact" in errors[0], errors

    limited = folder / "limited"
    launch(limited, tiny(training_steps=4)).finish()
    largest = max(path.stat().st_size for path in newest(limited).iterdir())
    limit = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (largest // 2, largest // 2))  # noqa: E731
    run = launch(limited, tiny(training_steps=12), prepare=limit)
    assert run.wait() == [1], run.log[-2000:]
    check(limited, run.log.partition("resumed from")[2])
    launch(limited, tiny(training_steps=12)).finish()
    if not mount_tmpfs(folder / "disk", "size=14m"):
        return "RLIMIT_FSIZE; mounting a small file system is not allowed here"
    full = folder / "disk" / "full"
    launch(full, tiny(training_steps=4)).finish()
    run = launch(full, tiny(training_steps=5000, training_checkpoint_every=5000, training_log_every=100))
    while "resumed from" not in run.log:
        time.sleep(0.01)
    run.wait_for_step(100)
    fill(folder / "disk" / "ballast")
    os.kill(run.pids[0], signal.SIGTERM)
    assert run.wait() == [1], run.log[-2000:]
    check(full, run.log.partition("resumed from")[2])
    for verb in ("report", "sample", "export"):
        out, said = folder / "disk" / "new" / verb, io.StringIO()
        with contextlib.redirect_stderr(said):
            assert main([verb, str(full), "--out", str(out)]) == 1, said.getvalue()
        assert re.fullmatch(rf"error: {out}\S*: cannot be written \(No space .* free\)\n", said.getvalue()), (
            said.getvalue()
        )
        assert not out.parent.exists(), [*out.parent.rglob("*")]
    return "both, and report, sample and export: one line each, the checkpoint before is intact, nothing left behind"


def fill(file: Path) -> None:
    """Write until the disk is full."""
    with file.open("wb", buffering=0) as ballast:
        for size in (2**16, 1):
            try:
                while ballast.write(bytes(size)):
                    pass
            except OSError:
                continue


@case(
    8,
    "output folder read-only, of another run, on a full disk, a symlink, a file, in use",
    passes_when="refused before data or model are built, in 3 s (of CPU), in one message; nothing is created or changed",
    protections=["folder.early"],
)
def folders(folder: Path, protect: bool) -> str:
    config = tiny(training_steps=4)
    other = folder / "other"
    launch(other, tiny(training_steps=4, optimizer_lr=0.5)).finish()
    (folder / "link").symlink_to("elsewhere")
    (folder / "elsewhere").mkdir()
    (folder / "file").touch()
    used = launch(folder / "used", tiny(training_steps=100_000, training_checkpoint_every=100_000))
    used.wait_for_step(1)
    refused = {
        other: "optimizer.lr: 0.5 there, 0.001 asked for",
        folder / "link": "is a symbolic link",
        folder / "file": "is a file",
        folder / "file" / "run": "is a file",
        folder / "used": "another process is training into",
    }
    if mount_tmpfs(folder / "disk", "size=4k"):
        refused[folder / "disk" / "run"] = "MB free, a run needs 10.0 MB"
    if mount_tmpfs(folder / "readonly", "ro"):
        refused[folder / "readonly" / "run"] = "no permission to write"
    slowest = slowest_cpu = 0.0
    try:
        for out, words in refused.items():
            code, output, seconds, cpu = cold(folder / out.name, config, "build.source=raise:RuntimeError", out=out)
            assert "injected at" not in output, f"{out.name}: the data was built first"
            assert code == 1 and words in output and "Traceback" not in output, f"{out.name}: {code} {output}"
            assert cpu < 3, f"{out.name}: took {cpu:.1f} s of CPU"  # of its own: others may use the machine
            slowest, slowest_cpu = max(slowest, seconds), max(slowest_cpu, cpu)
    finally:
        used.kill()
    assert not list((folder / "elsewhere").iterdir())
    assert (other / METRICS).is_file()
    return f"{len(refused)} of {len(refused)} refused, the slowest in {slowest:.1f} s, {slowest_cpu:.1f} s of CPU"
