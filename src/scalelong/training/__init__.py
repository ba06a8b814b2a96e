"""Training: configuration, the step, the loop, checkpoints."""

from scalelong.runs.events import read_events
from scalelong.runs.presets import PRESETS, get_preset
from scalelong.runs.settings import RunConfig, from_yaml, to_yaml
from scalelong.training.loop import Trainer, train
from scalelong.training.nonfinite import NonFiniteError
from scalelong.training.run import TrainedRun, load_run

__all__ = [
    "PRESETS",
    "NonFiniteError",
    "RunConfig",
    "TrainedRun",
    "Trainer",
    "from_yaml",
    "get_preset",
    "load_run",
    "read_events",
    "to_yaml",
    "train",
]
