"""How good the images are: features of samples, and their distance to those of real images."""

from scalelong.evaluation.evaluate import (
    Evaluation,
    EvaluationObserver,
    evaluate_images,
    evaluate_run,
    load_condition,
    load_training_data,
    self_check,
)
from scalelong.evaluation.extractors import InceptionFeatures, RandomConvFeatures, get_extractor
from scalelong.evaluation.frechet import (
    FewSamplesWarning,
    frechet_distance,
    frechet_distance_of_features,
    kernel_distance,
)
from scalelong.evaluation.statistics import FeatureStatistics, reference_statistics

__all__ = [
    "Evaluation",
    "EvaluationObserver",
    "FeatureStatistics",
    "FewSamplesWarning",
    "InceptionFeatures",
    "RandomConvFeatures",
    "evaluate_images",
    "evaluate_run",
    "frechet_distance",
    "frechet_distance_of_features",
    "get_extractor",
    "kernel_distance",
    "load_condition",
    "load_training_data",
    "reference_statistics",
    "self_check",
]
