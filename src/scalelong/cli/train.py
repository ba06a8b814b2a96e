"""Train a preset on real data; run the same command again to resume.

Example: scalelong train digits-demo --method ls --steps 200 --out runs/digits-ls

Example: scalelong train cifar10-uvit-s2 --evaluate-every 50000 --sampling.precision bf16 --probe-every 50
"""

from __future__ import annotations

import json
import re
import timeit
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated

import torch
import tyro

from scalelong.backbones import as_network
from scalelong.cli.arguments import PresetName
from scalelong.data import DataError, Shape
from scalelong.data.download import DOWNLOADS
from scalelong.diffusion import draw_time_and_noise
from scalelong.errors import require
from scalelong.evaluation import get_extractor
from scalelong.evaluation.evaluate import EvaluationObserver, check_count
from scalelong.evaluation.extractors import check_extractor
from scalelong.report.numbers import duration
from scalelong.runs import CONFIG
from scalelong.runs.presets import EXPECTED
from scalelong.runs.settings import Conditioning
from scalelong.stability import OscillationProbe
from scalelong.training import PRESETS, RunConfig, Trainer, from_yaml, get_preset, to_yaml
from scalelong.training.build import build_model, build_objective, build_source, check_config
from scalelong.training.step import autocast, resolve_precision

SHORT = {  # names that flags have in other verbs
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
    preset: PresetName  # one of those above; optional with --config
    out: str = ""  # the run's folder; default: runs/PRESET-METHOD-seedN
    config: str = ""  # a YAML file (such as a run's config.yaml) whose settings override the preset's
    dry_run: bool = False  # print settings, parameters, memory and time; fetches nothing and trains nothing
    probe_every: int = 0  # steps between records of the blocks' feature and gradient norms; 0: never
    evaluate_every: int = 0  # steps between FID evaluations; 0: never
    evaluate_samples: int = 10_000  # images per evaluation
    evaluate_extractor: str = "inception"  # inception, or random-conv (light, and not FID)
    settings: Annotated[RunConfig, tyro.conf.arg(name="")] = field(default_factory=RunConfig)


def parse(arguments: list[str]) -> Train:
    """The preset, then the YAML file, then the flags: later ones win."""
    short = ", ".join(f"{short} for {flag}" for short, flag in SHORT.items() if short != "--evaluate-precision")
    about = f"{__doc__}\nShort: {short}\n\nPresets: {', '.join(PRESETS)}"

    def parsed(given: list[str], default: Train) -> Train:
        return tyro.cli(Train, args=given, default=default, prog="scalelong train", description=about)

    arguments = [_long(argument) for argument in arguments]
    asked = [argument for argument in arguments if argument not in ("-h", "--help")]
    first = parsed(asked, Train(preset="", settings=RunConfig()))  # finds preset and file in any order
    if not first.preset and not first.config and asked == arguments:
        raise ValueError(f"preset: name the one to train, one of {', '.join(PRESETS)}; or --config FILE")
    settings = get_preset(first.preset) if first.preset else RunConfig()
    if first.config:
        settings = from_yaml(first.config, settings)
    return parsed(arguments, Train(preset=first.preset, settings=settings))


def _long(argument: str) -> str:
    """The flags of other verbs, such as --method, as those of `train`."""
    flag, equals, value = argument.partition("=")
    return f"{SHORT.get(flag, flag)}{equals}{value}"


def run_name(command: Train) -> str:
    """PRESET-METHOD-seedN; without a preset, the name of the file, or of data and model for a run's config.yaml."""
    settings, file = command.settings, Path(command.config)
    name = command.preset or file.stem
    if not command.preset and file.name == CONFIG:
        name = re.sub(r"[^A-Za-z0-9_.-]+", "-", f"{settings.data.name}-{settings.model.backbone}")
    return f"{name}-{settings.scaling.method}-seed{settings.training.seed}"


def main(arguments: list[str]) -> None:
    command = parse(arguments)
    settings = command.settings
    for name, every in (("probe-every", command.probe_every), ("evaluate-every", command.evaluate_every)):
        require(every >= 0, name, "a number of steps, or 0 for never", every)
    check_extractor(command.evaluate_extractor)
    evaluation = replace(settings.sampling, count=command.evaluate_samples)
    check_count(evaluation)
    if command.dry_run:
        print_estimate(settings)
        return
    trainer = Trainer(settings, command.out or f"runs/{run_name(command)}")
    if command.probe_every:
        trainer.observers.append(OscillationProbe(trainer.model, trainer.probe_inputs(), every=command.probe_every))
    if command.evaluate_every:
        extractor = get_extractor(command.evaluate_extractor, trainer.device)
        trainer.observers.append(EvaluationObserver(trainer, extractor, evaluation, command.evaluate_every))
    folder = trainer.run()
    if trainer.ranks.is_main_process:
        state = "stopped" if trainer.step < settings.training.steps else "trained"
        print(f"{state} at step {trainer.step}: {folder}")


def print_estimate(config: RunConfig) -> None:
    """Print what training would take; data that is not on this machine is assumed to be as the preset expects it."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    check_config(config, on_gpu=device.type == "cuda")
    shape, conditioning, about = _expected_data(config)
    with torch.device("meta"):
        model = build_model(config, shape, conditioning)
    parameters = sum(p.numel() for p in model.parameters())
    gates = sum(p.numel() for p in model.get_submodule("scalelong").parameters())
    seconds, batch = _seconds_per_step(config, shape, conditioning, device)
    images = " x ".join(map(str, shape))
    total = f"{duration(seconds * config.training.steps)} in all on this {device.type}"
    print(to_yaml(config))
    print(f"data        {config.data.name}: {about} of {images}")
    print(f"parameters  {parameters:,}, of them {gates:,} in the skips' gates")
    print(f"memory      {parameters * 20 / 2**30:.2f} GiB for weights, gradients, AdamW and EMA, plus activations")
    print(f"time        about {duration(seconds)} a step, {total}")
    images = "1 random image" if batch == 1 else f"{batch} random images"
    print(f"            (gradients of {images}, scaled up to batch {config.training.batch_size}; not compiled)")


def _expected_data(config: RunConfig) -> tuple[Shape, Conditioning, str]:
    """Shape and condition of the data, and how many images there are; nothing is fetched or encoded."""
    data, condition = config.data, config.condition
    known = EXPECTED.get(data.name)
    there = not (data.name in DOWNLOADS and DOWNLOADS[data.name].check(data.root)) and not data.name.startswith("hf:")
    classes, names = (known[1].num_classes, known[1].class_names) if known else (0, ())
    try:
        source = build_source(config) if there else None
    except (DataError, OSError):
        if known is None:
            raise
        source = None
    if source is not None:
        shape, about, classes = source.shape, f"{len(source):,} images", source.num_classes
    else:
        shape, about = known[0] if known else (3, 0, 0), "not there yet; expected are images"
        shape = (shape[0], data.image_size, data.image_size) if data.image_size else shape
        if not shape[1]:
            raise DataError(f"data.name: {data.name} is not there yet, so its size is not known; set data.image_size")
    if condition.kind == "class":
        return shape, Conditioning(classes or 10, condition.drop > 0, tuple(names)), about
    if condition.kind == "text":
        return shape, Conditioning(text_tokens=condition.max_tokens, text_dim=_text_dim(condition.encoder)), about
    return shape, Conditioning(), about


def _text_dim(encoder: str) -> int:
    """Width of a text encoder, from its folder if it is on this machine."""
    file = Path(encoder) / "config.json"
    if file.is_file():
        config = json.loads(file.read_text())
        return int((config.get("text_config") or config).get("hidden_size", 768))
    return 384 if encoder == "minilm" else 768


def _seconds_per_step(
    config: RunConfig, shape: Shape, conditioning: Conditioning, device: torch.device
) -> tuple[float, int]:
    """Seconds for the gradients of a whole batch, scaled up from a few random images; and how many those were."""
    size = min(1 if device.type == "cpu" else 16, config.training.batch_size)
    model, objective = build_model(config, shape, conditioning).to(device), build_objective(config)
    index = torch.arange(size, device=device)
    t, noise = draw_time_and_noise(objective.process, 0, index, shape)
    given: dict[str, torch.Tensor] = {}
    if conditioning.num_classes:
        given["class_labels"] = index % conditioning.num_classes
    if conditioning.text_dim:
        given["context"] = torch.zeros(size, conditioning.text_tokens, conditioning.text_dim, device=device)
    net, precision = as_network(model), autocast(device, resolve_precision(config, device))

    def gradients() -> None:
        with precision:
            loss = objective.loss(net, noise, noise, t, **given).mean()
        loss.backward()  # type: ignore[no-untyped-call]
        if device.type == "cuda":
            torch.cuda.synchronize()

    seconds = timeit.timeit(gradients, number=1)
    if seconds < 1:  # the first call may be slower
        seconds = min(timeit.repeat(gradients, number=1, repeat=3))
    return seconds * config.training.batch_size / size, size
