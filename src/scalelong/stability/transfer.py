"""Measure transfer of the best learning rate or kappa across widths with a grid of short runs."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import mean
from typing import Any

from matplotlib import colormaps
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator

from scalelong.errors import require, unknown_name
from scalelong.files import write_text
from scalelong.report.plots import save_figure
from scalelong.runs import METRICS
from scalelong.runs.events import read_events
from scalelong.runs.folder import check_folder, checkpoints
from scalelong.runs.settings import MupSettings, RunConfig
from scalelong.training import NonFiniteError, Trainer
from scalelong.training.build import at_width, check_config
from scalelong.training.ranks import is_main_rank

logger = logging.getLogger(__name__)
RESULTS = "transfer.json"
PARAMETRIZATIONS = ("mup", "standard")


@dataclass(frozen=True)
class Point:
    """One run of the grid."""

    parametrization: str
    width: int
    lr: float
    kappa: float
    seed: int
    loss: float | None = None  # mean training loss over the last tenth of the steps; None: diverged or not trained yet

    @property
    def name(self) -> str:
        return f"{self.parametrization}-w{self.width}-lr{self.lr:g}-k{self.kappa:g}-seed{self.seed}"


def transfer_grid(
    preset: RunConfig,
    widths: Sequence[int],
    rates: Sequence[float],
    *,
    kappas: Sequence[float] = (),
    seeds: Sequence[int] = (0,),
    parametrizations: Sequence[str] = PARAMETRIZATIONS,
) -> dict[Point, RunConfig]:
    """Configurations for every width, rate, kappa and seed in both parametrizations; the first width is the muP base.

    >>> from scalelong.runs.presets import get_preset
    >>> [point.name for point in transfer_grid(get_preset("digits-demo"), (32, 64), (1e-3,), parametrizations=("mup",))]
    ['mup-w32-lr0.001-k0.7-seed0', 'mup-w64-lr0.001-k0.7-seed0']
    """
    require(len(set(widths)) >= 2, "widths", "at least two different widths", tuple(widths))
    require(bool(rates) and min(rates) > 0, "rates", "at least one positive learning rate", tuple(rates))
    grid = {}
    for kind in parametrizations:
        if kind not in PARAMETRIZATIONS:
            raise unknown_name("parametrizations", kind, PARAMETRIZATIONS)
        for width in widths:
            for lr, kappa, seed in ((r, k, s) for r in rates for k in kappas or (preset.scaling.kappa,) for s in seeds):
                config = replace(
                    preset,
                    model=at_width(preset.model, width, "widths"),
                    optimizer=replace(preset.optimizer, lr=lr),
                    scaling=replace(preset.scaling, kappa=kappa),
                    mup=MupSettings(widths[0] if kind == "mup" else 0),
                    training=replace(preset.training, seed=seed),
                )
                grid[Point(kind, width, lr, kappa, seed)] = check_config(config)
    return grid


def run_transfer(grid: Mapping[Point, RunConfig], out: str | Path) -> list[Point]:
    """Train missing runs in folders below `out` and return the points with their losses.

    `out`/transfer.json is updated after every run.
    """
    out, points = Path(out), []
    for position, (point, config) in enumerate(grid.items(), 1):
        if is_main_rank():
            logger.info("run %d of %d: %s", position, len(grid), point.name)
        points.append(replace(point, loss=loss_of(config, out / point.name)))
        if is_main_rank():
            write_text(out / RESULTS, json.dumps([asdict(point) for point in points], indent=1) + "\n")
    return points


def loss_of(config: RunConfig, folder: Path) -> float | None:
    """Train in `folder` unless complete, and return the mean training loss over the last tenth; None if not finite."""
    check_folder(folder, config)
    complete = max(checkpoints(folder), default=0) >= config.training.steps
    if not complete and not _diverged(folder):
        try:
            trainer = Trainer(config, folder)
            trainer.run()
            if trainer.stopping:
                raise RuntimeError(f"stopped in {folder.name} at step {trainer.step}; repeat the command to continue")
        except NonFiniteError as error:
            logger.warning("%s: %s", folder, error)
    return None if _diverged(folder) else final_loss(folder)


def _diverged(folder: Path) -> bool:
    return (folder / METRICS).is_file() and any(record.get("kind") == "diverged" for record in read_events(folder)[0])


def final_loss(folder: Path) -> float:
    """Mean training loss over the last tenth of a run's records; all widths see the same images, times and noise."""
    losses = [record["loss"] for record in read_events(folder)[0] if record["kind"] == "train"]
    if not losses:
        raise ValueError(f"{folder / METRICS}: holds no training record; lower training.log_every")
    return float(mean(losses[-max(1, len(losses) // 10) :]))


@dataclass(frozen=True)
class Optimum:
    """The best value of one parametrization at one width, by mean loss over seeds."""

    parametrization: str
    width: int
    best: float
    loss: float
    seeds: int


def optima(points: Sequence[Point], over: str = "lr") -> list[Optimum]:
    """The best rate (over="lr") or kappa at every width; ignores values with diverged or missing seeds.

    >>> runs = [Point("mup", width, lr, 0.7, 0, loss=(lr - 1e-3) ** 2) for width in (64, 128) for lr in (1e-3, 2e-3)]
    >>> [(found.width, found.best) for found in optima(runs)]
    [(64, 0.001), (128, 0.001)]
    """
    found = []
    for kind, width in dict.fromkeys((point.parametrization, point.width) for point in points):
        counted, seeds = _counted(points, kind, width, over)
        if counted:
            best = min(counted, key=lambda value: counted[value])
            found.append(Optimum(kind, width, best, counted[best], seeds))
    return found


def _counted(points: Sequence[Point], kind: str, width: int, over: str) -> tuple[dict[float, float], int]:
    """Mean loss per value with the most seeds and no divergence, and the number of seeds."""
    curve = _curve(points, kind, width, over)
    most = max(seeds for _, seeds in curve.values())
    return {v: loss for v, (loss, seeds) in curve.items() if math.isfinite(loss) and seeds == most}, most


def _curve(points: Sequence[Point], kind: str, width: int, over: str) -> dict[float, tuple[float, int]]:
    """Value -> (mean loss over seeds at the best other value, inf if a seed diverged; number of seeds)."""
    other, curve = "kappa" if over == "lr" else "lr", {}
    mine = [point for point in points if (point.parametrization, point.width) == (kind, width)]
    for value in sorted({getattr(point, over) for point in mine}):
        here = [point for point in mine if getattr(point, over) == value]
        losses: dict[float, list[float]] = {}
        for point in here:
            losses.setdefault(getattr(point, other), []).append(math.inf if point.loss is None else point.loss)
        curve[value] = min(map(mean, losses.values())), len({point.seed for point in here})
    return curve


def summary(points: Sequence[Point], over: str = "lr") -> str:
    """The best value at every width, the factor by which it moves, and whether wider is better at the base's best value."""
    found, lines = optima(points, over), [f"{'':9} {'width':>6} {'best ' + over:>10} {'loss':>9} {'seeds':>6}"]
    for kind in dict.fromkeys(each.parametrization for each in found):
        rows = [each for each in found if each.parametrization == kind]
        lines += [f"{kind:9} {row.width:6d} {row.best:10.3g} {row.loss:9.5f} {row.seeds:6d}" for row in rows]
        moved = max(row.best for row in rows) / min(row.best for row in rows)
        held = [_curve(points, kind, row.width, over).get(rows[0].best, (math.inf, 0))[0] for row in rows]
        wider = all(later <= earlier for earlier, later in pairwise(held))
        better = "is never worse" if wider else "is sometimes worse"
        lines.append(f"{kind:9} the best {over} moves by a factor of {moved:.3g}; at {rows[0].best:g}, wider {better}")
    return "\n".join(lines)


def plot(points: Sequence[Point], path: str | Path, over: str = "lr") -> Path:
    """Plot loss against rate or kappa, one line per width, one panel per parametrization.

    Thin lines: single seeds; thick lines: means over all seeds; circles: best values.
    """
    kinds, widths = list(dict.fromkeys(p.parametrization for p in points)), sorted({p.width for p in points})
    figure = Figure(figsize=(5.0 * len(kinds) + 1.2, 4.2), layout="constrained")
    axes = figure.subplots(1, len(kinds), sharey=True, squeeze=False)
    best = {(each.parametrization, each.width): each for each in optima(points, over)}
    shades = colormaps["viridis_r"]([0.12 + 0.78 * i / max(len(widths) - 1, 1) for i in range(len(widths))])
    colours = dict(zip(widths, shades, strict=True))
    axis: Any
    for axis, kind in zip(axes[0], kinds, strict=True):
        for width in widths:
            if (kind, width) not in best:
                continue
            mine = [p for p in points if (p.parametrization, p.width) == (kind, width) and p.loss is not None]
            for seed in {p.seed for p in mine}:
                run = sorted((getattr(p, over), p.loss) for p in mine if p.seed == seed)
                axis.plot(*zip(*run, strict=True), ".-", color=colours[width], alpha=0.35, linewidth=0.8)
            counted, style = _counted(points, kind, width, over)[0], {"color": colours[width], "linewidth": 2.2}
            axis.plot(list(counted), list(counted.values()), label=f"width {width}", **style)
            found, ring = best[kind, width], {"markersize": 12, "markeredgewidth": 2, "markerfacecolor": "none"}
            axis.plot(found.best, found.loss, "o", color=colours[width], **ring)
        if over == "lr":
            axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        axis.set(title="muP" if kind == "mup" else kind, xlabel="learning rate" if over == "lr" else over)
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0][0].yaxis.set_major_locator(LogLocator(subs=(1, 1.5, 2, 3, 5, 7)))
    axes[0][0].yaxis.set_major_formatter("{x:g}")
    axes[0][0].yaxis.set_minor_locator(NullLocator())
    axes[0][0].set_ylabel("training loss at the end")
    axes[0][0].legend(frameon=False)
    return save_figure(figure, path)
