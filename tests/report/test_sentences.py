"""The sentences change with the data, and are right about it."""

import re
from pathlib import Path

from scalelong.report import Comparison, compare_runs, read_runs, sentences
from scalelong.report.tables import notes
from tests.report.runs import write_run

STEADY, SHAKY = [10.0, 11.0, 10.0, 11.0], [10.0, 15.0, 10.0, 15.0]
NOISE = [0.30, 0.34, 0.31, 0.33, 0.29, 0.35, 0.32, 0.30, 0.33, 0.31] * 5


def compare(tmp_path: Path) -> Comparison:
    return compare_runs(read_runs([tmp_path])[0])


def finding(tmp_path: Path) -> str:
    ((_, text),) = sentences.findings(compare(tmp_path))
    return text


def test_less_oscillation_is_reported_with_both_values_and_the_change(tmp_path: Path) -> None:
    write_run(tmp_path / "a", "none", norms=SHAKY)
    write_run(tmp_path / "b", "cs", norms=STEADY)
    assert "cs 0.7 lowers the oscillation of the middle block from 0.400 to 0.0952 (−76%)" in finding(tmp_path)


def test_more_oscillation_is_reported_as_more(tmp_path: Path) -> None:
    write_run(tmp_path / "a", "none", norms=STEADY)
    write_run(tmp_path / "b", "cs", norms=SHAKY)
    assert "cs 0.7 raises the oscillation of the middle block from 0.0952 to 0.400 (+320%)" in finding(tmp_path)


def test_no_change_is_reported_as_none(tmp_path: Path) -> None:
    write_run(tmp_path / "a", "none", norms=STEADY)
    write_run(tmp_path / "b", "cs", norms=STEADY)
    assert "does not change the oscillation of the middle block" in finding(tmp_path)


def test_losses_that_are_not_clearly_different_are_given_with_the_test(tmp_path: Path) -> None:
    write_run(tmp_path / "a", "none", losses=NOISE)
    write_run(tmp_path / "b", "cs", losses=[v + (0.01 if i % 2 else -0.01) for i, v in enumerate(NOISE)])
    assert "final loss not clearly different (difference" in finding(tmp_path)
    assert re.search(r"standard error [\d.]+, 95% interval −[\d.]+ to [\d.]+, paired t-test", finding(tmp_path))


def test_a_clear_difference_of_losses_is_named_with_its_direction(tmp_path: Path) -> None:
    write_run(tmp_path / "a", "none", losses=NOISE)
    write_run(tmp_path / "b", "cs", losses=[v - 0.1 + 0.001 * (i % 2) for i, v in enumerate(NOISE)])
    assert "final loss lower, 0.2185 against 0.3180" in finding(tmp_path)
    assert "it reaches loss" in finding(tmp_path).lower()


def test_several_seeds_within_their_spread_are_no_change(tmp_path: Path) -> None:
    for seed, (none, cs) in enumerate([(STEADY, SHAKY), (SHAKY, STEADY), (STEADY, STEADY)]):
        write_run(tmp_path / f"n{seed}", "none", seed, norms=none)
        write_run(tmp_path / f"c{seed}", "cs", seed, norms=cs)
    assert "cs 0.7 shows no clear change in the oscillation" in finding(tmp_path)
    assert "within the spread" not in finding(tmp_path), "a change may be far beyond the ± beside it"
    assert re.search(r"difference not significant \(95% interval −[\d.]+ to [\d.]+, paired t-test\)", finding(tmp_path))
    told = "No method clearly differs in oscillation of the middle block; the lowest mean is"
    assert sentences.headline(compare(tmp_path)).startswith(told)
    assert "Mean ± sd over 3 seeds" in sentences.seeds(compare(tmp_path))


def test_a_single_seed_proves_nothing(tmp_path: Path) -> None:
    write_run(tmp_path / "a", "none")
    assert "a single seed, which is not conclusive" in sentences.seeds(compare(tmp_path))
    write_run(tmp_path / "b", "none", 1)
    assert "not conclusive" not in sentences.seeds(compare(tmp_path))
    write_run(tmp_path / "c", "cs")
    assert "cs 0.7 ran with a single seed" in sentences.seeds(compare(tmp_path))


def test_a_target_that_is_not_reached_is_reported(tmp_path: Path) -> None:
    write_run(tmp_path / "a", "none", losses=[1.0, 0.2])
    write_run(tmp_path / "b", "cs", losses=[1.0, 0.9])
    comparison = compare(tmp_path)
    race = comparison.loss_race(0.5)
    assert race is not None
    assert sentences.speed_up(race, comparison.groups[1], comparison.groups[0]) == "it does not reach loss 0.5000"
    assert "not reached by cs 0.7" in sentences.target(race)


def test_names_of_methods_keep_their_case_at_the_start_of_a_sentence(tmp_path: Path) -> None:
    write_run(tmp_path / "a", "mp_cat", norms=STEADY, kappa=[1.0])
    assert sentences.headline(compare(tmp_path)).startswith("mp_cat ends at a loss of")
    write_run(tmp_path / "b", "rezero", norms=SHAKY)
    assert sentences.headline(compare(tmp_path)).startswith("mp_cat has the lowest oscillation of the middle block")
    assert sentences.throughput(compare(tmp_path)).startswith("mp_cat trains on 100 images")


def test_the_headline_ranks_and_calls_a_tie_a_tie(tmp_path: Path) -> None:
    write_run(tmp_path / "a", "none", losses=NOISE, norms=SHAKY)
    write_run(tmp_path / "b", "cs", losses=NOISE, norms=STEADY)
    headline = sentences.headline(compare(tmp_path))
    assert headline.startswith("cs 0.7 has the lowest oscillation of the middle block (0.0952), ahead of none (0.400)")
    assert "no method clearly differs in final loss; the lowest mean is 0.3180" in headline
    write_run(tmp_path / "c", "ls", losses=[v - 0.1 for v in NOISE])
    assert "ls has the lowest final loss (0.2180), ahead of" in sentences.headline(compare(tmp_path))


def test_one_run_alone_is_described(tmp_path: Path) -> None:
    write_run(tmp_path / "a", "cs", losses=[1.0, 0.5])
    comparison = compare(tmp_path)
    assert sentences.headline(comparison) == "cs 0.7 ends at a loss of 0.5000 after 20 steps."
    assert sentences.findings(comparison) == []


def test_coefficients_are_described_from_outermost_to_innermost(tmp_path: Path) -> None:
    write_run(tmp_path / "a", "none", kappa=[1.0, 1.0, 1.0])
    write_run(tmp_path / "b", "cs", kappa=[1.0, 0.7, 0.49])
    write_run(tmp_path / "c", "ls", kappa=[0.5, 0.6, 0.4])
    write_run(tmp_path / "d", "ls", 1, kappa=[0.5, 0.6, 0.4])
    text = sentences.coefficients(compare(tmp_path))
    assert text[0] == "none: the same for all 3 skips, 1.00."
    assert text[1] == "cs 0.7: falling from 1.00 at the outermost skip to 0.490 at the innermost."
    assert text[2].startswith("ls: between 0.400 and 0.600, from 0.500")
    below = "ls lies below the curve of cs 0.7 at 3 of 3 skips"
    assert text[3:] == [f"{below}; they are furthest apart at skip 1, by 0.500."]


def test_learned_coefficients_that_hardly_differ_are_nearly_the_same(tmp_path: Path) -> None:
    write_run(tmp_path / "a", "ls", kappa=[0.50, 0.502])
    (text,) = sentences.coefficients(compare(tmp_path))
    assert text.startswith("ls: nearly the same for all 2 skips, 0.500 to 0.502 after training")


def test_times_of_runs_that_trained_together_are_not_compared(tmp_path: Path) -> None:
    for name, method, seconds in (("a", "none", 100.0), ("b", "cs", 200.0)):
        write_run(tmp_path / name, method, seconds=seconds)
        metrics = tmp_path / name / "metrics.jsonl"
        metrics.write_text(metrics.read_text().replace('"torch": "2"', '"torch": "2", "time": "2026-01-01 10:00:00"'))
    text = sentences.throughput(compare(tmp_path))
    assert text.startswith(
        "none trains on 1.00 images per second (median) and cs 0.7 on 0.500. Some runs trained at the"
    )
    assert finding(tmp_path).endswith("(1.00× as fast in steps).")


def test_throughput_and_quality_are_compared_with_the_baseline(tmp_path: Path) -> None:
    write_run(tmp_path / "a", "none", evaluations=[(40, 20.0)])
    write_run(tmp_path / "b", "cs", seconds=2.0, evaluations=[(40, 15.0)])
    comparison = compare(tmp_path)
    assert (
        sentences.throughput(comparison) == "none trains on 100 images per second (median) and cs 0.7 on 50.0 (−50%)."
    )
    assert "FID of 10,000 images 15.00 against 20.00 (−25%) at step 40" in finding(tmp_path)
    assert sentences.qualities(comparison) == [
        "FID of 10,000 images at step 40, lower is better: 15.00 for cs 0.7 and 20.00 for none."
    ]


def test_oscillations_that_do_not_compare_are_not_ranked(tmp_path: Path) -> None:
    write_run(tmp_path / "a", "none", norms=SHAKY, data="f1")
    write_run(tmp_path / "b", "cs", norms=STEADY, data="f2")
    comparison = compare(tmp_path)
    assert sentences.headline(comparison).startswith("These runs are shown side by side but not ranked")
    assert finding(tmp_path) == "cs 0.7: none of its records can be compared."
    assert sentences.oscillations(comparison) == [
        "The oscillations of these runs are not comparable, so they are plotted but not ranked."
    ]
    write_run(tmp_path / "other" / "a", "none", norms=SHAKY)
    write_run(tmp_path / "other" / "b", "cs", norms=STEADY, every=5, losses=[1.0] * 8)
    assert "oscillation" not in sentences.headline(compare(tmp_path / "other")) + finding(tmp_path / "other")
    assert "final loss" in sentences.headline(compare(tmp_path / "other"))


def test_qualities_of_different_steps_are_given_with_their_steps(tmp_path: Path) -> None:
    write_run(tmp_path / "a", "none", evaluations=[(20, 240.0), (40, 72.0)])
    write_run(tmp_path / "b", "cs", evaluations=[(20, 230.0)])
    assert "FID of 10,000 images 230.0 against 240.0 (−4.2%) at step 20" in finding(tmp_path)
    assert any(
        "images is compared at step 20, the last step common to all runs" in note for note in notes(compare(tmp_path))
    )
    write_run(tmp_path / "other" / "a", "none", evaluations=[(40, 72.0)])
    write_run(tmp_path / "other" / "b", "cs", evaluations=[(20, 230.0)])
    text = finding(tmp_path / "other")
    assert "FID of 10,000 images 230.0 at step 20, none 72.00 at step 40, not comparable" in text
    assert "%" not in text
    comparison = compare(tmp_path / "other")
    assert sentences.qualities(comparison) == [
        "FID of 10,000 images, at steps that differ and so not compared: 72.00 at step 40 for none; "
        "230.0 at step 20 for cs 0.7."
    ]
    assert any("not measured at a step common to all runs" in note for note in notes(comparison))


def test_a_speed_up_between_evaluations_is_not_resolved(tmp_path: Path) -> None:
    for name, method in (("a", "none"), ("b", "cs")):
        write_run(tmp_path / name, method, evaluations=[(20, 30.0), (40, 20.0)])
    write_run(tmp_path / "c", "ls")
    comparison = compare(tmp_path)
    none, cs, ls = comparison.groups
    race = comparison.metric_race(comparison.metrics[0])
    assert race is not None
    assert sentences.speed_up(race, cs, none) == (
        "it reaches FID 20.00 between 20 steps (2 s) and 40 steps (4 s), none between 20 steps (2 s) and 40 steps (4 s) "
        "(speed-up in steps not resolved, in time not resolved)"
    )
    assert sentences.speed_up(race, ls, none) == ""  # it was not measured
    assert "where these intervals overlap, the speed-up is not resolved" in sentences.target(race)
