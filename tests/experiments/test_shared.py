"""What the experiments share: runs are told apart by what they compute, and stacked networks are what single runs are."""

from __future__ import annotations

import dataclasses
import subprocess

import pytest
from common import Options, base_config, by_method, run_key, trained, varied
from ensemble import Member, for_member, train_together
from output import beats, recorded_command

from scalelong.data import load_source
from scalelong.training import RunConfig, read_events, train


def small(steps: int = 3) -> RunConfig:
    config = base_config("cpu", steps)
    return dataclasses.replace(
        config,
        model=dataclasses.replace(config.model, patch_size=4, dim=16, depth=4, heads=2),
        training=dataclasses.replace(config.training, batch_size=4, log_every=1),
    )


def test_a_key_is_that_of_what_is_computed() -> None:
    config = small()
    keys = {run_key(varied(config, method, seed)) for method in ("none", "cs:0.5", "cs:0.7", "ls") for seed in (0, 1)}
    assert len(keys) == 8
    elsewhere = dataclasses.replace(config, data=dataclasses.replace(config.data, root="elsewhere", workers=0))
    assert run_key(elsewhere) == run_key(config)
    assert varied(config, "universal:1.5").scaling.allow_amplify
    assert not varied(config, "universal:0.5").scaling.allow_amplify


@pytest.mark.slow
def test_runs_are_trained_by_the_command_once(tmp_path) -> None:
    """In the order asked for, whatever ends first; what is complete is only read, and a run that fails is told."""
    options, config = Options(jobs=2, runs=str(tmp_path)), small()
    configs = [varied(config, method, seed=1) for method in ("none", "cs:0.5")]
    found = trained(configs, options, probe_every=1)
    assert [run.config for run in found] == configs
    assert all(run.blocks for run in found), "nothing was probed"
    written = [run.folder / "metrics.jsonl" for run in found]
    before = [path.stat().st_mtime_ns for path in written]
    assert [run.folder for run in trained(configs, options)] == [run.folder for run in found]
    assert [path.stat().st_mtime_ns for path in written] == before
    broken = dataclasses.replace(config, data=dataclasses.replace(config.data, name="folder:nowhere"))
    with pytest.raises(subprocess.CalledProcessError):
        trained([broken], options)


@pytest.mark.slow
def test_stacked_members_have_the_losses_of_runs_of_their_own(tmp_path) -> None:
    config, members = small(), [Member(0.5, 0), Member(0.9, 1)]
    course = train_together(config, load_source("digits"), members, probe_every=2)
    for column, member in enumerate(members):
        folder = train(for_member(config, member), tmp_path / str(column))
        losses = [record["loss"] for record in read_events(folder)[0] if record["kind"] == "train"]
        assert course.losses[:, column].tolist() == pytest.approx(losses, rel=1e-5)
    assert course.norm_steps == [2]
    assert course.fixed_loss[0] != course.fixed_loss[1]


def test_coefficients_are_warmed_up() -> None:
    """After as many steps as it warms up over, a member has CS's coefficients; at first it has those of kappa = 1."""
    config, source = small(1), load_source("digits")
    warmed, plain = train_together(
        config, source, [Member(0.5, 0, warm_steps=9), Member(1.0, 0)], probe_every=1
    ).losses[0]
    assert warmed == pytest.approx(plain.item(), rel=1e-6)


def test_tables_and_commands() -> None:
    rows = [{"method": "none", "x": 1.0}, {"method": "ls", "x": 2.0}, {"method": "none", "x": 3.0}]
    assert by_method(rows, "x") == {"none": [1.0, 3.0], "ls": [2.0]}
    arguments = ["somewhere/fig01.py", "--out", "there", "--steps", "3", "--runs", "here"]
    assert recorded_command(arguments) == ["experiments/fig01.py", "--steps", "3"]


def test_one_seed_decides_nothing() -> None:
    values = {"none, seed 0": 2.0, "cs 0.5, seed 0": 1.0, "ls, seed 0": 1.5}
    assert beats(values, lower=True) is None
    assert beats({**values, "none, seed 1": 1.8}, lower=True) is True
    assert beats({**values, "none, seed 1": 1.2}, lower=True) is False
    assert beats({**values, "none, seed 1": 1.2}, lower=False) is False
    assert beats({"none, seed 0": 1.0, "none, seed 1": 1.2, "ls, seed 0": 1.5}, lower=False) is True
