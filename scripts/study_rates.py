"""Each method of the study at its own best learning rate; called by scripts/study_table.py."""

from __future__ import annotations

from plot import AGAIN, BASELINE, comparable
from results import RESULTS, read_meta

SEED = 1
END = 25_000
Measured = tuple[float, str]  # test loss and FID, "" where not measured
Found = dict[str, dict[float, dict[int, Measured]]]  # by method, rate and step


def found_rates(piece: str) -> Found:
    """All runs of one seed that differ from those of `piece` in method and rate only, for methods with several rates."""
    rates = {name: about["settings"]["lr"] for name, about in read_meta(RESULTS)["pieces"].items()}
    found: Found = {}
    rows = comparable(RESULTS, piece, free=("lr",))
    for row in sorted(
        rows, key=lambda row: row["method"] == AGAIN
    ):  # which takes the place of the run with older kernels
        if int(row["seed"]) == SEED:
            method = BASELINE if row["method"] == AGAIN else row["method"]
            steps = found.setdefault(method, {}).setdefault(rates[row["experiment"]], {})
            steps[int(row["step"])] = (float(row["test_loss"]), row["fid"])
    return {method: own for method, own in found.items() if len(own) > 1}


def at_end(found: Found) -> dict[str, dict[float, float]]:
    """The loss at the end by method and rate, of the runs that reached it."""
    return {m: {rate: steps[END][0] for rate, steps in own.items() if END in steps} for m, own in found.items()}


def best(found: Found) -> dict[str, tuple[float, float]]:
    """The rate with the lowest loss at the end, and that loss, by method."""
    return {method: min(own.items(), key=lambda item: item[1]) for method, own in at_end(found).items()}


def rate_table(found: Found, names: dict[str, str]) -> str:
    """Loss at the last step that all runs have, and at the end with FID."""
    rates = sorted({rate for own in found.values() for rate in own})
    runs = [steps for own in found.values() for steps in own.values()]
    middle = max(set.intersection(*map(set, runs)))
    columns = [
        (step, rate) for step in (middle, END) for rate in rates if any(step in o.get(rate, {}) for o in found.values())
    ]
    lowest = best(found)
    header = " | ".join(f"{step // 1000}k, {rate:g}" for step, rate in columns)
    lines = [f"| test loss (FID-10k) | {header} |", "|---" * (len(columns) + 1) + "|"]
    for method, own in found.items():
        cells = []
        for step, rate in columns:
            loss, fid = own.get(rate, {}).get(step, (0.0, ""))
            text = f"{loss:.5f}" + (f" ({float(fid):.1f})" if fid else "") if loss else ""
            cells.append(f"**{text}**" if (step, rate) == (END, lowest[method][0]) else text)
        lines.append(f"| {names.get(method, method)} | {' | '.join(cells)} |")
    return "\n".join(lines)


def best_rates(found: Found, names: dict[str, str]) -> str:
    """Each method's lowest loss, with its rate and the number of rates tried, relative to the unscaled network's lowest."""
    rates = {m: f"at {rate:g} (best of {len(at_end(found)[m])})" for m, (rate, _) in best(found).items()}
    base = best(found)[BASELINE][1]
    others = {method: loss for method, (_, loss) in best(found).items() if method != BASELINE}
    said = [f"{names.get(m, m)} {100 * (loss / base - 1):+.1f}% {rates[m]}" for m, loss in others.items()]
    return f"test loss against the unscaled network {rates[BASELINE]}: {'; '.join(said)}; 1 seed"
