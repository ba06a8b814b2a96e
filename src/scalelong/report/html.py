"""The report: one HTML file that works offline."""

from __future__ import annotations

import base64
import dataclasses
import io
import json
import logging
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from PIL import Image

from scalelong.files import write_text
from scalelong.report import sentences
from scalelong.report.charts import make_charts
from scalelong.report.compare import Comparison, Race, compare_runs
from scalelong.report.groups import Group, differing_settings, settings_in_use
from scalelong.report.notes import notes
from scalelong.report.numbers import count, duration, joined, number
from scalelong.report.tables import arrivals_table, measures_table, pairs_table, race_names
from scalelong.runs.reader import Run

logger = logging.getLogger(__name__)

COLOURS = 8  # --c0 (the unscaled network) to --c7 in report.css

FILM_BYTES = 2_400_000  # of encoded images; as base64 they take a third more
FRAMES = 24
WIDTH = 640
SMALL = 20_000  # bytes


def write_report(
    runs: Sequence[Run],
    path: str | Path,
    refused: Sequence[str] = (),
    loss: float | None = None,
    metric_value: float | None = None,
) -> Path:
    """Write the report of these runs; `loss` and `metric_value` are targets of the races.

    >>> from scalelong.runs.reader import read_run
    >>> from scalelong.runs.settings import RunConfig, to_yaml
    >>> _ = Path("config.yaml").write_text(to_yaml(RunConfig()))
    >>> _ = Path("metrics.jsonl").write_text('{"step": 10, "kind": "train", "loss": 0.5, "seconds": 2}')
    >>> print(write_report([read_run(".")], "report.html"))
    report.html
    """
    path = Path(path)
    if path.is_dir():
        raise ValueError(f"out: {path} is a folder; give a file, for example {path / 'report.html'}")
    comparison = compare_runs(runs)
    write_text(path, render(comparison, comparison.races(loss, metric_value), refused))
    return path


def render(comparison: Comparison, races: Sequence[Race], refused: Sequence[str] = ()) -> str:
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
    return environment.get_template("report.html").render(files=files, **_context(comparison, races, refused))


def _context(comparison: Comparison, races: Sequence[Race], refused: Sequence[str]) -> dict[str, Any]:
    charts, films, colours = make_charts(comparison), make_films(comparison.groups), _colours(comparison.groups)
    groups = [
        {"label": group.label, "colour": colour} for group, colour in zip(comparison.groups, colours, strict=True)
    ]
    plain = [{k: v for k, v in dataclasses.asdict(c).items() if v not in (None, "", [])} for c in charts.values()]
    data = json.dumps({"groups": groups, "charts": plain}, separators=(",", ":"), allow_nan=False)
    loss_race = next((race for race in races if race.what == "loss"), None)
    return {
        "title": f"{joined(sorted({run.config.data.name for run in comparison.runs}))}: "
        f"{joined([group.label for group in comparison.groups])}",
        "facts": _facts(comparison),
        "headline": sentences.headline(comparison),
        "seeds": sentences.seeds(comparison),
        "findings": [
            (colours[comparison.groups.index(group)], group.label, text)
            for group, text in sentences.findings(comparison, loss_race)
        ],
        "notes": notes(comparison, refused),
        "groups": groups,
        "charts": charts,
        "measures": measures_table(comparison),
        "races": [
            {
                "what": what,
                "target": number(race.target),
                "why": sentences.target(race),
                "arrivals": arrivals_table(race),
                "pairs": pairs_table(race),
            }
            for race, what in zip(races, race_names(races), strict=True)
            if len(race.arrivals) > 1
        ],
        "oscillation": sentences.oscillations(comparison),
        "coefficients": [
            text
            for text in (
                *map(sentences.coefficients, comparison.groups),
                sentences.learned_against_constant(comparison.groups),
            )
            if text
        ],
        "throughput": sentences.throughput(comparison),
        "smoothing": sentences.smoothing(comparison),
        "quality": sentences.qualities(comparison),
        "films": films,
        "films_lead": sentences.sample_grids([(film.group, film.run) for film in films]),
        "film_steps": sorted({frame.step for film in films for frame in film.frames}),
        "group_index": {group.label: i for i, group in enumerate(comparison.groups)},
        "configuration": _configuration(comparison.groups),
        "all_settings": [(key, _shown(value)) for key, value in settings_in_use(comparison.baseline.config).items()],
        "baseline": comparison.baseline.label,
        "runs": [_run_facts(group, run) for group in comparison.groups for run in group.runs],
        "window": count(comparison.window),
        "horizon": count(comparison.horizon),
        "written": time.strftime("%Y-%m-%d %H:%M"),
        "data": data.replace("<", "\\u003c"),
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


def _configuration(groups: Sequence[Group]) -> list[list[str]]:
    """The settings that differ between methods, as a table."""
    rows = differing_settings([group.config for group in groups])
    head = ["setting", *(group.label for group in groups)]
    return [head, *([key, *map(_shown, values)] for key, values in rows.items())] if rows else []


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
    """Grey for the unscaled network, a colour of its own for each other method."""
    others = iter(range(len(groups)))
    plain = next((group for group in groups if group.method == "none"), None)
    return [0 if group is plain else 1 + next(others) % (COLOURS - 1) for group in groups]


def _tight(text: str) -> str:
    """Keep numbers on one line with their ±, their unit and their method, by no-break spaces."""
    return re.sub(
        r"(?<=cs|al) (?=\d\.)|(?<=ed) (?=\d\.)|(?<=\d) (?=(s|min|h|steps|images)\b)|(?<=[\ds]) (?=±)|(?<=±) (?=\d)",
        "\u00a0",
        text,
    )


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:g}"
    return "–" if value is None else ", ".join(map(str, value)) if isinstance(value, tuple) else str(value)


# ----------------------------------------------------------------------------------------------------------- sample grids


@dataclass(frozen=True)
class Frame:
    """A sample grid as a data URI."""

    step: int
    uri: str
    width: int
    height: int


@dataclass(frozen=True)
class Film:
    """The sample grids of one method over training, of its first seed that has any."""

    group: Group
    run: Run
    frames: list[Frame]

    def at(self, step: int) -> int:
        """Index of the newest frame at a step."""
        return max((i for i, frame in enumerate(self.frames) if frame.step <= step), default=0)


def make_films(groups: Sequence[Group], budget: int = FILM_BYTES) -> list[Film]:
    """A film for each method that has sample grids, with fewer and then smaller frames until all fit."""
    chosen = [(group, next((run for run in group.runs if run.sample_grids()), None)) for group in groups]
    for frames, width in ((FRAMES, WIDTH), (12, WIDTH), (6, WIDTH), (6, WIDTH // 2), (3, WIDTH // 2), (1, WIDTH // 4)):
        films = [Film(group, run, _frames(run, frames, width)) for group, run in chosen if run is not None]
        if sum(len(frame.uri) for film in films for frame in film.frames) * 3 / 4 <= budget:
            return [film for film in films if film.frames]
    logger.warning("the sample grids do not fit into the report and were left out")
    return []


def _frames(run: Run, limit: int, width: int) -> list[Frame]:
    grids = run.sample_grids()
    kept = sorted({round(i * (len(grids) - 1) / (limit - 1)) for i in range(limit)}) if limit > 1 else [-1]
    frames = []
    for step, path in (grids[i] for i in kept):
        try:
            frames.append(_encoded(step, path, width))
        except (OSError, SyntaxError) as error:  # PIL raises either for a damaged PNG
            logger.warning("%s: is not a readable image (%s); left out", path, error)
    return frames


def _encoded(step: int, path: Path, width: int) -> Frame:
    """A small file as it is, a larger one as WebP if that is smaller; wide ones are resized to `width`."""
    original = path.read_bytes()
    with Image.open(io.BytesIO(original)) as opened:
        image = opened.convert("RGB")
    wide = image.width > width
    if wide:
        image = image.resize((width, max(1, round(image.height * width / image.width))), Image.Resampling.LANCZOS)
    packed = io.BytesIO()
    image.save(packed, "WEBP", quality=85)
    kind, content = "webp", packed.getvalue()
    if not wide and len(original) <= max(len(content), SMALL):
        kind, content = "png", original
    return Frame(step, f"data:image/{kind};base64,{base64.b64encode(content).decode()}", image.width, image.height)
