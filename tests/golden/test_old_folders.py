"""Run folders, exports and saved weights of version 0.1 still load, compute the same, resume and make a report."""

from __future__ import annotations

import tarfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import scalelong
from scalelong.backbones import UViT, UViTConfig, as_network
from scalelong.cli.main import main
from scalelong.training import load_run


@pytest.fixture(scope="module")
def old(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("v0.1")
    with tarfile.open(Path(__file__).with_name("v0.1.tar.xz")) as archive:
        archive.extractall(folder, filter="data")
    return folder


def outputs(model: torch.nn.Module, channels: int, labels: bool) -> torch.Tensor:
    x = torch.randn(2, channels, 8, 8, generator=torch.Generator().manual_seed(0))
    given = {"class_labels": torch.tensor([1, 10])} if labels else {}
    with torch.no_grad():
        return as_network(model)(x, torch.tensor([100.0, 700.0]), **given)


@pytest.mark.parametrize("name", ["uvit-ls", "uvit-export", "unet-export"])
def test_a_run_or_export_loads_and_computes_what_it_did(old: Path, name: str) -> None:
    run = load_run(old / name)
    expected = load_file(old / "outputs.safetensors")[name]
    found = outputs(run.model, run.shape[0], run.config.condition.kind == "class")
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_saved_weights_load(old: Path) -> None:
    model = UViT(UViTConfig(image_size=8, patch_size=4, in_channels=1, dim=16, depth=4, heads=2, num_classes=11))
    scalelong.load(model, old / "uvit-saved")
    expected = load_file(old / "outputs.safetensors")["uvit-ls"]
    torch.testing.assert_close(outputs(model.eval(), 1, True), expected, rtol=1e-4, atol=1e-5)


def test_diffusers_loads_the_export_with_the_code_in_it(old: Path) -> None:
    from diffusers import DiffusionPipeline

    pipe = DiffusionPipeline.from_pretrained(old / "uvit-export", trust_remote_code=True)
    images = pipe(class_labels=[3], num_inference_steps=2, output_type="pt").images
    assert images.shape[0] == 1 and images.isfinite().all()


def test_a_run_is_reported_and_resumed(old: Path, tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    main(["report", str(old / "uvit-ls"), "--out", str(page)])
    assert "FD(random-conv-64-seed0)" in page.read_text()
    folder = old / "uvit-ls"
    main(["train", "--config", str(folder / "config.yaml"), "--training.steps", "6", "--out", str(folder)])
    assert load_run(folder).step == 6
