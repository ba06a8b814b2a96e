"""Measure the FID of a run against its training data and record it in metrics.jsonl; uses the run's sampler by default.

Distributes the work over ranks under torchrun.

Example: scalelong evaluate runs/cifar10-uvit-s2-cs-seed0 --num-samples 50000 --seeds 0 1 2

Example: scalelong evaluate runs/cifar10-uvit-s2-cs-seed0 --weights model --precision bf16 --kid
"""

from __future__ import annotations

import functools
import logging
import statistics
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import torch
import tyro
from accelerate import PartialState

from scalelong.cli.arguments import RunFolder, SamplingFlags, parse_over_run
from scalelong.diffusion import resolve_sampling
from scalelong.evaluation import evaluate_run, get_extractor, reference_statistics
from scalelong.evaluation.evaluate import (
    Evaluation,
    check_count,
    load_condition,
    load_training_data,
    reference_features,
)
from scalelong.files import check_writable
from scalelong.progress import hide
from scalelong.runs.events import append_event
from scalelong.training import load_run


@dataclass(frozen=True)
class Evaluate:
    run: RunFolder  # the run's folder
    seeds: tuple[int, ...] = (0,)  # one evaluation per seed
    extractor: str = "inception"  # inception, or random-conv (lightweight, not FID)
    inception: str | None = None  # file of the Inception network; default: download and verify
    kid: bool = False  # also measure the kernel distance (KID)
    weights: Annotated[str, tyro.conf.arg(aliases=["--run-weights"])] = "ema"  # ema, or model for the raw weights
    checkpoint: int | None = None  # step of the checkpoint; default: the newest
    device: str = "cuda" if torch.cuda.is_available() else "cpu"
    sampling: Annotated[SamplingFlags, tyro.conf.arg(name="")] = SamplingFlags(count=10_000)  # noqa: RUF009


def main(arguments: list[str]) -> None:
    command = parse_over_run(Evaluate, arguments, prog="scalelong evaluate", description=__doc__)
    if not command.seeds or len(set(command.seeds)) < len(command.seeds):
        raise ValueError(f"seeds: give one or more different numbers, got {list(command.seeds)}")
    check_count(command.sampling)
    check_writable(Path(command.run), "run", "copy the run: its evaluations are recorded in it")
    if command.weights not in ("ema", "model") and Path(command.weights).is_file():
        logging.warning("--weights FILE is called --inception now; --weights is ema or model")
        command = replace(command, inception=command.weights, weights="ema")
    ranks = PartialState(cpu=not command.device.startswith("cuda") or not torch.cuda.is_available())
    if not ranks.is_main_process:
        hide()
    device = str(ranks.device) if ranks.num_processes > 1 else command.device
    run = load_run(command.run, weights=command.weights, step=command.checkpoint, device=device)
    extractor = get_extractor(command.extractor, device, command.inception)
    resolve_sampling(command.sampling, run.objective.process)
    source, root = load_training_data(run), run.config.data.root
    condition = load_condition(run, source)
    condition.null_condition(command.sampling)
    reference = reference_statistics(source, extractor, root=root)
    features = reference_features(source, extractor, root) if command.kid else None
    measure = functools.partial(evaluate_run, run, extractor, reference, command.sampling, kid_reference=features)
    values = []
    for seed in command.seeds:
        evaluation = measure(seed, condition=condition, rank=ranks.process_index, world_size=ranks.num_processes)
        values.append(evaluation.result.value)
        if ranks.is_main_process:
            append_event(run.folder, run.step, "evaluation", evaluation.record())
            print(_line(run.step, evaluation), flush=True)
    if len(values) > 1 and ranks.is_main_process:
        spread = f"mean {statistics.mean(values):.3f}  sd {statistics.stdev(values):.3f}  minimum {min(values):.3f}"
        print(f"{evaluation.result.metric} over {len(values)} seeds: {spread}")


def _line(step: int, evaluation: Evaluation) -> str:
    result, sampling = evaluation.result, evaluation.sampling
    kid = f"  KID = {result.kid.mean:.5f} ± {result.kid.sd:.5f}" if result.kid else ""
    guidance = f", guidance {sampling.guidance:g}" if sampling.guidance != 1 else ""
    return (
        f"{result.metric} = {result.value:.3f}{kid}  ({result.extractor}; {result.n:,} images of seed {evaluation.seed}, "
        f"{sampling.sampler} {sampling.steps} steps{guidance}, step {step}; "
        f"sampled in {evaluation.generate_seconds:.1f} s, {evaluation.seconds:.1f} s total)"
    )
