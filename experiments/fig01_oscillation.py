"""Fig. 1: the norm of hidden features over training for none, rsqrt2, cs and ls.

python experiments/fig01_oscillation.py                            # depths 12 and 20, minutes on one core
python experiments/fig01_oscillation.py --scale gpu --jobs 3       # U-ViT-S/2 on CIFAR-10, depth 12
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

import matplotlib.pyplot as plt
import tyro
from common import Options, block_oscillations, by_method, grid, measures, setting, trained
from output import Claim, dress, print_claims, print_table, save, write_csv, write_summary

from scalelong.report.colours import colour
from scalelong.runs.reader import Run

NAME = "fig01-oscillation"
COLUMNS = {"oscillation_all_blocks": "mean over all blocks", "oscillation_middle": "middle block"}


@dataclass(frozen=True)
class Figure1(Options):
    """All options; the depths are of the whole U without its middle block."""

    depths: tuple[int, ...] = (12,)


def main() -> None:
    options = tyro.cli(Figure1, description=__doc__)
    out = options.folder(NAME)
    depths = options.depths
    runs = trained([config for depth in depths for config in grid(options, depth=depth)], options)
    rows = [measures(run) for run in runs]
    write_csv(rows, out / "runs.csv")
    write_csv(curves(runs), out / "curves.csv")
    draw(runs, depths, out / "fig01.png")
    claims = [
        claim
        for depth in depths
        for column in COLUMNS
        for claim in judged([row for row in rows if row["depth"] == depth], column, depth)
    ]
    setup = f"{setting(runs[0].config)}; depths {depths}, seeds {options.seeds}"
    write_summary(out, claims, setup, table=averages(rows))
    print_claims(claims)
    print()
    print_table(averages(rows))


def judged(rows: list[dict[str, Any]], column: str, depth: int) -> list[Claim]:
    """CS and LS below none, and below rsqrt2 too, on average over the seeds."""
    found = {method: mean(values) for method, values in by_method(rows, column).items()}
    ours = [value for method, value in found.items() if method not in ("none", "rsqrt2")]
    listed = ", ".join(f"{method} {value:.4f}" for method, value in found.items())
    measured = f"depth {depth}, relative oscillation after the warm-up, {COLUMNS[column]}: {listed}"
    return [
        Claim("CS and LS alleviate the oscillation of the original (Fig. 1)", measured, max(ours) < found["none"]),
        Claim(
            "rsqrt2 does so only to some extent, less than CS and LS (Fig. 1)", measured, max(ours) < found["rsqrt2"]
        ),
    ]


def averages(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Means over the seeds, a row for each depth and method."""
    columns = (*COLUMNS, "gradient_oscillation", "gradient_norm_spread", "final_loss")
    table = []
    for depth in sorted({row["depth"] for row in rows}):
        here = [row for row in rows if row["depth"] == depth]
        for method in by_method(here, "seed"):
            means = {column: mean(by_method(here, column)[method]) for column in columns}
            table.append({"depth": depth, "method": method, **means})
    return table


def curves(runs: list[Run]) -> list[dict[str, Any]]:
    """The norms that are plotted: middle and last block."""
    return [
        {"depth": r.config.model.depth, "method": r.label, "seed": r.seed, "block": b, "step": step, "norm": norm}
        for r in runs
        for b in (r.middle_block, r.blocks[-1])
        for step, norm in zip(*r.column("probe", f"norm/{b}"), strict=True)
    ]


def draw(runs: list[Run], depths: tuple[int, ...], path: Path) -> None:
    """For each depth: the middle block's norm for every seed, and the oscillation of every block."""
    figure, panels = plt.subplots(len(depths), 2, figsize=(11, 3.8 * len(depths)), layout="constrained", squeeze=False)
    for (left, right), depth in zip(panels, depths, strict=True):
        here = [run for run in runs if run.config.model.depth == depth]
        for name in dict.fromkeys(run.label for run in here):
            same = [run for run in here if run.label == name]
            for run in same:
                first = run is same[0]
                style = {"color": colour(name), "linewidth": 1.3 if first else 0.8, "alpha": 1.0 if first else 0.35}
                left.plot(*run.column("probe", f"norm/{run.middle_block}"), label=name if first else None, **style)
            found = [block_oscillations(run) for run in same]
            blocks = list(found[0])
            means = [mean(one[block] for one in found) for block in blocks]
            right.plot(range(len(blocks)), means, color=colour(name), marker="o", markersize=3.5, label=name)
        left.axvline(here[0].config.optimizer.warmup_steps, color="#999999", linewidth=0.8, linestyle=":")
        dress(left, f"Norm of the middle block, depth {depth} (faint: other seeds)", "step; dotted: end of the warm-up")
        dress(right, "Relative oscillation of each block, mean over seeds", "block, from input to output")
        left.legend(frameon=False, fontsize=8)
    save(figure, path)


if __name__ == "__main__":
    main()
