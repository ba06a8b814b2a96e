"""How good the images are: features of samples, and their distance to those of real images."""

from scalelong.evaluation.evaluate import (
    Evaluation,
    EvaluationObserver,
    Result,
    SelfCheck,
    check_count,
    evaluate_images,
    evaluate_run,
    load_condition,
    load_training_data,
    reference_features,
    self_check,
)
from scalelong.evaluation.extractors import (
    Extractor,
    InceptionFeatures,
    RandomConvFeatures,
    check_extractor,
    get_extractor,
    metric_name,
)
from scalelong.evaluation.frechet import (
    FewSamplesWarning,
    KernelDistance,
    frechet_distance,
    frechet_distance_of_features,
    kernel_distance,
)
from scalelong.evaluation.statistics import (
    FeatureStatistics,
    collect_statistics,
    image_batches,
    reference_statistics,
)
from scalelong.evaluation.weights import fetch_weights

__all__ = [
    "Evaluation",
    "EvaluationObserver",
    "Extractor",
    "FeatureStatistics",
    "FewSamplesWarning",
    "InceptionFeatures",
    "KernelDistance",
    "RandomConvFeatures",
    "Result",
    "SelfCheck",
    "check_count",
    "check_extractor",
    "collect_statistics",
    "evaluate_images",
    "evaluate_run",
    "fetch_weights",
    "frechet_distance",
    "frechet_distance_of_features",
    "get_extractor",
    "image_batches",
    "kernel_distance",
    "load_condition",
    "load_training_data",
    "metric_name",
    "reference_features",
    "reference_statistics",
    "self_check",
]
