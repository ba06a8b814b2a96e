"""Training: configuration, the step, the loop, checkpoints."""

from scalelong.training.config import RunConfig
from scalelong.training.events import read_events
from scalelong.training.guard import NonFiniteError
from scalelong.training.loop import Trainer, train
from scalelong.training.presets import PRESETS, get_preset
from scalelong.training.run import TrainedRun, load_run
from scalelong.training.yaml_file import from_yaml, to_yaml

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
