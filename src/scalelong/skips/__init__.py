"""Find the long skips of a model, scale them, check and fold the scaling, save and load it."""

from scalelong.skips.attach import Handle, apply, coefficients, find_skips, remove, skip_shapes
from scalelong.skips.families import known_families, known_skips
from scalelong.skips.fold import fold
from scalelong.skips.hooks import attached_skips, is_scaled, scaling_of
from scalelong.skips.long_skip import LongSkip, skip_table
from scalelong.skips.persistence import from_pretrained, load, save
from scalelong.skips.tracing.nesting import NoLongSkipsError
from scalelong.skips.tracing.verify import VerificationError, VerificationReport, measure_reach, verify

__all__ = [
    "Handle",
    "LongSkip",
    "NoLongSkipsError",
    "VerificationError",
    "VerificationReport",
    "apply",
    "attached_skips",
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
    "skip_shapes",
    "skip_table",
    "verify",
]
