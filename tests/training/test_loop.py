"""The loop: resuming, refusing, stopping, and what happens at a step that is not finite."""

from __future__ import annotations

import dataclasses
import logging
import os
import shlex
import shutil
import signal
import sys
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from scalelong import failpoints
from scalelong.failpoints import VARIABLE
from scalelong.runs.reader import read_run
from scalelong.runs.settings import RunConfig
from scalelong.training import NonFiniteError, Trainer, load_run, loop, read_events, train
from scalelong.training.checkpoint import CheckpointError
from scalelong.training.step import Pending, StepResult
from tests.training.tiny import assert_same_run, assert_same_weights, losses, newest, tiny


class Poison:
    """Makes the network's output for one sample NaN in the forward pass of one step, the first time it is reached."""

    def __init__(self, trainer: Trainer, step: int, sample: int = 2, times: int = 1) -> None:
        self.trainer, self.step, self.sample, self.times = trainer, step, sample, times
        trainer.model.register_forward_hook(self)

    def __call__(self, _module, _args, output):
        if self.trainer.step + 1 == self.step and self.times > 0:
            self.times -= 1
            output = output.clone()
            output[self.sample] = float("nan")
        return output


def test_the_files_of_a_run(tmp_path) -> None:
    folder = train(tiny(training_steps=6, training_sample_every=3), tmp_path / "run")
    assert {path.name for path in folder.iterdir()} == {
        ".lock", "config.yaml", "metrics.jsonl", "checkpoints", "samples", "tensorboard",
    }  # fmt: skip
    assert [path.name for path in sorted((folder / "samples").iterdir())] == ["step-00000003.png", "step-00000006.png"]
    assert [path.name for path in sorted((folder / "checkpoints").iterdir())] == ["step-00000004", "step-00000006"]
    records, damaged = read_events(folder)
    assert damaged == 0
    assert records[0]["kind"] == "start"
    assert records[0]["command"] == shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]])
    assert records[0]["data"] == load_run(folder).data != ""
    assert [record["step"] for record in records if record["kind"] == "checkpoint"] == [4, 6]
    last = [record for record in records if record["kind"] == "train"][-1]
    assert last["step"] == 6
    assert last.keys() >= {"loss", "gradient_norm", "lr", "images_per_second", "seconds", "skipped", "kappa"}


def test_training_learns(tmp_path) -> None:
    folder = train(tiny(training_steps=150, training_batch_size=16, optimizer_lr=3e-3), tmp_path / "run")
    found = [loss for _, loss in losses(folder)]
    assert sum(found[-20:]) < 0.8 * sum(found[:20])


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"training_accumulate": 2},
        {"training_log_every": 5},
        {"condition_kind": "class", "condition_drop": 0.3},
        {"features_conditioning": True, "distillation_weight": 0.1},
    ],
    ids=str,
)
def test_resuming_is_bit_identical_to_an_uninterrupted_run(changes, tmp_path) -> None:
    whole = train(tiny(**changes), tmp_path / "whole")
    train(tiny(training_steps=6, **changes), tmp_path / "parts")
    if "training_log_every" in changes:  # the records in between are at other steps when a run ends in between
        shutil.rmtree(newest(tmp_path / "parts"))
    parts = train(tiny(**changes), tmp_path / "parts")
    assert_same_run(whole, parts)


def test_the_same_command_on_a_finished_run_changes_nothing(tmp_path) -> None:
    folder = train(tiny(training_steps=4), tmp_path / "run")
    before = (folder / "metrics.jsonl").read_text()
    train(tiny(training_steps=4), tmp_path / "run")
    assert (folder / "metrics.jsonl").read_text() == before


def test_a_run_that_lost_its_checkpoints_does_not_start_afresh(tmp_path) -> None:
    folder = train(tiny(training_steps=6), tmp_path / "run")
    before = (folder / "metrics.jsonl").read_text()
    shutil.rmtree(folder / "checkpoints")
    with pytest.raises(CheckpointError, match="wrote checkpoints up to step 6, but they are missing"):
        train(tiny(training_steps=6), tmp_path / "run")
    assert (folder / "metrics.jsonl").read_text() == before


def test_a_run_killed_before_its_first_checkpoint_starts_again(tmp_path) -> None:
    trainer = Trainer(tiny(), tmp_path / "run")
    Poison(trainer, step=3)
    with pytest.raises(NonFiniteError):
        trainer.run()
    assert read_run(tmp_path / "run").diverged == 3
    assert_same_run(train(tiny(), tmp_path / "run"), train(tiny(), tmp_path / "whole"))
    assert read_run(tmp_path / "run").diverged is None


def test_a_stream_gives_the_same_run_as_a_resident_set(tmp_path) -> None:
    resident = train(tiny(training_steps=5), tmp_path / "resident")
    stream = train(tiny(training_steps=5, data_resident_mb=0), tmp_path / "stream")
    assert losses(resident) == losses(stream)


def test_accumulating_gives_the_same_run_up_to_rounding(tmp_path) -> None:
    one = train(tiny(training_steps=5), tmp_path / "one")
    four = train(tiny(training_steps=5, training_accumulate=4), tmp_path / "four")
    assert [loss for _, loss in losses(four)] == pytest.approx([loss for _, loss in losses(one)], rel=1e-4)


def test_a_checkpoint_that_cannot_be_written_leaves_the_one_before(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv(VARIABLE, "save.before_manifest=raise:OSError@2")
    monkeypatch.setattr(failpoints, "_visits", Counter())
    trainer = Trainer(tiny(), tmp_path / "run")
    with pytest.raises(CheckpointError, match=r"step 8: the checkpoint could not be written.*step-00000004 is intact"):
        trainer.run()
    assert newest(tmp_path / "run").name == "step-00000004"


def test_other_data_under_the_same_name_is_refused(tmp_path, monkeypatch) -> None:
    train(tiny(training_steps=4), tmp_path / "run")
    trainer = Trainer(tiny(), tmp_path / "run")
    monkeypatch.setitem(trainer.source.__dict__, "fingerprint", "other")
    with pytest.raises(CheckpointError, match="trained on other data"):
        trainer.run()


class TestNonFinite:
    """A sample whose loss is NaN at step 6."""

    def trainer(self, folder, policy: str, **changes: object) -> Trainer:
        return Trainer(tiny(training_on_nonfinite=policy, **changes), folder)

    @pytest.mark.parametrize("log_every", [1, 5], ids=["read at once", "read a step later"])
    def test_raise_stops_before_the_update_and_names_step_sample_and_time(self, log_every, tmp_path) -> None:
        trainer = self.trainer(tmp_path / "run", "raise", training_log_every=log_every)
        Poison(trainer, step=6)
        with pytest.raises(NonFiniteError, match=r"step 6: the loss is not finite.*samples \[42\] at t = \[0\.\d+\]"):
            trainer.run()
        clean = train(tiny(training_steps=5), tmp_path / "clean")
        weights = load_file(newest(clean) / "model.safetensors")
        assert all(torch.equal(value, weights[key]) for key, value in trainer.model.state_dict().items())

    def test_skip_counts_the_step_and_continues(self, tmp_path, caplog) -> None:
        trainer = self.trainer(tmp_path / "run", "skip")
        Poison(trainer, step=6)
        with caplog.at_level(logging.WARNING):
            trainer.run()
        assert "policy: skip" in caplog.text
        assert trainer.guard.skipped == [6]
        record = [r for r in read_events(tmp_path / "run")[0] if r["kind"] == "train"][-1]
        assert (record["step"], record["skipped"]) == (12, 1)
        assert all(torch.isfinite(p).all() for p in trainer.model.parameters())

    @pytest.mark.parametrize("log_every", [1, 5], ids=["read at once", "read a step later"])
    def test_rewind_returns_to_the_checkpoint_and_skips_that_step(self, log_every, tmp_path) -> None:
        rewound = self.trainer(tmp_path / "rewound", "rewind", training_log_every=log_every)
        Poison(rewound, step=6)
        rewound.run()
        skipped = self.trainer(tmp_path / "skipped", "skip")
        Poison(skipped, step=6)
        skipped.run()
        assert rewound.guard.skipped == [6]
        due = [step for step in range(1, 13) if step % log_every == 0 or step == 12]
        assert [step for step, _ in losses(tmp_path / "rewound")] == due
        for one, other in zip(rewound.model.parameters(), skipped.model.parameters(), strict=True):
            assert torch.equal(one, other)

    @pytest.mark.parametrize("log_every", [1, 5], ids=["read at once", "read a step later"])
    def test_a_loss_scaler_survives_a_rewind(self, log_every, tmp_path, monkeypatch) -> None:
        """It refuses to unscale a second time before an update; half precision is for GPUs, but a CPU can do it."""
        monkeypatch.setattr(loop, "check_config", lambda config, *_: config)
        trainer = self.trainer(tmp_path / "run", "rewind", training_precision="fp16", training_log_every=log_every)
        Poison(trainer, step=6)
        trainer.run()
        assert (trainer.step, trainer.guard.skipped) == (12, [6])

    @pytest.mark.parametrize("policy", ["skip", "rewind"])
    def test_the_run_stops_after_too_many(self, policy, tmp_path) -> None:
        trainer = self.trainer(tmp_path / "run", policy, training_max_nonfinite=2)
        for step in (2, 3, 4):
            Poison(trainer, step)
        with pytest.raises(NonFiniteError, match=r"step 4.*max_nonfinite = 2"):
            trainer.run()


@pytest.mark.parametrize("log_every", [1, 50], ids=["read at once", "read a step later"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_and_stops_and_the_run_resumes(number: int, log_every: int, tmp_path) -> None:
    config = tiny(training_log_every=log_every, training_checkpoint_every=50)
    trainer = Trainer(config, tmp_path / "run")
    trainer.observers.append(lambda step, model: os.kill(os.getpid(), number) if step == 6 else None)
    before = signal.getsignal(number)
    trainer.run()
    assert trainer.step == 7  # the signal arrived after step 6 was reduced; the next one carries it to every rank
    assert newest(tmp_path / "run").name == "step-00000007"
    assert signal.getsignal(number) == before
    train(config, tmp_path / "run")
    whole = train(config, tmp_path / "whole")
    if log_every == 1:
        assert_same_run(whole, tmp_path / "run")
    else:  # the record that was written when the run stopped is one more
        assert_same_weights(whole, tmp_path / "run")


@pytest.mark.parametrize("log_every", [1, 4], ids=["read at once", "read a step later"])
def test_waiting_for_the_device_counts_as_training_time(log_every, tmp_path, monkeypatch) -> None:
    read, clock = Pending.read, [0.0]

    def waits(self: Pending) -> StepResult:
        clock[0] += 1
        return read(self)

    monkeypatch.setattr(Pending, "read", waits)
    monkeypatch.setattr(loop, "time", SimpleNamespace(perf_counter=lambda: clock[0], strftime=time.strftime))
    folder = train(tiny(training_steps=8, training_log_every=log_every), tmp_path / "run")
    assert [r["seconds"] for r in read_events(folder)[0] if r["kind"] == "train"][-1] == 8


def test_observers_see_the_gradients_and_their_values_are_recorded(tmp_path) -> None:
    trainer = Trainer(tiny(training_steps=3), tmp_path / "run")
    trainer.observers.append(lambda step, model: {"bias": float(model.norm.bias.grad.norm())})
    trainer.run()
    probes = [record for record in read_events(tmp_path / "run")[0] if record["kind"] == "probe"]
    assert [record["step"] for record in probes] == [1, 2, 3]
    assert all(record["bias"] > 0 for record in probes)


class TestLoadRun:
    """Reading a trained model back."""

    @pytest.fixture
    def folder(self, tmp_path):
        return train(tiny(training_steps=8), tmp_path / "run")

    def test_the_average_or_the_weights_at_any_checkpoint(self, folder) -> None:
        for weights in ("ema", "model"):
            for step in (4, 8):
                run = load_run(folder, weights=weights, step=step)
                saved = load_file(folder / "checkpoints" / f"step-{step:08d}" / f"{weights}.safetensors")
                assert all(torch.equal(saved[key], value) for key, value in run.model.state_dict().items())
                assert (run.step, run.shape) == (step, (1, 8, 8))
        assert load_run(folder).step == 8

    def test_errors_name_what_is_missing(self, folder, tmp_path) -> None:
        with pytest.raises(ValueError, match="no checkpoint at 5; available: 4, 8"):
            load_run(folder, step=5)
        with pytest.raises(ValueError, match="must be ema or model"):
            load_run(folder, weights="best")
        with pytest.raises(FileNotFoundError, match="is not a run folder"):
            load_run(tmp_path / "elsewhere")
        with pytest.raises(CheckpointError, match="step-00000008: is a checkpoint, not a run folder; give the run"):
            load_run(folder / "checkpoints" / "step-00000008")
        shutil.rmtree(folder / "checkpoints")
        with pytest.raises(CheckpointError, match="holds no checkpoint yet"):
            load_run(folder)
        (folder / "scalelong.json").touch()
        with pytest.raises(CheckpointError, match=r"holds weights for scalelong\.load, it is not a run folder"):
            load_run(folder)


def test_edm_and_ddpm_train_too(tmp_path) -> None:
    for process in ("edm", "ddpm", "cosine"):
        config: RunConfig = dataclasses.replace(tiny(training_steps=3, diffusion_process=process))
        assert len(losses(train(config, tmp_path / process))) == 3


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_one_process_of_accelerate_on_a_cpu_is_told_how_to_get_more(tmp_path: Path, monkeypatch, caplog) -> None:
    monkeypatch.setenv("ACCELERATE_USE_CPU", "False")  # as `accelerate launch --num_processes 2` does
    Trainer(tiny(), tmp_path / "a")
    assert "for N ranks use torchrun --nproc-per-node N" in caplog.text


@pytest.mark.parametrize(
    "changes",
    [
        {"scaling_method": "cs_annealed", "scaling_anneal_steps": 9},
        {"scaling_method": "subset"},
        {"scaling_module": "time"},
        {"diffusion_min_snr_gamma": 5.0},
        {"diffusion_process": "flow"},
        {"optimizer_name": "muon"},
    ],
    ids=str,
)
def test_other_methods_and_objectives_train_and_resume_exactly(tmp_path, changes) -> None:
    whole = train(tiny(**changes), tmp_path / "whole")
    train(tiny(training_steps=7, **changes), tmp_path / "parts")
    assert_same_run(whole, train(tiny(**changes), tmp_path / "parts"))


def test_annealed_coefficients_follow_the_step_in_weights_and_average(tmp_path) -> None:
    config = tiny(scaling_method="cs_annealed", scaling_kappa=0.5, scaling_anneal_steps=10, training_steps=6)
    trainer = Trainer(config, tmp_path / "run")
    trainer.run()
    for model in (trainer.model, trainer.ema.model, load_run(tmp_path / "run").model):
        assert model.get_submodule("scalelong").current() == pytest.approx([1.0, 0.7])
    kappas = [record["kappa"][1] for record in read_events(tmp_path / "run")[0] if record["kind"] == "train"]
    assert kappas == pytest.approx([0.95, 0.9, 0.85, 0.8, 0.75, 0.7])
