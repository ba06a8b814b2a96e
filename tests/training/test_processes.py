"""Real processes: killed at any moment, two ranks, signals. Every test starts the command that a user would."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file

from scalelong.training import to_yaml
from tests.training.tiny import assert_same_run, losses, newest, tiny

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


def start(folder: Path, ranks: int = 1, launcher: str = "torchrun", **changes: object) -> subprocess.Popen[str]:
    folder.with_suffix(".yaml").write_text(to_yaml(tiny(**changes)))
    return subprocess.Popen(
        command(folder, ranks, launcher),
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


@pytest.mark.parametrize(("ranks", "workers"), [(1, 0), (1, 2), (2, 0), (2, 2)])
def test_killed_at_any_moment_the_run_ends_bit_identical(ranks: int, workers: int, tmp_path) -> None:
    """kill -9 of all processes at three random moments; resident data without workers, streamed data with them."""
    changes = {
        "training_steps": 60,
        "training_checkpoint_every": 7,
        "data_workers": workers,
        "data_resident_mb": 0 if workers else 2048,
    }
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    finish(start(whole, ranks, **changes))
    moments = random.Random(f"{ranks} {workers}")
    for least in (5, 20, 35):
        process = start(killed, ranks, **changes)
        wait_for(killed, least + moments.randrange(12), process)
        time.sleep(moments.random() * 0.05)
        kill_all(process)
    assert newest(killed).name < "step-00000060"
    finish(start(killed, ranks, **changes))
    assert_same_run(whole, killed)


@pytest.mark.parametrize("kind", ["none", "class"])
def test_two_ranks_equal_one(kind: str, tmp_path) -> None:
    """50 steps on one rank, and on two by torchrun and by accelerate launch: the same losses and weights to 1e-5."""
    changes = {"training_steps": 50, "training_checkpoint_every": 50, "condition_kind": kind}
    one = tmp_path / "one"
    finish(start(one, **changes))
    for launcher in ("torchrun", "accelerate"):
        two = tmp_path / launcher
        finish(start(two, 2, launcher, **changes))
        assert [loss for _, loss in losses(two)] == pytest.approx([loss for _, loss in losses(one)], abs=1e-5)
        expected = load_file(newest(one) / "model.safetensors")
        for name, value in load_file(newest(two) / "model.safetensors").items():
            torch.testing.assert_close(value, expected[name], rtol=0, atol=1e-5)


@pytest.mark.parametrize("ranks", [1, 2])
def test_sigterm_saves_and_exits_cleanly(ranks: int, tmp_path) -> None:
    folder = tmp_path / "run"
    process = start(folder, ranks, training_steps=5000, training_checkpoint_every=5000)
    wait_for(folder, 20, process)
    if ranks == 1:
        process.terminate()
        output = finish(process)
        assert "asked to stop (SIGTERM)" in output
        assert "stopped at step" in output
    else:
        os.killpg(process.pid, signal.SIGTERM)
        process.communicate(timeout=120)
    step = int(newest(folder).name.removeprefix("step-"))
    assert 20 <= step < 5000
    assert losses(folder)[-1][0] == step


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


POISONED_RANK = """
import sys
from scalelong.training import NonFiniteError, Trainer, from_yaml

trainer = Trainer(from_yaml(sys.argv[1]), sys.argv[2])

def poison(_module, _args, output):
    if trainer.step == 2 and trainer.ranks.process_index == 1:
        output = output.clone()
        output[1] = float("nan")
    return output

trainer.model.register_forward_hook(poison)
try:
    trainer.run()
except NonFiniteError as error:
    print(f"rank {trainer.ranks.process_index} stopped: {error}", flush=True)
"""


def test_a_bad_sample_on_one_rank_stops_both_and_is_named_by_both(tmp_path) -> None:
    """Step 3 covers samples 16 to 23; rank 1 has the last four, the second of which is made NaN."""
    (tmp_path / "poisoned.py").write_text(POISONED_RANK)
    (tmp_path / "run.yaml").write_text(to_yaml(tiny(training_log_every=5)))
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*launch, tmp_path / "poisoned.py", tmp_path / "run.yaml", tmp_path / "run"],
        env=ENVIRONMENT, capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    for rank in (0, 1):
        assert f"rank {rank} stopped: step 3: the loss is not finite" in done.stdout
    assert done.stdout.count("samples [21] at t = ") == 2
