"""Export of trained runs: weights with their scaling, or a folder that `DiffusionPipeline.from_pretrained` loads."""

from scalelong.pipelines.export import Exported, export_pipeline, export_weights, scheduler_for

__all__ = ["Exported", "export_pipeline", "export_weights", "scheduler_for"]
