"""The Frechet distance of two sets of features, by torch.cov."""

from __future__ import annotations

import torch

from scalelong.evaluation import frechet_distance
from scalelong.evaluation.frechet import Array


def frechet_distance_of_features(features1: Array, features2: Array) -> float:
    x, y = (torch.as_tensor(features).double() for features in (features1, features2))
    return frechet_distance(x.mean(0), torch.cov(x.T), y.mean(0), torch.cov(y.T))
