"""The command line: help, clear errors, and the path a user walks."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import scalelong
from scalelong.cli.demo import METHODS
from scalelong.cli.main import VERBS, as_flags, main
from scalelong.runs.settings import RunConfig, differences
from scalelong.stability.sweep import sweep
from scalelong.training import from_yaml, load_run, to_yaml
from tests.training.tiny import tiny


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_has_a_help_with_an_example(verb: str, capsys) -> None:
    with pytest.raises(SystemExit) as stopped:
        main([verb, "--help"])
    assert stopped.value.code == 0
    printed = capsys.readouterr().out
    assert f"scalelong {verb}" in printed
    assert "\nExample:" in printed
    assert printed.count("Example:") == printed.count("\nExample:"), "examples run into each other"
    assert not re.search(r"^\W*STR\b", printed, re.M), "an argument has no name"


@pytest.mark.parametrize("verb", ["sample", "report", "export", "probe"])
def test_examples_name_runs_of_the_demo(verb: str, capsys) -> None:
    with pytest.raises(SystemExit):
        main([verb, "--help"])
    named = re.findall(r"runs/demo/(\S+)", capsys.readouterr().out)
    assert named
    assert {*named} <= sweep(RunConfig(), METHODS, [0]).keys()


def test_colours_are_left_out_if_asked() -> None:
    command = [sys.executable, "-m", "scalelong.cli.main", "sample", "--help"]
    code = f"import pty, sys; sys.exit(pty.spawn({command!r}))"  # on a terminal
    for without, coloured in (("", True), ("1", False)):
        environment = os.environ | {"NO_COLOR": without, "TERM": "xterm"}
        shown = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, check=True).stdout
        assert (b"\x1b[" in shown) == coloured


def test_without_a_verb_the_verbs_are_listed(capsys) -> None:
    assert main([]) == 2
    assert main(["--help"]) == 0
    listed = capsys.readouterr().out
    assert all(verb in listed for verb in VERBS)
    assert main(["trian"]) == 2
    assert "verb: unknown 'trian'; did you mean 'train'?" in capsys.readouterr().err
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"scalelong {scalelong.__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train"], "preset: name the one to train, one of digits-demo"),
        (["train", "digit-demo"], "did you mean 'digits-demo'?"),
        (["train", "mine.yaml"], "preset: mine.yaml is a file; pass --config mine.yaml"),
        (["train", "digits-demo", "--method", "CS"], "scaling.method: unknown 'CS'; did you mean 'cs'?"),
        (["train", "digits-demo", "--distillation.dim=0"], "distillation.dim: must be at least 1, got 0"),
        (["train", "x"], "preset: unknown 'x'; choose one of digits-demo"),
        (["train", "digits-demo", "--config", "nope.yaml"], "config: nope.yaml cannot be read (No such file"),
        (["train", "digits-demo", "--scaling.kappa", "1.7", "--dry-run"], "scaling.kappa: must be in (0, 1], got 1.7"),
        (["train", "digits-demo", "--model.patch-size", "3"], "model.patch_size: 3 does not divide"),
        (["train", "digits-demo", "--training.precision", "fp16"], "training.precision: fp16 needs a GPU"),
        (["train", "digits-demo", "--data.name", "digit"], "did you mean 'digits'?"),
        (["sample", "nowhere"], "nowhere: is not a run folder"),
        (["evaluate", "nowhere"], "nowhere: is not a run folder"),
        (["data", "check", "cifar-10"], "did you mean 'cifar10'?"),
        (["data", "fetsh", "cifar10"], "data: unknown 'fetsh'; did you mean 'fetch'?"),
        (["train", "digits-demo", "--method", "css"], "scaling.method: unknown 'css'; did you mean 'cs'?"),
        (["train", "digits-demo", "--kappa=1.7"], "got 1.7; pass --scaling.allow-amplify to use it as a control"),
        (["inspect", "digits-demo", "--method", "cs", "--kappa", "2"], "pass --allow-amplify to use it"),
        (["train", "digits-demo", "--dry-run", "--model.patch-size", "3"], "model.patch_size: 3 does not divide"),
        (
            ["train", "digits-demo", "--dry-run", "--data", "hf:x"],
            "its size is unknown; set --data.image-size",
        ),
    ],
)
def test_bad_input_is_one_clear_line(arguments, message, capsys, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 1
    out, printed = capsys.readouterr()
    assert printed.startswith("error: ")
    assert message in printed
    assert "Traceback" not in printed
    assert out == "", "something was told before the error was found"
    assert not list(tmp_path.iterdir()), "something was left behind"


@pytest.mark.parametrize(
    "places", [("digits-demo", "--config", "{}"), ("--config", "{}", "digits-demo"), ("digits-demo", "--config={}")]
)
def test_flags_win_over_the_file_and_the_file_over_the_preset(places, tmp_path, capsys) -> None:
    (tmp_path / "mine.yaml").write_text("training: {steps: 5, batch_size: 16}\n")
    arguments = [argument.format(tmp_path / "mine.yaml") for argument in places]
    assert main(["train", *arguments, "--training.batch-size", "4", "--dry-run"]) == 0
    printed = capsys.readouterr().out
    assert "  steps: 5\n" in printed
    assert "  batch_size: 4\n" in printed
    assert "  ema_decay: 0.99\n" in printed
    assert "parameters  698,638" in printed
    assert "memory" in printed
    assert "time" in printed


def test_a_run_that_ends_in_its_warm_up_is_noted(capsys) -> None:
    arguments = ["train", "digits-demo", "--method", "none", "--dry-run", "--steps"]
    for steps, noted in (("50", True), ("100", False)):
        assert main([*arguments, steps, "--optimizer.warmup-steps", "100", "--optimizer.lr", "2e-4"]) == 0
        note = "warm-up     the run ends in the warm-up, at rate 0.0001 instead of 0.0002 (--optimizer.warmup-steps)"
        assert (note in capsys.readouterr().out) == noted


def test_remedies_name_the_flags_of_every_part() -> None:
    assert as_flags("x: bad; set features.tap", "train") == "x: bad; set --features.tap"
    assert as_flags("a.yaml: bad; did you mean 'training.steps'?", "train").endswith("'training.steps'?")
    assert as_flags("x: bad; set mup.base_width=0", "train") == "x: bad; set --mup.base-width 0"


def test_short_flags_are_those_of_other_verbs(capsys) -> None:
    flags = ["--method", "ls", "--steps=7", "--seed", "3", "--dry-run"]
    assert main(["train", "digits-demo", *flags]) == 0
    printed = capsys.readouterr().out
    assert all(f"  {line}\n" in printed for line in ("method: ls", "steps: 7", "seed: 3"))


@pytest.mark.parametrize(
    ("preset", "told"),
    [
        ("cifar10-unet", "cifar10: not available; assuming images of 3 x 32 x 32"),
        ("emoji32-text", r"emoji32: [\d,]+ images of 3 x 32 x 32"),
    ],
)
def test_a_dry_run_fetches_nothing_and_gives_times(preset: str, told: str, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setenv("SCALELONG_DATA", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    small = ["--model.channels", "32", "32", "--model.dim", "32", "--model.depth", "4", "--training.batch-size", "2"]
    assert main(["train", preset, *small, "--dry-run"]) == 0
    printed = capsys.readouterr().out
    assert re.search(told, printed)
    assert re.search(r"time +about .* per step, .*(s|min|h) total on this", printed)
    assert not list(tmp_path.iterdir()), "something was fetched or written"


def test_remedies_name_flags() -> None:
    told = "data.image_size: must be square; set data.image_size or training.batch_size, not mydata.size"
    assert as_flags(told, "train").endswith("; set --data.image-size or --training.batch-size, not mydata.size")
    assert as_flags(told, "kappa").endswith("; set --image-size or --batch-size, not mydata.size")
    assert as_flags("scaling.axis: built for 3; pass axis='channels'", "train").endswith(
        "; pass --scaling.axis channels"
    )
    assert as_flags("tap: no module 'x'; see model.named_modules()", "probe").endswith("; see model.named_modules()")
    assert as_flags("training.steps: must be at least 1", "train") == "training.steps: must be at least 1"


def test_a_file_of_settings_stands_alone(run, tmp_path, monkeypatch, capsys) -> None:
    """A run's own settings train it once more, without a preset."""
    monkeypatch.chdir(tmp_path)
    assert main(["train", "--config", str(run / "config.yaml"), "--training.seed", "1"]) == 0
    assert "trained at step" in capsys.readouterr().out
    (again,) = (tmp_path / "runs").iterdir()
    assert again.name == f"digits-uvit-{from_yaml(run / 'config.yaml').scaling.method}-seed1"
    changed = differences(from_yaml(run / "config.yaml"), from_yaml(again / "config.yaml"))
    assert changed == {"training.seed": (0, 1)}


def test_train_again_resumes_and_goes_on(run, capsys) -> None:
    yaml = str(run.parent / "tiny.yaml")
    assert main(["train", "digits-demo", "--config", yaml, "--out", str(run), "--training.steps", "6"]) == 0
    said = capsys.readouterr().out
    assert "trained at step 6" in said
    assert said.startswith("ls: in our long runs") and "--method none" in said.splitlines()[0]


def test_the_same_images_at_any_batch_size(run, capsys) -> None:
    for batch_size in ("3", "8"):
        arguments = ["sample", str(run), "--num", "8", "--batch-size", batch_size, "--out", str(run / batch_size)]
        assert main(arguments) == 0
    three, eight = (np.load(run / f"{size}.npz")["images"] for size in ("3", "8"))
    assert three.shape == (8, 8, 8, 1)
    assert np.abs(three.astype(int) - eight.astype(int)).max() <= 1
    assert main(["sample", str(run), "--num", "2", "--first", "4", "--out", str(run / "seed0.5")]) == 0
    later = np.load(run / "seed0.5.npz")["images"]
    assert np.abs(later.astype(int) - eight[4:6].astype(int)).max() <= 1
    assert Image.open(run / "8.png").width > 100


def test_an_evaluation_is_printed_and_recorded(run, capsys) -> None:
    arguments = ["evaluate", str(run), "--extractor", "random-conv", "--num-samples", "96", "--seeds", "0", "1"]
    assert main(arguments) == 0
    printed = capsys.readouterr().out
    assert printed.count("FD(random-conv-64-seed0) = ") == 2
    assert "FID" not in printed
    assert "over 2 seeds: mean" in printed
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    found = [record for record in records if record["kind"] == "evaluation"]
    assert [record["sample_seed"] for record in found] == [0, 1]
    assert all(record["step"] == 4 and record["n"] == 96 for record in found)
    assert all(record["sampling"].items() >= {"sampler": "ddim", "steps": 2, "count": 96}.items() for record in found)


def test_sampling_flags_override_the_settings_of_the_run(run, capsys) -> None:
    """The number of steps is that of the run as long as the sampler is."""
    arguments = ["evaluate", str(run), "--extractor", "random-conv", "--num-samples", "70", "--kid"]
    for flags in ([], ["--sampler", "heun"], ["--steps", "3"], ["--sampler", "heun", "--steps", "2", "--no-clip"]):
        assert main([*arguments, *flags]) == 0
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    found = [record for record in records if record["kind"] == "evaluation"][-4:]
    used = [(record["sampling"]["sampler"], record["sampling"]["steps"]) for record in found]
    assert used == [("ddim", 2), ("heun", 18), ("ddim", 3), ("heun", 2)]
    assert [record["sampling"]["clip"] for record in found] == [True, True, True, False]
    assert all(record["kid"] > 0 and record["kid_sd"] > 0 for record in found)
    assert capsys.readouterr().out.count("KID = ") == 4


def test_probes_and_evaluations_are_recorded_while_training(tmp_path) -> None:
    (tmp_path / "tiny.yaml").write_text(to_yaml(tiny(training_steps=4)))
    arguments = ["train", "digits-demo", "--config", str(tmp_path / "tiny.yaml"), "--out", str(tmp_path / "run")]
    arguments += ["--probe-every", "2", "--evaluate-every", "4", "--evaluate-samples", "70"]
    assert main([*arguments, "--evaluate-extractor", "random-conv"]) == 0
    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [r["step"] for r in records if r["kind"] == "probe"] == [2, 4]
    assert [(r["step"], r["metric"]) for r in records if r["kind"] == "evaluation"] == [(4, "FD(random-conv-64-seed0)")]


@pytest.mark.parametrize(
    ("flag", "value", "told"),
    [
        ("--evaluate-samples", "1", "sampling.count: must be at least 2 for a distance, got 1"),
        ("--evaluate-extractor", "vgg", "extractor: unknown 'vgg'; choose one of inception, random-conv"),
        ("--evaluate-every", "-4", "evaluate-every: must be a number of steps, or 0 for never, got -4"),
        ("--probe-every", "-1", "probe-every: must be a number of steps, or 0 for never, got -1"),
    ],
)
def test_a_wrong_way_to_measure_is_refused_before_training(tmp_path, capsys, flag: str, value: str, told: str) -> None:
    arguments = ["train", "digits-demo", "--out", str(tmp_path / "run"), "--training.steps", "1"]
    assert main([*arguments, "--evaluate-every", "4", flag, value]) == 1
    assert told in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_seeds_of_evaluations_are_different_ones(run, capsys) -> None:
    for seeds in ([], ["0", "0"]):
        assert main(["evaluate", str(run), "--extractor", "random-conv", "--seeds", *seeds]) == 1
        assert "seeds: give one or more different numbers" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_refused(run, capsys) -> None:
    assert main(["evaluate", str(run), "--extractor", "random-conv", "--device", "cuda"]) == 1
    assert "device: cuda is asked for, but torch finds no GPU" in capsys.readouterr().err
    assert main(["sample", str(run), "--device", "tpu"]) == 1
    assert "device: must be cpu or cuda, got tpu" in capsys.readouterr().err


def test_data_is_checked(capsys, tmp_path) -> None:
    assert main(["data", "check", "digits"]) == 0
    assert "digits: 1,797 images of 1 x 8 x 8, no problem found" in capsys.readouterr().out
    Image.new("RGB", (8, 8)).save(tmp_path / "good.png")
    (tmp_path / "bad.png").write_bytes(b"not an image")
    with pytest.raises(SystemExit, match="1 problem"):
        main(["data", "check", str(tmp_path)])
    assert capsys.readouterr().out.count("bad.png: ") == 1
    (tmp_path / "bad.png").unlink()
    Image.new("RGB", (8, 6)).save(tmp_path / "other.png")
    with pytest.raises(SystemExit, match="1 problem"):
        main(["data", "check", str(tmp_path)])
    assert main(["data", "check", str(tmp_path), "--image-size", "4"]) == 0
    assert "2 images of 3 x 4 x 4, no problem found" in capsys.readouterr().out


def test_whoever_reads_no_further_is_told_no_error() -> None:
    """As `scalelong data list | head -1` does."""
    command = [sys.executable, "-m", "scalelong.cli.main", "data", "list"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait() == 141


def test_the_weights_of_the_run_and_of_the_extractor_are_two_things(run, capsys, tmp_path) -> None:
    measure = ["evaluate", str(run), "--extractor", "random-conv", "--num-samples", "64"]
    network = tmp_path / "inception.pt"
    network.touch()
    for flag in ("--inception", "--weights"):  # --weights FILE is the older spelling
        assert main([*measure, flag, str(network)]) == 1
        assert "inception: is the file of the Inception network" in capsys.readouterr().err
    assert main([*measure, "--weights", "best"]) == 1
    assert "weights: must be ema or model, got 'best'" in capsys.readouterr().err
    for flag, weights in (("--weights", "ema"), ("--run-weights", "model")):
        assert main([*measure, flag, weights]) == 0
    ema, model = re.findall(r"= ([\d.]+) ", capsys.readouterr().out)
    assert ema != model
    for weights, own, other in (("ema", ema, model), ("model", model, ema)):
        out = tmp_path / weights
        assert main(["export", str(run), "--weights", weights, "--out", str(out)]) == 0
        card = (out / "README.md").read_text()
        assert f"= {own} (64 images" in card
        assert f"= {other} (64 images" not in card


def test_an_exported_model_lies_beside_a_card_that_loads_it(run, tmp_path, monkeypatch) -> None:
    main(["evaluate", str(run), "--extractor", "random-conv", "--num-samples", "96"])
    out = tmp_path / "exported"
    assert main(["export", str(run), "--out", str(out)]) == 0
    assert sorted(path.name for path in out.iterdir()) == [
        "README.md", "config.yaml", "model.safetensors", "scalelong.json",
    ]  # fmt: skip
    card = (out / "README.md").read_text()
    assert "- **Data**: digits, split train" in card
    assert "ls (shared = True" in card
    assert "4 steps at batch 8, seed 0" in card
    assert "FD(random-conv-64-seed0) = " in card
    assert "96 images of seed 0, ddim with 2 steps in fp32" in card
    monkeypatch.chdir(out)
    names: dict[str, Any] = {}
    exec(re.findall(r"```python\n(.*?)```", card, flags=re.S)[0], names)
    expected = load_run(run).model.state_dict()
    assert all(torch.equal(value, expected[key]) for key, value in names["model"].state_dict().items())
    assert main(["export", str(run), "--out", str(out)]) == 0  # over an earlier export


def test_warnings_are_one_line(monkeypatch) -> None:
    monkeypatch.setattr(warnings, "formatwarning", warnings.formatwarning)  # restored after the test
    assert main(["data", "list"]) == 0
    assert warnings.formatwarning("few samples", UserWarning, "statistics.py", 103) == "warning: few samples\n"


def test_arguments_that_the_locale_cannot_decode_are_refused(capsys) -> None:
    assert main(["train", "digits-demo", "--out", "r\udcc3\udcbcn"]) == 2
    assert "is not text in this locale; set PYTHONUTF8=1" in capsys.readouterr().err


def test_a_closed_output_is_no_error(run) -> None:
    command = [sys.executable, "-m", "scalelong.cli.main", "diagnose", str(run)]
    assert subprocess.run(["sh", "-c", f"{shlex.join(command)} >&-"], check=False).returncode == 0
