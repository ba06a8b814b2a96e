"""Rules that choose kappa from a short look: at the data, at the model as it is initialised, or at its first steps."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from stack import Course, Member

from scalelong.backbones import as_network
from scalelong.data import Source, to_float
from scalelong.diffusion import draw_time_and_noise
from scalelong.skips import find_skips
from scalelong.stability import OscillationProbe, recommend_kappa, relative_oscillation
from scalelong.training import RunConfig
from scalelong.training.build import build_model, build_objective

GRID = (0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
PILOT_SHARE = 1 / 3  # of a run: what may be spent on a pilot here
INTERVAL, HELD = "middle of the interval", "0.7 held in the interval"
OUTPUT, GRADIENTS = "output norm at init", "equal gradients at init"
PILOT_LOSS, PILOT_OSCILLATION = "pilot, lowest loss", "pilot, least oscillation"
RULES = (INTERVAL, HELD, OUTPUT, GRADIENTS, PILOT_LOSS, PILOT_OSCILLATION)


@dataclass(frozen=True)
class Chosen:
    """What a rule chose for one seed, and the grid's kappa next to it."""

    rule: str
    seed: int
    kappa: float

    @property
    def nearest(self) -> float:
        return min(GRID, key=lambda kappa: abs(kappa - self.kappa))


def choices(config: RunConfig, source: Source, members: Sequence[Member], course: Course) -> list[Chosen]:
    """Every rule's choice for every seed of a grid of constant kappas."""
    objective = build_objective(config)
    with torch.device("meta"):
        skips = len(find_skips(build_model(config, source.shape)))
    paper = recommend_kappa(source, objective.process, skips, prediction=objective.prediction)
    low, high = paper.kappa_interval
    found = []
    for seed in dict.fromkeys(member.seed for member in members):
        column = {m.kappa: i for i, m in enumerate(members) if m.seed == seed and not m.warm_steps}
        here = dataclasses.replace(config, training=dataclasses.replace(config.training, seed=seed))
        found += [
            Chosen(INTERVAL, seed, paper.middle),
            Chosen(HELD, seed, min(max(0.7, low), high)),
            Chosen(OUTPUT, seed, _best(partial(output_mismatch, here, source))),
            Chosen(GRADIENTS, seed, _best(partial(gradient_imbalance, here, source))),
            Chosen(PILOT_LOSS, seed, _best(partial(pilot_loss, course, column))),
            Chosen(PILOT_OSCILLATION, seed, _best(partial(pilot_oscillation, course, column))),
        ]
    return found


def output_mismatch(config: RunConfig, source: Source, kappa: float) -> float:
    """|log(||output|| / ||target||)| at initialisation."""
    config = _with(config, kappa)
    objective = build_objective(config)
    images, t, noise = _batch(config, source)
    x_t, alpha, sigma = objective.process.diffuse(images, noise, t)
    p, q = objective.target_weights(alpha, sigma)
    model = build_model(config, source.shape)
    with torch.no_grad():
        output = as_network(model)(*objective.process.network_input(x_t, t))
    return float((output.norm() / (p * images + q * noise).norm()).log().abs())


def gradient_imbalance(config: RunConfig, source: Source, kappa: float) -> float:
    """The standard deviation over the blocks of log ||gradient|| at initialisation."""
    config = _with(config, kappa)
    images, t, noise = _batch(config, source)
    model = build_model(config, source.shape)
    build_objective(config).loss(as_network(model), images, noise, t).mean().backward()
    norms = OscillationProbe(model, (images, t)).gradient_norms()
    return float(torch.tensor(list(norms.values())).log().std())


def pilot_loss(course: Course, column: dict[float, int], kappa: float) -> float:
    """Mean loss over the second half of the pilot."""
    last = int(PILOT_SHARE * len(course.losses))
    return float(course.losses[last // 2 : last, column[kappa]].mean())


def pilot_oscillation(course: Course, column: dict[float, int], kappa: float) -> float:
    """Mean over the blocks of the relative oscillation in the second half of the pilot."""
    last = int(PILOT_SHARE * len(course.losses))
    kept = [i for i, step in enumerate(course.norm_steps) if last // 2 < step <= last]
    norms = [values[kept, column[kappa]].tolist() for values in course.norms.values()]
    return sum(map(relative_oscillation, norms)) / len(norms)


def _best(score: Callable[[float], float]) -> float:
    return min(GRID, key=score)


def _with(config: RunConfig, kappa: float) -> RunConfig:
    return dataclasses.replace(config, scaling=dataclasses.replace(config.scaling, method="cs", kappa=kappa))


def _batch(config: RunConfig, source: Source, size: int = 64) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Images with times and noises of the run's own seed."""
    index = torch.arange(size)
    images = to_float(source.read_many((index % len(source)).tolist()))
    t, noise = draw_time_and_noise(build_objective(config).process, config.training.seed, index, source.shape)
    return images, t, noise
