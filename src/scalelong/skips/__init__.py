"""Find, scale, verify, fold, save and load the long skips of a model."""

from scalelong.errors import NoLongSkipsError, VerificationError
from scalelong.skips.attach import Handle, apply, coefficients, find_skips, remove
from scalelong.skips.families import known_families
from scalelong.skips.feature_conditioning import FeatureConditioning
from scalelong.skips.feature_routes import condition_on_features
from scalelong.skips.fold import fold
from scalelong.skips.hooks import is_scaled, scaling_of
from scalelong.skips.long_skip import LongSkip, skip_table
from scalelong.skips.persistence import from_pretrained, load, save
from scalelong.skips.tracing.verify import verify

__all__ = [
    "FeatureConditioning",
    "Handle",
    "LongSkip",
    "NoLongSkipsError",
    "VerificationError",
    "apply",
    "coefficients",
    "condition_on_features",
    "find_skips",
    "fold",
    "from_pretrained",
    "is_scaled",
    "known_families",
    "load",
    "remove",
    "save",
    "scaling_of",
    "skip_table",
    "verify",
]
