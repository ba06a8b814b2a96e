"""Sample grids of a run as pictures inside the page: few enough, and small enough."""

from __future__ import annotations

import base64
import io
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from PIL import Image

from scalelong.report.groups import Group
from scalelong.runs.reader import Run

logger = logging.getLogger(__name__)

BYTES_IN_ALL = 2_400_000  # of encoded pictures; as text they take a third more
FRAMES = 24
WIDTH = 640
SMALL = 20_000  # bytes


@dataclass(frozen=True)
class Frame:
    """One grid at one step, as a data URI."""

    step: int
    uri: str
    width: int
    height: int


@dataclass(frozen=True)
class Film:
    """The grids of one method over training: those of its first seed that drew any."""

    group: Group
    run: Run
    frames: list[Frame]

    def at(self, step: int) -> int:
        """The number of the newest frame at a step."""
        return max((i for i, frame in enumerate(self.frames) if frame.step <= step), default=0)


def make_films(groups: Sequence[Group], budget: int = BYTES_IN_ALL) -> list[Film]:
    """A film for each method that drew samples, with fewer frames and then smaller ones until all fit."""
    chosen = [(group, next((run for run in group.runs if run.sample_grids()), None)) for group in groups]
    for frames, width in ((FRAMES, WIDTH), (12, WIDTH), (6, WIDTH), (6, WIDTH // 2), (3, WIDTH // 2), (1, WIDTH // 4)):
        films = [Film(group, run, _frames(run, frames, width)) for group, run in chosen if run is not None]
        if sum(len(frame.uri) for film in films for frame in film.frames) * 3 / 4 <= budget:
            return [film for film in films if film.frames]
    logger.warning("the sample grids do not fit into the report and were left out")
    return []


def _frames(run: Run, count: int, width: int) -> list[Frame]:
    grids = run.sample_grids()
    kept = sorted({round(i * (len(grids) - 1) / max(count - 1, 1)) for i in range(count)}) if count > 1 else [-1]
    frames = []
    for step, path in (grids[i] for i in kept):
        try:
            frames.append(_encoded(step, path, width))
        except (OSError, SyntaxError) as error:  # a damaged PNG is either
            logger.warning("%s: is no picture (%s); left out", path, error)
    return frames


def _encoded(step: int, path: Path, width: int) -> Frame:
    """A small file as it is, a larger one as WebP if that is smaller; wide ones are shrunk to `width`."""
    original = path.read_bytes()
    with Image.open(io.BytesIO(original)) as opened:
        picture = opened.convert("RGB")
    shrunk = picture.width > width
    if shrunk:
        picture = picture.resize(
            (width, max(1, round(picture.height * width / picture.width))), Image.Resampling.LANCZOS
        )
    packed = io.BytesIO()
    picture.save(packed, "WEBP", quality=85)
    kind, content = ("webp", packed.getvalue())
    if not shrunk and len(original) <= max(len(content), SMALL):
        kind, content = ("png", original)
    uri = f"data:image/{kind};base64,{base64.b64encode(content).decode()}"
    return Frame(step, uri, picture.width, picture.height)
