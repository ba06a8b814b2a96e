"""Exceptions and helpers for their messages."""

from __future__ import annotations

import difflib
import math
import os
from collections.abc import Iterable
from typing import Any


class ScaleLongError(Exception):
    """Base class of all scalelong errors; the command line prints them as one line."""


class SettingError(ScaleLongError, ValueError):
    """A setting or argument with a bad value; the message names its dotted key."""


class DataError(ScaleLongError, ValueError):
    """Bad data; the message names the file (or row) and the remedy."""


class DamagedFileError(ScaleLongError, ValueError):
    """A file that is damaged, was changed, or is not what its name says; the message names it."""


class UnsafePathError(ScaleLongError, ValueError):
    """A name or link that escapes its folder."""


class CheckpointError(ScaleLongError, RuntimeError):
    """A checkpoint or export that cannot be used."""


class WriteError(ScaleLongError, OSError):
    """A file could not be written because the disk is full or failing; no partial file is left."""


class NonFiniteError(ScaleLongError, RuntimeError):
    """A loss or gradient is not finite, or there were too many such steps; the update was not applied."""


class StoppedError(ScaleLongError, RuntimeError):
    """A run was stopped by a signal after writing a checkpoint; the command line exits with `StoppedError.code`."""

    code = 75  # EX_TEMPFAIL of sysexits.h: run the same command again


class NoLongSkipsError(ScaleLongError, ValueError):
    """The network has no long skips, or they cannot be scaled individually."""


class VerificationError(ScaleLongError, ValueError):
    """The hooks of a model do not scale exactly its long skips."""


def did_you_mean(name: object, known: Iterable[str]) -> str:
    """ "did you mean 'x'? " for a near miss, else "".

    >>> did_you_mean("unversal", ["cs", "universal"])
    "did you mean 'universal'? "
    """
    given, names = str(name)[:100], list(known)
    near = [n for form in (given, given.lower()) for n in difflib.get_close_matches(form, names, n=1, cutoff=0.5)]
    return f"did you mean {near[0]!r}? " if near else ""


def unknown_name(key: str, name: object, known: Iterable[str]) -> SettingError:
    """Return a SettingError for an unknown name, with a suggestion.

    >>> print(unknown_name("sampler", "dimm", ["ddim", "heun"]))
    sampler: unknown 'dimm'; did you mean 'ddim'? choose one of ddim, heun
    """
    names = list(known)
    return SettingError(f"{key}: unknown {name!r}; {did_you_mean(name, names)}choose one of {', '.join(names)}")


def require(holds: bool, key: str, rule: str, value: object) -> None:
    """Raise a SettingError unless `holds`.

    >>> require(False, "training.steps", "at least 1", 0)
    Traceback (most recent call last):
    scalelong.errors.SettingError: training.steps: must be at least 1, got 0
    """
    if not holds:
        raise SettingError(f"{key}: must be {rule}, got {short(value)}")


def is_number(value: object) -> bool:
    """True for an int or a float; False for a bool."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def require_number(key: str, value: Any, low: float, high: float, whole: bool = False) -> None:
    """Raise a SettingError unless `value` is a finite number in [low, high].

    >>> require_number("optimizer.clip_norm", float("nan"), 0, 1e9)
    Traceback (most recent call last):
    scalelong.errors.SettingError: optimizer.clip_norm: must be a finite number, got nan
    """
    right_type = is_number(value) and (isinstance(value, int) or not whole)
    require(right_type, key, "a whole number" if whole else "a number", value)
    require(isinstance(value, int) or math.isfinite(value) or value == high, key, "a finite number", value)
    require(value >= low, key, f"at least {low:g}", value)
    require(value <= high, key, f"at most {high:,.15g}", value)


def require_memory(key: str, needed: float, what: str) -> None:
    """Raise a SettingError if `needed` bytes exceed this machine's memory."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if needed > total:
        sizes = f"{what} at least {needed / 2**30:,.0f} GiB of memory, this machine has {total / 2**30:,.0f}"
        raise SettingError(f"{key}: {sizes}; use smaller sizes")


def short(value: object, limit: int = 80) -> str:
    """Truncated repr(value); safe for large or deeply nested values.

    >>> short("x" * 200, 10)
    "'xxxxxx..."
    """
    try:
        shown = repr(value) if not isinstance(value, int) or abs(value) < 10**limit else f"a number of {limit}+ digits"
    except RecursionError:
        shown = f"a deeply nested {type(value).__name__}"
    return shown if len(shown) <= limit else f"{shown[: limit - 3]}..."


def one_line(error: BaseException) -> str:
    """Format an error for the command line: its message, with the type for unexpected errors.

    >>> one_line(MemoryError())
    'out of memory; use smaller sizes, for example of the batch'
    """
    text = str(error).strip()
    if isinstance(error, MemoryError) or "DefaultCPUAllocator" in text or "CUDA out of memory" in text:
        detail = f" ({text.splitlines()[0]})" if text else ""
        return f"out of memory{detail}; use smaller sizes, for example of the batch"
    if isinstance(error, ScaleLongError) and text:
        return text
    if isinstance(error, (ValueError, TypeError, OSError, RuntimeError, ImportError)) and text:
        return text
    name = type(error).__name__
    known = name == "SafetensorError"  # a damaged file
    return f"{name}: {text.partition(chr(10))[0]}" + ("" if known else "; SCALELONG_DEBUG=1 shows where")
