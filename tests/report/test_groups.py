"""Which runs belong together, and how they are called."""

from pathlib import Path

from scalelong.report import read_runs
from scalelong.report.groups import Group, baseline, differing_settings, group_runs
from tests.report.runs import write_run


def groups(tmp_path: Path) -> list[Group]:
    return group_runs(read_runs([tmp_path])[0])


def test_seeds_and_lengths_do_not_separate(tmp_path: Path) -> None:
    write_run(tmp_path / "a", "cs", seed=1)
    write_run(tmp_path / "b", "cs", seed=0, losses=[1.0] * 9)
    (only,) = groups(tmp_path)
    assert (only.label, only.seeds) == ("cs 0.7", [0, 1])


def test_the_untouched_network_comes_first_and_is_the_baseline(tmp_path: Path) -> None:
    write_run(tmp_path / "a", "cs")
    write_run(tmp_path / "b", "ls")
    assert baseline(groups(tmp_path)).label == "cs 0.7"
    write_run(tmp_path / "c", "none")
    assert [group.label for group in groups(tmp_path)] == ["none", "cs 0.7", "ls"]
    assert baseline(groups(tmp_path)).label == "none"


def test_equal_names_are_told_apart_by_what_differs(tmp_path: Path) -> None:
    write_run(tmp_path / "a", "none")
    write_run(tmp_path / "b", "none", optimizer_lr=0.01)
    assert [group.label for group in groups(tmp_path)] == ["none (lr=0.001)", "none (lr=0.01)"]


def test_options_that_the_method_does_not_take_do_not_count(tmp_path: Path) -> None:
    write_run(tmp_path / "a", "none", scaling_kappa=0.5)
    write_run(tmp_path / "b", "none", scaling_kappa=0.9, seed=1)
    (only,) = groups(tmp_path)
    assert differing_settings([run.config for run in only.runs]) == {"training.seed": [0, 1]}


def test_differing_settings_mark_what_has_no_effect(tmp_path: Path) -> None:
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
