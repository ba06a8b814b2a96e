"""Tables for the terminal and for CSV, and the caveats of a comparison."""

import csv
from pathlib import Path

from scalelong.report import Comparison, compare_runs, read_runs
from scalelong.report.tables import aligned, arrivals_table, measures_table, notes, pairs_table, write_csv
from tests.report.runs import write_run


def two_methods(tmp_path: Path) -> Comparison:
    for seed, last in enumerate((0.4, 0.5)):
        write_run(tmp_path / f"n{seed}", "none", seed, losses=[1.0, last], evaluations=[(20, 30.0 + seed)])
        write_run(tmp_path / f"c{seed}", "cs", seed, losses=[0.5, 0.2])
    return compare_runs(read_runs([tmp_path])[0])


def test_measures_are_mean_and_sd_and_unknown_columns_are_left_out(tmp_path: Path) -> None:
    head, none, cs = measures_table(two_methods(tmp_path))
    assert head == [
        "method",
        "trained with",
        "final loss",
        "gradient-norm spread",
        "images/s",
        "training time",
        "FID of 10,000 images",
    ]
    assert none == ["none", "2 seeds (0, 1)", "0.4500 ± 0.0707", "0 ± 0", "100 ± 0", "2.00 ± 0.00 s", "30.50 ± 0.71"]
    assert cs[-1] == "–"


def test_targets_that_are_not_reached_are_reported(tmp_path: Path) -> None:
    race = two_methods(tmp_path).loss_race(0.45)
    assert race is not None
    assert arrivals_table(race)[1] == [
        "none",
        "20 (1 of 2 seeds; the others: not reached)",
        "2 s (1 of 2 seeds; the others: not reached)",
    ]
    assert pairs_table(race)[1] == ["cs 0.7", "none", "none: not reached", "–"]
    never = two_methods(tmp_path / "again").loss_race(0.01)
    assert never is not None
    assert arrivals_table(never)[1][1:] == ["not reached", "not reached"]


def test_columns_line_up() -> None:
    assert aligned([["a", "long"], ["bcd", "1"]]) == "a    long\n---------\nbcd     1"


def test_csv_has_full_numbers_and_every_pair(tmp_path: Path) -> None:
    comparison = two_methods(tmp_path / "runs")
    race = comparison.loss_race()
    assert race is not None
    pairs = write_csv(comparison, [race], tmp_path / "out" / "table.csv")
    rows = list(csv.DictReader((tmp_path / "out" / "table.csv").open()))
    assert [(row["method"], float(row["final_loss_mean"])) for row in rows] == [("none", 0.45), ("cs 0.7", 0.2)]
    assert rows[0]["FID n=10000 inception mean"] == "30.5"
    assert [row["FID n=10000 inception step"] for row in rows] == ["20", ""]
    assert rows[1]["FID n=10000 inception mean"] == rows[0]["feature_oscillation_mean"] == ""
    (pair,) = csv.DictReader(pairs.open())
    assert (pair["method"], pair["against"], pair["reached"]) == ("cs 0.7", "none", "2 of 2")
    assert (float(pair["speedup_steps"]), pair["after_steps"]) == (2.0, "")


def test_arrivals_between_evaluations_are_intervals_and_may_not_be_resolved(tmp_path: Path) -> None:
    for name, method in (("a", "none"), ("b", "cs")):
        write_run(tmp_path / name, method, evaluations=[(20, 30.0), (40, 20.0)])
    comparison = compare_runs(read_runs([tmp_path])[0])
    race = comparison.metric_race(comparison.metrics[0])
    assert race is not None
    assert arrivals_table(race)[:2] == [
        ["method", "steps (between evaluations)", "time"],
        ["none", "20 to 40", "2 s to 4 s"],
    ]
    assert pairs_table(race)[1] == ["cs 0.7", "none", "not resolved", "not resolved"]
    (pair,) = csv.DictReader(write_csv(comparison, [race], tmp_path / "t.csv").open())
    assert (pair["after_steps"], pair["steps"], pair["against_after_steps"]) == ("20.0", "40.0", "20.0")
    assert (pair["speedup_steps"], pair["speedup_seconds"]) == ("", "")


def test_values_of_different_steps_are_shown_with_their_steps(tmp_path: Path) -> None:
    write_run(tmp_path / "a", "none", evaluations=[(40, 72.0)])
    write_run(tmp_path / "b", "cs", evaluations=[(20, 230.0)])
    write_run(tmp_path / "c", "ls")
    comparison = compare_runs(read_runs([tmp_path])[0])
    assert [row[-1] for row in measures_table(comparison)[1:]] == ["72.00 at step 40", "230.0 at step 20", "–"]
    write_csv(comparison, [], tmp_path / "t.csv")
    assert {row["FID n=10000 inception mean"] for row in csv.DictReader((tmp_path / "t.csv").open())} == {""}


def test_metrics_sampled_in_different_ways_have_different_headings(tmp_path: Path) -> None:
    ways = [{"sampler": "ddim"}, {"sampler": "euler"}, {"guidance": 2}, {"precision": "bf16"}, {"weights": "model"}, {}]
    for i, way in enumerate(ways):
        methods = (("n", "none"), ("c", "cs"))
        for name, method in methods:
            write_run(tmp_path / f"{name}{i}", method, i, evaluations=[(20, 30.0), (40, 20.0)], metric=way)
    comparison = compare_runs(read_runs([tmp_path])[0])
    shown = [head for head in measures_table(comparison)[0] if "FID" in head]
    assert len(set(shown)) == len(ways)
    assert "FID (10,000 images, guidance 2, inception)" in shown
    races = [race for metric in comparison.metrics if (race := comparison.metric_race(metric)) is not None]
    pairs = write_csv(comparison, races, tmp_path / "t.csv")
    columns = [name for name in next(csv.reader((tmp_path / "t.csv").open())) if "FID" in name]
    assert len(set(columns)) == 3 * len(ways)
    assert len({row["what"] for row in csv.DictReader(pairs.open())}) == len(ways)
    note = next(note for note in notes(comparison) if "ways that are not comparable" in note)
    assert note.count("weights as trained") == 1


# ---------------------------------------------------------------------------------------------------------------- caveats

STEADY = [10.0, 11.0, 10.0, 11.0]


def compare(tmp_path: Path) -> Comparison:
    return compare_runs(read_runs([tmp_path])[0])


def test_damage_and_gaps_are_noted(tmp_path: Path) -> None:
    write_run(tmp_path / "a", "none", losses=[1.0, None, 0.5], training_steps=100)
    folder = write_run(tmp_path / "b", "cs", data_name="emoji32", evaluations=[(10, 1.0)])
    with (folder / "metrics.jsonl").open("a") as file:
        file.write("{torn\n")
    text = "\n".join(notes(compare(tmp_path), ["c: is not a run folder"]))
    assert "Left out: c: is not a run folder." in text
    assert "trained on different data (digits and emoji32): losses, oscillations and quality cannot be " in text
    assert "b: 1 damaged line in metrics.jsonl, ignored." in text
    assert "a: at step 30 of 100." in text
    assert "a: 1 of 3 records have no finite loss" in text
    assert "numbers are taken up to step 30" in text


def test_what_does_not_compare_is_noted(tmp_path: Path) -> None:
    write_run(tmp_path / "a", "none", norms=STEADY, evaluations=[(40, 1.0)])
    write_run(tmp_path / "b", "cs", norms=STEADY, every=5, losses=[1.0] * 8, evaluations=[(40, 1.0)], metric={"n": 7})
    write_run(tmp_path / "c", "cs", diffusion_prediction="x0")
    text = "\n".join(notes(compare(tmp_path)))
    assert "minimize different losses (vp, predicting the default and vp, predicting x0)" in text
    assert "probed at different intervals (5 and 10 steps)" in text
    assert "measured in 2 ways that are not comparable" in text
    assert "No oscillation was recorded in" in text


def test_runs_at_the_same_time_and_repeated_seeds_are_noted(tmp_path: Path) -> None:
    for name, start in (("a", "2026-01-01 10:00:00"), ("b", "2026-01-01 10:00:02")):
        path = write_run(tmp_path / name) / "metrics.jsonl"  # four seconds long
        path.write_text(path.read_text().replace('"device"', f'"time": "{start}", "device"', 1))
    text = "\n".join(notes(compare(tmp_path)))
    assert "trained at the same time" in text
    assert "none: seed 0 was given more than once" in text
    path.write_text(path.read_text().replace("10:00:02", "11:00:00"))
    assert "trained at the same time" not in "\n".join(notes(compare(tmp_path)))


def test_a_long_start_up_is_noted(tmp_path: Path) -> None:
    path = write_run(tmp_path / "a", losses=[1.0] * 4) / "metrics.jsonl"  # seconds 1, 2, 3, 4
    for i in (4, 3, 2, 1):
        path.write_text(path.read_text().replace(f'"seconds": {i}.0', f'"seconds": {i + 6}.0'))
    assert any("a: 60% of its time was start-up" in note for note in notes(compare(tmp_path)))


def test_a_sound_comparison_needs_no_notes(tmp_path: Path) -> None:
    write_run(tmp_path / "a", "none", norms=STEADY)
    write_run(tmp_path / "b", "cs", norms=STEADY)
    assert notes(compare(tmp_path)) == []


def test_settings_that_differ_besides_the_scaling_are_noted(tmp_path: Path) -> None:
    write_run(tmp_path / "a", "none")
    changes = {"optimizer_lr": 2e-3, "data_flip": False, "distillation_weight": 0.1, "mup_base_width": 16}
    write_run(tmp_path / "b", "cs", **changes)
    (note,) = notes(compare(tmp_path))
    assert "differ in data.flip, distillation.weight, optimizer.lr and mup.base_width, which may" in note


def test_settings_that_the_labels_name_are_not_noted(tmp_path: Path) -> None:
    write_run(tmp_path / "a", "cs")
    write_run(tmp_path / "b", "cs", optimizer_lr=2e-3)
    comparison = compare(tmp_path)
    assert all("lr=" in group.label for group in comparison.groups) and notes(comparison) == []


def test_different_data_of_one_name_are_named_by_fingerprint(tmp_path: Path) -> None:
    write_run(tmp_path / "a", data="0123456789")
    write_run(tmp_path / "b", "cs", data="012345abcd")
    text = "\n".join(notes(compare(tmp_path)))
    assert "different data (digits, fingerprint 01234567 and digits, fingerprint 012345ab)" in text
