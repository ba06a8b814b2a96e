"""What a run says while it runs: metrics.jsonl always, TensorBoard where installed, W&B where asked for."""

from __future__ import annotations

import importlib.util
import json
import math
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

METRICS = "metrics.jsonl"
CHECKPOINT_KIND = "checkpoint"  # the record that a checkpoint was written at this step


class Events:
    """Writes one record per line, flushed at once; a record is a step and named numbers."""

    def __init__(self, folder: Path, resume_step: int, wandb_project: str | None = None) -> None:
        self.path = folder / METRICS
        cut_after(self.path, resume_step)
        self._file = self.path.open("a")
        self._board = _tensorboard(folder, resume_step)
        self._wandb = _wandb(folder, wandb_project) if wandb_project else None

    def write(self, step: int, kind: str, values: Mapping[str, Any]) -> None:
        """Append a record here, and its numbers to the boards."""
        self._file.write(_line(step, kind, values))
        self._file.flush()
        numbers = {f"{kind}/{key}": value for key, value in values.items() if isinstance(value, (int, float))}
        if self._board is not None:
            for key, value in numbers.items():
                self._board.add_scalar(key, value, step)
        if self._wandb is not None:
            self._wandb.log(numbers, step=step)

    def rewind(self, step: int) -> None:
        """Drop the records after `step`: those steps are run again."""
        self._file.close()
        cut_after(self.path, step)
        self._file = self.path.open("a")

    def close(self) -> None:
        """Flush and close all writers."""
        self._file.close()
        if self._board is not None:
            self._board.close()
        if self._wandb is not None:
            self._wandb.finish()


def append_event(folder: Path, step: int, kind: str, values: Mapping[str, Any]) -> None:
    """One more record of a run that is over; a last line that a kill tore stays a line of its own."""
    path = folder / METRICS
    torn = path.is_file() and path.read_bytes()[-1:] not in (b"", b"\n")
    with path.open("a") as file:
        file.write("\n" * torn + _line(step, kind, values))


def read_events(folder: Path) -> tuple[list[dict[str, Any]], int]:
    """The records of a run in order, and the number of damaged lines that were passed over."""
    records, damaged = [], 0
    for line in (folder / METRICS).read_text(errors="replace").splitlines():
        try:
            record = json.loads(line)
            records.append(record if isinstance(record["step"], int) else _refuse())
        except (ValueError, KeyError, TypeError):
            damaged += 1
    return records, damaged


def cut_after(path: Path, step: int) -> None:
    """Drop the records after `step` and a torn last line: the steps after a checkpoint are run again."""
    if not path.is_file():
        return
    records, _ = read_events(path.parent)
    kept = [json.dumps(record) for record in records if record["step"] <= step]
    staged = path.with_suffix(".staged")
    staged.write_text("".join(line + "\n" for line in kept))
    staged.replace(path)


def _refuse() -> dict[str, Any]:
    raise ValueError


def _line(step: int, kind: str, values: Mapping[str, Any]) -> str:
    """Non-finite numbers become null, which JSON has and NaN is not."""
    record = {"step": step, "kind": kind} | {key: _jsonable(value) for key, value in values.items()}
    return json.dumps(record) + "\n"


def _jsonable(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _jsonable(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_jsonable(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _tensorboard(folder: Path, resume_step: int) -> Any:
    if importlib.util.find_spec("tensorboard") is None:
        return None
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(folder / "tensorboard", purge_step=resume_step + 1)


def _wandb(folder: Path, project: str) -> Any:
    if importlib.util.find_spec("wandb") is None:
        raise ImportError(
            "training.wandb_project: wandb is not installed; pip install 'scalelong[wandb]', or leave it out"
        )
    import wandb

    kept = folder / "wandb-id"  # folders of one name are runs of their own
    if not kept.is_file():
        kept.write_text(secrets.token_hex(4))
    return wandb.init(project=project, name=folder.name, id=kept.read_text(), dir=str(folder), resume="allow")
