"""One HTML file that holds everything: opens offline, asks the network for nothing."""

from __future__ import annotations

import dataclasses
import json
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from scalelong.report import sentences
from scalelong.report.charts import Chart, make_charts
from scalelong.report.compare import Comparison, compare_runs
from scalelong.report.groups import Group, differing_settings, settings_in_use
from scalelong.report.notes import notes
from scalelong.report.numbers import count, duration, joined, number
from scalelong.report.samples import make_films
from scalelong.report.tables import arrivals_table, measures_table, pairs_table, race_names
from scalelong.runs.reader import Run
from scalelong.runs.settings import MAY_CHANGE

COLOURS = 8  # --c0 (the untouched network) to --c7 in report.css


@dataclass(frozen=True)
class Targets:
    """What the runs race to; None: the worst that any of them ends with."""

    loss: float | None = None
    metric_value: float | None = None


WORST = Targets()


def write_report(runs: Sequence[Run], path: str | Path, refused: Sequence[str] = (), targets: Targets = WORST) -> Path:
    """Write the report of these runs; the file appears whole or not at all."""
    path = Path(path)
    if path.is_dir():
        raise ValueError(f"out: {path} is a folder; give a file, for example {path / 'report.html'}")
    page = render(compare_runs(runs), refused, targets)
    path.parent.mkdir(parents=True, exist_ok=True)
    staged = path.with_name(f".{path.name}.staged")
    staged.write_text(page, encoding="utf-8")
    staged.replace(path)
    return path


def render(comparison: Comparison, refused: Sequence[str] = (), targets: Targets = WORST) -> str:
    """The page."""
    environment = Environment(
        loader=PackageLoader("scalelong.report"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
    )
    environment.filters["tight"] = _tight
    source = environment.loader
    assert source is not None
    files = {name: source.get_source(environment, name)[0] for name in ("report.css", "chart.js", "page.js")}
    return environment.get_template("report.html").render(files=files, **_context(comparison, refused, targets))


def _context(comparison: Comparison, refused: Sequence[str], targets: Targets) -> dict[str, Any]:
    charts = make_charts(comparison)
    colours = _colours(comparison.groups)
    films = make_films(comparison.groups)
    groups = [
        {"label": group.label, "colour": colour} for group, colour in zip(comparison.groups, colours, strict=True)
    ]
    data = {"groups": groups, "charts": [_plain(chart) for chart in charts.values()]}
    return {
        "title": f"{joined(sorted({run.config.data.name for run in comparison.runs}))}: "
        f"{joined([group.label for group in comparison.groups])}",
        "facts": _facts(comparison),
        "headline": sentences.headline(comparison),
        "seeds": sentences.seeds_words(comparison),
        "findings": [
            (colours[comparison.groups.index(group)], group.label, text)
            for group, text in sentences.findings(comparison, comparison.loss_race(targets.loss))
        ],
        "notes": notes(comparison, refused),
        "groups": groups,
        "charts": charts,
        "measures": measures_table(comparison),
        "races": _races(comparison, targets),
        "oscillation": sentences.oscillations_words(comparison),
        "coefficients": [text for group in comparison.groups if (text := sentences.coefficient_words(group))]
        + [text for text in [sentences.learned_against_constant(list(comparison.groups))] if text],
        "throughput": sentences.throughput_words(comparison),
        "smoothing": sentences.smoothing_words(comparison),
        "quality": sentences.quality_summary(comparison),
        "films": films,
        "films_lead": sentences.films_words([(film.group, film.run) for film in films]),
        "film_steps": sorted({frame.step for film in films for frame in film.frames}),
        "group_index": {group.label: i for i, group in enumerate(comparison.groups)},
        "configuration": _configuration(comparison.groups),
        "all_settings": [(key, _shown(value)) for key, value in settings_in_use(comparison.baseline.config).items()],
        "baseline": comparison.baseline.label,
        "runs": [_run_facts(group, run) for group in comparison.groups for run in group.runs],
        "window": count(comparison.window),
        "horizon": count(comparison.horizon),
        "written": time.strftime("%Y-%m-%d %H:%M"),
        "data": json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c"),
    }


def _facts(comparison: Comparison) -> list[tuple[str, str]]:
    """What was run, at a glance."""
    runs = comparison.runs
    seeds = sorted({run.seed for run in runs})
    model = comparison.baseline.config.model
    backbone = f"U-ViT, {model.depth} blocks of width {model.dim}"
    if model.backbone == "unet":
        backbone = f"UNet, channels {', '.join(map(str, model.channels))}"
    if len({run.config.model for run in runs}) > 1:
        backbone = "several, see below"
    devices = sorted({str(record["device"]) for run in runs for record in run.start if record.get("device")})
    spent = sum(run.seconds_at([run.last_step])[0] for run in runs)
    return [
        ("Runs", f"{len(runs)}"),
        ("Seeds" if len(seeds) > 1 else "Seed", ", ".join(map(str, seeds))),
        ("Steps", count(comparison.horizon)),
        ("Model", backbone),
        ("Device", joined(devices) or "not recorded"),
        ("Training time", f"{duration(spent)} in all"),
    ]


def _races(comparison: Comparison, targets: Targets) -> list[dict[str, Any]]:
    metrics = [comparison.metric_race(metric, targets.metric_value) for metric in comparison.metrics]
    races = [race for race in (comparison.loss_race(targets.loss), *metrics) if race is not None]
    return [
        {
            "what": what,
            "target": number(race.target),
            "why": sentences.target_words(race),
            "arrivals": arrivals_table(race),
            "pairs": pairs_table(race),
        }
        for race, what in zip(races, race_names(races), strict=True)
        if len(race.arrivals) > 1
    ]


def _configuration(groups: Sequence[Group]) -> list[list[str]]:
    """The settings that differ between methods, as a table."""
    rows = differing_settings([group.config for group in groups])
    shown = {key: values for key, values in rows.items() if key != "training.seed" and key not in MAY_CHANGE}
    head = ["setting", *(group.label for group in groups)]
    return [head, *([key, *map(_shown, values)] for key, values in shown.items())] if shown else []


def _run_facts(group: Group, run: Run) -> dict[str, Any]:
    return {
        "label": group.label,
        "seed": run.seed,
        "folder": str(run.folder),
        "steps": f"{count(run.last_step)} of {count(run.config.training.steps)}",
        "time": duration(run.seconds_at([run.last_step])[0]),
        "starts": [
            {
                "command": str(record.get("command", "")),
                "what": "started" if not record["step"] else f"resumed at step {count(record['step'])}",
                "facts": [(k, str(v)) for k, v in record.items() if k not in ("kind", "step", "command")],
            }
            for record in run.start
        ],
    }


def _colours(groups: Sequence[Group]) -> list[int]:
    """Grey for the untouched network, a colour of its own for each other method."""
    others = iter(range(len(groups)))
    plain = next((group for group in groups if group.method == "none"), None)
    return [0 if group is plain else 1 + next(others) % (COLOURS - 1) for group in groups]


def _plain(chart: Chart) -> dict[str, Any]:
    return {key: value for key, value in dataclasses.asdict(chart).items() if value not in (None, "", [])}


def _tight(text: str) -> str:
    """Numbers stay on one line with their ±, their unit and their method."""
    return re.sub(
        r"(?<=cs|al) (?=\d\.)|(?<=ed) (?=\d\.)|(?<=\d) (?=(s|min|h|steps|images)\b)|(?<=[\ds]) (?=±)|(?<=±) (?=\d)",
        "\u00a0",
        text,
    )


def _shown(value: Any) -> str:
    if value is None:
        return "–"
    return (
        f"{value:g}"
        if isinstance(value, float)
        else ", ".join(map(str, value))
        if isinstance(value, tuple)
        else str(value)
    )
