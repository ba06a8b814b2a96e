"""Checkpoints of the public code: golden outputs and gradients it gave, and refusals of weights that do not fit."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor

import scalelong
from scalelong.backbones.official import CODES, load_official_uvit
from scalelong.backbones.uvit import UViT, UViTConfig

GOLDEN = Path(__file__).parents[1] / "golden"
CASES = [
    *((name, method) for name in ("uvit_uncond", "uvit_class") for method in CODES),
    ("uvit_text", "none"),
]


@dataclass(frozen=True)
class Golden:
    config: dict[str, Any]
    kappa: float | None
    tensors: dict[str, Tensor]

    def weights(self, method: str) -> dict[str, Tensor]:
        """The checkpoint of one method: the backbone and, for LS, its gates."""
        folders = ("backbone/", f"{method}/")
        return {key.split("/", 1)[1]: value for key, value in self.tensors.items() if key.startswith(folders)}

    def gradients(self, method: str) -> dict[str, Tensor]:
        prefix = f"grad/{method}/"
        return {key.removeprefix(prefix): value for key, value in self.tensors.items() if key.startswith(prefix)}

    def run(self, model: UViT) -> Tensor:
        tensors = self.tensors
        return model(tensors["x"], tensors["timesteps"], class_labels=tensors.get("y"), context=tensors.get("context"))


@cache
def golden(name: str) -> Golden:
    with safe_open(GOLDEN / f"{name}.safetensors", "pt") as file:
        metadata = file.metadata()
        tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 (not a mapping)
    kappa = float(metadata["kappa"]) if "kappa" in metadata else None
    return Golden(json.loads(metadata["config"]), kappa, tensors)


def deviation(got: Tensor, reference: Tensor) -> float:
    return ((got - reference).abs().max() / reference.abs().max()).item()


@pytest.mark.parametrize(("name", "method"), CASES)
def test_golden_output_and_gradients(name: str, method: str) -> None:
    data = golden(name)
    model = load_official_uvit(data.config, data.weights(method), method, kappa=data.kappa)
    output = data.run(model)
    assert deviation(output, data.tensors[f"out/{method}"]) < 1e-5
    output.square().mean().backward()
    gradients = data.gradients(method)
    assert len(gradients) == (0 if name == "uvit_text" else 2)
    for parameter, reference in gradients.items():
        got = model.get_parameter(parameter).grad
        assert got is not None
        assert deviation(got, reference) < 1e-5


def test_every_golden_output_is_tested() -> None:
    stored = {(p.stem, key[4:]) for p in GOLDEN.glob("uvit_*") for key in golden(p.stem).tensors if key[:4] == "out/"}
    assert stored == set(CASES)


@pytest.mark.parametrize(("code", "method"), list(enumerate(CODES)))
def test_numbers_and_the_prefix_of_data_parallel_training(code: int, method: str) -> None:
    data = golden("uvit_class")
    prefixed = {f"module.{key}": value for key, value in data.weights(method).items()}
    model = load_official_uvit(data.config, prefixed, scalelong=code, kappa=data.kappa)
    assert deviation(data.run(model), data.tensors[f"out/{method}"]) < 1e-5


def test_the_model_does_not_share_memory_with_the_weights() -> None:
    data = golden("uvit_uncond")
    weights = {key: value.clone() for key, value in data.weights("ls").items()}
    model = load_official_uvit(data.config, weights, "ls")
    for value in weights.values():
        value.zero_()
    assert deviation(data.run(model), data.tensors["out/ls"]) < 1e-5


@pytest.mark.parametrize(("shared", "extra"), [(True, 8_497), (False, 50_982)])
def test_parameters_that_ls_adds_to_s2(shared: bool, extra: int) -> None:
    with torch.device("meta"):
        model = UViT(UViTConfig(image_size=32, patch_size=2, dim=512, depth=12, heads=8))
    before = sum(p.numel() for p in model.parameters())
    scalelong.apply(model, "ls", shared=shared)
    assert sum(p.numel() for p in model.parameters()) - before == extra


def test_defaults_are_those_of_the_public_code() -> None:
    """224x224, patches of 16, width 768, depth 12, no classes, no text, a final convolution: known by names and shapes."""
    with torch.device("meta"):
        vit = UViT(UViTConfig(image_size=224, patch_size=16, dim=768, depth=12, heads=12)).state_dict()
        narrow = {**vit, "mid_block.mlp.fc2.weight": torch.zeros(768, 768)}
    with pytest.raises(
        ValueError, match=r"mid_block\.mlp\.fc2\.weight is \(768, 768\), the settings imply \(768, 3072\)"
    ):
        load_official_uvit({}, narrow)  # all others fit


# ----------------------------------------------------------------------------------------------------------------- errors


def load(config: dict[str, Any] | None = None, weights: dict[str, Tensor] | None = None, **arguments: Any) -> UViT:
    data = golden("uvit_uncond")
    given = data.weights("none") if weights is None else weights
    return load_official_uvit({**data.config, **(config or {})}, given, **arguments)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"embed_dims": 32}, r"official\.config: unknown 'embed_dims'; did you mean 'embed_dim'"),
        ({"norm_layer": None}, r"official\.config: unknown 'norm_layer'"),
        ({"qk_scale": 0.1}, r"official\.qk_scale: 0\.1 is not supported"),
        ({"skip": False}, r"official\.skip: False"),
        ({"clip_dim": 24}, r"official\.clip_dim: 24 with num_clip_token None; a text model needs both"),
        ({"num_heads": 5}, r"uvit\.heads: 5 does not divide dim 32"),
        ({"depth": 4}, r"official\.state_dict: in_blocks\.2\..*imply none \(and \d\d more differ\)"),
        ({"num_classes": 10}, r"official\.state_dict: label_emb\.weight is missing, the settings imply \(10, 32\)"),
        ({"conv": False}, r"official\.state_dict: final_layer\.bias is \(3,\), the settings imply none"),
        ({"img_size": 16}, r"official\.state_dict: pos_embed is \(1, 17, 32\), the settings imply \(1, 65, 32\)"),
    ],
)
def test_settings_that_do_not_fit_are_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load(config)


@pytest.mark.parametrize("code", [5, -1, True, 2.0, "constant"])
def test_an_unknown_method_is_refused(code: Any) -> None:
    with pytest.raises(ValueError, match=rf"official\.scalelong: unknown {code!r}; choose one of 0 \('none'\)"):
        load(scalelong=code)


def test_cs_needs_its_kappa() -> None:
    with pytest.raises(ValueError, match=r"official\.kappa: None with 'cs'; pass the kappa"):
        load(scalelong="cs")
    with pytest.raises(ValueError, match=r"scaling\.kappa: must be in \(0, 1\], got 1\.7"):
        load(scalelong="cs", kappa=1.7)


@pytest.mark.parametrize(
    ("method", "stored"),
    [("none", "ls"), ("cs", "ls_individual"), ("ls", "none"), ("ls", "ls_individual"), ("ls_individual", "ls")],
)
def test_gates_that_do_not_fit_the_method_are_refused(method: str, stored: str) -> None:
    weights = golden("uvit_uncond").weights(stored)
    with pytest.raises(ValueError, match=rf"official\.scalelong: '{method}' does not fit .* the gates of '{stored}'"):
        load(weights=weights, scalelong=method, kappa=0.5)


def test_a_gate_of_the_wrong_size_is_refused() -> None:
    weights = {**golden("uvit_uncond").weights("ls"), "se.layer1.weight": torch.zeros(2, 17)}
    with pytest.raises(ValueError, match=r"official\.state_dict: the gates(?s:.*)\[2, 17\].*\[1, 17\]"):
        load(weights=weights, scalelong="ls")
