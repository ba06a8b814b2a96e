"""From images to a number: their distance to a reference."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from scalelong.evaluation.extractors import Extractor, metric_name
from scalelong.evaluation.frechet import KernelDistance, check_subsets, checked_features, kernel_distance
from scalelong.evaluation.ranks import all_parts
from scalelong.evaluation.reference import extract
from scalelong.evaluation.statistics import FeatureStatistics


@dataclass(frozen=True)
class Result:
    """One evaluation: what was measured, with what, on how many images, against what."""

    metric: str  # "FID", or "FD(<extractor>)"
    value: float
    n: int
    n_reference: int
    extractor: str
    extractor_hash: str
    reference: str  # fingerprint of the reference data
    kid: KernelDistance | None = None

    def to_json(self) -> str:
        """One line of JSON; `kid` is {"mean": ..., "sd": ...} or null."""
        fields = dataclasses.asdict(self)
        fields["kid"] = None if self.kid is None else self.kid._asdict()
        return json.dumps(fields, allow_nan=False)


def evaluate_images(
    batches: Iterable[Tensor],
    reference: FeatureStatistics,
    extractor: Extractor,
    *,
    kid_reference: Tensor | None = None,  # features (m, D) of the reference: adds KID
    kid_subset_size: int = 1000,
    kid_subsets: int = 100,
    seed: int = 0,  # of KID's subsets
    total: int | None = None,  # how many images all ranks bring; lets KID's subsets be checked before any is drawn
) -> Result:
    """Distance of uint8 images to the reference; under torch.distributed every rank brings its part and gets the result."""
    own = FeatureStatistics(reference.dim, extractor=extractor.name, extractor_hash=extractor.hash)
    own.require_same_features(reference)  # now, not after hours of features
    if kid_reference is not None:
        kid_reference = checked_features(kid_reference, "evaluation.kid_reference", reference.dim)
        known = len(kid_reference) if total is None else min(total, len(kid_reference))
        check_subsets(kid_subset_size, kid_subsets, known)
    kept = []
    for features in extract(batches, extractor, total):
        own.update(features)
        if kid_reference is not None:
            kept.append(features)
    whole = own.gather()
    kid = None
    if kid_reference is not None:
        mine = torch.cat(kept) if kept else torch.empty(0, reference.dim)
        rows = torch.cat(all_parts(mine))
        kid = kernel_distance(rows, kid_reference, subset_size=kid_subset_size, subsets=kid_subsets, seed=seed)
    return Result(
        metric=metric_name(extractor),
        value=whole.distance(reference),
        n=whole.n,
        n_reference=reference.n,
        extractor=extractor.name,
        extractor_hash=extractor.hash,
        reference=reference.data,
        kid=kid,
    )
