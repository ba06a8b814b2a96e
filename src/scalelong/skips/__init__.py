"""Where a scaling is applied: finding long skips, putting a scaling on a model, taking it off, saving it."""

from scalelong.skips.attach import Handle, apply, coefficients, find_skips, is_scaled, remove, scaling_of
from scalelong.skips.known import known_families
from scalelong.skips.persist import from_pretrained, load, save
from scalelong.skips.sites import LongSkip, skip_table

__all__ = [
    "Handle",
    "LongSkip",
    "apply",
    "coefficients",
    "find_skips",
    "from_pretrained",
    "is_scaled",
    "known_families",
    "load",
    "remove",
    "save",
    "scaling_of",
    "skip_table",
]
