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
    for row in comparable(RESULTS, piece, free=("lr",)):
        if int(row["seed"]) == SEED:
            method = BASELINE if row["method"] == AGAIN else row["method"]  # the later one: newer kernels
            steps = found.setdefault(method, {}).setdefault(rates[row["experiment"]], {})
            steps[int(row["step"])] = (float(row["test_loss"]), row["fid"])
    return {method: own for method, own in found.items() if len(own) > 1}


def best(found: Found) -> dict[str, tuple[float, float]]:
    """The rate with the lowest loss at the end, and that loss, by method."""
    ends = {m: {rate: steps[END][0] for rate, steps in own.items() if END in steps} for m, own in found.items()}
    return {method: min(own.items(), key=lambda item: item[1]) for method, own in ends.items()}


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
    """Each method's lowest loss with its rate, relative to the unscaled network's lowest."""
    base_rate, base = best(found)[BASELINE]
    others = [(method, *each) for method, each in best(found).items() if method != BASELINE]
    said = [f"{names.get(m, m)} {100 * (loss / base - 1):+.1f}% at {rate:g}" for m, rate, loss in others]
    return f"test loss against the unscaled network at {base_rate:g}: {'; '.join(said)} (1 seed)"
