"""Real processes: killed at any moment, two ranks, signals. Every test starts the command that a user would."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file

from scalelong.training import to_yaml
from tests.training.tiny import losses, newest, tiny

pytestmark = pytest.mark.slow

ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONWARNINGS": "ignore"}


def command(folder: Path, ranks: int, launcher: str = "torchrun") -> list[str]:
    """`scalelong train` as one process, or under a launcher."""
    verb = ["-m", "scalelong.cli.main", "train", "digits-demo", "--config", str(folder) + ".yaml", "--out", str(folder)]
    if ranks == 1:
        return [sys.executable, *verb]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    if launcher == "accelerate":
        launch = ["-m", "accelerate.commands.launch", "--cpu", "--num_processes", str(ranks), "--num_machines", "1"]
        launch += ["--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", port]
    else:
        launch = ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks), "--master-port", port]
    return [sys.executable, *launch, *verb]


def start(
    folder: Path, ranks: int = 1, launcher: str = "torchrun", options: Sequence[str] = (), **changes: object
) -> subprocess.Popen[str]:
    folder.with_suffix(".yaml").write_text(to_yaml(tiny(**changes)))
    return subprocess.Popen(
        [*command(folder, ranks, launcher), *options],
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def finish(process: subprocess.Popen[str]) -> str:
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0, output
    return output


def kill_all(process: subprocess.Popen[str]) -> None:
    """kill -9 of a launcher and of every rank and worker below it."""
    family = psutil.Process(process.pid).children(recursive=True)
    for each in [psutil.Process(process.pid), *family]:
        with contextlib.suppress(psutil.NoSuchProcess):
            each.kill()
    psutil.wait_procs(family, timeout=30)
    process.communicate()


def records(folder: Path) -> int:
    file = folder / "metrics.jsonl"
    return file.read_text().count("\n") if file.is_file() else 0


def wait_for(folder: Path, count: int, process: subprocess.Popen[str]) -> None:
    while records(folder) < count and process.poll() is None:
        time.sleep(0.001)


KINDS = {
    "none": {},
    "class": {"condition_kind": "class"},
    "distilled": {"features_conditioning": True, "distillation_weight": 0.5, "distillation_form": "negative_free"},
    "mup": {"mup_base_width": 8},
}


@pytest.mark.parametrize("kind", KINDS)
def test_two_ranks_equal_one(kind: str, tmp_path) -> None:
    """50 steps on one rank, and on two by torchrun and by accelerate launch: the same losses and weights to 1e-5."""
    changes = {"training_steps": 50, "training_checkpoint_every": 50, **KINDS[kind]}
    one = tmp_path / "one"
    finish(start(one, **changes))
    for launcher in ("torchrun", "accelerate") if kind in ("none", "class") else ("torchrun",):
        two = tmp_path / launcher
        finish(start(two, 2, launcher, **changes))
        assert [loss for _, loss in losses(two)] == pytest.approx([loss for _, loss in losses(one)], abs=1e-5)
        expected = load_file(newest(one) / "model.safetensors")
        for name, value in load_file(newest(two) / "model.safetensors").items():
            torch.testing.assert_close(value, expected[name], rtol=0, atol=1e-5)


def test_a_batch_that_two_ranks_cannot_share_is_refused(tmp_path) -> None:
    process = start(tmp_path / "run", 2, training_batch_size=5)
    output, _ = process.communicate(timeout=120)
    assert process.returncode != 0
    assert "training.batch_size: must be a multiple of 2 (2 ranks x 1 micro-batches), got 5" in output
    assert not (tmp_path / "run").exists()


def test_two_processes_do_not_train_into_one_folder(tmp_path) -> None:
    folder = tmp_path / "run"
    first = start(folder, training_steps=5000)
    wait_for(folder, 5, first)
    second = start(folder, training_steps=5000)
    output, _ = second.communicate(timeout=120)
    kill_all(first)
    assert second.returncode == 1
    assert "another process is training into" in output
