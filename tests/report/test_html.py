"""The page as text: whole, safe, small, and right about its runs."""

import base64
import io
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from scalelong.report import read_runs, write_report
from scalelong.report.groups import Group, group_runs
from scalelong.report.html import FRAMES, make_films
from tests.report.runs import draw_grid, write_run


def page(tmp_path: Path, *runs: Path) -> str:
    found, refused = read_runs(runs or [tmp_path])
    return write_report(found, tmp_path / "report.html", refused).read_text()


class Outline(HTMLParser):
    """Checks that tags close in order, and collects what would be loaded."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.loads: list[str] = []
        self.ids: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        self.loads += [str(values[key]) for key in ("src", "href", "srcset", "data", "action") if values.get(key)]
        self.ids += [str(values["id"])] if values.get("id") else []
        if tag not in ("meta", "link", "img", "input", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_everything_is_inside_the_file(tmp_path: Path) -> None:
    draw_grid(write_run(tmp_path / "a", norms=[1.0, 2.0], kappa=[1.0], evaluations=[(20, 5.0)]), 10)
    write_run(tmp_path / "b", "cs")
    text = page(tmp_path)
    outline = Outline()
    outline.feed(text)
    assert outline.open == []
    assert outline.loads
    assert all(link.startswith("data:") for link in outline.loads)
    assert len(outline.ids) == len(set(outline.ids))
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", text)


def test_records_are_escaped(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "a")
    evil = "</script><script>alert(1)</script><img src=x>"
    text = (folder / "metrics.jsonl").read_text()
    (folder / "metrics.jsonl").write_text(text.replace("scalelong train a", evil))
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 20, "kind": "evaluation", "metric": evil, "value": 1.0, "n": 2}) + "\n")
    made = page(tmp_path, folder)
    assert evil not in made
    assert "&lt;img src=x&gt;" in made
    assert made.count("<script") == 2


def test_the_page_says_what_is_missing_or_wrong(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "a")
    with (folder / "metrics.jsonl").open("a") as file:
        file.write("not json\n")
    text = page(tmp_path, folder, tmp_path / "nowhere")
    assert "1 damaged line in metrics.jsonl" in text
    assert "nowhere: is not a run folder" in text
    assert "No evaluation was recorded" in text
    assert "No run recorded block norms" in text
    assert "No run has samples yet" in text
    assert "a single seed, which is not conclusive" in text


def test_runs_of_different_data_are_plotted_without_quality(tmp_path: Path) -> None:
    write_run(tmp_path / "a", evaluations=[(20, 4.0)])
    write_run(tmp_path / "b", data_name="emoji32", evaluations=[(20, 4.0)])
    text = page(tmp_path)
    assert "their quality cannot be compared and is not plotted" in text
    assert 'id="chart-quality-0-steps"' not in text
    assert 'id="chart-loss-steps"' in text
    assert "How soon" not in text


def test_configurations_commands_and_speed_ups_are_shown(tmp_path: Path) -> None:
    write_run(tmp_path / "a", "none", losses=[1.0, 0.8, 0.6, 0.4])
    write_run(tmp_path / "b", "cs", losses=[0.9, 0.5, 0.4, 0.3], optimizer_lr=0.02)
    text = page(tmp_path)
    assert "How soon loss 0.4000 is reached" in text
    assert "1.33×" in text
    assert "scalelong train b" in text
    row = re.search(r'<th scope="row">optimizer.lr</th>(.*)', text)
    assert row is not None
    assert re.findall(r"<span>(.*?)</span>", row[1]) == ["0.001", "0.02"]


def test_a_run_without_a_finite_loss_is_still_shown(tmp_path: Path) -> None:
    write_run(tmp_path / "a", losses=[None, None], kappa=[1.0])
    write_run(tmp_path / "b", "cs", losses=[1.0, 0.5])
    assert "2 of 2 records have no finite loss" in page(tmp_path)


def test_the_page_stays_small(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    for i in range(4):
        losses = list(rng.random(1500))
        folder = write_run(tmp_path / str(i), "cs", losses=losses, norms=losses, optimizer_lr=0.001 * (i + 1))
        (folder / "samples").mkdir()
        for step in range(1, 9):
            noise = rng.integers(0, 256, (272, 272, 3), dtype=np.uint8)
            Image.fromarray(noise).save(folder / "samples" / f"step-{step:08d}.png")
    assert len(page(tmp_path).encode()) < 5_000_000


def test_a_folder_is_refused_as_the_file(tmp_path: Path) -> None:
    runs, _ = read_runs([write_run(tmp_path / "a")])
    with pytest.raises(ValueError, match="is a folder"):
        write_report(runs, tmp_path)
    made = write_report(runs, tmp_path / "new" / "folder" / "r.html")
    assert [path.name for path in made.parent.iterdir()] == ["r.html"]


# ----------------------------------------------------------------------------------------------------------- sample grids


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
