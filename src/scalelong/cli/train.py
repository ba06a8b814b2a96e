"""Train a preset on real data; run the same command again to resume.

Example: scalelong train digits-demo --scaling.method ls --training.steps 200 --out runs/digits-ls

Example: scalelong train cifar10-uvit-s2 --evaluate-every 50000 --sampling.precision bf16 --probe-every 50
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import tyro

from scalelong.cli.arguments import PresetName
from scalelong.cli.estimate import print_estimate
from scalelong.evaluation import EvaluationObserver, get_extractor
from scalelong.evaluation.evaluate import check_count
from scalelong.evaluation.extractors import check_extractor
from scalelong.stability import OscillationProbe
from scalelong.training import PRESETS, RunConfig, Trainer, from_yaml, get_preset


@dataclass(frozen=True)
class Train:
    """Arguments of `scalelong train`."""

    preset: PresetName  # one of those above; optional with --config
    out: str = ""  # the run's folder; default: runs/PRESET-METHOD-seedN
    config: str = ""  # a YAML file (such as a run's config.yaml) whose settings override the preset's
    dry_run: bool = False  # print the settings, parameters, memory and time, and train nothing
    probe_every: int = 0  # steps between records of the blocks' feature and gradient norms; 0: never
    evaluate_every: int = 0  # steps between FID evaluations; 0: never
    evaluate_samples: int = 10_000  # images per evaluation
    evaluate_extractor: str = "inception"  # inception, or random-conv (light, and not FID)
    settings: Annotated[RunConfig, tyro.conf.arg(name="")] = field(default_factory=RunConfig)


def parse(arguments: list[str]) -> Train:
    """The preset, then the YAML file, then the flags: later ones win."""
    arguments = [argument.replace("--evaluate-precision", "--sampling.precision") for argument in arguments]
    asked = [argument for argument in arguments if argument not in ("-h", "--help")]
    first = _parsed(asked, Train(preset="", settings=RunConfig()))  # finds the preset and the file in any order
    if not first.preset and not first.config and asked == arguments:
        raise ValueError(f"preset: name the one to train, one of {', '.join(PRESETS)}; or --config FILE")
    settings = get_preset(first.preset) if first.preset else RunConfig()
    if first.config:
        settings = from_yaml(first.config, settings)
    return _parsed(arguments, Train(preset=first.preset or Path(first.config).stem, settings=settings))


def _parsed(arguments: list[str], default: Train) -> Train:
    about = f"{__doc__}\nPresets: {', '.join(PRESETS)}"
    return tyro.cli(Train, args=arguments, default=default, prog="scalelong train", description=about)


def main(arguments: list[str]) -> None:
    """Parse, then train, or only print an estimate."""
    command = parse(arguments)
    settings = command.settings
    for name, every in (("probe-every", command.probe_every), ("evaluate-every", command.evaluate_every)):
        if every < 0:
            raise ValueError(f"{name}: must be a number of steps, or 0 for never, got {every}")
    check_extractor(command.evaluate_extractor)
    evaluation = dataclasses.replace(settings.sampling, count=command.evaluate_samples)
    check_count(evaluation)
    if command.dry_run:
        print_estimate(settings)
        return
    trainer = Trainer(
        settings, command.out or f"runs/{command.preset}-{settings.scaling.method}-seed{settings.training.seed}"
    )
    if command.probe_every:
        trainer.observers.append(OscillationProbe(trainer.model, trainer.probe_inputs(), every=command.probe_every))
    if command.evaluate_every:
        extractor = get_extractor(command.evaluate_extractor, trainer.device)
        trainer.observers.append(EvaluationObserver(trainer, extractor, evaluation, command.evaluate_every))
    folder = trainer.run()
    if trainer.ranks.is_main_process:
        state = "stopped" if trainer.step < settings.training.steps else "trained"
        print(f"{state} at step {trainer.step}: {folder}")
