"""The half-precision copy of the Inception and its way back."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from scripts import half_precision
from scripts.half_precision import convert, half_precision_copy, restore

from scalelong.evaluation import weights
from scalelong.evaluation.weights import find_weights, load_network
from scalelong.files import file_digest
from tests.evaluation.conftest import small_network  # noqa: F401


@pytest.fixture
def network(small_network: Path, monkeypatch: pytest.MonkeyPatch) -> Path:  # noqa: F811
    """The small network in the place of the true one."""
    convert(small_network, small_network.with_name("expected"), "<f4", "<f2")
    monkeypatch.setattr(half_precision, "HALF_SHA256", file_digest(small_network.with_name("expected")))
    for module in (weights, half_precision):
        monkeypatch.setattr(module, "INCEPTION_SHA256", file_digest(small_network))
    return small_network


def test_weights_are_rounded_once_and_computed_with_in_float32(network: Path, tmp_path: Path) -> None:
    half = half_precision_copy(tmp_path / "out" / "half.pt", network)
    assert half.read_bytes() == half_precision_copy(tmp_path / "again.pt", network).read_bytes()
    path, device = restore(half, tmp_path / "restored.pt"), torch.device("cpu")
    weight = load_network(find_weights(path, "fp16-weights"), device).weight
    original = load_network(find_weights(network), device).weight.detach().numpy()
    assert weight.dtype == torch.float32
    assert np.array_equal(weight.detach().numpy(), original.astype(np.float16).astype(np.float32))
    assert not np.array_equal(weight.detach().numpy(), original)


def test_other_files_are_refused(network: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is not a half-precision copy"):
        restore(network, tmp_path / "restored.pt")
    (tmp_path / "other.pt").write_bytes(b"other")
    with pytest.raises(ValueError, match=r"evaluation\.weights: .*other\.pt has sha256"):
        half_precision_copy(tmp_path / "half.pt", tmp_path / "other.pt")
