"""The records of a run: metrics.jsonl always, TensorBoard where installed, Weights & Biases on request."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from scalelong.files import write_text
from scalelong.runs import METRICS

CHECKPOINT_KIND = "checkpoint"  # records that a checkpoint was written at this step


class Events:
    """Appends records, a step and named values, to metrics.jsonl.

    >>> events = Events(Path("."), resume_step=0)
    >>> events.write(10, "train", {"loss": 0.5})
    >>> events.close()
    >>> read_events(Path("."))
    ([{'step': 10, 'kind': 'train', 'loss': 0.5}], 0)
    """

    def __init__(self, folder: Path, resume_step: int, wandb_project: str | None = None) -> None:
        self.path = folder / METRICS
        cut_after(self.path, resume_step)
        self._file = self.path.open("a")
        self._board: Any = None
        if importlib.util.find_spec("tensorboard") is not None:
            from torch.utils.tensorboard import SummaryWriter

            self._board = SummaryWriter(folder / "tensorboard", purge_step=resume_step + 1)
        self._wandb = _wandb(folder, wandb_project) if wandb_project else None

    def write(self, step: int, kind: str, values: Mapping[str, Any]) -> None:
        """Append a record and flush it; its numbers also go to TensorBoard and Weights & Biases."""
        self._file.write(_line(step, kind, values))
        self._file.flush()
        numbers = {f"{kind}/{key}": value for key, value in values.items() if isinstance(value, (int, float))}
        if self._board is not None:
            for key, value in numbers.items():
                self._board.add_scalar(key, value, step)
        if self._wandb is not None:
            self._wandb.log(numbers, step=step)

    def rewind(self, step: int) -> None:
        """Remove the records after `step`, because those steps are run again."""
        self._file.close()
        cut_after(self.path, step)
        self._file = self.path.open("a")

    def close(self) -> None:
        """Close all writers."""
        self._file.close()
        if self._board is not None:
            self._board.close()
        if self._wandb is not None:
            self._wandb.finish()


def append_event(folder: Path, step: int, kind: str, values: Mapping[str, Any]) -> None:
    """Append a record to a run that is not training; an incomplete last line stays a line of its own."""
    path = folder / METRICS
    incomplete = path.is_file() and path.read_bytes()[-1:] not in (b"", b"\n")
    with path.open("a") as file:
        file.write("\n" * incomplete + _line(step, kind, values))


def read_events(folder: Path) -> tuple[list[dict[str, Any]], int]:
    """The records of a run in order, and the number of damaged lines, which are skipped.

    >>> _ = Path("metrics.jsonl").write_text('{"step": 10, "kind": "train", "loss": 0.5}\\n{"step":')
    >>> read_events(Path())
    ([{'step': 10, 'kind': 'train', 'loss': 0.5}], 1)
    """
    return read_records(folder / METRICS)


def read_records(path: Path) -> tuple[list[dict[str, Any]], int]:
    """The JSON lines of a file that have a step, and the number of others."""
    lines = path.read_text(errors="replace").splitlines()
    records = []
    for line in lines:
        with contextlib.suppress(ValueError):
            record = json.loads(line)
            if isinstance(record, dict) and isinstance(record.get("step"), int):
                records.append(record)
    return records, len(lines) - len(records)


def cut_after(path: Path, step: int) -> None:
    """Remove the records after `step` and damaged lines from a metrics.jsonl."""
    if path.is_file():
        records, _ = read_events(path.parent)
        write_text(path, "".join(json.dumps(record) + "\n" for record in records if record["step"] <= step))


def _line(step: int, kind: str, values: Mapping[str, Any]) -> str:
    """Numbers that are not finite become null: JSON has no NaN."""
    text = json.dumps({"step": step, "kind": kind, **values})
    return json.dumps(json.loads(text, parse_constant=lambda _: None)) + "\n"


def _wandb(folder: Path, project: str) -> Any:
    try:
        import wandb
    except ImportError:
        raise ImportError("training.wandb_project: wandb is not installed; pip install 'scalelong[wandb]'") from None
    kept = folder / "wandb-id"  # a run is known by this, not by the folder's name
    if not kept.is_file():
        kept.write_text(secrets.token_hex(4))
    return wandb.init(project=project, name=folder.name, id=kept.read_text(), dir=str(folder), resume="allow")
