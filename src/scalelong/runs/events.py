"""Run records: metrics.jsonl, TensorBoard if installed, Weights & Biases on request."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import json
import logging
import secrets
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from scalelong.files import atomic_write, inside, open_inside, write_text
from scalelong.runs import METRICS

logger = logging.getLogger(__name__)

CHECKPOINT_KIND = "checkpoint"  # records that a checkpoint was written at this step
LONGEST_LINE = 2**20  # bytes; longer ones are damage


class Events:
    """Append records (a step and named values) to metrics.jsonl.

    >>> events = Events(Path("."), resume_step=0)
    >>> events.write(10, "train", {"loss": 0.5})
    >>> events.close()
    >>> read_events(Path("."))
    ([{'step': 10, 'kind': 'train', 'loss': 0.5}], 0)
    """

    def __init__(self, folder: Path, resume_step: int, wandb_project: str | None = None) -> None:
        self.folder = folder
        cut_after(folder, resume_step)
        self._file = open_inside(folder, METRICS, mode="a")
        self._board: Any = None
        if importlib.util.find_spec("tensorboard") is not None:
            from torch.utils.tensorboard import SummaryWriter

            self._board = SummaryWriter(inside(folder, "tensorboard"), purge_step=resume_step + 1)
        self._wandb = _wandb(folder, wandb_project) if wandb_project else None

    def write(self, step: int, kind: str, values: Mapping[str, Any]) -> None:
        """Append a record and flush it; its numbers also go to TensorBoard and Weights & Biases."""
        self._file.write(_line(step, kind, values))
        self._file.flush()
        numbers = {f"{kind}/{key}": value for key, value in values.items() if isinstance(value, (int, float))}
        try:
            for key, value in numbers.items() if self._board is not None else ():
                self._board.add_scalar(key, value, step)
        except OSError as error:  # metrics.jsonl has it all
            logger.warning("no more records for TensorBoard: %s", error)
            self._board = None
        if self._wandb is not None:
            self._wandb.log(numbers, step=step)

    def rewind(self, step: int) -> None:
        """Remove the records after `step`, which will be run again."""
        self._file.close()
        cut_after(self.folder, step)
        self._file = open_inside(self.folder, METRICS, mode="a")

    def close(self) -> None:
        """Close all writers."""
        for writer in filter(None, (self._file, self._board)):
            with contextlib.suppress(OSError):  # already reported
                writer.close()
        if self._wandb is not None:
            self._wandb.finish()


def append_event(folder: Path, step: int, kind: str, values: Mapping[str, Any]) -> None:
    """Append a record to a run that is not training; an incomplete last line is kept separate."""
    incomplete = False
    if inside(folder, METRICS).is_file():
        with open_inside(folder, METRICS, mode="rb") as whole:
            incomplete = whole.seek(0, 2) > 0 and whole.seek(-1, 2) >= 0 and whole.read() != b"\n"
    with open_inside(folder, METRICS, mode="a") as file:
        file.write("\n" * incomplete + _line(step, kind, values))


def read_events(folder: Path) -> tuple[list[dict[str, Any]], int]:
    """The records of a run in order, and the number of damaged lines, which are skipped.

    >>> _ = Path("metrics.jsonl").write_text('{"step": 10, "kind": "train", "loss": 0.5}\\n{"step":')
    >>> read_events(Path())
    ([{'step': 10, 'kind': 'train', 'loss': 0.5}], 1)
    """
    return read_records(inside(folder, METRICS))


def read_records(path: Path) -> tuple[list[dict[str, Any]], int]:
    """The JSON lines of a file that have a step, and the number of others."""
    lines = list(each_record(path))
    records = [record for record in lines if record is not None]
    return records, len(lines) - len(records)


def each_record(path: Path) -> Iterator[dict[str, Any] | None]:
    """The record of each line in order, None for a damaged line; one line is held in memory at a time."""
    with open_inside(path.parent, path.name, mode="rb") as file:
        while line := file.readline(LONGEST_LINE):
            yield _record(line if len(line) < LONGEST_LINE or line.endswith(b"\n") else b"")
            while len(line) == LONGEST_LINE and not line.endswith(b"\n"):
                line = file.readline(LONGEST_LINE)


def _record(line: bytes) -> dict[str, Any] | None:
    try:
        record = json.loads(line.decode(errors="replace"))
        if b"\\u" in line:
            json.dumps(record, ensure_ascii=False).encode()  # rejects lone surrogates
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) and isinstance(record.get("step"), int) else None


def cut_after(folder: Path, step: int) -> None:
    """Remove the records after `step` and damaged lines from metrics.jsonl."""
    if inside(folder, METRICS).is_file():
        with atomic_write(folder / METRICS) as file:
            for record in each_record(folder / METRICS):
                if record is not None and record["step"] <= step:
                    file.write(json.dumps(record).encode() + b"\n")


def fingerprint(folder: Path, size: int | None = None) -> dict[str, Any]:
    """Size and sha256 of metrics.jsonl, or of its first `size` bytes; a checkpoint keeps them."""
    if not inside(folder, METRICS).is_file():
        return {"bytes": 0, "sha256": hashlib.sha256().hexdigest()}
    with open_inside(folder, METRICS, mode="rb") as file:
        content = file.read() if size is None else file.read(size)
    return {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}


def check_fingerprint(folder: Path, stored: Mapping[str, Any]) -> None:
    """Warn if the records before a checkpoint have changed since it was written."""
    if fingerprint(folder, stored["bytes"]) != stored:
        changed = f"the first {stored['bytes']:,} bytes were damaged, cut or changed since the checkpoint was written"
        logger.warning("%s: %s; training continues, but its curves may be wrong", folder / METRICS, changed)


def _line(step: int, kind: str, values: Mapping[str, Any]) -> str:
    """Serialize a record; non-finite numbers become null."""
    text = json.dumps({"step": step, "kind": kind, **values})
    return json.dumps(json.loads(text, parse_constant=lambda _: None)) + "\n"


def _wandb(folder: Path, project: str) -> Any:
    import wandb

    kept = inside(folder, "wandb-id")  # a run is known by this, not by the folder's name
    if not kept.is_file():
        write_text(kept, secrets.token_hex(4))
    return wandb.init(project=project, name=folder.name, id=kept.read_text(), dir=str(folder), resume="allow")
