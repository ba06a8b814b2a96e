"""Fig. 13: coefficients above 1, at a larger and at a small batch.

    python experiments/fig13_amplify.py                                # minutes on one core
    python experiments/fig13_amplify.py --scale gpu --jobs 3           # U-ViT-S/2 on CIFAR-10

The paper compares FID; at these sizes the loss on fixed noise is compared.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from statistics import mean
from typing import Any

import matplotlib.pyplot as plt
import tyro
from common import Options, base_config, measures, setting, trained, varied
from output import Claim, dress, print_claims, print_table, save, write_csv, write_summary
from probe_loss import fixed_loss

from scalelong.report.colours import PALETTE
from scalelong.training import RunConfig

NAME = "fig13-amplify"
KAPPAS = (1.0, 1.25, 1.5)
BATCHES = {"cpu": (16, 4), "gpu": (64, 16)}


def main() -> None:
    options = tyro.cli(Options, description=__doc__)
    out = options.folder(NAME)
    runs = trained(configurations(options), options)
    rows = [
        measures(run) | {"kappa": run.config.scaling.kappa, "loss_on_fixed_noise": fixed_loss(run.folder)}
        for run in runs
    ]
    write_csv(rows, out / "runs.csv")
    table = averages(rows)
    draw(rows, out / "fig13.png")
    claims = [claim(rows, table, batch) for batch in BATCHES[options.scale]]
    write_summary(out, claims, setting(runs[0].config), table=table)
    print_claims(claims)
    print()
    print_table(table)


def configurations(options: Options) -> list[RunConfig]:
    """kappa_i = kappa for all skips, as in the figure's caption."""
    base = base_config(options.scale, options.steps or (300 if options.scale == "cpu" else 0))
    if options.scale == "cpu":
        base = dataclasses.replace(base, model=dataclasses.replace(base.model, dim=32, heads=2))
    return [
        varied(base, f"universal:{kappa}", seed, batch_size=batch)
        for batch in BATCHES[options.scale]
        for kappa in KAPPAS
        for seed in options.seeds
    ]


def averages(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Means over the seeds, a row for each batch size and kappa."""
    columns = ("loss_on_fixed_noise", "final_loss", "oscillation_all_blocks", "gradient_norm_spread")
    keys = dict.fromkeys((row["batch"], row["kappa"]) for row in rows)
    return [
        {"batch": batch, "kappa": kappa}
        | {c: mean(row[c] for row in rows if (row["batch"], row["kappa"]) == (batch, kappa)) for c in columns}
        for batch, kappa in keys
    ]


def claim(rows: list[dict[str, Any]], table: list[dict[str, Any]], batch: int) -> Claim:
    """The loss is higher with kappa above 1 than with 1, in every seed."""
    means = {row["kappa"]: row["loss_on_fixed_noise"] for row in table if row["batch"] == batch}
    listed = ", ".join(f"kappa {kappa:g}: {loss:.5f}" for kappa, loss in means.items())
    here = {(r["seed"], r["kappa"]): r["loss_on_fixed_noise"] for r in rows if r["batch"] == batch}
    worse = [loss > here[seed, 1.0] for (seed, kappa), loss in here.items() if kappa > 1]
    return Claim(
        "kappa > 1 degrades the model, the more so in unstable settings such as a small batch (Fig. 13, FID)",
        f"batch {batch}, loss on fixed noise: {listed}; above that of kappa = 1 in {sum(worse)} of {len(worse)} cases",
        all(worse),
    )


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Loss, seed by seed against kappa = 1, and oscillation."""
    figure, panels = plt.subplots(1, 2, figsize=(10, 3.8), layout="constrained")
    base = {(row["batch"], row["seed"]): row["loss_on_fixed_noise"] for row in rows if row["kappa"] == 1}
    columns = {
        "Loss on fixed noise above that of κ = 1, ‰": lambda r: 1000 * (_loss(r) / base[r["batch"], r["seed"]] - 1),
        "Relative oscillation, mean of blocks": lambda r: r["oscillation_all_blocks"],
    }
    for axes, (title, value) in zip(panels, columns.items(), strict=True):
        batches = dict.fromkeys(row["batch"] for row in rows)
        for batch, (colour, _) in zip(batches, PALETTE[1:3], strict=True):
            here = [row for row in rows if row["batch"] == batch]
            axes.plot([row["kappa"] for row in here], list(map(value, here)), ".", color=colour, alpha=0.5)
            means = [mean(value(row) for row in here if row["kappa"] == kappa) for kappa in KAPPAS]
            axes.plot(KAPPAS, means, color=colour, marker="o", markersize=4, label=f"batch {batch}")
        dress(axes, title, "κ of every skip; small dots: seeds")
        axes.set_xticks(KAPPAS)
    panels[0].legend(frameon=False, fontsize=8)
    save(figure, path)


def _loss(row: dict[str, Any]) -> float:
    return float(row["loss_on_fixed_noise"])


if __name__ == "__main__":
    main()
