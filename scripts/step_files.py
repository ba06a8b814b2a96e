"""Count the source files that one plain CPU training step enters, and the switches between them.

python scripts/step_files.py           # two numbers
python scripts/step_files.py --list    # and where they come from
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType

from torch import nn

import scalelong
from scalelong.runs.presets import get_preset
from scalelong.training import train

SOURCE = str(Path(scalelong.__file__).parent) + "/"
STEP = 3  # the first steps allocate


class StepFiles:
    """An observer of training that lists the files of our functions, in the order of their calls during one step."""

    def __init__(self) -> None:
        self.files: list[str] = []

    def __call__(self, step: int, _model: nn.Module) -> None:
        sys.setprofile(self.follow if step == STEP - 1 else None)

    def follow(self, frame: FrameType, event: str, _argument: object) -> None:
        path = frame.f_code.co_filename
        if event == "call" and path.startswith(SOURCE):
            self.files.append(path.removeprefix(SOURCE))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="print the files and the switches")
    listed = parser.parse_args().list
    config = get_preset("digits-demo")
    settings = replace(config.training, steps=STEP, log_every=10, checkpoint_every=10, sample_every=0)
    observer = StepFiles()
    with TemporaryDirectory() as folder:
        train(replace(config, training=settings), Path(folder) / "run", [observer])
    files = observer.files
    switches = Counter((old, new) for old, new in pairwise(files) if old != new)
    lines = [f"files entered: {len(set(files))}, switches: {sum(switches.values())}"]
    if listed:
        lines += [f"{count:5} calls into {name}" for name, count in Counter(files).most_common()]
        lines += [f"{count:5} x {old} -> {new}" for (old, new), count in switches.most_common()]
    sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
