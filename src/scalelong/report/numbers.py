"""How numbers are written: four significant digits, a dash for what is not known."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from scalelong.report.statistics import Estimate

UNKNOWN = "–"
UNRESOLVED = "not resolved"  # of a speed-up: the evaluations lie too far apart to tell


def number(value: float, digits: int = 4) -> str:
    """0.2301, 12.30, 1,234; significant digits, thousands apart."""
    if not math.isfinite(value):
        return UNKNOWN
    if value == 0:
        return "0"
    if abs(value) >= 10 ** (digits - 1):
        return f"{value:,.0f}"
    return f"{value:#.{digits}g}".rstrip(".")


def count(value: float) -> str:
    """1,234: steps and the like."""
    return f"{value:,.0f}" if math.isfinite(value) else UNKNOWN


def with_sd(value: Estimate, digits: int = 4) -> str:
    """0.2301 ± 0.0012, the sd with as many decimals as the mean; a single value stands alone."""
    if not math.isfinite(value.sd):
        return number(value.mean, digits)
    mean = number(value.mean, digits)
    decimals = len(mean.partition(".")[2]) if "e" not in mean else 0
    sd = f"{value.sd:,.{decimals}f}"
    return f"{mean} ± {sd if float(sd.replace(',', '')) or not value.sd else number(value.sd, 2)}"


def percent(new: float, old: float) -> str:
    """The change from old to new: −35%, +4.2%."""
    if not (math.isfinite(new) and math.isfinite(old)) or old == 0:
        return UNKNOWN
    change = 100 * (new / old - 1)
    text = f"{abs(change):.0f}" if abs(change) >= 9.95 else f"{abs(change):.1f}"
    return f"{'−' if change < 0 else '+'}{text}%"


def duration(seconds: float) -> str:
    """12.3 s, 4 min 5 s, 3 h 20 min."""
    if not math.isfinite(seconds):
        return UNKNOWN
    if seconds < 100:
        return f"{seconds:.3g} s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    minutes = round(seconds / 60)
    return f"{minutes // 60:,} h {minutes % 60} min"


def duration_with_sd(value: Estimate) -> str:
    """12.3 ± 0.4 s, or 4 min 5 s ± 12 s."""
    if not math.isfinite(value.sd):
        return duration(value.mean)
    return f"{with_sd(value, 3)} s" if value.mean < 100 else f"{duration(value.mean)} ± {duration(value.sd)}"


def times(value: float) -> str:
    """1.33x, or a dash."""
    return f"{value:.2f}×" if math.isfinite(value) else UNKNOWN


def at_steps(values: Sequence[tuple[int, float]]) -> str:
    """238.2 at step 4,000 and 115.7 at step 8,000; a dash for none."""
    return joined([f"{number(value)} at step {count(step)}" for step, value in values]) or UNKNOWN


def joined(parts: list[str]) -> str:
    """a, b and c."""
    return " and ".join([", ".join(parts[:-1]), parts[-1]]) if len(parts) > 1 else "".join(parts)


def shortened(names: Iterable[str]) -> dict[str, str]:
    """Each name's beginning, of eight letters or as many as it takes to tell them apart."""
    full = set(names)
    length = next(n for n in range(8, 9 + max(map(len, full), default=0)) if len({f[:n] for f in full}) == len(full))
    return {name: name[:length] for name in full}
