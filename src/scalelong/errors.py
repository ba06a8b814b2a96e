"""Errors and the wording they share."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def did_you_mean(name: object, known: Iterable[str]) -> str:
    """ "did you mean 'x'? " for a near miss, else "".

    >>> did_you_mean("unversal", ["cs", "universal"])
    "did you mean 'universal'? "
    """
    near = difflib.get_close_matches(str(name), list(known), n=1, cutoff=0.5)
    return f"did you mean {near[0]!r}? " if near else ""


def unknown_name(key: str, name: object, known: Iterable[str]) -> ValueError:
    """A ValueError for a name that is not among the known ones; raise it.

    >>> print(unknown_name("sampler", "dimm", ["ddim", "heun"]))
    sampler: unknown 'dimm'; did you mean 'ddim'? choose one of ddim, heun
    """
    names = list(known)
    return ValueError(f"{key}: unknown {name!r}; {did_you_mean(name, names)}choose one of {', '.join(names)}")


def require(holds: bool, key: str, rule: str, value: object) -> None:
    """Raise a ValueError unless `holds`.

    >>> require(False, "training.steps", "at least 1", 0)
    Traceback (most recent call last):
    ValueError: training.steps: must be at least 1, got 0
    """
    if not holds:
        raise ValueError(f"{key}: must be {rule}, got {value!r}")


class StoppedError(RuntimeError):
    """A run was asked to stop by a signal and wrote a checkpoint; the command line exits with `StoppedError.code`."""

    code = 75  # EX_TEMPFAIL of sysexits.h: run the same command again
