"""A run folder as plain data: settings, presets, events and one reader. No torch.

config.yaml                 the settings (settings.py)
metrics.jsonl               one record per line (events.py)
checkpoints/step-00001000/  tensors, state.json, config.yaml, manifest.json (training/checkpoint.py)
samples/step-00001000.png   grids sampled during training
.lock                       held by the process that trains into the folder
"""

from scalelong.files import LOCK as LOCK
from scalelong.files import MANIFEST as MANIFEST

CONFIG = "config.yaml"
METRICS = "metrics.jsonl"
CHECKPOINTS = "checkpoints"
SAMPLES = "samples"


def step_name(step: int) -> str:
    """Name of a checkpoint folder or a sample grid, without its suffix: step-00001000."""
    return f"step-{step:08d}"


def step_number(name: str) -> int | None:
    """The step in a name made by `step_name`; None for other names."""
    number = name.removeprefix("step-")
    return int(number) if name != number and number.isdecimal() else None
