"""Rules that choose kappa from a short look: at the data, at the model as it is initialised, or at its first steps."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import mean

import torch

from scalelong.backbones import as_network
from scalelong.data import Source, load_source, to_float
from scalelong.diffusion import draw_time_and_noise
from scalelong.report.series import RunSeries
from scalelong.skips import find_skips
from scalelong.stability import OscillationProbe, recommend_kappa, relative_oscillation
from scalelong.training import RunConfig
from scalelong.training.build import build_model, build_objective

GRID = (0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
PILOT_SHARE = 1 / 3  # of a run: what may be spent on a pilot here
INTERVAL, OUTPUT, GRADIENTS = "middle of the interval", "output norm at init", "equal gradients at init"
PILOT_LOSS, PILOT_OSCILLATION = "pilot, lowest loss", "pilot, least oscillation"
RULES = (INTERVAL, OUTPUT, GRADIENTS, PILOT_LOSS, PILOT_OSCILLATION)


@dataclass(frozen=True)
class Chosen:
    """What a rule chose for one seed, and the grid's kappa next to it."""

    rule: str
    seed: int
    kappa: float

    @property
    def nearest(self) -> float:
        return min(GRID, key=lambda kappa: abs(kappa - self.kappa))


def choices(runs: Sequence[RunSeries]) -> list[Chosen]:
    """Every rule's choice for every seed of a grid of runs."""
    found = []
    for seed in sorted({run.seed for run in runs}):
        own = {run.config.scaling.kappa: run for run in runs if run.seed == seed}
        config = own[1.0].config
        source = load_source(config.data.name, image_size=config.data.image_size, root=config.data.root)
        found += [
            Chosen(INTERVAL, seed, from_interval(config, source)),
            Chosen(OUTPUT, seed, _best(lambda k, c=config, s=source: output_mismatch(_with(c, k), s))),
            Chosen(GRADIENTS, seed, _best(lambda k, c=config, s=source: gradient_imbalance(_with(c, k), s))),
            Chosen(PILOT_LOSS, seed, _best(lambda k, runs=own: pilot_loss(runs[k]))),
            Chosen(PILOT_OSCILLATION, seed, _best(lambda k, runs=own: pilot_oscillation(runs[k]))),
        ]
    return found


def from_interval(config: RunConfig, source: Source) -> float:
    """recommend_kappa: the data, the noise and the number of skips."""
    with torch.device("meta"):
        skips = len(find_skips(build_model(config, source.shape)))
    objective = build_objective(config)
    return recommend_kappa(source, objective.process, skips, prediction=objective.prediction).kappa


def output_mismatch(config: RunConfig, source: Source) -> float:
    """|log(||output|| / ||target||)| at initialisation."""
    objective = build_objective(config)
    images, t, noise = _batch(config, source)
    alpha, sigma = (value.float()[:, None, None, None] for value in objective.process.marginal(t))
    p, q = objective.target_weights(alpha, sigma)
    model = build_model(config, source.shape)
    with torch.no_grad():
        output = as_network(model)(alpha * images + sigma * noise, objective.process.network_time(t).float())
    return float((output.norm() / (p * images + q * noise).norm()).log().abs())


def gradient_imbalance(config: RunConfig, source: Source) -> float:
    """The standard deviation over the blocks of log ||gradient|| at initialisation."""
    images, t, noise = _batch(config, source)
    model = build_model(config, source.shape)
    build_objective(config).loss(as_network(model), images, noise, t).mean().backward()
    norms = OscillationProbe(model, (images, t)).gradient_norms()
    return float(torch.tensor(list(norms.values())).log().std())


def pilot_loss(run: RunSeries) -> float:
    """Mean loss over the second half of the pilot."""
    last = pilot_steps(run)
    steps, losses = run.column("train", "loss", last)
    return mean(loss for step, loss in zip(steps, losses, strict=True) if step > last // 2)


def pilot_oscillation(run: RunSeries) -> float:
    """Mean over the blocks of the relative oscillation in the second half of the pilot."""
    last, found = pilot_steps(run), []
    for block in run.blocks:
        steps, norms = run.column("probe", f"norm/{block}", last)
        found.append(relative_oscillation([n for s, n in zip(steps, norms, strict=True) if s > last // 2]))
    return mean(found)


def pilot_steps(run: RunSeries) -> int:
    """How long the pilot is: the first part of the run itself."""
    return int(PILOT_SHARE * run.config.training.steps)


def _best(score: Callable[[float], float]) -> float:
    return min(GRID, key=score)


def _with(config: RunConfig, kappa: float) -> RunConfig:
    return dataclasses.replace(config, scaling=dataclasses.replace(config.scaling, kappa=kappa))


def _batch(config: RunConfig, source: Source, size: int = 64) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Images with times and noises of the run's own seed."""
    index = torch.arange(size)
    images = to_float(source.read_many((index % len(source)).tolist()))
    t, noise = draw_time_and_noise(build_objective(config).process, config.training.seed, index, source.shape)
    return images, t, noise
