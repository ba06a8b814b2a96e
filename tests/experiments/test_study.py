"""The study's queue refuses what cannot run, and its results what must not be joined."""

from __future__ import annotations

import dataclasses
import itertools
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from entries import Piece, Run, Speed, StudyError, check_startable, read_queue
from evaluator import NOISE_BINS
from piece import finish, to_rgb32, write_about
from plot import baselines, intervals_ahead, relative, smoothed, speed_up
from results import check_joinable, check_paired, collect, merge, outcomes, read_rows, write_rows
from train import train

from tests.experiments.tiny_study import PIECE, RUNS, tiny_spec


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    """A working folder in which all runs of the tiny piece were trained."""
    folder = tmp_path_factory.mktemp("piece")
    for run in RUNS:
        assert train(tiny_spec(folder, run), torch.device("cpu")) == "complete"
    return folder


# ---- queue


def test_the_queue_is_valid_and_its_first_open_piece_can_start() -> None:
    queue = read_queue()
    first = next(piece for piece in queue.pieces if piece.status != "done")
    check_startable(first, queue.speed)
    for piece in queue.pieces:
        if piece.status == "open":
            assert piece.minutes == pytest.approx(queue.speed.seconds(piece) / 60, abs=0.2), piece.name


def written(tmp_path: Path, *pieces: dict) -> Path:
    path = tmp_path / "queue.yaml"
    path.write_text(
        yaml.safe_dump({"speed": {"ms_per_step": 2.0}, "defaults": {"steps": 1000}, "pieces": list(pieces)})
    )
    return path


@pytest.mark.parametrize(
    ("piece", "message"),
    [
        ({"name": "p", "runs": [{"method": "none"}] * 2}, r"queue\.p\.runs: 2 runs are called 'none-seed0'"),
        ({"name": "p", "runs": [{"method": "cs", "kappa": 2}]}, r"queue\.p\.runs: scaling\.kappa: .*got 2"),
        ({"name": "p", "runs": [{"method": "sc"}]}, r"scaling\.method: unknown 'sc'"),
        ({"name": "p", "runs": []}, r"queue\.p\.runs: the piece has no runs"),
        ({"name": "p", "runs": [{"method": "ls"}], "step": 5}, r"queue\.p\.step: unknown key"),
        ({"name": "p", "runs": [{"method": "ls"}], "batch": 0}, r"queue\.p\.batch: must be at least 1, got 0"),
        ({"name": "p", "runs": [{"method": "ls"}], "data": "cifar"}, r"queue\.p\.data: unknown 'cifar'; .* cifar10"),
        ({"name": "p", "runs": [{"method": "ls", "ramp": 9}]}, r"queue\.p\.runs: ramp: needs constant coef.*'ls'"),
        ({"name": "p", "runs": [{"method": "cs", "ramp": 0}]}, r"ramp: must be a number of steps of at least 1, got 0"),
        ({"name": "p", "runs": [{"method": "none", "rate": -1}]}, r"rate: must be positive, got -1"),
        ({"name": "p", "runs": [{"method": "none", "joins": "he"}]}, r"joins: must be xavier, got 'he'"),
    ],
)
def test_bad_entries_are_refused(tmp_path, piece, message) -> None:
    with pytest.raises(StudyError, match=message):
        read_queue(written(tmp_path, piece))


def test_two_pieces_of_one_name_and_unknown_names_are_refused(tmp_path) -> None:
    piece = {"name": "p", "runs": [{"method": "ls"}]}
    with pytest.raises(StudyError, match="2 pieces are called 'p'"):
        read_queue(written(tmp_path, piece, piece))
    with pytest.raises(StudyError, match="no piece 'q'; choose one of p"):
        read_queue(written(tmp_path, piece)).find("q")


def test_a_piece_that_cannot_end_in_time_is_refused() -> None:
    five = Piece("p", tuple(Run("none", seed) for seed in range(5)))
    speed = Speed(ms_per_step=2.0)
    assert speed.seconds(five) == pytest.approx(60 + 5 * 100_000 * 0.002 + 5 * 4 * 8)
    check_startable(five, speed)
    with pytest.raises(StudyError, match=r"queue\.p\.steps: 5 runs of 100000 steps take .* minutes.*split the runs"):
        check_startable(five, Speed(ms_per_step=4.0))
    with pytest.raises(StudyError, match="take"):
        check_startable(dataclasses.replace(five, depth=24), speed)


def test_finished_pieces_are_refused() -> None:
    with pytest.raises(StudyError, match=r"queue\.p\.status: the piece is done"):
        check_startable(Piece("p", RUNS, status="done"), Speed(1.0))


# ---- results


def test_rows_samples_and_events_are_written(finished) -> None:
    rows = collect(PIECE, finished)
    assert [(row["method"], row["seed"], row["step"]) for row in rows] == [
        (label, seed, step)
        for label, seed in (("none", 0), ("ls start=0.95", 0), ("cs kappa=0.7", 1))
        for step in (4, 8)
    ]
    assert all(0 < float(row["test_loss"]) < 10 for row in rows)
    for run in RUNS:
        assert (finished / f"{run.name}.png").exists()
        for average, step in itertools.product(("", "~short"), (4, 8)):
            pixels = np.load(finished / "samples" / f"{run.name}{average}@{step}.npy")
            assert pixels.shape == (8, 3, 32, 32)
            assert pixels.dtype == np.uint8
    lines = [json.loads(line) for line in (finished / f"{RUNS[1].name}.jsonl").read_text().splitlines()]
    assert lines[-1] == {"event": "end", "reason": "complete", "step": 8}
    assert lines[1]["coefficients"] == pytest.approx([0.95, 0.95], abs=0.02)
    assert len(lines[1]["bins"]) == len(lines[1]["raw_bins"]) == len(lines[1]["short_bins"]) == NOISE_BINS
    assert sum(lines[1]["bins"]) / NOISE_BINS == pytest.approx(lines[1]["test_loss"], rel=1e-4)
    assert outcomes(PIECE, finished)["none-seed0"]["end"] == "complete"


def test_a_piece_whose_machine_was_lost_can_be_merged(finished, tmp_path) -> None:
    work, run = tmp_path / "work", RUNS[1]
    shutil.copytree(finished, work)
    write_about(work, {"name": "tiny", "commit": "abc", "data": "d0", "settings": dataclasses.asdict(PIECE)})
    lines = (work / f"{run.name}.jsonl").read_text().splitlines()
    (work / f"{run.name}.jsonl").write_text("\n".join(lines[:2]))
    finish(work, PIECE)
    ended = json.loads((work / "piece.json").read_text())["runs"]
    assert {name: (end["end"], end["step"]) for name, end in ended.items()} == {
        name: ("cut off", 4) if name == run.name else ("complete", 8) for name in ended
    }
    merge(work, tmp_path / "results")
    rows = read_rows(tmp_path / "results" / "curves.csv")
    assert [row["step"] for row in rows if row["method"] == run.label] == ["4"]
    kept = (work / "piece.json").read_text()
    finish(work, PIECE)
    assert (work / "piece.json").read_text() == kept


def test_runs_of_one_seed_see_the_same_batches_and_others_do_not(finished, tmp_path) -> None:
    check_paired(PIECE, finished)
    batches = [
        [json.loads(line).get("batch") for line in (finished / f"{run.name}.jsonl").read_text().splitlines()]
        for run in RUNS
    ]
    assert batches[0] == batches[1]
    assert batches[0] != batches[2]
    one_seed = dataclasses.replace(PIECE, runs=tuple(dataclasses.replace(run, seed=0) for run in RUNS))
    work = tmp_path / "work"
    shutil.copytree(finished, work)
    (work / "cs-kappa=0.7-seed1.jsonl").rename(work / "cs-kappa=0.7-seed0.jsonl")
    with pytest.raises(StudyError, match="others of its seed saw another"):
        check_paired(one_seed, work)


def test_results_of_another_commit_or_data_set_are_not_joined(finished, tmp_path) -> None:
    about = {"name": "tiny", "commit": "abc", "data": "d0", "settings": dataclasses.asdict(PIECE)}
    (finished / "piece.json").write_text(json.dumps(about))
    write_rows(finished / "curves.csv", collect(PIECE, finished))
    merge(finished, tmp_path)
    assert len(read_rows(tmp_path / "curves.csv")) == 6
    with pytest.raises(StudyError, match=r"results\.tiny: already there"):
        merge(finished, tmp_path)
    with pytest.raises(StudyError, match=r"results\.data: tiny was trained on data d0, this is d1"):
        check_joinable(tmp_path, "other", "abc", "d1")
    with pytest.raises(StudyError, match=r"results\.commit: tiny was trained by commit abc.*--accept-commit abc"):
        check_joinable(tmp_path, "other", "def", "d0")
    check_joinable(tmp_path, "other", "def", "d0", accept_commit=["old", "abc"])
    check_joinable(tmp_path, "other", "abc", "d1", data_name="fashion_mnist")


def test_a_piece_whose_batches_are_not_those_of_earlier_pieces_is_not_joined(finished, tmp_path) -> None:
    about = {"name": "tiny", "commit": "abc", "data": "d0", "settings": dataclasses.asdict(PIECE)}
    (finished / "piece.json").write_text(json.dumps(about))
    write_rows(finished / "curves.csv", collect(PIECE, finished))
    merge(finished, tmp_path / "results")
    work = tmp_path / "work"
    shutil.copytree(finished, work)
    (work / "piece.json").write_text(json.dumps(about | {"name": "again"}))
    merge(work, tmp_path / "results")
    rows = (work / "none-seed0.jsonl").read_text()
    (work / "none-seed0.jsonl").write_text(rows.replace('"batch": "', '"batch": "0'))
    (work / "piece.json").write_text(json.dumps(about | {"name": "third"}))
    with pytest.raises(StudyError, match=r"none-seed0: batch 0.* at step 4, others of its seed saw another"):
        merge(work, tmp_path / "results")


def test_curves_are_compared_with_the_unscaled_run() -> None:
    baseline, curve = {1: 4.0, 2: 2.0, 3: 1.0, 4: 0.8}, {1: 5.0, 2: 1.8, 3: 1.1, 4: 0.6}
    difference = relative(curve, baseline)
    assert difference == pytest.approx({1: 25, 2: -10, 3: 10, 4: -25})
    assert intervals_ahead(difference) == [(2, 2), (4, 4)]
    assert speed_up(curve, baseline) == pytest.approx(4 / 3.6)
    assert speed_up(baseline, curve) is None
    assert smoothed(baseline, width=2) == pytest.approx({2: 3.0, 3: 1.5, 4: 0.9})


def test_grey_images_become_rgb_with_a_margin() -> None:
    images = torch.randint(1, 256, (2, 1, 28, 28), dtype=torch.uint8)
    found = to_rgb32(images)
    assert found.shape == (2, 3, 32, 32)
    assert torch.equal(found[:, 1:2, 2:30, 2:30], images)
    assert not found[:, :, :2].any()
    colour = torch.randint(0, 256, (2, 3, 32, 32), dtype=torch.uint8)
    assert torch.equal(to_rgb32(colour), colour)


def test_a_run_is_compared_with_the_unscaled_one_of_its_piece_or_else_the_last_of_its_seed() -> None:
    order = [("a", "none", 1), ("a", "ls", 1), ("b", "cs", 1), ("b", "cs", 2), ("c", "none again=True", 1)]
    rows = [{"experiment": piece, "method": method, "seed": str(seed)} for piece, method, seed in order]
    assert baselines(rows) == {
        ("ls", 1): ("none", 1),
        ("cs", 1): ("none again=True", 1),
        ("none again=True", 1): ("none", 1),
    }
    assert baselines(rows[:4])["cs", 1] == ("none", 1)
