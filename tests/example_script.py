"""Run diffusers' examples/unconditional_image_generation/train_unconditional.py with two lines added.

python -m tests.example_script SCRIPT METHOD STOP [its arguments]    # STOP: exit right after this checkpoint; 0: never
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch

from tests.packages import declare_torchvision

MODEL = "    # Create EMA for the model.\n"  # what follows the model in the script
ADDED = {"import accelerate\n": "import scalelong\n", MODEL: '    scalelong.apply(model, "{method}")\n'}


def patched(source: str, method: str) -> str:
    """The script with `import scalelong` and `scalelong.apply(model, METHOD)`."""
    for before, line in ADDED.items():
        assert source.count(before) == 1, before
        source = source.replace(before, line.format(method=method) + before)
    return source


def main() -> None:
    script, method, stop = sys.argv[1:4]
    sys.argv = [script, *sys.argv[4:]]
    torch.set_num_threads(1)
    declare_torchvision()
    from accelerate import Accelerator

    save = Accelerator.save_state

    def save_state(self: Any, folder: str, *args: Any, **kwargs: Any) -> Any:
        result = save(self, folder, *args, **kwargs)
        if folder.endswith(f"checkpoint-{stop}"):
            os._exit(9)
        return result

    Accelerator.save_state = save_state  # type: ignore[method-assign]
    torch.manual_seed(0)
    code = compile(patched(Path(script).read_text(), method), script, "exec")
    exec(code, {"__name__": "__main__", "__file__": script})


if __name__ == "__main__":
    main()
