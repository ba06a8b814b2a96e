"""A small network in the form of the real one: TorchScript in a file."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn


class MeanColour(nn.Module):
    """(B, 3, H, W) -> (B, 4): the mean of each channel, times a weight, and the top left red value."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([1.0, 1.0, 1.0 + 2**-20]))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x.mean(dim=(2, 3)) * self.weight, x[:, :1, 0, 0]], dim=1)


@pytest.fixture
def small_network(tmp_path: Path) -> Path:
    path = tmp_path / "small.pt"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        torch.jit.save(torch.jit.script(MeanColour()), str(path))
    return path
