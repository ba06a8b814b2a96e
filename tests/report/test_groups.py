"""Which runs belong together, and how they are called."""

from pathlib import Path

from scalelong.report import compare_runs, read_runs
from scalelong.report.groups import (
    Group,
    differing_settings,
    group_runs,
    headings,
    metrics_of,
    protocols,
)
from scalelong.runs.records import Metric
from tests.report.runs import write_run


def groups(tmp_path: Path) -> list[Group]:
    return group_runs(read_runs([tmp_path])[0])


def test_runs_that_differ_in_seed_or_length_are_one_group(tmp_path: Path) -> None:
    write_run(tmp_path / "a", "cs", seed=1)
    write_run(tmp_path / "b", "cs", seed=0, losses=[1.0] * 9)
    (only,) = groups(tmp_path)
    assert (only.label, only.seeds) == ("cs 0.7", [0, 1])


def test_the_unscaled_network_comes_first_and_is_the_baseline(tmp_path: Path) -> None:
    write_run(tmp_path / "a", "cs")
    write_run(tmp_path / "b", "ls")
    assert compare_runs(read_runs([tmp_path])[0]).baseline.label == "cs 0.7"
    write_run(tmp_path / "c", "none")
    assert [group.label for group in groups(tmp_path)] == ["none", "cs 0.7", "ls"]
    assert compare_runs(read_runs([tmp_path])[0]).baseline.label == "none"


def test_equal_names_get_the_settings_that_differ(tmp_path: Path) -> None:
    write_run(tmp_path / "a", "none")
    write_run(tmp_path / "b", "none", optimizer_lr=0.01)
    assert [group.label for group in groups(tmp_path)] == ["none (lr=0.001)", "none (lr=0.01)"]


def test_options_that_the_method_does_not_take_do_not_count(tmp_path: Path) -> None:
    write_run(tmp_path / "a", "none", scaling_kappa=0.5)
    write_run(tmp_path / "b", "none", scaling_kappa=0.9, seed=1)
    (only,) = groups(tmp_path)
    assert differing_settings([run.config for run in only.runs]) == {}


def test_settings_without_effect_are_none(tmp_path: Path) -> None:
    write_run(tmp_path / "a", "none")
    write_run(tmp_path / "b", "cs", optimizer_lr=0.01)
    rows = differing_settings([group.config for group in groups(tmp_path)])
    assert rows == {
        "scaling.method": ["none", "cs"],
        "scaling.kappa": [None, 0.7],
        "scaling.allow_amplify": [None, False],
        "optimizer.lr": [0.001, 0.01],
    }


def test_runs_of_different_data_are_not_seeds_of_one_method(tmp_path: Path) -> None:
    write_run(tmp_path / "a", "none", data="0123456789")
    write_run(tmp_path / "b", "none", seed=1)
    (both,) = groups(tmp_path)  # one did not say
    assert (both.label, both.seeds) == ("none", [0, 1])
    write_run(tmp_path / "c", "none", seed=2, data="abcdefghij")
    assert [group.label for group in groups(tmp_path)] == [
        "none (data=01234567)",
        "none (data=unknown)",
        "none (data=abcdefgh)",
    ]


def test_data_at_two_paths_is_one_by_its_fingerprint(tmp_path: Path) -> None:
    write_run(tmp_path / "a", data="0123456789", data_name="folder:here")
    write_run(tmp_path / "b", seed=1, data="0123456789", data_name="folder:there")
    (both,) = groups(tmp_path)
    assert (both.label, both.seeds) == ("none", [0, 1])
    write_run(tmp_path / "c", seed=2, data_name="folder:elsewhere")  # without a fingerprint
    assert [group.seeds for group in groups(tmp_path)] == [[0, 1], [2]]


# --------------------------------------------------------------------------------------------------------------- metrics


def test_qualities_compare_only_within_one_protocol(tmp_path: Path) -> None:
    write_run(tmp_path / "a", evaluations=[(20, 30.0), (20, 34.0), (40, 20.0)])
    write_run(tmp_path / "b", "cs", evaluations=[(40, 9.0)], metric={"n": 50_000})
    write_run(tmp_path / "c", "ls", evaluations=[(40, 9.0)], metric={"sampler": "ddim", "sampler_steps": 5})
    runs = read_runs([tmp_path])[0]
    assert list(protocols(metrics_of(runs)).values()) == [
        "50,000 images, inception",
        "10,000 images, inception",
        "10,000 images, ddim 5 steps, inception",
    ]
    plain = Metric("FID", 10_000, "inception")
    assert [run.quality(plain) for run in runs] == [([20, 40], [32.0, 20.0]), ([], []), ([], [])]
    assert protocols([mine := Metric("FD(mine)", 10, "mine")]) == {mine: "10 images"}


def test_precisions_are_not_averaged_and_old_records_are_of_fp32(tmp_path: Path) -> None:
    sampled = {"sampler": "ddim", "sampler_steps": 5}
    write_run(tmp_path / "old", evaluations=[(40, 9.0)], metric=sampled)
    write_run(tmp_path / "new", "cs", evaluations=[(40, 8.0)], metric=sampled | {"precision": "fp32"})
    write_run(tmp_path / "half", "ls", evaluations=[(40, 7.0)], metric=sampled | {"precision": "bf16"})
    runs = read_runs([tmp_path])[0]
    values = {m.sampling.precision: [run.quality(m)[1] for run in runs] for m in metrics_of(runs)}
    assert values == {"fp32": [[], [8.0], [9.0]], "bf16": [[7.0], [], []]}


def test_weights_and_references_are_not_mixed(tmp_path: Path) -> None:
    write_run(tmp_path / "a", evaluations=[(40, 9.0)], metric={"reference": "r1"})
    write_run(tmp_path / "b", "cs", evaluations=[(40, 8.0)], metric={"reference": "r1", "weights": "ema"})
    write_run(tmp_path / "c", "ls", evaluations=[(40, 7.0)], metric={"reference": "r1", "weights": "model"})
    write_run(tmp_path / "d", "universal", evaluations=[(40, 6.0)], metric={"reference": "r2"})
    runs = read_runs([tmp_path])[0]
    found = {m: [values[0] for run in runs if (values := run.quality(m)[1])] for m in metrics_of(runs)}
    assert {name: found[m] for m, name in headings(list(found)).items()} == {
        "FID (10,000 images, inception, reference r1)": [9.0, 8.0],
        "FID (10,000 images, inception, reference r2)": [6.0],
        "FID (10,000 images, weights as trained, inception)": [7.0],
    }


def test_clipping_and_guidance_interval_are_named_where_nothing_else_tells_metrics_apart(tmp_path: Path) -> None:
    sampling = {"sampler": "ddim", "steps": 5, "guidance": 2.0}
    for name, more in {"a": {}, "b": {"clip": False}, "c": {"guidance_interval": [0.5, 3.0]}}.items():
        write_run(tmp_path / name, evaluations=[(40, 9.0)], metric={"sampling": sampling | more})
    start = "10,000 images, ddim 5 steps, guidance 2, inception"
    assert sorted(protocols(metrics_of(read_runs([tmp_path])[0])).values()) == [
        f"{start}, clipped, guided in 0 to inf",
        f"{start}, clipped, guided in 0.5 to 3",
        f"{start}, not clipped, guided in 0 to inf",
    ]
