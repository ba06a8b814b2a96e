"""LoRA of peft and diffusers on a scaled model: files name the scaling, loading checks it, gates are trained or reported."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from safetensors import safe_open
from torch import Tensor

import scalelong
from scalelong.skips.feature_conditioning import conditioning_of
from tests.families import assert_close

peft = pytest.importorskip("peft")
FILE = "pytorch_lora_weights.safetensors"


def unet(method: str = "", **options: Any) -> diffusers.UNet2DConditionModel:
    torch.manual_seed(0)
    model = diffusers.UNet2DConditionModel(
        sample_size=8, block_out_channels=(8, 16), layers_per_block=1, norm_num_groups=4, cross_attention_dim=8,
        attention_head_dim=4, down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
    )  # fmt: skip
    if method:
        scalelong.apply(model, method, **options)
    return model


def config(**options: Any) -> Any:
    return peft.LoraConfig(r=2, lora_alpha=2, target_modules=["to_q", "to_v"], init_lora_weights=False, **options)


def output(model: Any) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    x, text = torch.randn(2, 4, 8, 8, generator=generator), torch.randn(2, 3, 8, generator=generator)
    return model(x, 3, text).sample


def test_peft_saves_and_checks_the_scaling(tmp_path, caplog) -> None:
    for method in ("cs", "ls"):
        model = peft.get_peft_model(unet(method), config())
        model.save_pretrained(tmp_path / method)
        stored = json.loads((tmp_path / method / "adapter_config.json").read_text())["long_skip_scaling"]
        assert (stored["method"], stored["num_skips"]) == (method, 4)
        assert_close(output(peft.PeftModel.from_pretrained(unet(method), tmp_path / method)), output(model))
        with pytest.raises(
            ValueError, match=rf"trained on a model with {method}.*has none; call scalelong.apply\(model"
        ):
            peft.PeftModel.from_pretrained(unet(), tmp_path / method)
        with pytest.raises(ValueError, match=r"this one has cs\(kappa=0.3\)"):
            peft.PeftModel.from_pretrained(unet("cs", kappa=0.3), tmp_path / method)
    peft.get_peft_model(unet(), config()).save_pretrained(tmp_path / "plain")
    with caplog.at_level(logging.WARNING, "scalelong"):
        peft.PeftModel.from_pretrained(unet("cs"), tmp_path / "plain")
    assert "it was trained without a scaling, the model has cs(kappa=0.7)" in caplog.text


def save_as_scripts_do(model: Any, folder: Path) -> None:
    layers = diffusers.utils.convert_state_dict_to_diffusers(peft.get_peft_model_state_dict(model))
    diffusers.StableDiffusionPipeline.save_lora_weights(folder, unet_lora_layers=layers)


def load_as_pipelines_do(model: Any, folder: Path) -> None:
    mixin = diffusers.StableDiffusionPipeline
    state_dict, alphas, metadata = mixin.lora_state_dict(folder, return_lora_metadata=True)
    mixin.load_lora_into_unet(state_dict, alphas, model, metadata=metadata)


def load_adapter(model: Any, folder: Path) -> None:
    model.load_lora_adapter(folder, prefix=None, weight_name=FILE, use_safetensors=True)


@pytest.mark.parametrize(
    ("save", "load"),
    [(save_as_scripts_do, load_as_pipelines_do), (lambda model, folder: model.save_lora_adapter(folder), load_adapter)],
    ids=["pipeline", "model"],
)
def test_diffusers_saves_and_checks_the_scaling(save: Any, load: Any, tmp_path) -> None:
    model = unet("cs", kappa=0.6)
    model.add_adapter(config())
    save(model, tmp_path)
    with safe_open(str(tmp_path / FILE), framework="pt") as file:
        assert "long_skip_scaling" in file.metadata()["lora_adapter_metadata"]
    other = unet("cs", kappa=0.6)
    load(other, tmp_path)
    assert_close(output(other), output(model))
    with pytest.raises(ValueError, match=r'LoRA: .*has none; call scalelong.apply\(model, "cs", kappa=0.6\) first'):
        load(unet(), tmp_path)
    with pytest.raises(ValueError, match=r"cs\(kappa=0.6\) on 4 skips, this one has cs\(kappa=0.7\)"):
        load(unet("cs"), tmp_path)


@pytest.mark.parametrize(
    ("method", "options"), [("cs", {"kappa": 0.6, "placement": "after_norm"}), ("ls", {"shared": False})]
)
def test_errors_name_every_option_of_the_scaling(method: str, options: dict[str, Any], tmp_path) -> None:
    peft.get_peft_model(unet(method, **options), config()).save_pretrained(tmp_path)
    named = "".join(f".*{key}={value!r}" for key, value in options.items())
    with pytest.raises(ValueError, match=rf'call scalelong.apply\(model, "{method}"{named}'):
        peft.PeftModel.from_pretrained(unet(), tmp_path)
    with pytest.raises(ValueError, match=rf"trained on a model with {method}\({named}.*this one has {method}\("):
        peft.PeftModel.from_pretrained(unet(method), tmp_path)


def test_gates_in_modules_to_save_are_trained_saved_and_switched_off(tmp_path) -> None:
    base, model = output(unet("ls")), peft.get_peft_model(unet("ls"), config(modules_to_save=["scalelong"]))
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=10.0)
    before = scalelong.skips.scaling_of(model.get_base_model()).gates[0].zeta[2].bias.detach().clone()
    output(model).square().mean().backward()
    optimizer.step()
    trained = scalelong.skips.scaling_of(model.get_base_model()).gates[0].zeta[2].bias
    assert not torch.allclose(trained, before)
    model.save_pretrained(tmp_path)
    loaded = peft.PeftModel.from_pretrained(unet("ls"), tmp_path)
    assert_close(output(loaded), output(model))
    with loaded.disable_adapter():
        assert_close(output(loaded), base)
    assert_close(output(loaded), output(model))
    trained = output(model)
    with model.disable_adapter():
        output(model)
    assert_close(output(model.merge_and_unload()), trained)


def test_frozen_and_unsaved_gates_are_reported(tmp_path, caplog) -> None:
    model = peft.get_peft_model(unet("ls"), config()).train()
    with caplog.at_level(logging.WARNING, "scalelong"):
        output(model)
        output(model)
    assert caplog.text.count("are frozen while the model is trained; call model.scalelong.requires_grad_(True)") == 1
    model.get_base_model().scalelong.requires_grad_(True)
    model.save_pretrained(tmp_path)
    assert (
        'the gates are trained, but an adapter\'s file does not contain them; pass modules_to_save=["scalelong"]'
        in caplog.text
    )


def test_the_conditioning_on_features_in_modules_to_save_is_trained_saved_and_switched_off(tmp_path) -> None:
    def conditioned() -> diffusers.UNet2DConditionModel:
        model = unet()
        scalelong.condition_on_features(model)
        return model

    base, model = output(unet()), peft.get_peft_model(conditioned(), config(modules_to_save=["feature_conditioning"]))
    output(model).square().mean().backward()
    gate = conditioning_of(model.get_base_model()).gate
    assert gate.grad is not None
    with torch.no_grad():
        gate.fill_(1.0)
    trained = output(model)
    model.save_pretrained(tmp_path)
    assert_close(output(peft.PeftModel.from_pretrained(conditioned(), tmp_path)), trained)
    with model.disable_adapter():
        assert_close(output(model), base)
    assert_close(output(model.merge_and_unload()), trained)
