"""Switch the protections off that SCALELONG_FAILPOINT names (`files.inside=off`), to show that the fault cases can fail.

`tests.faults.harness.environment` puts this folder on PYTHONPATH, so it runs at the start of every process of a case.
Functions that other modules import by name are replaced before those modules are imported.
"""

from __future__ import annotations

import math
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any


def _nothing(*_args: Any, **_options: Any) -> None:
    pass


def _set(module: str, name: str, value: Any) -> None:
    """Replace an attribute of a module, or of a class in it: `training.guard`, `Guard.limit`."""
    owner: Any = import_module(f"scalelong.{module}")
    *classes, attribute = name.split(".")
    for each in classes:
        owner = getattr(owner, each)
    setattr(owner, attribute, value)


def _verify_nothing() -> None:
    class Same(str):
        __slots__ = ()
        __hash__ = None

        def __ne__(self, other: object) -> bool:
            return False

    _set("training.checkpoint", "file_digest", lambda _path: Same())


def _no_staging() -> None:
    from scalelong import files

    @contextmanager
    def in_place(home: Path) -> Iterator[Path]:
        with files._writing(home):
            home.mkdir(exist_ok=True)
            yield home

    files.atomic_folder = in_place


def _no_limits() -> None:
    for module, name in (("data.base", "MAX_CLASSES"), ("data.images", "MAX_PIXELS"), ("data.webdataset", "_LONGEST")):
        _set(module, name, math.inf)
    _set("data.imagenet64", "_check_sizes", _nothing)


def _any_number() -> None:
    from scalelong.data import latents

    def read_many(self: Any, items: Any) -> Any:
        rows = latents.np.empty((len(items), *self.stored[0]), dtype=latents.np.float32)
        return latents.gather_rows(self._shard, self._starts, items, rows)

    latents.LatentSource.read_many = read_many


def _no_timeout() -> None:
    def wait(_loader: Any, worker: Any) -> str:
        while not worker.pipe.poll(0.2):
            pass
        return "" if worker.receive() else f"died ({worker.cause()})"

    _set("data.loader", "StreamLoader._wait_for", wait)


def _end_at_sigterm() -> None:
    def handle(number: int, _action: Any) -> None:
        if number == signal.SIGTERM:
            signal.signal(number, signal.SIG_DFL)

    _set("data.workers", "signal", SimpleNamespace(**{**vars(signal), "signal": handle}))


def _first_position() -> None:
    from scalelong.training.loop import Trainer

    start = Trainer._start_batches

    def from_the_first(self: Trainer) -> None:
        step, self.step = self.step, 0
        start(self)
        self.step = step

    Trainer._start_batches = from_the_first


def _alone() -> None:
    from scalelong.training import step

    apart = {"all_reduce": _nothing, "all_gather_object": _nothing}
    step.dist = SimpleNamespace(**{**vars(step.dist), **apart})


def _global_random() -> None:
    import torch

    def bits(_seed: int, _stream: str, index: Any, shape: Any = ()) -> Any:
        return torch.randint(-(2**63), 2**63 - 1, (index.shape[0], *shape), device=index.device)

    _set("random", "random_bits", bits)


def _any_file() -> None:
    _set("files", "check_manifest", lambda _folder: False)
    _set("skips.persistence", "_check_hashes", _nothing)


def _late_check() -> None:
    _set("cli.train", "check_folder", _nothing)
    _set("training.loop", "check_folder", _nothing)


OFF: dict[str, Callable[[], None]] = {
    "checkpoint.verify": _verify_nothing,
    "data.finite": _any_number,
    "data.limits": _no_limits,
    "files.inside": lambda: _set("files", "inside", lambda folder, *names: Path(folder).joinpath(*names)),
    "files.leftovers": lambda: _set("files", "remove_leftovers", _nothing),
    "files.manifest": _any_file,
    "files.staging": _no_staging,
    "folder.early": _late_check,
    "guard.spikes": lambda: _set("training.guard", "Guard.limit", lambda _self, unread: math.inf),
    "loader.replace": lambda: _set("data.loader", "_MOST_REPLACED", 0),
    "loader.signals": _end_at_sigterm,
    "loader.timeout": _no_timeout,
    "loop.signals": lambda: _set("training.loop", "stop_signals", lambda _stop: nullcontext()),
    "random.counter": _global_random,
    "ranks.explain": lambda: _set("training.ranks", "Ranks.explain", lambda _self, error: error),
    "ranks.names": lambda: _set("training.ranks", "_join", lambda _limit: {}),
    "ranks.timeout": lambda: _set("training.ranks", "timedelta", lambda seconds: timedelta(seconds=1800)),
    "report.escape": lambda: _set("report.card", "plain", lambda value: value),
    "resume.position": _first_position,
    "settings.check": lambda: _set("runs.validation", "check_values", _nothing),
    "skips.restore": lambda: _set("skips.example", "Snapshot.restore", _nothing),
    "step.share": _alone,
}

for _part in os.environ.get("SCALELONG_FAILPOINT", "").split(","):
    if _part.endswith("=off"):
        OFF[_part.removesuffix("=off")]()
