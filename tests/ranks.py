"""Ending the ranks of a test."""

from __future__ import annotations

import os
import sys
from typing import NoReturn

import torch.distributed as dist


def leave() -> NoReturn:
    """Exit this rank when all ranks are done, without tearing down gloo, which rarely deadlocks or aborts the process."""
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)
