"""Rules that choose kappa, against the best of a grid.

The rules: the middle of the paper's interval (from the data alone), and 0.7 moved into it; at initialisation, the kappa
whose output is nearest to the target in norm, and the one whose blocks have the most equal gradients; the kappa with the
lowest loss, or the least oscillation, in the first third of the steps. Also CS whose coefficients start at 1 and reach
kappa^(i-1) later.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import matplotlib.pyplot as plt
from output import Claim, Outcome, dress, save, write_csv
from rules import GRID, RULES, Chosen, choices
from settings import Experiment
from stack import Course, Member, train_together

from scalelong.data import load_source
from scalelong.report.colours import colour

WARMED = (0.5, 0.7)  # tried with a schedule too
WARM_SHARE = 0.4  # of the steps, from coefficients of 1 to those of CS


def measure(experiment: Experiment, _: object, out: Path) -> Outcome:
    rows, chosen, table = [], [], []
    for setting, config in experiment.runs.items():
        source, steps = load_source(config.data.name, image_size=config.data.image_size), config.training.steps
        members = [Member(kappa, seed) for kappa in GRID for seed in experiment.seeds]
        members += [Member(k, seed, int(WARM_SHARE * steps)) for k in WARMED for seed in experiment.seeds]
        course = train_together(config, source, members, name=setting)
        found = measured(setting, members, course)
        picks = choices(config, source, members, course)
        rows += found
        chosen += [{"setting": setting, **dataclasses.asdict(pick)} for pick in picks]
        table += regrets(setting, found, picks)
    write_csv(rows, out / "runs.csv")
    write_csv(chosen, out / "choices.csv")
    write_csv(table, out / "table.csv")
    draw(rows, chosen, out / "auto_kappa.png")
    setting = f"U-ViTs of width 32, {steps} steps; loss of the averaged weights on fixed images, times and noises"
    return Outcome(judged(table, rows, len(experiment.seeds)), setting, {"table": table})


def measured(setting: str, members: list[Member], course: Course) -> list[dict[str, Any]]:
    """A row for each member."""
    tail = course.losses[-len(course.losses) // 5 :].mean(0)
    return [
        {
            "setting": setting,
            "coefficients": "warmed" if member.warm_steps else "constant",
            "kappa": member.kappa,
            "seed": member.seed,
            "loss": float(course.fixed_loss[i]),
            "training_loss": float(tail[i]),
        }
        for i, member in enumerate(members)
    ]


def loss_of(rows: list[dict[str, Any]], setting: str, kappa: float, what: str = "constant") -> list[float]:
    """Seed by seed."""
    keys = (setting, kappa, what)
    return [row["loss"] for row in rows if (row["setting"], row["kappa"], row["coefficients"]) == keys]


def regrets(setting: str, rows: list[dict[str, Any]], picks: list[Chosen]) -> list[dict[str, Any]]:
    """Best of the grid, each rule's choice (its nearest kappa of the grid), 0.7, no scaling, and the schedules."""
    losses = {kappa: loss_of(rows, setting, kappa) for kappa in GRID}
    means = {kappa: mean(values) for kappa, values in losses.items()}
    best = min(means, key=lambda kappa: means[kappa])
    noise = paired_sd(list(losses.values()))

    def line(what: str, kappa: float, loss: float) -> dict[str, Any]:
        regret = loss - means[best]
        return {"setting": setting, "choice": what, "kappa": kappa, "loss": loss, "regret": regret, "sd": noise}

    table = [line("best of the grid", best, means[best])]
    for rule in RULES:
        own = [pick for pick in picks if pick.rule == rule]
        loss = mean(losses[pick.nearest][position] for position, pick in enumerate(own))
        table.append(line(rule, mean(pick.kappa for pick in own), loss))
    table += [line("0.7", 0.7, means[0.7]), line("no scaling", 1.0, means[1.0])]
    return table + [line("schedule 1 -> CS", k, mean(loss_of(rows, setting, k, "warmed"))) for k in WARMED]


def paired_sd(losses: list[list[float]]) -> float:
    """How much a kappa's loss varies with the seed after each seed's mean is subtracted."""
    levels = [mean(column) for column in zip(*losses, strict=True)]
    if len(levels) < 2:
        return 0.0
    return mean(stdev(loss - level for loss, level in zip(values, levels, strict=True)) for values in losses)


def judged(table: list[dict[str, Any]], rows: list[dict[str, Any]], seeds: int) -> list[Claim]:
    """Whether a rule beats 0.7 by more than the noise of the mean, and whether the schedule pays."""
    settings = list(dict.fromkeys(row["setting"] for row in table))
    regret = {c: mean(row["regret"] for row in table if row["choice"] == c) for c in (*RULES, "0.7", "no scaling")}
    noise = mean(row["sd"] for row in table) / (seeds * len(settings)) ** 0.5
    best = min(RULES, key=lambda rule: regret[rule])
    listed = ", ".join(f"{choice} {value:+.5f}" for choice, value in regret.items())
    chosen = mean(row["kappa"] for row in table if row["choice"] == best)
    gains = [
        mean(loss_of(rows, setting, kappa)) - mean(loss_of(rows, setting, kappa, "warmed"))
        for setting in settings
        for kappa in WARMED
    ]
    return [
        Claim(
            "Does a rule beat kappa = 0.7? (the paper leaves the choice open)",
            f"mean regret over {len(settings)} settings: {listed}; noise of such a mean {noise:.5f}; best rule: "
            f"{best}, which chose kappa {chosen:.2f} on average",
            regret[best] < regret["0.7"] - noise,
        ),
        Claim(
            "Does a schedule from 1 to kappa^(i-1) pay against the same kappa held constant?",
            f"loss constant minus warmed, by setting and kappa: {', '.join(format(gain, '+.5f') for gain in gains)}",
            all(gain > 0 for gain in gains),
        ),
    ]


def draw(rows: list[dict[str, Any]], chosen: list[dict[str, Any]], path: Path) -> None:
    """Loss against kappa in each setting, each seed's mean subtracted, and below it what the rules chose."""
    settings = list(dict.fromkeys(row["setting"] for row in rows))
    figure, panels = plt.subplots(
        2, len(settings), figsize=(4.8 * len(settings), 5.6), layout="constrained", height_ratios=(3, 2), sharex=True
    )
    for column, setting in enumerate(settings):
        losses = [loss_of(rows, setting, kappa) for kappa in GRID]
        levels = [mean(values) for values in zip(*losses, strict=True)]
        _draw_losses(panels[0][column], losses, [loss_of(rows, setting, k, "warmed") for k in WARMED], levels)
        dress(panels[0][column], setting, "", "loss above the seed's mean, ‰" if column == 0 else "")
        below = panels[1][column]
        for height, rule in enumerate(reversed(RULES)):
            picks = [row["kappa"] for row in chosen if row["setting"] == setting and row["rule"] == rule]
            below.plot(picks, [height] * len(picks), "o", color="#777777", alpha=0.5, markersize=6)
        dress(below, "", "κ; a dot for each seed's choice")
        below.set_yticks(range(len(RULES)), list(reversed(RULES)) if column == 0 else [""] * len(RULES))
        below.set_ylim(-0.6, len(RULES) - 0.4)
    panels[0][-1].legend(frameon=False, fontsize=8)
    save(figure, path)


def _draw_losses(axes: Any, losses: list[list[float]], warmed: list[list[float]], levels: list[float]) -> None:
    def shown(values: list[float]) -> list[float]:
        return [1000 * (value / level - 1) for value, level in zip(values, levels, strict=True)]

    for kappa, values in zip(GRID, losses, strict=True):
        axes.plot([kappa] * len(values), shown(values), ".", color=colour("cs"), alpha=0.5, markersize=6)
    axes.plot(
        GRID, [mean(shown(values)) for values in losses], color=colour("cs"), linewidth=1.6, label="CS, mean of seeds"
    )
    means = [mean(shown(values)) for values in warmed]
    axes.plot(WARMED, means, "*", color=colour("ls"), markersize=11, label="coefficients from 1 to CS")
