"""Two ranks, of which rank 1 dies once; those that torchrun starts in their place must wait for each other again."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

from scalelong.training.ranks import Ranks


def main(written: Path) -> None:
    """In the second attempt rank 0 writes a file late, and rank 1 expects it behind their barrier."""
    ranks = Ranks(timeout=60)
    first_attempt = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
    if not first_attempt and ranks.is_main_process:
        time.sleep(1)
        written.touch()
    ranks.barrier()
    if first_attempt:
        if not ranks.is_main_process:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(60)  # torchrun ends it
    assert written.is_file(), "error: rank 1 did not wait for rank 0"


if __name__ == "__main__":
    main(Path(sys.argv[1]))
