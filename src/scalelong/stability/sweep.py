"""Train one preset with several methods and seeds, each run with an oscillation probe."""

from __future__ import annotations

import logging
import multiprocessing
import os
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path

import torch

from scalelong.errors import NonFiniteError, StoppedError, require
from scalelong.progress import Progress, hide
from scalelong.runs import METRICS
from scalelong.runs.events import read_events
from scalelong.runs.settings import RunConfig
from scalelong.stability.probes import OscillationProbe
from scalelong.training import Trainer
from scalelong.training.build import check_config
from scalelong.training.ranks import is_main_rank

logger = logging.getLogger(__name__)


def sweep(
    preset: RunConfig, methods: Sequence[str], seeds: Sequence[int], steps: int | None = None
) -> dict[str, RunConfig]:
    """Configurations of a preset for each method ("cs", or with kappa "cs:0.5") and seed, by name.

    >>> list(sweep(RunConfig(), ["none", "cs:0.5"], seeds=[0, 1]))
    ['none-seed0', 'none-seed1', 'cs0.5-seed0', 'cs0.5-seed1']
    """
    for key, given in (("methods", methods), ("seeds", seeds)):
        require(len(given) > 0, key, "one or more", [*given])
    configs = {}
    for name in methods:
        method, _, kappa = name.partition(":")
        if kappa and "kappa" not in replace(preset.scaling, method=method).options():
            raise ValueError(f"methods: {name!r}, but {method} has no kappa; leave out :{kappa}")
        try:
            scaling = replace(preset.scaling, method=method, kappa=float(kappa) if kappa else preset.scaling.kappa)
        except ValueError:
            raise ValueError(f"methods: {name!r} has no number after the colon; write for example cs:0.5") from None
        for seed in seeds:
            training = replace(preset.training, seed=seed, steps=preset.training.steps if steps is None else steps)
            config = check_config(replace(preset, scaling=scaling, training=training))
            configs[f"{name.replace(':', '')}-seed{seed}"] = config
    return configs


def train_in_turn(configs: Mapping[str, RunConfig], out: Path) -> None:
    """Train or resume runs sequentially, so their times are comparable."""
    for position, (name, config) in enumerate(configs.items(), 1):
        if is_main_rank():
            logger.info("run %d of %d: %s", position, len(configs), name)
        try:
            stopped = _train(config, out / name)
        except NonFiniteError as error:
            logger.warning("%s diverged, the other runs continue: %s", name, error)
            continue
        if stopped is not None:
            raise StoppedError(f"stopped in {name} at step {stopped}; repeat the command to continue")


def train_in_parallel(configs: Mapping[str, RunConfig], out: Path) -> None:
    """Train or resume runs in parallel, one per core, each with one thread and a progress bar."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(len(configs), cores), spawn, _start_worker) as pool:
        futures = [pool.submit(_train, config, out / name) for name, config in configs.items()]
        _show_progress(futures, configs, out)
        for future in futures:
            future.result()


def _start_worker() -> None:
    torch.set_num_threads(1)
    hide()  # the parent shows a bar for each run


def _train(config: RunConfig, folder: Path) -> int | None:
    """Train with a probe; return the step at which the run was stopped, if any."""
    trainer = Trainer(config, folder)
    probe = OscillationProbe(trainer.model, trainer.probe_inputs(), every=config.training.log_every)
    trainer.observers.append(probe)
    trainer.run()
    return trainer.step if trainer.stopping else None


def _show_progress(futures: Sequence[Future[int | None]], configs: Mapping[str, RunConfig], out: Path) -> None:
    """Progress bars, read from the records of the runs."""
    bars = {
        name: Progress(total=config.training.steps, desc=name.ljust(6), unit="step", position=i)
        for i, (name, config) in enumerate(configs.items())
    }
    done = False
    while not done:
        done = all(future.done() for future in futures)
        for name, bar in bars.items():
            if not (out / name / METRICS).is_file():
                bar.unpause()  # waiting for a core does not count
            else:
                records = [record for record in read_events(out / name)[0] if record["kind"] == "train"]
                if records and records[-1]["step"] > bar.n:
                    bar.set_postfix(loss=f"{records[-1]['loss']:.4f}", refresh=False)
                    bar.update(records[-1]["step"] - bar.n)
                    if bar.lines and bar.n >= configs[name].training.steps:
                        bar.close()
        time.sleep(0 if done else 0.5)
    for bar in bars.values():
        bar.close()
