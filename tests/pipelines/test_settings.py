"""Every scaling works in every setting by the same flag."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from scalelong.scaling.registry import METHODS
from scalelong.training import load_run, train
from tests.training.tiny import losses, tiny

from .settings import SETTINGS, UNET, setting

SHORT: dict[str, Any] = {"training_steps": 2, "training_checkpoint_every": 2, "training_batch_size": 4}
TRAINED = [name for name, method in METHODS.items() if not method.sampling_only]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    return {name: setting(name, tmp_path_factory.mktemp(name)) for name in SETTINGS}


@pytest.mark.parametrize("method", ["none", "cs", "ls"])
@pytest.mark.parametrize("backbone", ["uvit", "unet"])
@pytest.mark.parametrize("name", SETTINGS)
def test_the_scalings_of_the_paper(
    made: dict[str, dict[str, Any]], tmp_path: Path, name: str, backbone: str, method: str
) -> None:
    network = UNET if backbone == "unet" else {"model_patch_size": 2}
    train(tiny(**SHORT, **network, **made[name], scaling_method=method), tmp_path / "run")
    assert all(math.isfinite(loss) for _, loss in losses(tmp_path / "run"))
    run = load_run(tmp_path / "run")
    assert (run.conditioning.num_classes > 0, run.conditioning.text_dim > 0) == (name == "class", name == "text")
    assert run.shape == ((3, 8, 8) if name == "text" else (3, 4, 4) if name == "latent" else (1, 8, 8))


@pytest.mark.parametrize("method", sorted(set(TRAINED) - {"none", "cs", "ls"}))
def test_the_other_scalings(made: dict[str, dict[str, Any]], tmp_path: Path, method: str) -> None:
    train(tiny(**SHORT, **made["text"], model_patch_size=4, scaling_method=method), tmp_path / "run")
    assert all(math.isfinite(loss) for _, loss in losses(tmp_path / "run"))
