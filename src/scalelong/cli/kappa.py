"""Which kappa: the interval of the paper's Sec. 4.1 from data, noise and number of skips, and one value, with the reasons.

MODEL is a preset or a run's folder, which bring their data along; or, with --data, a diffusers folder or module:callable.

Example: scalelong kappa digits-demo --out runs/kappa

Example: scalelong kappa mymodels:build --data folder:photos --image-size 64
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import matplotlib
import torch
import tyro

from scalelong import coefficients, find_skips
from scalelong.cli.arguments import ModelName
from scalelong.cli.open_model import open_model
from scalelong.data import Shape, Source, load_source
from scalelong.diffusion import get_process
from scalelong.runs.settings import DataSettings
from scalelong.skips import is_scaled
from scalelong.skips.auto import sum_of_squares
from scalelong.skips.example import is_meta
from scalelong.stability.kappa import Recommendation, recommend_kappa
from scalelong.training import PRESETS, RunConfig, from_yaml, get_preset
from scalelong.training.build import build_model

matplotlib.use("Agg")
import matplotlib.pyplot as plt

BLUE, ORANGE, RED = "#4e79a7", "#f28e2b", "#e15759"


@dataclass(frozen=True)
class Kappa:
    """What is on the command line."""

    model: ModelName  # see above
    data: str | None = None  # instead of the preset's: a name, folder:PATH or hf:NAME; needed where there is no preset
    image_size: int | None = None  # crop and resize the data to this
    skips: int | None = None  # instead of the model's: the number of long skips
    shape: tuple[str, ...] = ()  # example inputs for unknown classes: 1,3,32,32 is random numbers, 1:int64 zeros
    process: str = ""  # vp, ddpm, cosine, edm; default: the preset's, or vp
    prediction: str = ""  # noise, x0, v; default: the preset's, or the process's own
    samples: int = 4096
    seed: int = 0
    out: str = "runs/kappa"  # folder of the plot


def main(arguments: list[str]) -> None:
    """Sample, recommend, draw."""
    command = tyro.cli(Kappa, args=arguments, prog="scalelong kappa", description=__doc__)
    config = known_config(command.model)
    source = find_source(command, config)
    skips = command.skips if command.skips is not None else count_skips(command, config, source.shape)
    process = get_process(command.process or (config.diffusion.process if config else "vp"))
    prediction = command.prediction or (config.diffusion.prediction if config else "")
    found = recommend_kappa(source, process, skips, prediction=prediction, samples=command.samples, seed=command.seed)
    out = Path(command.out)
    out.mkdir(parents=True, exist_ok=True)
    name = re.sub(r"[^A-Za-z0-9_.-]+", "-", command.model).strip("-")
    plot(found, f"{name}: {source.name}, {process.name}", out / f"kappa-{name}.png")
    print(summary(found, config))
    if found.prediction != "noise" and "noise" in process.predictions:
        paper = recommend_kappa(source, process, skips, prediction="noise", samples=command.samples, seed=command.seed)
        low, high = paper.kappa_interval
        print(f"\nWith eps as the target, as in the paper: kappa {low:.3f} .. {high:.3f}, middle {paper.middle:.3f}.")
    print(f"\npicture  {out / f'kappa-{name}.png'}")


def known_config(model: str) -> RunConfig | None:
    """The configuration of a preset or a run; None for other models."""
    if model in PRESETS:
        return get_preset(model)
    path = Path(model) / "config.yaml"
    return from_yaml(path) if path.is_file() else None


def find_source(command: Kappa, config: RunConfig | None) -> Source:
    """The data asked for, or those of the preset or run."""
    if config is None and command.data is None:
        if not Path(command.model).exists() and ":" not in command.model:
            get_preset(command.model)  # refuses the name, and suggests the nearest
        raise ValueError(
            f"data: {command.model} brings no data along; say which it is trained on, for example --data folder:photos"
        )
    settings = config.data if config else DataSettings()
    size = command.image_size or (settings.image_size if command.data is None else None)
    split = settings.split if command.data is None else "train"
    return load_source(command.data or settings.name, image_size=size, split=split, root=settings.root)


def count_skips(command: Kappa, config: RunConfig | None, shape: Shape) -> int:
    """The number of long skips; a preset's model is built without memory on the meta device."""
    if config is not None and config.condition.kind != "text":
        with torch.device("meta"):
            return len(find_skips(build_model(config, shape)))
    opened = open_model(command.model, command.shape)
    args, kwargs = opened.small if opened.small is not None and not is_meta(opened.model) else ((), {})
    if is_scaled(opened.model):
        return len(coefficients(opened.model))
    return len(find_skips(opened.model, *args, **kwargs))


def summary(found: Recommendation, config: RunConfig | None) -> str:
    """The numbers, the reasoning and what to beware of."""
    low, high = found.kappa_interval
    lines = [
        f"skips N                   {found.num_skips}",
        f"ratio, mean               {found.mean_ratio:.3f}  (standard error {found.standard_error:.3f})",
        f"ratio, 97% quantile       {found.tail_ratio:.3f}",
        f"kappa of CS, interval     {low:.3f} .. {high:.3f}  (middle {found.middle:.3f})",
        f"kappa of CS, recommended  {found.kappa:g}",
    ]
    if config is not None and "kappa" in config.scaling.options():
        lines.append(f"kappa in the settings     {config.scaling.kappa} ({config.scaling.method})")
    return "\n".join([*lines, "", found.reasoning, *(f"warning: {warning}" for warning in found.warnings)])


def plot(found: Recommendation, title: str, path: Path) -> None:
    """The distribution of the ratio with the interval, and kappa against the sum."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.8), layout="constrained")
    low, high = found.sum_interval
    shown = [ratio for ratio in found.ratios if ratio <= 2 * high]
    left.hist(shown, 60, color=BLUE, alpha=0.8)
    left.axvline(low, color=ORANGE, label=f"mean {low:.2f}")
    left.axvline(high, color=RED, label=f"97% quantile {high:.2f}")
    left.set(xlabel="||target||² / ||x_t||²", ylabel="samples")
    left.set_title(title, fontsize=10.5, loc="left")
    grid = [i / 200 for i in range(201)]
    right.plot(grid, [sum_of_squares(kappa, found.num_skips) for kappa in grid], color=BLUE)
    right.axhspan(low, high, color=ORANGE, alpha=0.2, label="interval for the sum")
    right.axvspan(*found.kappa_interval, color=BLUE, alpha=0.12, label="interval for κ")
    right.plot(
        found.kappa,
        sum_of_squares(found.kappa, found.num_skips),
        "o",
        color=RED,
        label=f"recommended κ = {found.kappa:g}",
    )
    right.set(xlabel="κ", ylabel="Σ κ^(2(i-1))", ylim=(0.5, max(found.num_skips, high) * 1.05))
    right.set_title(f"CS with N = {found.num_skips} skips", fontsize=10.5, loc="left")
    for axes in (left, right):
        axes.legend(frameon=False, fontsize=8)
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=100)
    plt.close(figure)
