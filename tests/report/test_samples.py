"""Grids in the page: the right ones, within the budget."""

import base64
import io
from pathlib import Path

import numpy as np
from PIL import Image

from scalelong.report import read_runs
from scalelong.report.groups import Group, group_runs
from scalelong.report.samples import FRAMES, make_films
from tests.report.runs import draw_grid, write_run


def groups(tmp_path: Path) -> list[Group]:
    return group_runs(read_runs([tmp_path])[0])


def test_a_film_has_the_first_and_the_last_grid_and_few_between(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "a")
    for step in range(1, 101):
        draw_grid(folder, step)
    (film,) = make_films(groups(tmp_path))
    steps = [frame.step for frame in film.frames]
    assert (len(steps), steps[0], steps[-1]) == (FRAMES, 1, 100)


def test_a_frame_decodes_to_the_grid(tmp_path: Path) -> None:
    draw_grid(write_run(tmp_path / "a"), 7, "red")
    ((frame,),) = (film.frames for film in make_films(groups(tmp_path)))
    picture = Image.open(io.BytesIO(base64.b64decode(frame.uri.partition(",")[2])))
    assert picture.size == (frame.width, frame.height) == (16, 16)
    assert picture.convert("RGB").getpixel((3, 3)) == (255, 0, 0)


def test_large_grids_shrink_and_thin_out_until_they_fit(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "a")
    (folder / "samples").mkdir()
    noise = np.random.default_rng(0).integers(0, 256, (900, 900, 3), dtype=np.uint8)
    for step in (1, 2):
        Image.fromarray(noise).save(folder / "samples" / f"step-{step:08d}.png")
    (wide,) = make_films(groups(tmp_path))
    assert (len(wide.frames), wide.frames[0].width) == (2, 640)
    (narrow,) = make_films(groups(tmp_path), budget=70_000)
    assert narrow.frames[0].width <= 320
    assert sum(len(frame.uri) for frame in narrow.frames) * 3 / 4 <= 70_000
    assert narrow.frames[-1].step == 2
    assert make_films(groups(tmp_path), budget=10) == []


def test_methods_without_grids_and_damaged_grids_are_left_out(tmp_path: Path) -> None:
    write_run(tmp_path / "a", "none")
    folder = write_run(tmp_path / "b", "cs")
    draw_grid(folder, 1)
    (folder / "samples" / "step-00000002.png").write_bytes(b"\x89PNG torn")
    (film,) = make_films(groups(tmp_path))
    assert (film.group.label, [frame.step for frame in film.frames]) == ("cs 0.7", [1])
