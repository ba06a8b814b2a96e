"""Who reaches what when, on curves that can be read off by hand."""

import math
from pathlib import Path

import pytest

from scalelong.report import Comparison, compare_runs, read_runs
from scalelong.report.tables import notes
from tests.report.runs import write_run


def compare(tmp_path: Path) -> Comparison:
    return compare_runs(read_runs([tmp_path])[0])


def test_all_runs_reach_the_worst_final_loss_and_are_timed(tmp_path: Path) -> None:
    write_run(tmp_path / "a", "none", losses=[1.0, 0.8, 0.6, 0.4])
    write_run(tmp_path / "b", "cs", losses=[0.9, 0.5, 0.4, 0.3], seconds=2.0)
    race = compare(tmp_path).loss_race()
    assert race is not None
    assert race.target == 0.4
    assert [(a.steps.mean, a.seconds.mean) for a in race.arrivals] == [(40, 4), (30, 6)]
    (pair,) = race.pairs()
    assert (pair.first.group.label, pair.second.group.label) == ("cs 0.7", "none")
    assert pair.in_steps == pytest.approx(40 / 30)
    assert pair.in_seconds == pytest.approx(4 / 6)


def test_a_target_that_some_seed_misses_gives_no_speed_up(tmp_path: Path) -> None:
    write_run(tmp_path / "a", "none", 0, losses=[1.0, 0.5])
    write_run(tmp_path / "b", "none", 1, losses=[1.0, 0.7])
    write_run(tmp_path / "c", "cs", 0, losses=[0.6, 0.4])
    race = compare(tmp_path).loss_race(0.6)
    assert race is not None
    none, cs = race.arrivals
    assert (none.reached, none.all_reached, none.steps.mean) == (1, False, 20)
    assert (cs.reached, cs.all_reached, cs.steps.mean) == (1, True, 10)
    (pair,) = race.pairs()
    assert math.isnan(pair.in_steps)
    assert math.isnan(pair.in_seconds)


def test_one_lucky_record_does_not_reach_a_loss(tmp_path: Path) -> None:
    losses = [1.0] * 100
    losses[30] = 0.1  # window: 1000 // 20 = 50 steps, five records
    losses[95:] = [0.5] * 5
    write_run(tmp_path / "a", losses=losses)
    comparison = compare(tmp_path)
    assert comparison.window == 50
    race = comparison.loss_race(0.5)
    assert race is not None
    assert race.arrivals[0].steps.mean == 1000


def test_numbers_are_taken_up_to_the_last_common_step(tmp_path: Path) -> None:
    write_run(tmp_path / "a", "none", losses=[1.0] * 10)
    write_run(tmp_path / "b", "cs", losses=[1.0] * 10 + [0.1] * 10)
    comparison = compare(tmp_path)
    assert comparison.horizon == 100
    assert [comparison.measure(group, "final_loss").mean for group in comparison.groups] == [1.0, 1.0]


def test_measures_are_means_over_seeds_and_rank_the_best_first(tmp_path: Path) -> None:
    for seed, (none, cs) in enumerate([(1.0, 0.5), (2.0, 0.7)]):
        write_run(tmp_path / f"none{seed}", "none", seed, losses=[none] * 2)
        write_run(tmp_path / f"cs{seed}", "cs", seed, losses=[cs] * 2, seconds=0.5)
    comparison = compare(tmp_path)
    none_, cs_ = comparison.groups
    assert comparison.measure(none_, "final_loss").mean == 1.5
    assert comparison.measure(none_, "final_loss").sd == pytest.approx(math.sqrt(0.5))
    assert [group.label for group in comparison.ranking("final_loss")] == ["cs 0.7", "none"]
    assert comparison.ranking("feature_oscillation") == []
    assert comparison.difference(cs_, none_, "final_loss").value == pytest.approx(-0.9)
    with pytest.raises(ValueError, match="measure: unknown"):
        comparison.measure(none_, "beauty")


def test_the_losses_of_single_seeds_are_paired_step_by_step(tmp_path: Path) -> None:
    shared = [1.0, 3.0, 2.0, 5.0, 1.5, 4.0, 2.5, 3.5, 1.0, 2.0]
    write_run(tmp_path / "a", "none", losses=shared * 5)
    write_run(tmp_path / "b", "cs", losses=[loss - 0.1 - 0.001 * (i % 2) for i, loss in enumerate(shared * 5)])
    write_run(tmp_path / "c", "ls", 1, losses=[loss - 0.1 for loss in shared * 5])
    none, cs, ls = (comparison := compare(tmp_path)).groups
    assert comparison.difference(cs, none, "final_loss").clear  # the noise is the same in both
    assert not comparison.difference(ls, none, "final_loss").clear  # another seed: it is not


def test_one_seed_against_several_has_no_clear_difference(tmp_path: Path) -> None:
    write_run(tmp_path / "a", "none", 0, losses=[0.5] * 10)
    write_run(tmp_path / "b", "none", 1, losses=[0.3] * 10)
    write_run(tmp_path / "c", "cs", 0, losses=[0.49] * 10)
    none, cs = (comparison := compare(tmp_path)).groups
    difference = comparison.difference(cs, none, "final_loss")
    assert difference.value == pytest.approx(0.09)  # of seed 0 alone it is -0.01
    assert math.isnan(difference.standard_error)
    assert not difference.clear


def test_losses_of_different_data_or_objectives_are_not_raced(tmp_path: Path) -> None:
    write_run(tmp_path / "a", evaluations=[(20, 9.5), (40, 9.0)])
    write_run(tmp_path / "b", "cs", diffusion_prediction="x0", evaluations=[(40, 8.0)])
    comparison = compare(tmp_path)
    assert (comparison.same_data, comparison.same_loss) == (True, False)
    assert comparison.loss_race() is None
    assert comparison.metric_race(comparison.metrics[0]) is not None
    write_run(tmp_path / "c", data_name="emoji32")
    comparison = compare(tmp_path)
    assert not comparison.same_data
    assert comparison.loss_race() is None
    assert comparison.metric_race(comparison.metrics[0]) is None


def test_single_measurements_are_raced_only_to_a_given_value(tmp_path: Path) -> None:
    write_run(tmp_path / "a", "none", evaluations=[(40, 20.0)])
    write_run(tmp_path / "b", "cs", evaluations=[(40, 15.0)])
    comparison = compare(tmp_path)
    assert comparison.metric_race(comparison.metrics[0]) is None
    asked = comparison.metric_race(comparison.metrics[0], 18.0)
    assert asked is not None
    assert (asked.asked, asked.protocol) == (True, "10,000 images, inception")


def test_only_measured_methods_take_part_in_a_metric_race(tmp_path: Path) -> None:
    write_run(tmp_path / "a", "none", evaluations=[(20, 30.0), (40, 20.0)])
    write_run(tmp_path / "b", "cs", evaluations=[(20, 20.0), (40, 15.0)])
    write_run(tmp_path / "c", "ls")
    comparison = compare(tmp_path)
    race = comparison.metric_race(comparison.metrics[0])
    assert race is not None
    assert (race.what, race.target) == ("FID", 20.0)
    assert [(a.group.label, a.steps.mean, a.seconds.mean) for a in race.arrivals] == [
        ("none", 40, 4),
        ("cs 0.7", 20, 2),
    ]
    assert [(a.steps.after, a.seconds.after) for a in race.arrivals] == [(20, 2), (0, 0)]
    assert [pair.in_steps for pair in race.pairs()] == [2.0]  # (0, 20] against (20, 40]
    unreached = comparison.metric_race(comparison.metrics[0], 1.0)
    assert unreached is not None
    assert [a.reached for a in unreached.arrivals] == [0, 0]


def test_data_are_the_same_by_fingerprint_where_both_have_one(tmp_path: Path) -> None:
    write_run(tmp_path / "a", data="f1")
    write_run(tmp_path / "b", "cs", data="f1", data_name="emoji32")
    assert compare(tmp_path).same_loss  # one fingerprint, whatever it is called
    write_run(tmp_path / "c", "ls", data="f2")
    comparison = compare(tmp_path)
    assert (comparison.same_data, comparison.same_loss, comparison.same_probes) == (False, False, False)
    old = [run for run in read_runs([tmp_path])[0] if run.folder.name != "b"]
    write_run(tmp_path / "old" / "d", "universal")
    unknown = read_runs([tmp_path / "old"])[0]
    assert [compare_runs([run, *unknown]).same_data for run in old] == [True, True]  # by name


def test_qualities_are_compared_at_the_last_step_that_all_share(tmp_path: Path) -> None:
    write_run(tmp_path / "a", "none", evaluations=[(20, 240.0), (40, 72.0)])
    write_run(tmp_path / "b", "cs", evaluations=[(20, 230.0)])
    write_run(tmp_path / "c", "ls")
    comparison = compare(tmp_path)
    (metric,) = comparison.metrics
    assert comparison.quality_step(metric) == 20
    assert [comparison.measure(group, metric).mean for group in comparison.groups[:2]] == [240.0, 230.0]
    assert comparison.difference(*comparison.groups[:2], metric).value == 10.0
    write_run(tmp_path / "d", "universal", evaluations=[(30, 100.0)])
    comparison = compare(tmp_path)
    assert comparison.quality_step(metric) is None
    assert [comparison.measure(group, metric).n for group in comparison.groups] == [0] * 4
    assert [comparison.last_qualities(group, metric) for group in comparison.groups] == [
        *([(40, 72.0)], [(20, 230.0)], [], [(30, 100.0)])
    ]


def test_arrivals_between_the_same_evaluations_give_no_speed_up(tmp_path: Path) -> None:
    write_run(tmp_path / "a", "none", evaluations=[(20, 30.0), (40, 20.0)])
    write_run(tmp_path / "b", "cs", evaluations=[(20, 30.0), (40, 15.0)])
    write_run(tmp_path / "c", "ls", evaluations=[(20, 30.0), (40, 15.0)], seconds=10.0)
    comparison = compare(tmp_path)
    race = comparison.metric_race(comparison.metrics[0])
    assert race is not None
    assert race.sparse
    assert all(math.isnan(pair.in_steps) and not pair.first.steps.resolved(pair.second.steps) for pair in race.pairs())
    by_name = {(p.first.group.label, p.second.group.label): p for p in race.pairs()}
    assert math.isnan(by_name["cs 0.7", "none"].in_seconds)
    assert by_name["ls", "none"].in_seconds == pytest.approx(0.1)  # 20 to 40 s against 2 to 4 s
    dense = comparison.loss_race()
    assert dense is not None
    assert (dense.sparse, [pair.in_steps for pair in dense.pairs()]) == (False, [1.0, 1.0, 1.0])


def test_diverged_runs_are_left_out_and_named(tmp_path: Path) -> None:
    write_run(tmp_path / "a", "none")
    write_run(tmp_path / "b", "cs")
    diverged = write_run(tmp_path / "c", "cs", 1, losses=[9.0], training_steps=40)
    with (diverged / "metrics.jsonl").open("a") as file:
        file.write('{"step": 12, "kind": "diverged", "loss": NaN}\n')
    comparison = compare(tmp_path)
    assert comparison.horizon == 40
    assert [group.seeds for group in comparison.groups] == [[0], [0]]
    (left_out,) = [note for note in notes(comparison) if "diverged" in note]
    assert left_out.startswith(f"Left out: {comparison.left_out[0].folder}: diverged at step 12 of 40 (")
    alone = compare_runs(read_runs([diverged])[0])
    assert notes(alone)[0] == left_out.removeprefix("Left out: ")


def test_no_runs_are_refused() -> None:
    with pytest.raises(ValueError, match="runs: none given"):
        compare_runs([])
