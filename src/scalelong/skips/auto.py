"""kappa="auto": which kappa of CS, when nobody says.

No rule that looks at the data or at the model's start chose better than 0.7 by more than the noise, and a pilot of
training only ever chose not to scale (experiments/auto_kappa.py), so "auto" is 0.7. The interval of Sec. 4.1 on the
example is logged beside it.
"""

from __future__ import annotations

import logging

from torch import Tensor

from scalelong.scaling.constant import constant_coefficients
from scalelong.skips.example import tensors_in
from scalelong.skips.long_skip import Call

logger = logging.getLogger(__name__)

AUTO = "auto"
USUAL_KAPPA = 0.7
TAIL = 0.97  # Sec. 4.1: "more than 97% of the values are smaller than 5"


def auto_kappa(method: str) -> float:
    """The kappa that "auto" stands for."""
    if method != "cs":
        raise ValueError(f"scaling.kappa: 'auto' is for 'cs', got method {method!r}; give a number")
    return USUAL_KAPPA


def log_choice(num_skips: int, call: Call | None) -> None:
    """Tell what "auto" is; with an example of noisy inputs, also how it lies to the paper's interval."""
    interval = example_interval(num_skips, call) if call is not None else None
    if interval is None:
        logger.info("scaling.kappa: auto is %g", USUAL_KAPPA)
        return
    low, high = interval
    place = "inside" if low <= USUAL_KAPPA <= high else "outside"
    told = "scaling.kappa: auto is %g, %s the interval %.3f .. %.3f of Sec. 4.1 on the example"
    logger.info(told, USUAL_KAPPA, place, low, high)


def example_interval(num_skips: int, call: Call) -> tuple[float, float] | None:
    """The interval of kappa from a batch x_t: m / ||x_t||^2 stands for ||eps||^2 / ||x_t||^2; None without images."""
    args, kwargs = call
    images = next(
        (t for t in tensors_in((args, kwargs)) if t.is_floating_point() and t.ndim > 2 and not t.is_meta), None
    )
    if images is None or images.numel() == 0:
        return None
    norms = images.detach().double().flatten(1).square().mean(1)
    if not bool((norms > 0).all() and norms.isfinite().all()):
        return None
    low, high = ratio_interval(1 / norms)
    return kappa_for_sum(low, num_skips), kappa_for_sum(high, num_skips)


def ratio_interval(ratios: Tensor) -> tuple[float, float]:
    """(mean, 97% quantile), in rising order: a mean beyond the quantile takes its place."""
    mean, tail = float(ratios.mean()), float(ratios.quantile(TAIL))
    return min(mean, tail), max(mean, tail)


def sum_of_squares(kappa: float, num_skips: int) -> float:
    """sum_i kappa^(2(i-1)) of CS (Eq. 8)."""
    return sum(k * k for k in constant_coefficients(num_skips, kappa))


def kappa_for_sum(total: float, num_skips: int) -> float:
    """The kappa in [0, 1] with sum_i kappa^(2(i-1)) = total, by bisection; 0 or 1 where the total cannot be reached."""
    if total <= 1:
        return 0.0
    if total >= num_skips:
        return 1.0
    low, high = 0.0, 1.0
    while high - low > 1e-12:
        middle = (low + high) / 2
        low, high = (middle, high) if sum_of_squares(middle, num_skips) < total else (low, middle)
    return (low + high) / 2
