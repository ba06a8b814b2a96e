"""Settings and checkpoints of a run folder."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable
from pathlib import Path

from scalelong.errors import SettingError
from scalelong.files import file_digest, inside, read_json
from scalelong.runs import CHECKPOINTS, CONFIG, MANIFEST, step_number
from scalelong.runs.config import LARGEST_YAML, from_yaml
from scalelong.runs.settings import MAY_CHANGE, RunConfig, differences

logger = logging.getLogger(__name__)


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
        changed = [key for key in differences(config, kept) if key not in MAY_CHANGE]
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
