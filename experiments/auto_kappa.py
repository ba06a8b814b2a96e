"""Can kappa be chosen without trying? Rules against the best of a grid, in settings of depth x data x batch.

    python experiments/auto_kappa.py --steps 300 --seeds 0 1                  # ten minutes of one core
    python experiments/auto_kappa.py --steps 1000 --seeds 0 1 2 --jobs 14     # on a machine with more of them

The rules: the middle of the paper's interval (from the data alone); at initialisation, the kappa whose output is nearest
to the target in norm, and the one whose blocks have the most equal gradients; the kappa with the lowest loss, or the
least oscillation, in the first third of the steps. Also CS whose coefficients start at 1 and reach kappa^(i-1) later.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import matplotlib.pyplot as plt
import tyro
from auto_rules import GRID, RULES, Chosen, choices
from common import Options, base_config, trained, varied
from output import Claim, dress, print_claims, print_table, save, write_csv, write_summary
from probe_loss import fixed_loss

from scalelong.report.series import RunSeries
from scalelong.training import RunConfig

NAME = "auto-kappa"
WARMED = ("cs:0.5", "cs:0.7")  # tried with a schedule too
WARM_SHARE = 0.4  # of the steps, from coefficients of 1 to those of CS


@dataclass(frozen=True)
class Setting:
    """Depth x data x batch."""

    name: str
    data: str
    image_size: int | None
    patch: int
    depth: int
    batch: int


SETTINGS = (
    Setting("digits, depth 12, batch 16", "digits", None, 2, 12, 16),
    Setting("digits, depth 20, batch 8", "digits", None, 2, 20, 8),
    Setting("emoji 16x16, depth 8, batch 16", "emoji32", 16, 4, 8, 16),
)


def main() -> None:
    options = tyro.cli(Options, description=__doc__)
    if options.scale != "cpu":
        raise ValueError(f"scale: this experiment has small networks only, got {options.scale!r}; leave it out")
    out = options.folder(NAME)
    rows, chosen, table = [], [], []
    for setting in SETTINGS:
        runs = trained(configurations(setting, options), options, probe_every=10)
        warmed = trained(warm_configurations(setting, options), options, probe_every=10, warm_share=WARM_SHARE)
        found = [*measured(setting, runs), *measured(setting, warmed, "warmed")]
        picks = choices(runs)
        rows += found
        chosen += [{"setting": setting.name, **dataclasses.asdict(pick)} for pick in picks]
        table += regrets(setting, found, picks)
        print_table([row for row in table if row["setting"] == setting.name])
        print(flush=True)
    write_csv(rows, out / "runs.csv")
    write_csv(chosen, out / "choices.csv")
    write_csv(table, out / "table.csv")
    draw(rows, chosen, out / "auto_kappa.png")
    claims = judged(table, rows)
    told = "Small U-ViTs; loss: on fixed images, times and noises, averaged weights; regret: loss above the grid's best"
    write_summary(out, claims, told, table=table)
    print_claims(claims)


def configurations(setting: Setting, options: Options) -> list[RunConfig]:
    """CS with every kappa of the grid and every seed."""
    base = setting_config(setting, options)
    return [varied(base, f"cs:{kappa}", seed) for kappa in GRID for seed in options.seeds]


def warm_configurations(setting: Setting, options: Options) -> list[RunConfig]:
    """The same for those with a schedule."""
    base = setting_config(setting, options)
    return [varied(base, method, seed) for method in WARMED for seed in options.seeds]


def setting_config(setting: Setting, options: Options) -> RunConfig:
    """A small U-ViT that predicts the noise."""
    base = base_config("cpu", options.steps or 300)
    return dataclasses.replace(
        base,
        data=dataclasses.replace(base.data, name=setting.data, image_size=setting.image_size),
        model=dataclasses.replace(base.model, patch_size=setting.patch, depth=setting.depth, dim=32, heads=2),
        optimizer=dataclasses.replace(base.optimizer, warmup_steps=50),
        training=dataclasses.replace(base.training, batch_size=setting.batch),
    )


def measured(setting: Setting, runs: list[RunSeries], what: str = "constant") -> list[dict[str, Any]]:
    """A row for each run."""
    return [
        {
            "setting": setting.name,
            "coefficients": what,
            "kappa": run.config.scaling.kappa,
            "seed": run.seed,
            "loss": fixed_loss(run.folder),
            "training_loss": run.final_loss(),
        }
        for run in runs
    ]


def loss_of(rows: list[dict[str, Any]], setting: str, kappa: float, what: str = "constant") -> list[float]:
    """Seed by seed."""
    keys = (setting, kappa, what)
    return [row["loss"] for row in rows if (row["setting"], row["kappa"], row["coefficients"]) == keys]


def regrets(setting: Setting, rows: list[dict[str, Any]], picks: list[Chosen]) -> list[dict[str, Any]]:
    """Best of the grid, each rule's choice (its nearest kappa of the grid), 0.7, no scaling, and the schedules."""
    means = {kappa: mean(loss_of(rows, setting.name, kappa)) for kappa in GRID}
    best = min(means, key=lambda kappa: means[kappa])
    noise = mean(stdev(loss_of(rows, setting.name, k)) for k in GRID) if len({r["seed"] for r in rows}) > 1 else 0.0

    def line(what: str, kappa: float, loss: float) -> dict[str, Any]:
        regret = loss - means[best]
        return {
            "setting": setting.name,
            "choice": what,
            "kappa": kappa,
            "loss": loss,
            "regret": regret,
            "seed_sd": noise,
        }

    table = [line("best of the grid", best, means[best])]
    for rule in RULES:
        own = [pick for pick in picks if pick.rule == rule]
        table.append(line(rule, mean(pick.kappa for pick in own), mean(means[pick.nearest] for pick in own)))
    table += [line("0.7", 0.7, means[0.7]), line("no scaling", 1.0, means[1.0])]
    for method in WARMED:
        kappa = float(method.partition(":")[2])
        table.append(line("schedule 1 -> CS", kappa, mean(loss_of(rows, setting.name, kappa, "warmed"))))
    return table


def judged(table: list[dict[str, Any]], rows: list[dict[str, Any]]) -> list[Claim]:
    """Whether a rule beats 0.7 on average over the settings, and whether the schedule pays."""
    settings = list(dict.fromkeys(row["setting"] for row in table))
    fixed = mean(row["regret"] for row in table if row["choice"] == "0.7")
    averages = {rule: mean(row["regret"] for row in table if row["choice"] == rule) for rule in RULES}
    told = ", ".join(f"{rule} {value:+.5f}" for rule, value in averages.items())
    best = min(averages, key=lambda rule: averages[rule])
    gains = [
        mean(loss_of(rows, setting, kappa)) - mean(loss_of(rows, setting, kappa, "warmed"))
        for setting in settings
        for kappa in (float(method.partition(":")[2]) for method in WARMED)
    ]
    return [
        Claim(
            "Is there a rule that beats kappa = 0.7? (the paper leaves the choice open)",
            f"mean regret over {len(settings)} settings: 0.7 {fixed:+.5f}; {told}; the best rule is: {best}",
            averages[best] < fixed,
        ),
        Claim(
            "Does a schedule from 1 to kappa^(i-1) pay against the same kappa held constant?",
            f"loss constant minus warmed, by setting and kappa: {', '.join(format(gain, '+.5f') for gain in gains)}",
            all(gain > 0 for gain in gains),
        ),
    ]


def draw(rows: list[dict[str, Any]], chosen: list[dict[str, Any]], path: Path) -> None:
    """Loss against kappa in each setting, with what the rules chose."""
    settings = list(dict.fromkeys(row["setting"] for row in rows))
    figure, panels = plt.subplots(1, len(settings), figsize=(4.6 * len(settings), 4), layout="constrained")
    markers = dict(zip(RULES, "osD^v", strict=True))
    for axes, setting in zip(panels, settings, strict=True):
        losses = [loss_of(rows, setting, kappa) for kappa in GRID]
        axes.plot(
            GRID, [mean(values) for values in losses], color="#4e79a7", linewidth=1.6, label="CS, mean of the seeds"
        )
        for kappa, values in zip(GRID, losses, strict=True):
            axes.plot([kappa] * len(values), values, ".", color="#4e79a7", alpha=0.5, markersize=5)
        for method in WARMED:
            kappa = float(method.partition(":")[2])
            value = mean(loss_of(rows, setting, kappa, "warmed"))
            axes.plot(
                kappa, value, "*", color="#e15759", markersize=10, label="schedule" if method == WARMED[0] else None
            )
        base = axes.get_ylim()[0]
        for height, rule in enumerate(RULES):
            picks = [row["kappa"] for row in chosen if row["setting"] == setting and row["rule"] == rule]
            place = base - (axes.get_ylim()[1] - base) * 0.05 * (height + 1)
            axes.plot(picks, [place] * len(picks), markers[rule], color="#777777", markersize=4, label=rule)
        dress(axes, setting, "κ", "loss on fixed noise" if axes is panels[0] else "")
    panels[-1].legend(frameon=False, fontsize=7)
    save(figure, path)


if __name__ == "__main__":
    main()
