"""Fig. 12: feature oscillation under different seeds, depth 12.

python experiments/fig12_seeds.py                                  # minutes on one core
python experiments/fig12_seeds.py --scale gpu --jobs 3             # U-ViT-S/2 on CIFAR-10
"""

from __future__ import annotations

from statistics import mean, stdev
from typing import Any

import matplotlib.pyplot as plt
import tyro
from common import Options, by_method, grid, measures, setting, trained
from output import Claim, dress, print_claims, print_table, save, write_csv, write_summary

from scalelong.report.colours import colour
from scalelong.runs.reader import Run

NAME = "fig12-seeds"
COLUMNS = {"oscillation_all_blocks": "mean over all blocks", "oscillation_middle": "middle block"}


def main() -> None:
    options = tyro.cli(Options, description=__doc__)
    out = options.folder(NAME)
    runs = trained(grid(options), options)
    rows = [measures(run) for run in runs]
    write_csv(rows, out / "runs.csv")
    claims = [claim(rows, column) for column in COLUMNS]
    draw(runs, out / "fig12.png")
    write_summary(out, claims, setting(runs[0].config), table=averages(rows))
    print_claims(claims)
    print()
    print_table(averages(rows))


def claim(rows: list[dict[str, Any]], column: str) -> Claim:
    """Every seed: none above cs and above ls."""
    found = by_method(rows, column)
    plain = found["none"]
    wins = {
        name: sum(value < base for value, base in zip(values, plain, strict=True))
        for name, values in found.items()
        if name != "none"
    }
    ours = [name for name in wins if name.startswith("cs") or name == "ls"]
    listed = ", ".join(f"{name} in {count} of {len(plain)} seeds" for name, count in wins.items())
    return Claim(
        "The original UNet consistently shows feature oscillation; CS and LS reduce it (Fig. 12)",
        f"relative oscillation after the warm-up, {COLUMNS[column]}: below none for {listed}",
        all(wins[name] == len(plain) for name in ours),
    )


def averages(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Mean and standard deviation over the seeds, a row for each method."""
    columns = (
        "oscillation_all_blocks",
        "oscillation_middle",
        "gradient_oscillation",
        "gradient_norm_spread",
        "final_loss",
    )
    table = []
    for method in by_method(rows, "seed"):
        line: dict[str, Any] = {"method": method}
        for column in columns:
            values = by_method(rows, column)[method]
            spread = f" ± {stdev(values):.2g}" if len(values) > 1 else ""
            line[column] = f"{mean(values):.4f}{spread}"
        table.append(line)
    return table


def draw(runs: list[Run], path: Any) -> None:
    """A column for each seed: above the middle block's norm, below the last block's."""
    seeds = sorted({run.seed for run in runs})
    figure, panels = plt.subplots(2, len(seeds), figsize=(4.2 * len(seeds), 6), layout="constrained", squeeze=False)
    for run in runs:
        column = seeds.index(run.seed)
        for row, block in enumerate((run.middle_block, run.blocks[-1])):
            steps, norms = run.column("probe", f"norm/{block}")
            name = run.label
            panels[row][column].plot(steps, norms, color=colour(name), label=name, linewidth=1.1)
            dress(
                panels[row][column],
                f"{block}, seed {run.seed}",
                "step; dotted: end of the warm-up",
                "norm of its output" if column == 0 else "",
            )
    for axes in panels.flat:
        axes.axvline(runs[0].config.optimizer.warmup_steps, color="#999999", linewidth=0.8, linestyle=":")
    panels[1][0].legend(frameon=False, fontsize=8)
    save(figure, path)


if __name__ == "__main__":
    main()
