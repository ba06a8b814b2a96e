"""Checkpoints: killed while saving, damaged on disk, no space left."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path

from scalelong.training.checkpoint import load_newest
from tests.faults.harness import case
from tests.training.tiny import newest, tiny


class Heard(logging.Handler):
    """Collects what is logged."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.text = ""
        logging.getLogger("scalelong").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.text += record.getMessage() + "\n"


def flipped(data: bytes) -> bytes:
    middle = len(data) // 2
    return data[:middle] + bytes([data[middle] ^ 4]) + data[middle + 1 :]


DAMAGES = {
    "bit flip": flipped,
    "truncation": lambda data: data[: len(data) // 2],
    "zero bytes": lambda data: bytes(len(data)),
    "empty": lambda data: b"",
    "{}": lambda data: b"{}",
    "[]": lambda data: b"[]",
    "deletion": None,
}


@case(
    3,
    "bit flip, truncation, zero bytes, deletion, `{}` or `[]` as content, of each checkpoint file; a stray `step-abc`",
    passes_when="detected, file named, falls back to the checkpoint before",
    protections=["checkpoint.verify"],
)
def damaged_files(folder: Path, protect: bool) -> str:
    from scalelong.training import train

    run = train(tiny(training_steps=8), folder / "run")
    names = sorted(path.name for path in newest(run).iterdir())
    assert len(names) == 5, names
    heard, count = Heard(), 0
    for name in names:
        for damage, change in DAMAGES.items():
            copy = folder / "copy"
            shutil.copytree(run / "checkpoints", copy)
            stray = copy / "step-abc"
            stray.mkdir()
            file = copy / "step-00000008" / name
            if change is None:
                file.unlink()
            else:
                file.write_bytes(change(file.read_bytes()))
            heard.text = ""
            found = load_newest(copy)
            assert found is not None
            assert found[0].name == "step-00000004", f"{name}, {damage}: not detected"
            assert str(file) in heard.text or (damage == "deletion" and name in heard.text), (
                f"{name}, {damage}: unnamed"
            )
            assert str(stray) in heard.text, "the stray folder is not named"
            assert json.loads((found[0] / "state.json").read_text()) == found[2]
            shutil.rmtree(copy)
            count += 1
    return f"{count} of {count} damages detected, named and passed over"
