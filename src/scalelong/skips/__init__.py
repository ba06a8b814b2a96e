"""Where a scaling is applied: finding long skips, putting a scaling on a model, checking it, taking it off, saving it."""

from scalelong.skips.attach import Handle, apply, coefficients, find_skips, is_scaled, remove, scaling_of
from scalelong.skips.families import known_families, known_skips
from scalelong.skips.fold import fold
from scalelong.skips.long_skip import LongSkip, skip_table
from scalelong.skips.persistence import from_pretrained, load, save
from scalelong.skips.tracing.nesting import NoLongSkipsError
from scalelong.skips.tracing.reach import measure_reach
from scalelong.skips.tracing.verify import VerificationError, VerificationReport, verify

__all__ = [
    "Handle",
    "LongSkip",
    "NoLongSkipsError",
    "VerificationError",
    "VerificationReport",
    "apply",
    "coefficients",
    "find_skips",
    "fold",
    "from_pretrained",
    "is_scaled",
    "known_families",
    "known_skips",
    "load",
    "measure_reach",
    "remove",
    "save",
    "scaling_of",
    "skip_table",
    "verify",
]
