"""Train a preset on real data; run the same command again to resume.

Example: scalelong train digits-demo --scaling.method ls --training.steps 200 --out runs/digits-ls
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import torch
import tyro

from scalelong.backbones.unet import model_inputs
from scalelong.cli.arguments import PresetName
from scalelong.cli.estimate import print_estimate
from scalelong.data.loader import caption_rows
from scalelong.diffusion import draw_time_and_noise
from scalelong.evaluation.run import EvaluationObserver, Protocol, check_extractor, get_extractor
from scalelong.stability import OscillationProbe
from scalelong.training import PRESETS, RunConfig, Trainer, from_yaml, get_preset


@dataclass(frozen=True)
class Train:
    """What is on the command line."""

    preset: PresetName  # one of those above; may be left out where --config names a file
    out: str = ""  # the run's folder; default: runs/PRESET-METHOD-seedN
    config: str = ""  # a YAML file (a run's config.yaml is one) whose settings go over the preset's, or stand alone
    dry_run: bool = False  # print the settings, parameters, memory and time, and train nothing
    probe_every: int = 0  # record the blocks' feature and gradient norms every so many steps; 0: never
    evaluate_every: int = 0  # measure FID every so many steps; 0: never
    evaluate_samples: int = 10_000
    evaluate_precision: str = "fp32"  # of the denoiser, for those evaluations: fp32, bf16, fp16
    evaluate_extractor: str = "inception"  # inception, or random-conv (light, and not FID)
    settings: Annotated[RunConfig, tyro.conf.arg(name="")] = field(default_factory=RunConfig)


def parse(arguments: list[str]) -> Train:
    """The preset, then the YAML file, then the flags: later ones win."""
    asked = [argument for argument in arguments if argument not in ("-h", "--help")]
    first = _parsed(asked, Train(preset="", settings=RunConfig()))  # finds the preset and the file wherever they stand
    if not first.preset and not first.config and asked == arguments:
        raise ValueError(f"preset: say which to train, one of {', '.join(PRESETS)}; or --config FILE")
    settings = get_preset(first.preset) if first.preset else RunConfig()
    if first.config:
        settings = from_yaml(first.config, settings)
    return _parsed(arguments, Train(preset=first.preset or Path(first.config).stem, settings=settings))


def _parsed(arguments: list[str], default: Train) -> Train:
    about = f"{__doc__}\nPresets: {', '.join(PRESETS)}"
    return tyro.cli(Train, args=arguments, default=default, prog="scalelong train", description=about)


def main(arguments: list[str]) -> None:
    """Resolve, then train or only tell."""
    command = parse(arguments)
    settings = command.settings
    if command.dry_run:
        print_estimate(settings)
        return
    default = f"runs/{command.preset}-{settings.scaling.method}-seed{settings.training.seed}"
    protocol = _evaluations(command)
    trainer = Trainer(settings, command.out or default)
    if command.probe_every:
        trainer.observers.append(oscillation_probe(trainer, command.probe_every))
    if command.evaluate_every:
        extractor = get_extractor(command.evaluate_extractor, trainer.device)
        trainer.observers.append(EvaluationObserver(trainer, extractor, protocol, command.evaluate_every))
    folder = trainer.run()
    if trainer.ranks.is_main_process:
        print(f"{_state(trainer)} at step {trainer.step}: {folder}")


def _evaluations(command: Train) -> Protocol:
    """How the run is measured on its way, checked before anything is trained."""
    for name, every in (("probe-every", command.probe_every), ("evaluate-every", command.evaluate_every)):
        if every < 0:
            raise ValueError(f"{name}: must be a number of steps, or 0 for never, got {every}")
    check_extractor(command.evaluate_extractor)
    return Protocol(command.evaluate_samples, precision=command.evaluate_precision)


def _state(trainer: Trainer) -> str:
    return "stopped" if trainer.step < trainer.config.training.steps else "trained"


def oscillation_probe(trainer: Trainer, every: int, size: int = 32) -> OscillationProbe:
    """A probe on the first images of the data, with their conditions, and with noise and times of their own."""
    source, device = trainer.source, trainer.device
    size = min(size, len(source))
    index = torch.arange(size)
    images = source.prepare(source.read_many(range(size)).to(device), 0, index.to(device), None)
    process = trainer.objective.process
    t, noise = draw_time_and_noise(process, trainer.config.training.seed + 1, index.to(device), source.shape)
    alpha, sigma = (value.float()[:, None, None, None] for value in process.marginal(t))
    scale = process.input_scale(t)[:, None, None, None]
    x = (scale * (alpha * images + sigma * noise)).float()
    given = trainer.condition.of_rows(caption_rows(0, index, index, source.caption_counts))
    inputs = model_inputs(trainer.model, x, process.network_time(t).float(), **given)
    return OscillationProbe(trainer.model, inputs, every=every)
