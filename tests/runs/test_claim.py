"""Who may write to a run folder."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest

from scalelong.cli.main import main
from scalelong.files import check_space
from scalelong.runs.folder import claim_folder
from scalelong.training import Trainer, from_yaml, to_yaml, train
from scalelong.training.checkpoint import CheckpointError
from tests.training.tiny import tiny


def test_another_configuration_in_the_folder_is_shown_and_refused(tmp_path) -> None:
    train(tiny(training_steps=4), tmp_path / "run")
    with pytest.raises(ValueError, match=r"(?s)another configuration:.*optimizer\.lr: 0\.001 there, 0\.5 asked for"):
        train(tiny(training_steps=4, optimizer_lr=0.5), tmp_path / "run")


def test_a_folder_with_other_things_in_it_is_refused(tmp_path) -> None:
    (tmp_path / "thesis.txt").write_text("precious")
    with pytest.raises(ValueError, match=r"not empty and holds no config\.yaml"):
        train(tiny(), tmp_path)
    with pytest.raises(ValueError, match="is a file"):
        train(tiny(), tmp_path / "thesis.txt")
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


def test_too_little_space_is_reported_before_training(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10, 10, 1000))
    with pytest.raises(OSError, match=r"0\.0 MB free, a run needs 10\.0 MB"):
        train(tiny(), tmp_path / "run")


def test_missing_permission_is_reported_before_training(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(PermissionError, match="no permission to write"):
        train(tiny(), tmp_path / "run")


def test_a_second_process_is_refused_and_changes_nothing(tmp_path) -> None:
    """The lock is taken once more here, which counts as another process."""
    ready, refused = Trainer(tiny(training_steps=99), tmp_path / "run"), []

    def intrude(step: int, model: object) -> None:
        for start in (ready.run, lambda: Trainer(tiny(training_steps=99), tmp_path / "run")):
            with pytest.raises(RuntimeError, match="another process is training into"):
                start()
            refused.append(step)

    train(tiny(training_steps=1), tmp_path / "run", [intrude])
    assert refused == [1, 1]
    assert from_yaml(tmp_path / "run" / "config.yaml") == tiny(training_steps=1)


def test_nothing_is_written_before_training_starts(tmp_path, monkeypatch, capsys) -> None:
    """Bad options of observers, and bad data, are found after the trainer is built."""
    Trainer(tiny(), tmp_path / "run")
    monkeypatch.chdir(tmp_path)
    flags = ["--steps", "2", "--validate-every", "1", "--validate-split", "tset", "--out", "run"]
    assert main(["train", "digits-demo", *flags]) == 1
    assert "validate-split: digits has no 'tset'" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setattr("scalelong.training.build.find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"training\.wandb_project: wandb is not installed"):
        train(tiny(training_wandb_project="x"), tmp_path / "run")
    assert list(tmp_path.iterdir()) == []
    free = shutil.disk_usage(tmp_path)._replace(free=20 * 10**6)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: free)
    with pytest.raises(OSError, match="1001 checkpoints need"):
        train(tiny(training_keep=1000), tmp_path / "run")
    assert list(tmp_path.iterdir()) == []


def test_the_lock_is_released_whatever_happened(tmp_path) -> None:
    done = Trainer(tiny(training_steps=4), tmp_path / "run")
    done.run()
    complete = Trainer(tiny(training_steps=4), tmp_path / "run")
    complete.run()
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    failing = Trainer(tiny(training_steps=4), tmp_path / "run")
    with pytest.raises(CheckpointError):
        failing.run()
    Trainer(tiny(training_steps=4), tmp_path / "run")


def test_a_folder_that_was_only_locked_is_still_empty(tmp_path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / ".lock").touch()
    train(tiny(training_steps=1), tmp_path / "run")


def test_a_folder_whose_run_never_began_takes_other_settings(tmp_path) -> None:
    """As after a kill during the first steps."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text(to_yaml(tiny(optimizer_lr=0.5)))
    train(tiny(training_steps=1), tmp_path / "run")
    assert from_yaml(tmp_path / "run" / "config.yaml") == tiny(training_steps=1)


def test_a_complete_run_keeps_its_settings_when_fewer_steps_are_requested(tmp_path) -> None:
    train(tiny(training_steps=8), tmp_path / "run")
    train(tiny(training_steps=4), tmp_path / "run")
    assert from_yaml(tmp_path / "run" / "config.yaml").training.steps == 8


def test_a_symbolic_link_is_refused(tmp_path) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "run").symlink_to("there")
    with pytest.raises(ValueError, match=r"run is a symbolic link; give the folder that it points to, .*there"):
        train(tiny(), tmp_path / "run")


def test_a_refusal_creates_nothing(tmp_path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="file is a file"):
        train(tiny(), tmp_path / "file" / "run")
    with pytest.raises(ValueError, match="nowhere"):
        train(tiny(data_name="nowhere"), tmp_path / "run")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_space_for_the_checkpoints_is_checked_in_units_that_show_it(tmp_path) -> None:
    free = shutil.disk_usage(tmp_path).free
    check_space(tmp_path, free / 2, "it needs")
    with pytest.raises(OSError, match=r"free, it needs \d+\.\d GB; free some"):
        check_space(tmp_path, free + 1e9, "it needs")


def test_leftovers_of_a_killed_process_are_removed_at_the_start(tmp_path) -> None:
    folder = train(tiny(training_steps=4), tmp_path / "run")
    for left in (folder / ".config.yaml-staging-ab12", folder / "checkpoints" / ".step-00000004-staging-ab12"):
        left.mkdir()
    train(tiny(training_steps=4), folder)
    assert not list(folder.rglob(".*staging*"))


def test_a_folder_is_refused_before_torch_is_imported(tmp_path) -> None:
    (tmp_path / "thesis.txt").touch()
    code = f"""
import sys
from scalelong.cli.main import main
assert main(["train", "digits-demo", "--out", {str(tmp_path)!r}]) == 1
assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_forked_child_does_not_keep_the_folder(tmp_path) -> None:
    """A worker that outlives a killed run must not lock the folder."""
    lock = claim_folder(tmp_path / "run", tiny())
    ready, done = os.pipe(), os.pipe()
    if (child := os.fork()) == 0:
        os.write(ready[1], b"x")
        os.read(done[0], 1)
        os._exit(0)
    os.read(ready[0], 1)
    lock.close()
    claim_folder(tmp_path / "run", tiny()).close()
    os.write(done[1], b"x")
    os.waitpid(child, 0)
