"""How good the images are: features of samples, and their distance to those of real images."""

from scalelong.evaluation.evaluate import evaluate_images, evaluate_run, self_check
from scalelong.evaluation.extractors import InceptionFeatures, RandomConvFeatures, get_extractor
from scalelong.evaluation.frechet import FewSamplesWarning, frechet_distance, kernel_distance
from scalelong.evaluation.statistics import FeatureStatistics, reference_statistics

__all__ = [
    "FeatureStatistics",
    "FewSamplesWarning",
    "InceptionFeatures",
    "RandomConvFeatures",
    "evaluate_images",
    "evaluate_run",
    "frechet_distance",
    "get_extractor",
    "kernel_distance",
    "reference_statistics",
    "self_check",
]
