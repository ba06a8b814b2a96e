"""Trained runs as folders that `DiffusionPipeline.from_pretrained` loads."""

from scalelong.pipelines.export import Exported, export_pipeline
from scalelong.pipelines.schedulers import scheduler_for

__all__ = ["Exported", "export_pipeline", "scheduler_for"]
