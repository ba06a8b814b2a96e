"""Stable training of U-shaped diffusion models by scaling their long skip connections (ScaleLong, NeurIPS 2023).

One line on the model you have: `scalelong.apply(model, "cs", kappa=0.7)`.
"""

from scalelong.skips import (
    Handle,
    LongSkip,
    apply,
    coefficients,
    find_skips,
    fold,
    from_pretrained,
    load,
    remove,
    save,
    skip_table,
    verify,
)

__version__ = "0.1.0"

__all__ = [
    "Handle",
    "LongSkip",
    "apply",
    "coefficients",
    "find_skips",
    "fold",
    "from_pretrained",
    "load",
    "remove",
    "save",
    "skip_table",
    "verify",
]
