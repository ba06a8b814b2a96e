"""The harness of the experiments: settings are checked first, runs are trained once, claims are computed from them."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import output
import pytest
import run as harness
import settings
from settings import EXPERIMENTS, Experiment, load, names, run_key, scales

from scalelong.data import load_source
from scalelong.errors import SettingError
from scalelong.runs.reader import read_run
from scalelong.training import read_events, train
from tests.report.runs import write_run

TINY = ("model.dim=16", "model.depth=4", "model.heads=2", "model.patch_size=4", "training.batch_size=4")
RUNS = "runs: {a: {}}\nmeasures: [test_loss]\n"
assert load("auto-kappa").measure, "its folder is on the path now"
stack = import_module("stack")
PAGE = (EXPERIMENTS.parent / "docs" / "experiments.md").read_text()


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    """Trained runs, which the experiments share."""
    return tmp_path_factory.mktemp("runs")


def small(name: str = "fig01-oscillation", steps: int = 30) -> Experiment:
    return load(name, steps=steps, seeds=[1], changes=harness.parsed_changes(TINY))


@pytest.mark.parametrize("name", names())
def test_every_experiment_has_valid_settings_results_and_a_place_on_the_page(name: str) -> None:
    """Results may be missing only where the page says so."""
    for scale in scales(name) or [""]:
        experiment = load(name, scale)
        assert experiment.question.endswith(("?", "."))
        assert not scale or experiment.runs or experiment.measure
    rows = [line for line in PAGE.splitlines() if f"](#{name}) |" in line]
    assert f"## {name}\n" in PAGE and rows
    assert any((EXPERIMENTS / "results").glob(f"{name}*/*")) or "| not run yet |" in rows[0]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("runz: {}", "x/settings.yaml: key: unknown 'runz'; did you mean 'runs'"),
        ("runs: {a: {}, a: {scaling: {method: ls}}}", "the key 'a' is given twice"),
        ("runs: {a: {}, b: {}}", "'a' and 'b' have the same settings"),
        ("runs: {a: {scaling: {method: lss}}}", "x/settings.yaml: runs.a: scaling.method: unknown 'lss'; did you mean 'ls'"),
        ("runs: {a: {model: {dept: 3}}}", "x/settings.yaml: runs.a: unknown key 'model.dept'; did you mean 'model.depth'"),
        ("runs: {a: {training: {steps: many}}}", "runs.a: training.steps: must be a whole number, got 'many'"),
        ("preset: cifar-uvit", "x/settings.yaml: preset: unknown 'cifar-uvit'; did you mean 'cifar10-"),
        ("seeds: [0, 0]", "seeds: must be one or more different numbers"),
        ("runs: [none]", "runs: must be a dict"),
        ("runs: {a: {}}\nmeasures: [fid]", "measures: unknown 'fid'"),
        (f"{RUNS}claims: [{{paper: p, lower: [a], than: [b], measures: [test_loss]}}]", "claims: unknown 'b'"),
        (f"{RUNS}claims: [{{paper: p, lower: a, than: [a], measures: [test_loss]}}]", "claims: must be lists of lower"),
        ("runs: {a: {}}", "must be given runs and measures, a measure.py or a command"),
    ],
)  # fmt: skip
def test_bad_settings_are_one_line_before_anything_is_trained(text, message, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(settings, "EXPERIMENTS", tmp_path)
    (tmp_path / "defaults.yaml").write_text("cpu: {}")
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "settings.yaml").write_text(f"question: Why?\nscales: {{cpu: }}\n{text}\n")
    with pytest.raises(SettingError):
        load("x")
    assert harness.main(["x", "--out", str(tmp_path / "out"), "--runs", str(tmp_path / "runs")]) == 1
    said = capsys.readouterr().err
    assert message in said and said.count("\n") == 1
    assert not (tmp_path / "out").exists() and not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["fig12-seed"], "experiment: unknown 'fig12-seed'; did you mean 'fig12-seeds'"),
        (["fig12-seeds", "--scale", "tpu"], "scales: unknown 'tpu'"),
        (["fig12-seeds", "--set", "steps"], "set: must be SECTION.KEY=VALUE, got 'steps'"),
        (["fig11-block-norms", "--set", "options.step=1"], "set: options: key: unknown 'step'; did you mean 'steps'"),
        (["fig12-seeds", "--steps", "20"], "out: results of other steps, seeds or settings need a folder of their own"),
        (["fig12-seeds", "--out", str(EXPERIMENTS)], "holds no results of an experiment; choose another folder"),
        (["study"], "study: is started by `python experiments/study/piece.py"),
    ],
)
def test_bad_commands_are_one_line(given, message, capsys) -> None:
    assert harness.main(given) == 1
    assert message in capsys.readouterr().err


def test_a_key_is_that_of_what_is_computed() -> None:
    experiment = small()
    assert len({run_key(config) for config in experiment.configs.values()}) == 4
    elsewhere = load("fig01-oscillation", steps=30, seeds=[1], changes={"data": {"root": "elsewhere", "workers": 0}})
    here = load("fig01-oscillation", steps=30, seeds=[1])
    assert run_key(elsewhere.runs["ls"]) == run_key(here.runs["ls"])
    assert run_key(load("fig12-seeds").runs["ls"]) == run_key(load("fig07-learned-kappa").runs["ls"])


def test_a_shorter_run_has_a_shorter_warm_up() -> None:
    config = load("fig01-oscillation", steps=80).runs["none"]
    assert (config.training.steps, config.training.checkpoint_every, config.optimizer.warmup_steps) == (80, 80, 10)


@pytest.mark.slow
def test_an_experiment_is_trained_once_and_measured(runs, tmp_path, capsys) -> None:
    """Runs of another experiment that are the same are not trained again; a dry run tells them apart."""
    given, seeds = ["--steps", "30", "--runs", str(runs), "--set", *TINY], ["--seeds", "0", "1"]
    fig12 = ["fig12-seeds", *given, *seeds, "--out"]
    assert harness.main([*fig12, str(tmp_path / "fig12"), "--jobs", "2"]) == 0
    with (tmp_path / "fig12" / "runs.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["run"], row["seed"]) for row in rows] == [
        (r, s) for r in ("none", "rsqrt2", "cs 0.5", "ls") for s in "01"
    ]
    assert all(float(row["final_loss"]) > 0 for row in rows)
    summary = json.loads((tmp_path / "fig12" / "summary.json").read_text())
    assert summary["command"].startswith("python experiments/run.py fig12-seeds --steps 30 --set")
    assert [claim["agrees"] in (True, False) for claim in summary["claims"]] == [True, True]
    assert (tmp_path / "fig12" / "fig12-seeds.png").is_file()
    events = {path: path.stat().st_mtime_ns for path in runs.glob("*/metrics.jsonl")}
    capsys.readouterr()
    where = ["--seeds", "0", "1", "2", "--out", str(tmp_path / "fig01"), "--dry-run"]
    assert harness.main(["fig01-oscillation", *given, *where]) == 0
    said = capsys.readouterr().out
    assert "cs 0.5, seed 1: complete" in said and "about" in said and said.count("missing") == 4
    assert harness.main([*fig12, str(tmp_path / "again")]) == 0
    assert {path: path.stat().st_mtime_ns for path in events} == events
    assert (tmp_path / "again" / "runs.csv").read_text() == (tmp_path / "fig12" / "runs.csv").read_text()


@pytest.mark.slow
def test_a_run_that_fails_ends_the_experiment_and_leaves_the_old_results(tmp_path, capsys) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "summary.json").write_text("{}")
    where = ["--runs", str(tmp_path / "runs"), "--out", str(tmp_path / "out"), "--set", "data.name=folder:nowhere"]
    assert harness.main(["fig12-seeds", *where]) == 1
    assert "stopped; after mending it" in capsys.readouterr().err
    assert len(list(tmp_path.glob("runs/*.yaml"))) < 12, "the others were not started"
    assert [path.read_text() for path in (tmp_path / "out").iterdir()] == ["{}"]


@pytest.mark.slow
def test_distances_and_samples_come_from_the_commands(tmp_path) -> None:
    """The samples of the picture, and `scalelong evaluate` with the flags of the settings, once."""
    where = ["--steps", "20", "--runs", str(tmp_path / "runs"), "--out", str(tmp_path / "out"), "--set", *TINY]
    assert harness.main(["conditional", *where, "sampling.steps=2"]) == 0
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert [claim["agrees"] for claim in summary["claims"]] == [None, None]
    evaluated = [p.read_text().count('"kind": "evaluation"') for p in tmp_path.glob("runs/*/metrics.jsonl")]
    assert evaluated == [2, 2, 2]
    assert harness.main(["conditional", *where, "sampling.steps=2"]) == 0
    assert [p.read_text().count('"kind": "evaluation"') for p in tmp_path.glob("runs/*/metrics.jsonl")] == evaluated


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "fig03-distributions",
        "fig07-learned-kappa",
        "fig11-block-norms",
        "fig13-amplify",
        "auto-kappa",
        "learning-rates",
    ],
)
def test_own_measurements_run_in_a_tiny_form(name: str, runs: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(load("learning-rates").measure, "RUNS", runs)
    digits = ["data.name=digits", "data.image_size=8", "data.flip=false", "model.patch_size=2"]
    given = {
        "learning-rates": ["--steps", "20", "--set", *TINY, *digits, "options.rates=[0.001,1000]"],
        "fig03-distributions": ["--steps", "30", "--set", *TINY, "options.data=[digits]"],
        "fig07-learned-kappa": ["--steps", "30", "--set", *TINY],
        "fig11-block-norms": ["--set", "options.steps=12"],
        "fig13-amplify": ["--steps", "30", "--set", "model.dim=16", "model.depth=4"],
        "auto-kappa": ["--steps", "120", "--set", "model.dim=16"],
    }[name]
    where = ["--runs", str(runs), "--out", str(tmp_path / "out"), "--seeds", "0"]
    assert harness.main([name, *where, *given]) == 0
    assert json.loads((tmp_path / "out" / "summary.json").read_text())["claims"]
    assert list((tmp_path / "out").glob("*.csv")) and len(list((tmp_path / "out").glob("*.png"))) == 1


@pytest.mark.slow
def test_stacked_members_have_the_losses_of_runs_of_their_own(tmp_path) -> None:
    config, members = small(steps=3).runs["none"], [stack.Member(0.5, 0), stack.Member(0.9, 1)]
    config = replace(config, training=replace(config.training, log_every=1))
    course = stack.train_together(config, load_source("digits"), members, probe_every=2)
    for column, member in enumerate(members):
        folder = train(stack.for_member(config, member), tmp_path / str(column))
        losses = [record["loss"] for record in read_events(folder)[0] if record["kind"] == "train"]
        assert course.losses[:, column].tolist() == pytest.approx(losses, rel=1e-5)
    assert course.norm_steps == [2]
    assert course.fixed_loss[0] != course.fixed_loss[1]


def test_coefficients_are_warmed_up() -> None:
    """After as many steps as it warms up over, a member has CS's coefficients; at first it has those of kappa = 1."""
    config, source = small(steps=1).runs["none"], load_source("digits")
    warmed, plain = stack.train_together(
        config, source, [stack.Member(0.5, 0, warm_steps=9), stack.Member(1.0, 0)], probe_every=1
    ).losses[0]
    assert warmed == pytest.approx(plain.item(), rel=1e-6)


def test_a_run_that_was_interrupted_is_drawn_at_the_common_steps(tmp_path) -> None:
    folders = [
        write_run(tmp_path / name, losses=losses, norms=[1.0]) for name, losses in (("a", [2, 1]), ("b", [2, 1]))
    ]
    record = json.dumps({"step": 13, "kind": "train", "loss": 1.5, "seconds": 1.3})
    lines = (folders[1] / "metrics.jsonl").read_text().splitlines()
    (folders[1] / "metrics.jsonl").write_text("\n".join([*lines[:2], record, *lines[2:]]) + "\n")
    runs = {folder.name: [read_run(folder)] for folder in folders}
    rows = [{"run": name, "seed": 0, "final_loss": 1.0} for name in runs]
    output.draw(runs, rows, ["final_loss"], tmp_path / "drawn.png")
    assert (tmp_path / "drawn.png").is_file()


def test_claims_are_judged_by_seed_or_on_average_and_one_seed_decides_nothing() -> None:
    values = {"none": (2.0, 1.0), "ls": (1.0, 1.5)}
    rows = [{"run": run, "seed": seed, "x": x} for run, own in values.items() for seed, x in enumerate(own)]
    claim = {"paper": "p", "lower": ["ls"], "than": ["none"], "measures": ["x"]}
    found = harness.judged(rows, claim, "x")
    assert (found.agrees, found.measured) == (False, "x: none 1.5, ls 1.25; ls below none in 1 of 2 seeds")
    assert harness.judged(rows, {**claim, "by": "mean"}, "x").agrees is True
    assert harness.judged(rows, {**claim, "lower": ["none"], "than": ["ls"], "by": "mean"}, "x").agrees is False
    assert harness.judged([row for row in rows if row["seed"] == 0], claim, "x").agrees is None


def test_collapsed_runs_are_counted_and_a_method_is_judged_at_its_best_rate() -> None:
    """Losses that are not finite count as collapsed, and the others alone make the mean."""
    own = load("learning-rates").measure
    losses = {("none", 1): (0.2, None), ("none", 2): (0.95, 0.4), ("ls", 1): (0.3, 0.1), ("ls", 2): (0.2, 0.4)}
    rows = [
        {"run": f"depth 2, {name}", "lr": lr, "seed": seed, "loss": loss, "collapsed": loss is None or loss > 0.9}
        for (name, lr), found in losses.items()
        for seed, loss in enumerate(found)
    ]
    table = own.averages(rows)
    assert [row["collapsed"] for row in table] == [1, 1, 0, 0]
    assert [row["mean loss of the others"] for row in table] == pytest.approx([0.2, 0.4, 0.2, 0.3])
    fewer, lower = own.judged(table, rows)
    assert (fewer.agrees, fewer.measured) == (False, "collapsed: none 2 of 4, ls 0 of 4"), "not significant"
    many = [{**row, "seed": 2 * copy + row["seed"]} for row in rows for copy in range(4)]
    assert own.judged(own.averages(many), many)[0].agrees
    assert lower.measured == "median 0.6750 for none at 2, median 0.2000 for ls at 1; ls below none in 2 of 2 seeds"
    assert lower.agrees
