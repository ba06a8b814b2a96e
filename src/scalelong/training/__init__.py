"""Training: settings, step, loop, checkpoints, and sampling from a trained run."""

from scalelong.runs.config import from_yaml, to_yaml
from scalelong.runs.events import read_events
from scalelong.runs.presets import PRESETS, get_preset
from scalelong.runs.settings import RunConfig
from scalelong.training.guard import NonFiniteError
from scalelong.training.loop import Trainer, train
from scalelong.training.optimizers import EMA
from scalelong.training.run import TrainedRun, load_run, sample_batches

__all__ = [
    "EMA",
    "PRESETS",
    "NonFiniteError",
    "RunConfig",
    "TrainedRun",
    "Trainer",
    "from_yaml",
    "get_preset",
    "load_run",
    "read_events",
    "sample_batches",
    "to_yaml",
    "train",
]
