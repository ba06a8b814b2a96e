"""Exports of runs that were trained with conditioning on features and with self-distillation."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from diffusers import UNet2DModel

import scalelong
from scalelong.pipelines import export_pipeline, export_weights
from scalelong.pipelines.uvit_model import UViTModel
from scalelong.training import load_run, train
from scalelong.training.build import build_model
from tests.training.tiny import tiny


@pytest.mark.parametrize("method", ["cs", "ls"])
@pytest.mark.parametrize("backbone", ["uvit", "unet"])
def test_an_export_keeps_the_conditioning(backbone: str, method: str, tmp_path: Path) -> None:
    unet = {"model_channels": (32, 32), "model_layers_per_block": 1, "diffusion_process": "ddpm"}
    sizes = unet if backbone == "unet" else {}
    features = {"features_conditioning": True, "distillation_weight": 0.1, "training_steps": 3}
    config = tiny(model_backbone=backbone, scaling_method=method, **features, **sizes)
    folder = train(config, tmp_path / "run")
    run = load_run(folder)
    with torch.no_grad():
        run.model.feature_conditioning.gate.fill_(1.0)
    x = torch.randn(2, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    t = torch.tensor([3, 500]) if backbone == "unet" else torch.tensor([3.0, 500.0])

    def output(model: torch.nn.Module) -> torch.Tensor:
        with torch.no_grad():
            found = model(x, t)
        return found if isinstance(found, torch.Tensor) else found.sample

    before = output(run.model)
    weights = export_weights(run, tmp_path / "weights")
    plain = tiny(model_backbone=backbone, scaling_method=method, **sizes)
    model = build_model(plain, run.shape)
    scalelong.remove(model)
    assert torch.allclose(output(scalelong.load(model, weights).eval()), before, atol=1e-5)

    exported = export_pipeline(run, tmp_path / "pipeline")
    assert exported.needs_us
    assert not exported.plain
    assert torch.allclose(output(load_run(exported.folder).model), before, atol=1e-5)
    if backbone == "uvit":
        denoiser = UViTModel.from_pretrained(exported.folder / "unet").eval()
    else:
        denoiser = scalelong.from_pretrained(UNet2DModel, exported.folder / "unet").eval()
    assert torch.allclose(output(denoiser), before, atol=1e-5)
