"""Table 4: the direction of CS, kappa^(i-1) against kappa^(N-i+1).

    python experiments/table4_direction.py                             # minutes on one core
    python experiments/table4_direction.py --scale gpu --jobs 3        # U-ViT-S/2 on CIFAR-10

The paper compares FID; at these sizes the loss is compared, on training batches and on fixed noise.
"""

from __future__ import annotations

from pathlib import Path
from statistics import mean
from typing import Any

import matplotlib.pyplot as plt
import tyro
from common import Options, by_method, grid, measures, setting, trained
from output import Claim, dress, print_claims, print_table, save, write_csv, write_summary
from probe_loss import fixed_loss

from scalelong.report.colours import colour
from scalelong.runs.reader import Run

NAME = "table4-direction"
METHODS = ("cs_reversed:0.5", "cs:0.5")
PARTS = 5  # columns of the table: shares of the training


def main() -> None:
    options = tyro.cli(Options, description=__doc__)
    out = options.folder(NAME)
    runs = trained(grid(options, METHODS), options)
    rows = [measures(run) | {"loss_on_fixed_noise": fixed_loss(run.folder)} for run in runs]
    write_csv(rows, out / "runs.csv")
    table = course(runs)
    write_csv(table, out / "table.csv")
    draw(runs, out / "table4.png")
    claims = [claim(rows, "loss_on_fixed_noise"), claim(rows, "oscillation_all_blocks")]
    write_summary(out, claims, setting(runs[0].config), table=table)
    print_claims(claims)
    print()
    print_table(table)


def claim(rows: list[dict[str, Any]], column: str) -> Claim:
    """The paper's direction has the smaller value in every seed."""
    wrong, right = by_method(rows, column).values()
    listed = f"{column.replace('_', ' ')}: reversed {mean(wrong):.5f}, CS {mean(right):.5f}"
    wins = sum(a < b for a, b in zip(right, wrong, strict=True))
    return Claim(
        "kappa^(i-1) has significant advantages over the reverse direction (Table 4, FID)",
        f"{listed}; CS lower in {wins} of {len(right)} seeds",
        wins == len(right),
    )


def course(runs: list[Run]) -> list[dict[str, Any]]:
    """Mean training loss over each fifth of the steps, over the seeds."""
    total = runs[0].config.training.steps
    table = []
    for name in dict.fromkeys(run.label for run in runs):
        line: dict[str, Any] = {"method": name}
        for part in range(1, PARTS + 1):
            first, last = total * (part - 1) // PARTS, total * part // PARTS
            values = [
                loss
                for run in runs
                if run.label == name
                for step, loss in zip(*run.column("train", "loss"), strict=True)
                if first < step <= last
            ]
            line[f"loss to step {last}"] = mean(values)
        table.append(line)
    return table


def draw(runs: list[Run], path: Path) -> None:
    """Loss and middle block over training."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.8), layout="constrained")
    seen: set[str] = set()
    for run in runs:
        name = run.label
        style = {"color": colour(name), "linewidth": 1.1, "alpha": 0.8, "label": None if name in seen else name}
        seen.add(name)
        left.plot(*run.column("train", "loss"), **style)
        right.plot(*run.column("probe", f"norm/{run.middle_block}"), **style)
    dress(left, "Training loss (means of 10 steps), every seed", "step")
    left.set_yscale("log")
    dress(right, "Norm of the middle block on a fixed batch", "step")
    left.legend(frameon=False, fontsize=8)
    save(figure, path)


if __name__ == "__main__":
    main()
