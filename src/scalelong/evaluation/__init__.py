"""Image quality (feature distances) and representation quality (linear probes)."""

from scalelong.evaluation.evaluate import evaluate_images, evaluate_run, self_check
from scalelong.evaluation.extractors import InceptionFeatures, RandomConvFeatures, get_extractor
from scalelong.evaluation.frechet import FewSamplesWarning, frechet_distance, kernel_distance
from scalelong.evaluation.linear_probe import fit_linear, linear_probe, probe_run
from scalelong.evaluation.statistics import FeatureStatistics, reference_statistics

__all__ = [
    "FeatureStatistics",
    "FewSamplesWarning",
    "InceptionFeatures",
    "RandomConvFeatures",
    "evaluate_images",
    "evaluate_run",
    "fit_linear",
    "frechet_distance",
    "get_extractor",
    "kernel_distance",
    "linear_probe",
    "probe_run",
    "reference_statistics",
    "self_check",
]
