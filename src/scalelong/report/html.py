"""The report: one HTML file that works offline."""

from __future__ import annotations

import base64
import io
import json
import logging
import re
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from PIL import Image

from scalelong.files import open_inside, write_text
from scalelong.report import sentences, tables
from scalelong.report.charts import Chart, make_charts
from scalelong.report.colours import PALETTE, assign
from scalelong.report.compare import Comparison, compare_runs
from scalelong.report.groups import Group, differing_settings, seeds_text, settings_in_use
from scalelong.report.numbers import count, duration, joined, number
from scalelong.runs.reader import Run

logger = logging.getLogger(__name__)

FILM_BYTES = 2_400_000  # of encoded images; as base64 they take a third more
FRAMES, WIDTH = 24, 640  # of a film, at most
SMALL = 20_000  # bytes
LARGEST_GRID = 2**24  # bytes and pixels of one sample grid


def write_report(
    runs: Sequence[Run], path: str | Path, refused: Sequence[str] = (), loss: float | None = None,
    metric_value: float | None = None,
) -> Path:  # fmt: skip
    """Write the report of these runs; `loss` and `metric_value` are targets of the races.

    >>> from scalelong.runs.reader import read_run
    >>> from scalelong.runs.config import to_yaml
    >>> from scalelong.runs.settings import RunConfig
    >>> _ = Path("config.yaml").write_text(to_yaml(RunConfig()))
    >>> _ = Path("metrics.jsonl").write_text('{"step": 10, "kind": "train", "loss": 0.5, "seconds": 2}')
    >>> print(write_report([read_run(".")], "report.html"))
    report.html
    """
    path = Path(path)
    if path.is_dir():
        raise ValueError(f"out: {path} is a folder; give a file, for example {path / 'report.html'}")
    comparison = compare_runs(runs)
    races = comparison.races(loss, metric_value)
    source = PackageLoader("scalelong.report")
    environment = Environment(
        loader=source, autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined
    )
    environment.filters |= {"tight": _tight, "count": count, "duration": duration, "number": number, "shown": _shown}
    charts = make_charts(comparison)
    methods = {group.label: group.method for group in comparison.groups}
    colours = dict(zip(methods, assign([*methods.values()]), strict=True))  # an entry of the palette for each label
    names = joined(sorted({run.config.data.name for run in comparison.runs}))
    page = environment.get_template("report.html").render(
        files={name: source.get_source(environment, name)[0] for name in ("report.css", "chart.js", "page.js")},
        title=f"{names}: {joined([group.label for group in comparison.groups])}",
        written=time.strftime("%Y-%m-%d %H:%M"),
        comparison=comparison,
        facts=_facts(comparison),
        findings=sentences.findings(comparison, next((race for race in races if race.what == "loss"), None)),
        notes=tables.notes(comparison, refused),
        races=[pair for pair in zip(tables.race_names(races), races, strict=True) if len(pair[1].arrivals) > 1],
        films=make_films(comparison.groups),
        differing=differing_settings([group.config for group in comparison.groups]),
        settings=settings_in_use(comparison.baseline.config),
        charts=charts,
        colours=colours,
        palette=PALETTE,
        data=_data(charts, colours),
        sentences=sentences,
        tables=tables,
    )
    write_text(path, page)
    return path


def _data(charts: dict[str, Chart], colours: dict[str, int]) -> str:
    """Chart data as JSON that is safe inside a script tag."""
    groups = [{"label": label, "colour": colour} for label, colour in colours.items()]
    plain = [{k: v for k, v in asdict(chart).items() if v not in (None, "", [])} for chart in charts.values()]
    data = json.dumps({"groups": groups, "charts": plain}, separators=(",", ":"), allow_nan=False)
    return data.replace("<", "\\u003c")


def _facts(comparison: Comparison) -> list[tuple[str, str]]:
    """Key facts about the runs."""
    runs, model = comparison.runs, comparison.baseline.config.model
    seeds = sorted({run.seed for run in runs})
    backbone = f"U-ViT, {model.depth} blocks of width {model.dim}"
    if model.backbone == "unet":
        backbone = f"UNet, channels {', '.join(map(str, model.channels))}"
    if len({run.config.model for run in runs}) > 1:
        backbone = "several, see below"
    devices = sorted({str(record["device"]) for run in runs for record in run.start if record.get("device")})
    spent = sum(run.seconds_at([run.last_step])[0] for run in runs)
    return [
        ("Runs", f"{len(runs)}"),
        ("Seeds", seeds_text(seeds)),
        ("Steps", count(comparison.horizon)),
        ("Model", backbone),
        ("Device", joined(devices) or "not recorded"),
        ("Training time", f"{duration(spent)} in all"),
    ]


def _tight(text: str) -> str:
    """Keep numbers on one line with their ±, their unit and their method, by no-break spaces."""
    units = r"(?<=cs|al|ed) (?=\d\.)|(?<=\d) (?=(s|min|h|steps|images)\b)|(?<=[\ds]) (?=±)|(?<=±) (?=\d)"
    return re.sub(units, "\u00a0", text)


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
        except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:  # PIL raises any of them
            logger.warning("%s: is not a readable image (%s); left out", path, error)
    return frames


def _encoded(step: int, path: Path, width: int) -> Frame:
    """A small file as it is, a larger one as WebP if that is smaller; wide ones are resized to `width`."""
    with open_inside(path.parent, path.name, mode="rb") as file:
        original = file.read(LARGEST_GRID + 1)
    with Image.open(io.BytesIO(original), formats=("PNG",)) as opened:
        if len(original) > LARGEST_GRID or opened.width * opened.height > LARGEST_GRID:
            raise ValueError(f"{opened.width} x {opened.height} pixels are too many for a sample grid")
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
