"""How good the images are: features of samples, and their distance to those of real images."""

from scalelong.evaluation.evaluate import (
    Evaluation,
    EvaluationObserver,
    Result,
    SelfCheck,
    evaluate_images,
    evaluate_run,
    load_condition,
    load_training_data,
    self_check,
)
from scalelong.evaluation.extractors import (
    Extractor,
    InceptionFeatures,
    RandomConvFeatures,
    get_extractor,
    metric_name,
)
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
    "Extractor",
    "FeatureStatistics",
    "FewSamplesWarning",
    "InceptionFeatures",
    "RandomConvFeatures",
    "Result",
    "SelfCheck",
    "evaluate_images",
    "evaluate_run",
    "frechet_distance",
    "frechet_distance_of_features",
    "get_extractor",
    "kernel_distance",
    "load_condition",
    "load_training_data",
    "metric_name",
    "reference_statistics",
    "self_check",
]
