"""Diagnose the stability of a run from its records. No torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median

from scalelong.runs.reader import FINAL_SHARE, PROBE_EVERY, Run, read_run
from scalelong.runs.settings import RunConfig

OSCILLATES = 0.1  # of the norm, between records; a convention, as is SPIKES
SPIKES = 5.0  # times the median gradient norm
FEW = 5  # records of the loss, of which no trend is judged


@dataclass(frozen=True)
class Sentence:
    """A statement, its subject and its number."""

    about: str  # course, features, gradients, steps, semantics, try
    text: str
    number: float
    alarming: bool = False


NOTHING = Sentence("try", "Nothing here asks for a change (0 alarms).", 0)


def diagnose(folder: str | Path) -> list[Sentence]:
    """Describe the loss, oscillation, gradient spikes and skipped steps of a run, and what to try.

    folder: a run folder, or the file of an `OscillationProbe`.

    >>> from scalelong.runs.config import to_yaml
    >>> _ = Path("config.yaml").write_text(to_yaml(RunConfig()))
    >>> _ = Path("metrics.jsonl").write_text('{"step": 10, "kind": "train", "loss": 0.5, "seconds": 2}')
    >>> print(diagnose(".")[0].text)
    The loss stayed at 0.5 (means of the first and last fifth of 1 record, too few to judge).
    """
    run = read_run(folder)
    if run.folder.is_file():
        found = [*(_course(run) if run.column("train", "loss")[0] else []), *_features(run), *_block_gradients(run)]
        return found + _advice(found, run.config, elsewhere=True)
    found = [*_course(run), *_features(run), *_gradients(run), *_steps(run), *_semantics(run)]
    return found + _advice(found, run.config)


def _course(run: Run) -> list[Sentence]:
    losses = run.column("train", "loss")[1]
    if not losses:
        return [Sentence("course", f"No record has a finite loss ({len(run.train)} records).", 0.0, True)]
    first, last = mean(losses[: max(1, int(len(losses) * FINAL_SHARE))]), run.final_loss()
    went = f"{'fell' if last < first else 'rose'} from {first:.4g} to {last:.4g}"
    went = f"stayed at {last:.4g}" if last == first else went
    records = f"{len(losses)} record{'s' if len(losses) > 1 else ''}"
    few = ", too few to judge" if len(losses) < FEW else ""
    text = f"The loss {went} (means of the first and last fifth of {records}{few})."
    change = last / first if first else math.copysign(math.inf, last) if last else 1.0
    found = [Sentence("course", text, change, last >= first and not few)]
    step, total = run.last_step, run.config.training.steps
    if step < total and run.diverged is None:
        text = f"The run is at step {step} of {total}; repeat the training command to continue it."
        found.append(Sentence("course", text, step / total))
    return found


def _features(run: Run) -> list[Sentence]:
    if not run.probe:
        advice = f"train with --probe-every {PROBE_EVERY} to see which blocks oscillate"
        return [Sentence("features", f"Features were not measured: 0 probe records; {advice}.", 0)]
    found = _oscillations(run, "norm")
    if not found:
        text = f"{len(run.probe)} probe records are too few to measure oscillation; 2 after the warm-up are needed."
        return [Sentence("features", text, len(run.probe))]
    ranked = sorted(found.items(), key=lambda item: -item[1])
    worst, value = ranked[0]
    unsteady = [f"{name} {moved:.0%}" for name, moved in ranked if moved > OSCILLATES]
    if not unsteady:
        text = f"No block oscillates: the least steady, {worst}, moves by {value:.1%} of its norm between records"
        return [Sentence("features", f"{text} ({len(found)} blocks, limit {OSCILLATES:.0%}).", value)]
    worst = ", ".join(unsteady[:4]) + (f" and {len(unsteady) - 4} more" if len(unsteady) > 4 else "")
    text = f"{len(unsteady)} of {len(found)} blocks oscillate, moving by more than {OSCILLATES:.0%} of their norm"
    return [Sentence("features", f"{text} between records: {worst}.", value, True)]


def _gradients(run: Run) -> list[Sentence]:
    warmup = run.config.optimizer.warmup_steps
    after = warmup if run.last_step > warmup else -1
    _, norms = run.column("train", "gradient_norm", after=after)
    steps, peaks = run.column("train", "gradient_norm_max", after=after)
    if not norms or not peaks:
        return [Sentence("gradients", f"No record has a finite gradient norm ({len(run.train)} records).", 0.0, True)]
    usual = median(norms)
    if not usual:
        text = f"Gradients are exactly zero in at least half of the {len(norms)} records: nothing is learned there."
        return [Sentence("gradients", text, 0.0, True)]
    spikes = sum(peak > SPIKES * usual for peak in peaks)
    largest, at = max(zip(peaks, steps, strict=True), key=lambda pair: pair[0])
    if spikes:
        above = f"{spikes} of {len(peaks)} records have a norm above {SPIKES:g} times the median {usual:.3g}"
        text = f"Gradients spike: {above}, the largest {largest:.3g} by step {at}."
    else:
        times = f"{largest / usual:.1f} times the median {usual:.3g} (limit {SPIKES:g})"
        text = f"Gradients do not spike: the largest norm, {largest:.3g} by step {at}, is {times}."
    found = [Sentence("gradients", text, largest / usual, spikes > 0)]
    return found + _block_gradients(run)


def _block_gradients(run: Run) -> list[Sentence]:
    blocks = _oscillations(run, "gradient")
    if not blocks:
        return []
    value, name = max((value, name) for name, value in blocks.items())
    return [Sentence("gradients", f"The least steady block gradient: {name}, {value:.0%} between records.", value)]


def _steps(run: Run) -> list[Sentence]:
    if (at := run.diverged) is not None:
        text = f"The run ended at step {at} of {run.config.training.steps}: non-finite loss or gradient, or too many spikes."
        return [Sentence("steps", text, at, True)]
    skipped = int(max(run.column("train", "skipped")[1], default=0))
    text = f"{skipped} of {run.last_step} steps were skipped because their loss or gradient was not finite."
    return [Sentence("steps", text, skipped, skipped > 0)]


def _semantics(run: Run) -> list[Sentence]:
    """How probe accuracy changes with the noise: unimodal while a network generalizes, decreasing once it memorizes."""
    if not run.linear_probes:
        return []
    record = run.linear_probes[-1]
    levels, row = record["noise"], record["held_out"][record["blocks"].index(record["block"])]
    error = math.sqrt(max(row) * (1 - max(row)) / max(1, record["n_held_out"]))
    best, first = row.index(max(row)), row[0]
    gain = row[best] - first
    shape = f"peaks at noise {levels[best]:.2g}, {100 * gain:.1f} points above noise {levels[0]:.2g}"
    alarming = False
    if len(levels) < 3:
        verdict = "has no shape with fewer than three levels; probe more (--levels 9)"
    elif best == 0 and row[0] - max(row[1:]) <= error:
        close = f"is as high at noise {levels[row.index(max(row[1:]), 1)]:.2g} as at the lowest"
        verdict = f"{close}, within the error of {100 * error:.1f}: unimodal or monotone, undecided"
    elif best == 0:
        verdict, alarming = "is monotone: it falls from the lowest noise on, as in networks that memorize", True
    elif gain <= error:
        verdict = f"{shape}, which is within the error of {100 * error:.1f}: unimodal or monotone, undecided"
    elif best == len(row) - 1:
        verdict = f"rises up to the highest noise measured, {levels[best]:.2g}; probe higher levels"
    else:
        verdict = f"is unimodal: it {shape}, as in networks that generalize"
    text = f"Linear-probe accuracy of {record['block']} over noise {verdict} ({len(levels)} levels)."
    return [Sentence("semantics", text, gain, alarming)]


def _advice(found: Sequence[Sentence], config: RunConfig, elsewhere: bool = False) -> list[Sentence]:
    """What to try; elsewhere: in another training loop, whose settings are unknown."""
    alarms = {sentence.about: sentence.number for sentence in found if sentence.alarming}
    optimizer, tips = config.optimizer, []
    if elsewhere:
        scale, compare = 'scalelong.apply(model, "cs") before the optimizer is built', ""
        half, tenth = "half the learning rate", "a tenth of the learning rate"
    else:
        scale, compare = "--scaling.method cs (now none)", "; compare the two with scalelong compare"
        half = f"--optimizer.lr {optimizer.lr / 2:g} (now {optimizer.lr:g})"
        tenth = f"a tenth of the rate, --optimizer.lr {optimizer.lr / 10:g}"
    if (number := alarms.get("features")) is not None:
        seen = f"a block moves by {number:.0%}"
        if config.scaling.method == "none":
            tips.append((f"{scale}: {seen}{compare}", number))
        tips.append((f"{half}: {seen}", number))
    if number := alarms.get("gradients"):
        now = f"(now {optimizer.clip_norm:g}): the largest is {number:.1f} times it"
        tips.append((f"--optimizer.clip-norm at twice the median norm {now}", number))
    if number := alarms.get("steps"):
        how = "fp32" if config.training.precision == "fp16" else "a longer --optimizer.warmup-steps"
        now = f"{config.training.precision}, warm-up {optimizer.warmup_steps}"
        tips.append((f"{how} (now {now}): a loss or gradient was not finite", number))
        if "features" not in alarms:
            tips.append((f"{half}: a loss or gradient was not finite", number))
    if (number := alarms.get("course")) is not None:
        tips.append((f"{tenth}: the loss did not fall", number))
    return [Sentence("try", f"Try {tip}.", number) for tip, number in tips] or [NOTHING]


def _oscillations(run: Run, what: str) -> dict[str, float]:
    """Relative oscillation of each block's "norm" or "gradient" after the warm-up."""
    blocks = [key.removeprefix(f"{what}/") for key in run.probe.keys if key.startswith(f"{what}/")]
    found = {block: run.oscillation(block, what=what) for block in blocks}
    return {block: value for block, value in found.items() if not math.isnan(value)}
