"""The paper's settings in miniature: without a condition, by class, by text, and in latents."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from scalelong.backbones.autoencoder import Autoencoder, autoencoder_digest, small_autoencoder
from scalelong.data import load_source
from scalelong.data.latents import Origin, encode
from tests.data.conftest import noise
from tests.data.encoders import make_bert

UNET: dict[str, Any] = {"model_backbone": "unet", "model_channels": (32, 32), "model_layers_per_block": 1}
SETTINGS = ("pixel", "class", "text", "latent")


def setting(name: str, folder: Path) -> dict[str, Any]:
    """The changes to a tiny run; what it needs is made in `folder`."""
    if name == "class":
        return {"condition_kind": "class", "condition_drop": 0.2}
    if name == "text":
        data = f"coco:{make_coco(folder / 'coco')}"
        encoder = str(make_bert(folder / "bert"))
        text = {"condition_kind": "text", "condition_encoder": encoder, "condition_max_tokens": 6}
        return {"data_name": data, "data_image_size": 8, "data_root": str(folder / "cache"), **text}
    if name == "latent":
        return {"data_name": f"latents:{make_latents(folder / 'latents')}", "sampling_clip": False}
    return {}


def make_coco(folder: Path) -> Path:
    """Four pictures with two captions each."""
    (folder / "train2014").mkdir(parents=True)
    (folder / "annotations").mkdir()
    images = [{"id": number, "file_name": f"{number}.png"} for number in range(4)]
    for image in images:
        picture = Image.fromarray(noise(int(str(image["id"])), 12, 12, 3))
        picture.save(folder / "train2014" / str(image["file_name"]))
    words = ["red apple", "green apple", "red flag", "green flag"]
    notes = [{"id": k, "image_id": k % 4, "caption": f"{'a ' * (k // 4)}{words[k % 4]}"} for k in range(8)]
    table = {"images": images, "annotations": notes}
    (folder / "annotations" / "captions_train2014.json").write_text(json.dumps(table))
    return folder


def make_latents(folder: Path) -> Path:
    """The digits in an untrained autoencoder of 4 x 4 x 3 latents."""
    torch.manual_seed(0)
    model = small_autoencoder(1, (8, 8), latent_channels=3, size=8).eval().requires_grad_(False)
    autoencoder = Autoencoder(model, autoencoder_digest(model), scale=2.0)
    return encode(load_source("digits"), autoencoder, folder, Origin("digits"), batch_size=512)
