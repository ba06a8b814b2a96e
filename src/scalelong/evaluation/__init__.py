"""How good are the images: generate them, take features, measure the distance to real ones."""

from scalelong.evaluation.check import SelfCheck, self_check
from scalelong.evaluation.evaluate import Result, evaluate_images
from scalelong.evaluation.extractors import Extractor, RandomConvFeatures, metric_name
from scalelong.evaluation.frechet import (
    FewSamplesWarning,
    KernelDistance,
    frechet_distance,
    frechet_distance_of_features,
    kernel_distance,
)
from scalelong.evaluation.generate import generate, generate_batches
from scalelong.evaluation.inception import InceptionFeatures
from scalelong.evaluation.reference import collect_statistics, image_batches, reference_statistics
from scalelong.evaluation.statistics import FeatureStatistics
from scalelong.evaluation.weights import fetch_weights, half_precision_copy

__all__ = [
    "Extractor",
    "FeatureStatistics",
    "FewSamplesWarning",
    "InceptionFeatures",
    "KernelDistance",
    "RandomConvFeatures",
    "Result",
    "SelfCheck",
    "collect_statistics",
    "evaluate_images",
    "fetch_weights",
    "frechet_distance",
    "frechet_distance_of_features",
    "generate",
    "generate_batches",
    "half_precision_copy",
    "image_batches",
    "kernel_distance",
    "metric_name",
    "reference_statistics",
    "self_check",
]
