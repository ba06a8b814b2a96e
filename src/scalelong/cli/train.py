"""Train a preset on real data; run the same command again to resume.

Example: scalelong train digits-demo --method ls --steps 200 --out runs/digits-ls

Example: scalelong train cifar10-uvit-s2 --evaluate-every 50000 --sampling.precision bf16 --probe-every 50
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated

import tyro

from scalelong.cli.arguments import PresetName
from scalelong.errors import StoppedError, require
from scalelong.runs import CONFIG
from scalelong.runs.config import from_yaml
from scalelong.runs.folder import check_folder
from scalelong.runs.presets import PRESETS, get_preset
from scalelong.runs.settings import RunConfig

SHORT = {  # common flag names
    "--method": "--scaling.method",
    "--kappa": "--scaling.kappa",
    "--data": "--data.name",
    "--image-size": "--data.image-size",
    "--steps": "--training.steps",
    "--seed": "--training.seed",
    "--evaluate-precision": "--sampling.precision",
}


@dataclass(frozen=True)
class Train:
    preset: PresetName  # see above; optional with --config
    out: str = ""  # the run's folder; default: runs/PRESET-METHOD-seedN
    config: str = ""  # YAML file (such as a run's config.yaml) that overrides the preset
    dry_run: bool = False  # print settings, parameters, memory and time without downloading or training
    probe_every: int = 0  # steps between records of feature and gradient norms; 0: never
    validate_every: int = 0  # steps between validation losses; 0: never
    validate_split: str = "test"  # of the data
    validate_images: int = 2000  # number of images, from the start of the split
    evaluate_every: int = 0  # steps between FID evaluations; 0: never
    evaluate_samples: int = 10_000  # images per evaluation
    evaluate_extractor: str = "inception"  # inception, or random-conv (lightweight, not FID)
    settings: Annotated[RunConfig, tyro.conf.arg(name="")] = field(default_factory=RunConfig)


def parse(arguments: list[str]) -> Train:
    """Merge preset, YAML file and flags; later ones take precedence."""
    short = ", ".join(f"{short} for {flag}" for short, flag in SHORT.items() if short != "--evaluate-precision")
    about = f"{__doc__}\nShort: {short}\n\nPresets: {', '.join(PRESETS)}"

    def parsed(given: list[str], default: Train) -> Train:
        return tyro.cli(Train, args=given, default=default, prog="scalelong train", description=about)

    arguments = [_long(argument) for argument in arguments]
    asked = [argument for argument in arguments if argument not in ("-h", "--help")]
    first = parsed(asked, Train(preset="", settings=RunConfig()))  # find preset and file in any order
    if not first.preset and not first.config and asked == arguments:
        raise ValueError(f"preset: name the one to train, one of {', '.join(PRESETS)}; or --config FILE")
    if first.preset not in PRESETS and Path(first.preset).suffix in (".yaml", ".yml"):
        raise ValueError(f"preset: {first.preset} is a file; pass --config {first.preset}")
    settings = get_preset(first.preset) if first.preset else RunConfig()
    if first.config:
        settings = from_yaml(first.config, settings)
    return parsed(arguments, Train(preset=first.preset, settings=settings))


def _long(argument: str) -> str:
    """Translate common flags such as --method to those of `train`."""
    flag, equals, value = argument.partition("=")
    return f"{SHORT.get(flag, flag)}{equals}{value}"


def run_name(command: Train) -> str:
    """PRESET-METHOD-seedN; without a preset, the name of the file, or of data and model for a run's config.yaml."""
    settings, file = command.settings, Path(command.config)
    name = command.preset or file.stem
    if not command.preset and file.name == CONFIG:
        name = re.sub(r"[^A-Za-z0-9_.-]+", "-", f"{settings.data.name}-{settings.model.backbone}")
    return f"{name}-{settings.scaling.method}-seed{settings.training.seed}"


def warmup_note(config: RunConfig) -> str:
    """A note if the run ends before the warm-up does."""
    warmup, lr, steps = config.optimizer.warmup_steps, config.optimizer.lr, config.training.steps
    if steps >= warmup:
        return ""
    return (
        f"the run ends in the warm-up, at rate {lr * steps / warmup:.2g} instead of {lr:.2g} (--optimizer.warmup-steps)"
    )


def main(arguments: list[str]) -> None:
    command = parse(arguments)
    settings = command.settings
    for name in ("probe_every", "validate_every", "evaluate_every"):
        every = getattr(command, name)
        require(every >= 0, name.replace("_", "-"), "a number of steps, or 0 for never", every)
    folder = Path(command.out or f"runs/{run_name(command)}")
    if not command.dry_run and os.environ.get("RANK", "0") == "0":
        check_folder(folder, settings)
    # torch is slow to import: check the folder first
    from scalelong.cli.estimate import print_estimate
    from scalelong.evaluation import get_extractor
    from scalelong.evaluation.evaluate import EvaluationObserver, check_count
    from scalelong.evaluation.extractors import check_extractor
    from scalelong.stability import OscillationProbe
    from scalelong.stability.kappa import training_note
    from scalelong.training import Trainer
    from scalelong.training.validation import ValidationObserver

    check_extractor(command.evaluate_extractor)
    evaluation = replace(settings.sampling, count=command.evaluate_samples)
    check_count(evaluation)
    notes = {"scaling": training_note(settings.scaling, settings.training.steps), "warm-up": warmup_note(settings)}
    if command.dry_run:
        print_estimate(settings)
        print("".join(f"{about:12}{note}\n" for about, note in notes.items() if note), end="")
        return
    trainer = Trainer(settings, folder)
    if trainer.ranks.is_main_process and any(notes.values()):
        print(*filter(None, notes.values()), sep="\n", flush=True)
    if command.probe_every:
        trainer.observers.append(OscillationProbe(trainer.model, trainer.probe_inputs(), every=command.probe_every))
    if command.validate_every:
        split, images = command.validate_split, command.validate_images
        trainer.observers.append(ValidationObserver(trainer, split, command.validate_every, images))
    if command.evaluate_every:
        extractor = get_extractor(command.evaluate_extractor, trainer.device)
        trainer.observers.append(EvaluationObserver(trainer, extractor, evaluation, command.evaluate_every))
    trainer.run()
    is_main, stopped = trainer.ranks.is_main_process, trainer.step < settings.training.steps
    if stopped:
        raise StoppedError(f"stopped at step {trainer.step}: {folder}; the same command continues" if is_main else "")
    if is_main:
        print(f"trained at step {trainer.step}: {folder}")
