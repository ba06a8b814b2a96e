"""Measure a trained run: FID-10k of its averaged weights against its own data, into the run's metrics.jsonl.

Example: scalelong evaluate runs/cifar10-uvit-s2-cs-seed0 --num-samples 50000 --seeds 0 1 2
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass

import torch
import tyro

from scalelong.cli.arguments import RunFolder
from scalelong.evaluation.reference import reference_statistics
from scalelong.evaluation.run import Evaluation, Protocol, condition_of, evaluate_run, get_extractor, source_of
from scalelong.runs.events import append_event
from scalelong.training import load_run
from scalelong.training.run import TrainedRun


@dataclass(frozen=True)
class Evaluate:
    """What is on the command line."""

    run: RunFolder  # the run's folder
    num_samples: int = 10_000
    seeds: tuple[int, ...] = (0,)  # one evaluation for each
    sampler: str = ""  # default: the run's own
    steps: int = 0  # 0: the run's own
    guidance: float | None = None  # of a conditional run; default: the run's own
    batch_size: int = 500
    precision: str = "fp32"  # of the denoiser: fp32, bf16, fp16
    compile: bool = False  # compile the denoiser; pays from some thousand images on
    extractor: str = "inception"  # inception, or random-conv (light, and not FID)
    weights: str | None = None  # the Inception's file; default: fetched and verified
    run_weights: str = "ema"  # the run's averaged weights, or those as trained: ema or model
    checkpoint: int | None = None  # the step of the checkpoint; default: the newest
    device: str = "cuda" if torch.cuda.is_available() else "cpu"


def main(arguments: list[str]) -> None:
    """Load, draw, measure, record."""
    command = tyro.cli(Evaluate, args=arguments, prog="scalelong evaluate", description=__doc__)
    if not command.seeds or len(set(command.seeds)) < len(command.seeds):
        raise ValueError(f"seeds: give one or more different numbers, got {list(command.seeds)}")
    protocol = Protocol(
        command.num_samples,
        command.sampler,
        command.steps,
        command.batch_size,
        command.precision,
        command.compile,
        command.guidance,
    )
    run = load_run(command.run, weights=command.run_weights, step=command.checkpoint, device=command.device)
    extractor = get_extractor(command.extractor, command.device, command.weights)
    source = source_of(run)
    reference = reference_statistics(source, extractor, root=run.config.data.root)
    condition = condition_of(run, source)
    found = []
    for seed in command.seeds:
        evaluation = evaluate_run(run, extractor, reference, protocol, seed, condition=condition)
        append_event(run.folder, run.step, "evaluation", evaluation.record())
        found.append(evaluation)
        print(_line(run, evaluation))
    if len(found) > 1:
        values = [evaluation.result.value for evaluation in found]
        spread = f"mean {statistics.mean(values):.3f}  sd {statistics.stdev(values):.3f}  minimum {min(values):.3f}"
        print(f"{found[0].result.metric} over {len(values)} seeds: {spread}")


def _line(run: TrainedRun, evaluation: Evaluation) -> str:
    result = evaluation.result
    guided = f", guidance {evaluation.guidance:g}" if evaluation.guidance != 1 else ""
    return (
        f"{result.metric} = {result.value:.3f}  ({result.extractor}; {result.n:,} images of seed {evaluation.seed}, "
        f"{evaluation.sampler} {evaluation.sampler_steps} steps{guided}, step {run.step}; "
        f"drawn in {evaluation.generate_seconds:.1f} s, in all {evaluation.seconds:.1f} s)"
    )
