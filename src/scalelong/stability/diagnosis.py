"""What a run's records say about its stability, in words, each sentence backed by a number.

The limits are conventions, stated in the sentences: a block oscillates if its norm moves by more than a tenth of its size
from one record to the next, a gradient spikes if it is five times the usual one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median
from typing import Any

from scalelong.runs.oscillation import PROBE_EVERY, relative_oscillation
from scalelong.training import RunConfig, from_yaml, read_events

OSCILLATES = 0.1  # of its size, from one record to the next
SPIKES = 5.0  # times the median gradient norm
SHARE = 0.2  # "at first" and "at last" are fifths of the records

Record = dict[str, Any]


@dataclass(frozen=True)
class Sentence:
    """One statement: what it is about, the words, and the number they rest on."""

    about: str  # course, features, gradients, steps, try
    text: str
    number: float
    alarming: bool = False


def diagnose(folder: str | Path) -> list[Sentence]:
    """Read a run and say what it shows; a run without probe records is told how to get them."""
    folder = Path(folder)
    if not (folder / "config.yaml").is_file() or not (folder / "metrics.jsonl").is_file():
        raise FileNotFoundError(
            f"run: {folder} holds no config.yaml with metrics.jsonl; give a folder that scalelong train wrote"
        )
    records, damaged = read_events(folder)
    if not (train := [record for record in records if record.get("kind") == "train"]):
        raise ValueError(f"run: {folder} holds no training record ({damaged} damaged lines); train on, then come back")
    config = from_yaml(folder / "config.yaml")
    probe = [record for record in records if record.get("kind") == "probe"]
    found = [*_course(train, config), *_features(probe, config), *_gradients(train, probe, config), *_steps(train)]
    return found + _advice(found, config)


# ------------------------------------------------------------------------------------------------------- what was seen


def _course(train: Sequence[Record], config: RunConfig) -> list[Sentence]:
    losses = _column(train, "loss")[1]
    if not losses:
        return [Sentence("course", f"No record holds a finite loss ({len(train)} records).", 0.0, True)]
    count = max(1, int(len(losses) * SHARE))
    first, last = mean(losses[:count]), mean(losses[-count:])
    step, wanted = train[-1]["step"], config.training.steps
    went = f"{'fell' if last < first else 'rose'} from {first:.4g} to {last:.4g}"
    text = (
        f"The loss {f'stayed at {last:.4g}' if last == first else went} (means of the first and last fifth of "
        f"{len(losses)} records)."
    )
    change = last / first if first else math.copysign(math.inf, last) if last else 1.0
    found = [Sentence("course", text, change, last >= first and len(losses) > 1)]
    if step < wanted:
        found.append(
            Sentence("course", f"It stands at step {step} of {wanted}; the same command goes on.", step / wanted)
        )
    return found


def _features(probe: Sequence[Record], config: RunConfig) -> list[Sentence]:
    if not probe:
        return [
            Sentence(
                "features",
                f"Features were not measured: 0 probe records. Train with --probe-every {PROBE_EVERY} to see which blocks "
                "oscillate.",
                0,
            )
        ]
    found = block_oscillations(probe, "norm", config.optimizer.warmup_steps)
    if not found:
        text = f"{len(probe)} probe records are too few to speak of oscillation; 2 after the warm-up are needed."
        return [Sentence("features", text, len(probe))]
    ranked = sorted(found.items(), key=lambda item: -item[1])
    restless = [(name, value) for name, value in ranked if value > OSCILLATES]
    worst, value = ranked[0]
    if not restless:
        text = f"No block oscillates: the liveliest, {worst}, moves by {value:.1%} of its norm between records"
        return [Sentence("features", f"{text} ({len(found)} blocks, limit {OSCILLATES:.0%}).", value)]
    shown = ", ".join(f"{name} {value:.0%}" for name, value in restless[:4])
    more = f" and {len(restless) - 4} more" if len(restless) > 4 else ""
    text = (
        f"{len(restless)} of {len(found)} blocks oscillate, moving by more than {OSCILLATES:.0%} of their norm between "
        f"records: {shown}{more}."
    )
    return [Sentence("features", text, value, True)]


def _gradients(train: Sequence[Record], probe: Sequence[Record], config: RunConfig) -> list[Sentence]:
    after = [record for record in train if record["step"] > config.optimizer.warmup_steps] or list(train)
    norms, (steps, peaks) = _column(after, "gradient_norm")[1], _column(after, "gradient_norm_max")
    if not norms or not peaks:
        return [Sentence("gradients", f"No record holds a finite gradient norm ({len(after)} records).", 0.0, True)]
    usual = median(norms)
    if not usual:
        text = f"Gradients are exactly zero in at least half of the {len(norms)} records: nothing is learnt there."
        return [Sentence("gradients", text, 0.0, True)]
    spikes = [(step, peak) for step, peak in zip(steps, peaks, strict=True) if peak > SPIKES * usual]
    at, largest = max(zip(steps, peaks, strict=True), key=lambda pair: pair[1])
    if spikes:
        text = (
            f"Gradients spike: {len(spikes)} of {len(peaks)} records hold a norm above {SPIKES:g} times the median "
            f"{usual:.3g}, the largest {largest:.3g} by step {at}."
        )
    else:
        text = (
            f"Gradients do not spike: the largest norm, {largest:.3g} by step {at}, is {largest / usual:.1f} times the "
        )
        text += f"median {usual:.3g} (limit {SPIKES:g})."
    found = [Sentence("gradients", text, largest / usual, bool(spikes))]
    blocks = block_oscillations(probe, "gradient", config.optimizer.warmup_steps) if probe else {}
    if blocks:
        name, value = max(blocks.items(), key=lambda item: item[1])
        found.append(
            Sentence("gradients", f"The least steady gradient is that of {name}: {value:.0%} between records.", value)
        )
    return found


def _steps(train: Sequence[Record]) -> list[Sentence]:
    skipped = max((int(record.get("skipped") or 0) for record in train), default=0)
    step = train[-1]["step"]
    if not skipped:
        return [Sentence("steps", f"No step was skipped for values that are not finite (0 of {step}).", 0)]
    text = f"{skipped} of {step} steps were skipped because their loss or gradient was not finite."
    return [Sentence("steps", text, skipped, True)]


# -------------------------------------------------------------------------------------------------------- what to try


def _advice(found: Sequence[Sentence], config: RunConfig) -> list[Sentence]:
    alarms = {sentence.about: sentence for sentence in found if sentence.alarming}
    scaling, tips = config.scaling, []
    if "features" in alarms:
        number = alarms["features"].number
        seen = f"a block moves by {number:.0%}"
        if scaling.method == "none":
            tips.append(
                (f"Try --scaling.method cs (now none): {seen}; compare the two with scalelong compare.", number)
            )
        tips.append((f"Try --optimizer.lr {config.optimizer.lr / 2:g} (now {config.optimizer.lr:g}): {seen}.", number))
    if "gradients" in alarms and alarms["gradients"].number:
        number = alarms["gradients"].number
        clip = config.optimizer.clip_norm
        tips.append(
            (
                f"Try --optimizer.clip-norm at twice the median norm (now {clip:g}): the largest is {number:.1f} times it.",
                number,
            )
        )
    if "steps" in alarms:
        number = alarms["steps"].number
        how = "fp32" if config.training.precision == "fp16" else "a longer --optimizer.warmup-steps"
        now = f"{config.training.precision}, warm-up {config.optimizer.warmup_steps}"
        tips.append((f"Try {how} (now {now}): {number:g} steps were lost.", number))
    if "course" in alarms:
        number = alarms["course"].number
        tips.append(
            (f"Try a tenth of the rate, --optimizer.lr {config.optimizer.lr / 10:g}: the loss did not fall.", number)
        )
    return [Sentence("try", text, number) for text, number in tips] or [
        Sentence("try", "Nothing here asks for a change (0 alarms).", 0)
    ]


# ------------------------------------------------------------------------------------------------------------ numbers


def block_oscillations(probe: Sequence[Record], what: str, after: int = 0) -> dict[str, float]:
    """Relative oscillation of each block's "norm" or "gradient" over the probe records after a step."""
    late = [record for record in probe if record["step"] > after]
    blocks = dict.fromkeys(
        key.removeprefix(f"{what}/") for record in late for key in record if key.startswith(f"{what}/")
    )
    columns = {block: _column(late, f"{what}/{block}")[1] for block in blocks}
    return {block: relative_oscillation(norms) for block, norms in columns.items() if len(norms) > 1}


def _column(records: Sequence[Record], key: str) -> tuple[list[int], list[float]]:
    """Steps and finite values."""
    pairs = [(record["step"], record.get(key)) for record in records]
    kept = [(s, float(v)) for s, v in pairs if isinstance(v, (int, float)) and math.isfinite(v)]
    return [step for step, _ in kept], [value for _, value in kept]
