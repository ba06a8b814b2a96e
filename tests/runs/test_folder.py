"""The settings of a run folder, and their copy in its checkpoints."""

from __future__ import annotations

import json
import logging

import pytest

from scalelong.errors import SettingError
from scalelong.files import file_digest
from scalelong.runs.config import to_yaml
from scalelong.runs.folder import is_run, read_config
from tests.training.tiny import tiny


@pytest.fixture
def run(tmp_path):
    """A folder with settings, and with their copy in a checkpoint."""
    (tmp_path / "config.yaml").write_text(to_yaml(tiny()))
    step = tmp_path / "checkpoints" / "step-00000004"
    step.mkdir(parents=True)
    (step / "config.yaml").write_text(to_yaml(tiny()))
    (step / "manifest.json").write_text(json.dumps({"config.yaml": file_digest(step / "config.yaml")}))
    return tmp_path


@pytest.mark.parametrize("content", [None, "", "{}", "[]", "data: {name: digits}", "\0\0", to_yaml(tiny(model_dim=32))])
def test_lost_or_damaged_settings_are_those_of_the_checkpoint(content: str | None, run, caplog) -> None:
    (run / "config.yaml").unlink()
    if content is not None:
        (run / "config.yaml").write_text(content)
    with caplog.at_level(logging.WARNING):
        assert is_run(run)
        assert read_config(run) == tiny()
    assert str(run / "config.yaml") in caplog.text


def test_settings_that_may_change_are_taken_from_the_run(run, caplog) -> None:
    (run / "config.yaml").write_text(to_yaml(tiny(training_steps=99)))
    assert read_config(run) == tiny(training_steps=99)
    assert not caplog.text


def test_a_damaged_copy_is_not_used(run) -> None:
    (run / "checkpoints" / "step-00000004" / "config.yaml").write_text(to_yaml(tiny(model_dim=32)))
    assert read_config(run) == tiny()
    (run / "config.yaml").write_text("[]")
    with pytest.raises(SettingError, match=r"config\.yaml: must hold keys and values"):
        read_config(run)
    (run / "config.yaml").unlink()
    assert not is_run(run)
