"""Train a preset on real data; run the same command again to resume.

Example: scalelong train digits-demo --scaling.method ls --training.steps 200 --out runs/digits-ls

Example: scalelong train cifar10-uvit-s2 --evaluate-every 50000 --sampling.precision bf16 --probe-every 50
"""

from __future__ import annotations

import timeit
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated

import torch
import tyro

from scalelong.cli.arguments import PresetName
from scalelong.data import DataError, Source, make_loader
from scalelong.errors import require
from scalelong.evaluation import get_extractor
from scalelong.evaluation.evaluate import EvaluationObserver, check_count
from scalelong.evaluation.extractors import check_extractor
from scalelong.runs.presets import EXPECTED
from scalelong.runs.settings import Conditioning
from scalelong.stability import OscillationProbe
from scalelong.training import PRESETS, RunConfig, Trainer, from_yaml, get_preset, to_yaml
from scalelong.training.build import build_model, build_objective, build_source, check_config
from scalelong.training.condition import Condition, make_condition
from scalelong.training.step import Stepper
from scalelong.training.validation import ValidationObserver


@dataclass(frozen=True)
class Train:
    preset: PresetName  # one of those above; optional with --config
    out: str = ""  # the run's folder; default: runs/PRESET-METHOD-seedN
    config: str = ""  # a YAML file (such as a run's config.yaml) whose settings override the preset's
    dry_run: bool = False  # print the settings, parameters, memory and time, and train nothing
    probe_every: int = 0  # steps between records of the blocks' feature and gradient norms; 0: never
    validate_every: int = 0  # steps between validation losses, in ten bins of noise; 0: never
    validate_split: str = "test"  # of the data
    validate_images: int = 2000  # the first of the split
    evaluate_every: int = 0  # steps between FID evaluations; 0: never
    evaluate_samples: int = 10_000  # images per evaluation
    evaluate_extractor: str = "inception"  # inception, or random-conv (light, and not FID)
    settings: Annotated[RunConfig, tyro.conf.arg(name="")] = field(default_factory=RunConfig)


def parse(arguments: list[str]) -> Train:
    """The preset, then the YAML file, then the flags: later ones win."""
    about = f"{__doc__}\nPresets: {', '.join(PRESETS)}"

    def parsed(given: list[str], default: Train) -> Train:
        return tyro.cli(Train, args=given, default=default, prog="scalelong train", description=about)

    arguments = [argument.replace("--evaluate-precision", "--sampling.precision") for argument in arguments]
    asked = [argument for argument in arguments if argument not in ("-h", "--help")]
    first = parsed(asked, Train(preset="", settings=RunConfig()))  # finds preset and file in any order
    if not first.preset and not first.config and asked == arguments:
        raise ValueError(f"preset: name the one to train, one of {', '.join(PRESETS)}; or --config FILE")
    settings = get_preset(first.preset) if first.preset else RunConfig()
    if first.config:
        settings = from_yaml(first.config, settings)
    return parsed(arguments, Train(preset=first.preset or Path(first.config).stem, settings=settings))


def main(arguments: list[str]) -> None:
    command = parse(arguments)
    settings = command.settings
    for name in ("probe_every", "validate_every", "evaluate_every"):
        every = getattr(command, name)
        require(every >= 0, name.replace("_", "-"), "a number of steps, or 0 for never", every)
    check_extractor(command.evaluate_extractor)
    evaluation = replace(settings.sampling, count=command.evaluate_samples)
    check_count(evaluation)
    if command.dry_run:
        print_estimate(settings)
        return
    name = f"{command.preset}-{settings.scaling.method}-seed{settings.training.seed}"
    trainer = Trainer(settings, command.out or f"runs/{name}")
    if command.probe_every:
        trainer.observers.append(OscillationProbe(trainer.model, trainer.probe_inputs(), every=command.probe_every))
    if command.validate_every:
        split, images = command.validate_split, command.validate_images
        trainer.observers.append(ValidationObserver(trainer, split, command.validate_every, images))
    if command.evaluate_every:
        extractor = get_extractor(command.evaluate_extractor, trainer.device)
        trainer.observers.append(EvaluationObserver(trainer, extractor, evaluation, command.evaluate_every))
    folder = trainer.run()
    if trainer.ranks.is_main_process:
        state = "stopped" if trainer.step < settings.training.steps else "trained"
        print(f"{state} at step {trainer.step}: {folder}")


def print_estimate(config: RunConfig) -> None:
    """Print the settings, parameters, memory and time; without the data, for the shape that the preset expects."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    print(to_yaml(check_config(config, on_gpu=device.type == "cuda")))
    source: Source | None = None
    try:
        source = build_source(config)
        condition = make_condition(config, source, device)
        shape, conditioning = source.shape, condition.conditioning
        print(f"data        {source.name}: {len(source):,} images of {' x '.join(map(str, shape))}")
    except (DataError, OSError) as error:
        if config.data.name not in EXPECTED:
            raise
        source, (shape, known) = None, EXPECTED[config.data.name]
        known = replace(known, null_class=known.num_classes > 0 and config.condition.drop > 0)
        conditioning = Conditioning() if config.condition.kind == "none" else known
        print(f"data        not there yet: {error}")
        print(f"            computed for {' x '.join(map(str, shape))}, as this preset expects it")
    with torch.device("meta"):
        model = build_model(config, shape, conditioning)
    parameters = sum(p.numel() for p in model.parameters())
    gates = sum(p.numel() for p in model.get_submodule("scalelong").parameters())
    print(f"parameters  {parameters:,}, of them {gates:,} in the skips' gates")
    print(f"memory      {parameters * 20 / 2**30:.2f} GiB for weights, gradients, AdamW and EMA, plus activations")
    if source is not None:
        _print_time(config, source, condition)


def _print_time(config: RunConfig, source: Source, condition: Condition) -> None:
    device, size = condition.device, min(4, config.training.batch_size)
    small = replace(config, training=replace(config.training, batch_size=size, accumulate=1, compile="off"))
    model = build_model(config, source.shape, condition.conditioning).to(device)
    stepper = Stepper(small, model, build_objective(config), device, condition=condition)
    loader = make_loader(source, 0, device, flip=config.data.flip, workers=0)

    def step() -> None:
        pending = stepper.compute(1, loader.batches([torch.arange(size)]))
        stepper.update(pending)
        pending.read()
        stepper.clear()

    seconds = min(timeit.repeat(step, number=1, repeat=3)) * config.training.batch_size / size
    if device.type == "cuda":
        print(f"            {torch.cuda.max_memory_allocated() / 2**30:.2f} GiB was the peak at batch {size}")
    hours = f"{seconds * config.training.steps / 3600:.3g} h in all on this {device.type}"
    print(f"time        about {seconds:.3g} s a step, {hours} (scaled up from batch {size}, not compiled)")
