"""Runs read from folders, with what can be wrong with them."""

import math
import statistics
from dataclasses import asdict
from pathlib import Path

import pytest

from scalelong.report import write_report
from scalelong.runs import CHECKPOINTS, step_name
from scalelong.runs.events import append_event
from scalelong.runs.folder import checkpoints
from scalelong.runs.reader import read_run, read_runs, relative_oscillation, relative_spread
from scalelong.runs.settings import SamplingSettings
from tests.report.runs import draw_grid, write_run


def test_a_run_is_read_by_kind(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "a", "cs", losses=[3.0, 2.0, 1.0], norms=[1.0, 2.0], kappa=[1.0, 0.7]))
    assert run.label == "cs 0.7"
    assert run.column("train", "loss") == ([10, 20, 30], [3.0, 2.0, 1.0])
    assert run.column("train", "loss", upto=20) == ([10, 20], [3.0, 2.0])
    assert (run.last_step, run.middle_block, run.coefficients()) == (30, "mid_block", [1.0, 0.7])
    assert run.oscillation() == pytest.approx(1 / 1.5)  # |2 - 1| / mean(1, 2)
    assert run.seconds_at([0, 15, 30]) == [0.0, 1.5, 3.0]


def test_final_loss_is_the_mean_of_the_last_fifth(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "a", losses=[9.0] * 8 + [1.0, 2.0]))
    assert run.final_loss() == 1.5
    assert run.final_losses() == ([90, 100], [1.0, 2.0])
    assert run.final_loss(upto=50) == 9.0


def test_what_was_not_recorded_is_nan(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "a", losses=[None, None]))
    assert math.isnan(run.final_loss())
    assert math.isnan(run.oscillation())
    assert (run.middle_block, run.coefficients(), run.sample_grids()) == ("", [], [])


def test_damaged_lines_and_values_are_ignored(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "a", losses=[1.0, 0.5])
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 30, "kind": "train", "loss": "much"}\n{"step": 40, "kind": "train", "loss": NaN}\n')
        file.write('{"kind": "train"}\n[1, 2]\n{"step": 50, "ki')
    run = read_run(folder)
    assert run.damaged_lines == 3
    assert run.column("train", "loss") == ([10, 20], [1.0, 0.5])


@pytest.mark.parametrize(
    "change",
    [
        '"value": Infinity',
        '"value": 1e400',
        f'"value": 1{"0" * 400}',
        '"value": true',
        '"value": "9.0"',
        '"precision": 16',
        '"sampling": 7',
        '"sampling": {"steps": "many"}',
        '"sampling": {"clip": 1}',
        '"sampling": {"guidance_interval": [0.0]}',
        '"sampling": {"guidance": 2.0, "guidance_interval": [0.0, "high"]}',
        '"sampler": ["ddim"]',
        '"sampler_steps": "many"',
        '"guidance": {}',
        '"reference": 1',
        '"weights": false',
        '"metric": null',
        '"n": null',
        '"n": true',
        '"step": true',
        f'"step": 1{"0" * 400}',
        '"step": -1',
    ],
)
def test_evaluations_with_bad_fields_are_damaged_lines(change: str, tmp_path: Path) -> None:
    folder = write_run(tmp_path / "a", evaluations=[(20, 9.0)])
    line = '{"step": 40, "kind": "evaluation", "metric": "FID", "value": 8.0, "n": 10000, "extractor": "inception"'
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(f"{line}, {change}}}\n")
    run = read_run(folder)
    assert (run.damaged_lines, [measurement.value for measurement in run.evaluations]) == (1, [9.0])
    assert write_report([run], tmp_path / "r.html").is_file()


def test_a_null_value_is_not_damage_and_a_missing_one_is(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "a")
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 40, "kind": "evaluation", "metric": "FID", "value": null, "n": 10}\n')
        file.write('{"step": 40, "kind": "evaluation", "metric": "FID", "n": 10}\n')
        file.write('{"step": 40, "kind": "evaluation", "metric": "FID", "value": 1.0}\n')
        file.write('{"step": 0, "kind": "start", "data": 7}\n')
    run = read_run(folder)
    assert (run.damaged_lines, run.evaluations, len(run.start)) == (3, (), 1)


def test_huge_numbers_are_ignored(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "a", losses=[1.0, 0.5])
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(f'{{"step": 30, "kind": "train", "loss": 1{"0" * 400}}}\n')
    assert read_run(folder).column("train", "loss") == ([10, 20], [1.0, 0.5])


def test_only_grids_sampled_during_training_are_found(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "a")
    for step in (20, 5):
        draw_grid(folder, step)
    (folder / "samples" / "seed0.png").write_bytes(b"")
    (folder / "samples" / "step-last.png").write_bytes(b"")
    assert [step for step, _ in read_run(folder).sample_grids()] == [5, 20]


def test_a_folder_of_runs_is_read_as_the_runs_in_it(tmp_path: Path) -> None:
    for name in ("b", "a"):
        write_run(tmp_path / name)
    runs, refused = read_runs([tmp_path, tmp_path / "a"])
    assert [run.folder.name for run in runs] == ["a", "b"]  # and none twice
    assert refused == []


def test_a_bad_run_is_left_out_and_named_while_others_remain(tmp_path: Path) -> None:
    good, empty = write_run(tmp_path / "good"), write_run(tmp_path / "empty")
    (empty / "metrics.jsonl").unlink()
    runs, refused = read_runs([good, empty, tmp_path / "nowhere"])
    assert [run.folder.name for run in runs] == ["good"]
    assert "has no metrics.jsonl" in refused[0]
    assert "nowhere: is not a run folder" in refused[1]


def test_no_run_at_all_is_an_error_that_says_why(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="runs: none given"):
        read_runs([])
    folder = write_run(tmp_path / "a", losses=[])
    with pytest.raises(ValueError, match="has no training record"):
        read_runs([folder])
    (folder / "metrics.jsonl").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match=r"a: metrics\.jsonl"):
        read_runs([folder])


def test_flat_and_nested_sampling_records_are_the_same_metric(tmp_path: Path) -> None:
    flat = {"sampler": "ddim", "sampler_steps": 5, "guidance": 2.0, "precision": "bf16", "weights": "ema"}
    settings = SamplingSettings("ddim", 5, clip=False, guidance=2.0, guidance_interval=(0.5, 3.0), precision="bf16")
    nested = {"sampling": asdict(settings) | {"batch_size": 7, "count": 10_000}, "weights": "ema"}
    own = {"sampling_clip": False, "sampling_guidance_interval": (0.5, 3.0)}  # older records do not repeat these
    old = read_run(write_run(tmp_path / "old", evaluations=[(40, 9.0)], metric=flat, **own))
    new = read_run(write_run(tmp_path / "new", evaluations=[(40, 9.0)], metric=nested))
    assert old.evaluations == new.evaluations
    assert new.evaluations[0].metric.sampling == settings


def test_an_infinite_guidance_interval_survives_json(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "a")
    settings = asdict(SamplingSettings("ddim", 5, guidance=2.0))
    append_event(folder, 40, "evaluation", {"metric": "FID", "value": 9.0, "n": 10, "sampling": settings})
    assert read_run(folder).evaluations[0].metric.sampling.guidance_interval == (0.0, math.inf)


def test_checkpoints_are_listed_by_step(tmp_path: Path) -> None:
    for name in (step_name(20), step_name(100_000_000), ".staged-step-00000030", "step-x"):
        (tmp_path / CHECKPOINTS / name).mkdir(parents=True)
    assert list(checkpoints(tmp_path)) == [20, 100_000_000]
    assert checkpoints(tmp_path / "nowhere") == {}


def test_oscillation_and_spread_by_hand() -> None:
    assert relative_oscillation([1.0, 3.0, 2.0]) == pytest.approx((2 + 1) / 2 / 2)
    assert relative_oscillation([5.0, 5.0, 5.0]) == 0
    assert relative_spread([1.0, 3.0]) == pytest.approx(2**0.5 / 2)
    values = [0.3, 1.7, 2.2, 0.9]
    assert relative_spread(values) == pytest.approx(statistics.stdev(values) / statistics.mean(values))


@pytest.mark.parametrize("function", [relative_oscillation, relative_spread])
def test_series_of_zeros_infinities_and_single_records(function) -> None:
    assert math.isnan(function([0.0, 0.0]))
    assert not math.isfinite(function([1.0, math.inf, 2.0]))
    with pytest.raises(ValueError, match="at least 2 records, got 1"):
        function([1.0])


def test_oscillations_leave_out_the_warm_up(tmp_path: Path) -> None:
    norms = [1.0, 9.0, 2.0, 3.0]
    whole = read_run(write_run(tmp_path / "a", norms=norms))
    after = read_run(write_run(tmp_path / "b", norms=norms, optimizer_warmup_steps=20))
    assert whole.oscillation() == pytest.approx((8 + 7 + 1) / 3 / (15 / 4))
    assert after.oscillation() == pytest.approx(1 / 2.5)
