"""The settings and checkpoints of a run folder; checks and a lock before training into it. No torch."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable
from pathlib import Path
from typing import IO, Any

from scalelong.errors import SettingError
from scalelong.files import (
    check_space,
    check_writable,
    file_digest,
    inside,
    lock_folder,
    read_json,
    remove_leftovers,
)
from scalelong.runs import CHECKPOINTS, CONFIG, LOCK, MANIFEST, METRICS, SAMPLES, step_number
from scalelong.runs.config import LARGEST_YAML, from_yaml
from scalelong.runs.settings import MAY_CHANGE, RunConfig, differences

logger = logging.getLogger(__name__)

_LEAST_FREE = 10e6  # bytes; the size of the checkpoints is checked once the model is built


def is_run(folder: str | Path) -> bool:
    return (Path(folder) / CONFIG).is_file() or _copy_of_config(Path(folder)) is not None


def read_config(folder: str | Path) -> RunConfig:
    """The settings of a run; falls back to the copy in the newest checkpoint, with a warning."""
    folder = Path(folder)
    own, copy = inside(folder, CONFIG), _copy_of_config(folder)
    if copy is None:
        if not own.is_file():
            raise FileNotFoundError(f"{folder}: is not a run folder (no {CONFIG}); give one that scalelong train wrote")
        return from_yaml(own)
    if own.is_file() and own.stat().st_size == copy.stat().st_size and own.read_bytes() == copy.read_bytes():
        return from_yaml(own)
    kept = from_yaml(copy)
    try:
        config = from_yaml(own)
        changed = forbidden_changes(kept, config)
        if not changed:
            return config
        problem = f"it says otherwise than the checkpoint on {', '.join(changed)}"
    except SettingError as error:
        problem = str(error)
    logger.warning("%s: lost, damaged or changed (%s); using %s", own, problem, copy)
    return kept


def _copy_of_config(folder: Path) -> Path | None:
    """The copy of config.yaml in the newest checkpoint; older checkpoints lack it."""
    for step in reversed(checkpoints(folder).values()):
        copy = inside(step, CONFIG)
        with contextlib.suppress(OSError, ValueError, AttributeError):  # damaged
            if copy.stat().st_size <= LARGEST_YAML and read_json(step, MANIFEST).get(CONFIG) == file_digest(copy):
                return copy
    return None


def checkpoints(folder: str | Path) -> dict[int, Path]:
    """The checkpoints of a run by step, oldest first."""
    return by_step(path for path in inside(Path(folder), CHECKPOINTS).glob("step-*") if path.is_dir())


def by_step(paths: Iterable[Path]) -> dict[int, Path]:
    """The paths named by `step_name`, in the order of the steps."""
    known = (path for path in paths if not path.is_symlink())
    found = {step: path for path in known if (step := step_number(path.stem)) is not None}
    return dict(sorted(found.items()))


# --------------------------------------------------------------------------------------------- before training


def check_folder(folder: Path, config: RunConfig) -> None:
    """Raise if a run with this configuration cannot be written to `folder`; has no side effects."""
    if folder.is_symlink():
        raise ValueError(f"out: {folder} is a symbolic link; give the folder that it points to, {folder.resolve()}")
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"out: {folder} is a file; choose a folder")
    for name in (CONFIG, METRICS, LOCK, CHECKPOINTS, SAMPLES):
        inside(folder, name)  # links out of the folder are refused
    if is_run(folder) and ((folder / METRICS).is_file() or checkpoints(folder)):  # it started
        if changed := forbidden_changes(read_config(folder), config):
            lines = "\n".join(f"  {key}: {old!r} there, {new!r} asked for" for key, (old, new) in changed.items())
            raise ValueError(f"out: {folder / CONFIG} is of another configuration:\n{lines}\nchoose another folder")
    elif not is_run(folder) and folder.is_dir() and any(path.name != LOCK for path in folder.iterdir()):
        raise ValueError(f"out: {folder} is not empty and holds no {CONFIG}; choose another folder")
    check_writable(folder)
    check_space(folder, _LEAST_FREE, "a run needs")
    if (folder / LOCK).is_file():
        lock_folder(folder).close()


def forbidden_changes(old: RunConfig, new: RunConfig) -> dict[str, tuple[Any, Any]]:
    """The differences with which a run cannot be resumed, as key -> (old, new).

    Data may move: with another path of the same kind, the fingerprint of the data decides.
    """
    changed = {key: values for key, values in differences(old, new).items() if key not in MAY_CHANGE}
    kind, colon, _ = old.data.name.partition(":")
    same_kind = colon and new.data.name.startswith(f"{kind}:")
    if same_kind or Path(new.data.name.removeprefix("folder:")).expanduser().is_dir():
        changed.pop("data.name", None)
    return changed


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
    return lock
