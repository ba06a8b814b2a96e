"""Check and lock a run folder before training. No torch."""

from __future__ import annotations

import os
from pathlib import Path
from typing import IO

from scalelong.files import check_space, inside, lock_folder, remove_leftovers, write_text
from scalelong.runs import CHECKPOINTS, CONFIG, LOCK, METRICS, SAMPLES
from scalelong.runs.config import to_yaml
from scalelong.runs.folder import checkpoints, is_run, read_config
from scalelong.runs.settings import MAY_CHANGE, RunConfig, differences

_LEAST_FREE = 10e6  # bytes; the size of the checkpoints is checked once the model is built


def check_folder(folder: Path, config: RunConfig) -> None:
    """Raise if a run with this configuration cannot be written to `folder`; has no side effects."""
    if folder.is_symlink():
        raise ValueError(f"out: {folder} is a symbolic link; give the folder that it points to, {folder.resolve()}")
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"out: {folder} is a file; choose a folder")
    for name in (CONFIG, METRICS, LOCK, CHECKPOINTS, SAMPLES):
        inside(folder, name)  # links out of the folder are refused
    if is_run(folder) and ((folder / METRICS).is_file() or checkpoints(folder)):  # it started
        changed = {k: v for k, v in differences(read_config(folder), config).items() if k not in MAY_CHANGE}
        if changed:
            lines = "\n".join(f"  {key}: {old!r} there, {new!r} asked for" for key, (old, new) in changed.items())
            raise ValueError(f"out: {folder / CONFIG} is of another configuration:\n{lines}\nchoose another folder")
    elif not is_run(folder) and folder.is_dir() and any(path.name != LOCK for path in folder.iterdir()):
        raise ValueError(f"out: {folder} is not empty and holds no {CONFIG}; choose another folder")
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not there.is_dir():
        raise ValueError(f"out: cannot create {folder}: {there} is a file; choose another folder")
    if not os.access(there, os.W_OK | os.X_OK):
        raise PermissionError(f"out: no permission to write to {there}; choose another folder")
    check_space(there, _LEAST_FREE, "a run needs")
    if (folder / LOCK).is_file():
        lock_folder(folder).close()


def claim_folder(folder: Path, config: RunConfig) -> IO[str]:
    """Lock `folder` until the returned file is closed, and remove leftovers of killed processes."""
    check_folder(folder, config)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise PermissionError(f"out: cannot create {folder}: {error.strerror}; choose a writable folder") from error
    lock = lock_folder(folder)
    for part in (folder, folder / CHECKPOINTS, folder / SAMPLES):
        remove_leftovers(part)
    if config.training.steps >= max(checkpoints(folder), default=0):  # a complete run keeps its config
        write_text(folder / CONFIG, to_yaml(config))
    return lock
