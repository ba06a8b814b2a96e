"""Processes that are killed, stopped or asked to stop: runs, ranks and workers."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path

from scalelong.errors import StoppedError
from tests.faults.harness import PATIENCE, case, times, wait_until
from tests.faults.processes import launch, ranks_of, torchrun
from tests.training.tiny import assert_same_run, newest, tiny

STREAMED = {"data_workers": 2, "data_resident_mb": 0}


@case(
    1,
    "`kill -9` at 20 random steps, ranks 1, 2 x workers 0, 2",
    passes_when="losses and hashes of weights, EMA and optimizer are identical to those of an undisturbed run",
    protections=["resume.position"],
)
def killed_at_random(folder: Path, protect: bool) -> str:
    kills = times(20, 4)
    settings = [(1, 0), (1, 2), (2, 0), (2, 2)] if times(1, 0) else [(1, 2), (2, 0)]
    for ranks, workers in settings:
        streamed = {"data_workers": workers, "data_resident_mb": 0 if workers else 2048}
        config = tiny(training_steps=8 * kills, training_checkpoint_every=5, **streamed)
        whole, killed = folder / f"whole{ranks}{workers}", folder / f"killed{ranks}{workers}"
        launch(whole, config, ranks).finish()
        chance = random.Random(f"{ranks} {workers}")
        for kill in range(kills):
            run = launch(killed, config, ranks)
            run.wait_for_step(min(8 * kill + chance.randrange(1, 8), 8 * kills - 2))
            time.sleep(chance.random() * 0.03)
            if kill % 2:
                run.kill()
            else:  # the workers have to notice it themselves
                for pid in run.pids:
                    os.kill(pid, signal.SIGKILL)
                run.wait()
                assert not run.orphans(), "workers outlive their run"
        launch(killed, config, ranks).finish()
        assert_same_run(whole, killed)
    return f"{kills} kills in each of {len(settings)} settings, all identical to the bit"


@case(
    4,
    "SIGTERM and SIGINT to the process group with workers, to the main process, to rank 1, to torchrun",
    passes_when="checkpoint within 10 s, documented exit code (75), no orphans, identical resume",
    protections=["loop.signals", "loader.signals + loader.replace"],
)
def signals(folder: Path, protect: bool) -> str:
    whole = {}
    ways = [("group", 1), ("main", 1), ("rank 1", 2), ("group", 2), ("torchrun", 2), ("torchrun group", 2)]
    slowest, count = 0.0, 0
    for number in (signal.SIGTERM, signal.SIGINT):
        short = (0, 2, 4) if number == signal.SIGTERM else (0,)
        for to, ranks in ways if times(1, 0) else [ways[i] for i in short]:
            config = tiny(training_steps=90, training_checkpoint_every=1000, **STREAMED)
            if ranks not in whole:
                whole[ranks] = folder / f"whole{ranks}"
                launch(whole[ranks], config, ranks).finish()
            stopped = folder / f"{number.name}-{to.replace(' ', '-')}-{ranks}"
            slow = "loader.read=delay:0.3" if to == "group" else ""  # so that the loop waits for workers at the signal
            run = torchrun(stopped, config) if "torchrun" in to else launch(stopped, config, ranks, slow)
            run.wait_for_step(20)
            sent = time.monotonic()
            if "group" in to:
                os.killpg(run.group, number)
            else:
                os.kill(run.pids[1 if to == "rank 1" else 0], number)
            saved = lambda folder=stopped: any((folder / "checkpoints").glob("step-*"))  # noqa: E731
            wait_until(saved, 10, f"{number.name} to {to}: checkpoint")
            slowest = max(slowest, time.monotonic() - sent)
            codes = run.wait(60)
            assert all(codes) if "torchrun" in to else set(codes) == {StoppedError.code}, f"{to}: exit codes {codes}"
            assert not run.orphans(), f"{number.name} to {to}: processes are left"
            assert newest(stopped).name < "step-00000090", "it was not stopped"
            launch(stopped, config, ranks).finish()
            assert_same_run(whole[ranks], stopped)
            count += 1
    return f"{count} of {count}; slowest checkpoint {slowest:.1f} s after the signal"


@case(
    10,
    "a loader worker killed, and one stopped (SIGSTOP)",
    passes_when="replaced at the same position at most 3 times, identical result; a time-out ends a hang, SIGTERM too",
    protections=["loader.replace", "loader.timeout"],
)
def workers(folder: Path, protect: bool) -> str:
    config = tiny(training_steps=160, training_checkpoint_every=1000, data_worker_timeout=2.0 * PATIENCE, **STREAMED)
    whole = folder / "whole"
    launch(whole, config).finish()
    for name, number in (("killed", signal.SIGKILL), ("stopped", signal.SIGSTOP)):
        run = launch(folder / name, config)
        for step in (20, 60, 100)[: times(3, 1)]:
            run.wait_for_step(step, 40)
            run.workers()[step % 2].send_signal(number)
        run.finish(30)
        assert "starting another one at the same position" in run.log
        assert not run.orphans()
        assert_same_run(whole, run.folder)
    run = launch(folder / "hopeless", config)
    run.wait_for_step(10)
    killed = 0
    while run.running() and killed < 50:
        for worker in run.workers():
            worker.kill()
            killed += 1
        time.sleep(0.2)
    assert run.wait(20) == [1]
    assert run.log.strip().splitlines()[-1].startswith("error: data.workers: a worker process died"), run.log[-500:]
    patient = tiny(training_steps=160, training_checkpoint_every=1000, **STREAMED)
    run = launch(folder / "patient", patient)
    run.wait_for_step(10)
    for worker in run.workers():
        worker.send_signal(signal.SIGSTOP)
    time.sleep(0.5)
    os.kill(run.pids[0], signal.SIGTERM)
    assert run.wait(15) == [StoppedError.code]
    return "killed and stopped workers replaced with identical results; the fourth failure ends the run with one line"


@case(
    11,
    "`kill -9` of rank 1",
    passes_when="rank 0 ends within 30 s and names it; with one restart by torchrun the weights are identical",
    protections=["ranks.explain", "ranks.names"],
)
def rank_killed(folder: Path, protect: bool) -> str:
    config = tiny(training_steps=400, training_checkpoint_every=20)
    run = launch(folder / "run", config, ranks=2)
    run.wait_for_step(30)
    os.kill(run.pids[1], signal.SIGKILL)
    started = time.monotonic()
    assert run.wait(30)[0] == 1
    seconds = time.monotonic() - started
    assert "error: ranks: rank 1 does not answer" in run.log, run.log[-1500:]
    short = tiny(training_steps=120, training_checkpoint_every=10)
    launch(folder / "whole", short, ranks=2).finish()
    late = "ranks.main_joins=delay:3"  # rank 1 is there first, and must not take rank 0 for the one that died
    again = torchrun(folder / "again", short, late, restarts=1)
    again.wait_for_step(25)
    ranks_of(again)[1].kill()
    again.finish()
    assert "resumed from" in again.log
    assert_same_run(folder / "whole", folder / "again")
    torchrun(folder / "waiting", ["tests.faults.restart", str(folder / "written")], restarts=1).finish()
    return f"rank 0 ended after {seconds:.0f} s and named rank 1; restarted, identical to the bit"


@case(
    12,
    "SIGSTOP of rank 1",
    passes_when="the time-out (training.rank_timeout, default 300 s; here 5 s) ends the run and names the rank",
    protections=["ranks.timeout"],
)
def rank_stopped(folder: Path, protect: bool) -> str:
    config = tiny(training_steps=1000, training_checkpoint_every=20, training_rank_timeout=5.0 * PATIENCE)
    run = launch(folder / "run", config, ranks=2)
    run.wait_for_step(30)
    os.kill(run.pids[1], signal.SIGSTOP)
    started = time.monotonic()
    try:
        wait_until(lambda: not run.running(0), 25, "end of rank 0")
    finally:
        seconds = time.monotonic() - started
        run.kill()
    assert run.codes[run.pids[0]] == 1
    assert "error: ranks: rank 1 does not answer" in run.log, run.log[-1500:]
    return f"rank 0 ended after {seconds:.0f} s and named rank 1"
