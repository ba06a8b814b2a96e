"""`scalelong kappa`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import tyro

from scalelong.cli.arguments import ModelName
from scalelong.cli.open_model import count_skips, known_config
from scalelong.data import load_source
from scalelong.diffusion import get_process
from scalelong.errors import unknown_name
from scalelong.files import check_writable
from scalelong.runs.presets import PRESETS
from scalelong.runs.settings import DataSettings, DiffusionSettings, RunConfig
from scalelong.stability.kappa import Recommendation, plot, recommend_kappa


@dataclass(frozen=True)
class Kappa:
    """Recommend kappa: the interval of Sec. 4.1 from data, noise process and number of skips, and one value.

    MODEL is a preset or a run folder; or, with --data, a diffusers folder or module:callable.

    Example: scalelong kappa digits-demo --out runs/kappa

    Example: scalelong kappa mymodels:build --data folder:photos --image-size 64
    """

    model: ModelName  # see above
    data: str | None = None  # a name, folder:PATH or hf:NAME; default: the preset's; required for other models
    image_size: int | None = None  # crop and resize the data to this
    skips: int | None = None  # the number of long skips; default: the model's
    shape: tuple[str, ...] = ()  # example inputs for unknown classes: 1,3,32,32 is random numbers, 1:int64 zeros
    process: str = ""  # vp, ddpm, cosine, edm; default: the preset's, or vp
    prediction: str = ""  # noise, x0, v; default: the preset's, or the process's own
    steps: int | None = None  # training steps; default: the preset's
    num_samples: Annotated[int, tyro.conf.arg(aliases=["--samples"])] = 4096
    seed: int = 0
    out: str = "runs/kappa"  # folder of the plot


def main(arguments: list[str]) -> None:
    """Sample, recommend, plot."""
    command = tyro.cli(Kappa, args=arguments, prog="scalelong kappa")
    check_writable(Path(command.out))
    config = known_config(command.model)
    if config is None and command.data is None:
        if not Path(command.model).exists() and ":" not in command.model:
            raise unknown_name("preset", command.model, PRESETS)
        raise ValueError(f"data: {command.model} does not name its data; pass it, for example --data folder:photos")
    data = config.data if config and command.data is None else DataSettings(command.data or "")
    root = config.data.root if config else None
    source = load_source(data.name, image_size=command.image_size or data.image_size, split=data.split, root=root)
    skips = command.skips if command.skips is not None else count_skips(command.model, command.shape, source.shape)
    diffusion = config.diffusion if config else DiffusionSettings()
    process = get_process(command.process or diffusion.process)
    steps = command.steps if command.steps is not None else config.training.steps if config else None
    options: dict[str, Any] = {"samples": command.num_samples, "seed": command.seed, "steps": steps}
    recommend = partial(recommend_kappa, source, process, skips, **options)
    found = recommend(prediction=command.prediction or diffusion.prediction)
    name = re.sub(r"[^A-Za-z0-9_.-]+", "-", command.model).strip("-")
    picture = Path(command.out) / f"kappa-{name}.png"
    picture.parent.mkdir(parents=True, exist_ok=True)
    plot(found, f"{name}: {source.name}, {process.name}", picture)
    print(summary(found, config))
    if "noise" in process.predictions:
        print("\nThe paper's mean ratio of 1.22 (target eps) is a mean of ratios or, by Lemma 3.2, a ratio of means:")
        for reading in (found if found.prediction == "noise" else recommend(prediction="noise")).readings:
            print("  {:24}{:.3f}   kappa {:.3f} .. {:.3f}".format(reading.name, reading.ratio, *reading.kappa_interval))
    print(f"\npicture  {picture}")


def summary(found: Recommendation, config: RunConfig | None) -> str:
    """The numbers, the reasoning and the warnings."""
    (mean, tail), (low, high) = found.sum_interval, found.kappa_interval
    lines = [
        f"skips N                   {found.num_skips}",
        f"ratio, mean               {mean:.3f}  (standard error {found.standard_error:.3f})",
        f"ratio, 97% quantile       {tail:.3f}",
        f"kappa of CS, interval     {low:.3f} .. {high:.3f}  (middle {found.middle:.3f})",
        f"kappa of CS, recommended  {found.kappa:g}{' (no scaling)' if found.kappa == 1 else ''}",
    ]
    if config is not None and "kappa" in config.scaling.options():
        lines.append(f"kappa in the settings     {config.scaling.kappa} ({config.scaling.method})")
    return "\n".join([*lines, "", found.reasoning, *(f"warning: {warning}" for warning in found.warnings)])
