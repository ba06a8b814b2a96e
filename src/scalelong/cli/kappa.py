"""Choose kappa: the interval of the paper's Sec. 4.1 from data, noise process and number of skips, and one value.

MODEL is a preset or a run folder, which name their data; or, with --data, a diffusers folder or module:callable.

Example: scalelong kappa digits-demo --out runs/kappa

Example: scalelong kappa mymodels:build --data folder:photos --image-size 64
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import tyro

from scalelong.cli.arguments import ModelName
from scalelong.cli.open_model import count_skips, known_config
from scalelong.data import Source, load_source
from scalelong.diffusion import get_process
from scalelong.runs.presets import get_preset
from scalelong.runs.settings import DataSettings, RunConfig
from scalelong.stability.kappa import Recommendation, plot, recommend_kappa


@dataclass(frozen=True)
class Kappa:
    """Options of `scalelong kappa`."""

    model: ModelName  # see above
    data: str | None = None  # instead of the preset's: a name, folder:PATH or hf:NAME; required for other models
    image_size: int | None = None  # crop and resize the data to this
    skips: int | None = None  # the number of long skips; default: the model's
    shape: tuple[str, ...] = ()  # example inputs for unknown classes: 1,3,32,32 is random numbers, 1:int64 zeros
    process: str = ""  # vp, ddpm, cosine, edm; default: the preset's, or vp
    prediction: str = ""  # noise, x0, v; default: the preset's, or the process's own
    num_samples: int = 4096
    seed: int = 0
    out: str = "runs/kappa"  # folder of the plot


def main(arguments: list[str]) -> None:
    """Sample, recommend, plot."""
    command = tyro.cli(Kappa, args=arguments, prog="scalelong kappa", description=__doc__)
    config = known_config(command.model)
    source = find_source(command, config)
    skips = command.skips if command.skips is not None else count_skips(command.model, command.shape, source.shape)
    process = get_process(command.process or (config.diffusion.process if config else "vp"))
    prediction = command.prediction or (config.diffusion.prediction if config else "")
    recommend = partial(recommend_kappa, source, process, skips, samples=command.num_samples, seed=command.seed)
    found = recommend(prediction=prediction)
    out = Path(command.out)
    out.mkdir(parents=True, exist_ok=True)
    name = re.sub(r"[^A-Za-z0-9_.-]+", "-", command.model).strip("-")
    plot(found, f"{name}: {source.name}, {process.name}", out / f"kappa-{name}.png")
    print(summary(found, config))
    if "noise" in process.predictions:
        print(readings(found if found.prediction == "noise" else recommend(prediction="noise")))
    print(f"\npicture  {out / f'kappa-{name}.png'}")


def find_source(command: Kappa, config: RunConfig | None) -> Source:
    """The data given, or those of the preset or run."""
    if config is None and command.data is None:
        if not Path(command.model).exists() and ":" not in command.model:
            get_preset(command.model)  # raises, with the nearest name
        raise ValueError(
            f"data: {command.model} does not name its data; say which it is trained on, for example --data folder:photos"
        )
    settings = config.data if config else DataSettings()
    size = command.image_size or (settings.image_size if command.data is None else None)
    split = settings.split if command.data is None else "train"
    return load_source(command.data or settings.name, image_size=size, split=split, root=settings.root)


def summary(found: Recommendation, config: RunConfig | None) -> str:
    """The numbers, the reasoning and the warnings."""
    low, high = found.kappa_interval
    lines = [
        f"skips N                   {found.num_skips}",
        f"ratio, mean               {found.sum_interval[0]:.3f}  (standard error {found.standard_error:.3f})",
        f"ratio, 97% quantile       {found.sum_interval[1]:.3f}",
        f"kappa of CS, interval     {low:.3f} .. {high:.3f}  (middle {found.middle:.3f})",
        f"kappa of CS, recommended  {found.kappa:g}",
    ]
    if config is not None and "kappa" in config.scaling.options():
        lines.append(f"kappa in the settings     {config.scaling.kappa} ({config.scaling.method})")
    return "\n".join([*lines, "", found.reasoning, *(f"warning: {warning}" for warning in found.warnings)])


def readings(found: Recommendation) -> str:
    """Both meanings of the paper's mean ratio, 1.22, on these data, and the lemma's value."""
    head = (
        "The paper's mean ratio of 1.22 (target eps) is a mean of ratios or, as Lemma 3.2 suggests, a ratio of means:"
    )
    rows = [
        f"  {reading.name.ljust(24)}{reading.ratio:.3f}   kappa {reading.kappa_interval[0]:.3f} .. "
        f"{reading.kappa_interval[1]:.3f}"
        for reading in found.readings
    ]
    return "\n".join(["", head, *rows])
