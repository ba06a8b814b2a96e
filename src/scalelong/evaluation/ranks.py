"""Tensors of all ranks of torch.distributed, where there are several."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor


def all_parts(own: Tensor) -> list[Tensor]:
    """Every rank's (n, ...) tensor, in the order of ranks, on every rank; n may differ, the rest may not."""
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return [own]
    device = "cuda" if dist.get_backend() == "nccl" else "cpu"
    counts = [int(part) for part in _all_gather(torch.tensor(len(own), device=device))]
    padded = own.new_zeros((max(counts), *own.shape[1:]), device=device)
    padded[: len(own)] = own
    return [part[:count] for part, count in zip(_all_gather(padded), counts, strict=True)]


def _all_gather(own: Tensor) -> list[Tensor]:
    parts = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, own)
    return parts
