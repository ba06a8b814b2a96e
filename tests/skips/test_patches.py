"""diffusers, its EMA and accelerate's checkpoints keep the scaling; diffusers' example script, interrupted and resumed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from diffusers.training_utils import EMAModel
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor

import scalelong
from tests.families import assert_close, assert_same_weights
from tests.packages import FOLDER
from tests.sources import SCRIPT, path

ROOT = Path(__file__).parents[2]
BLOCKS: dict[str, Any] = {
    "sample_size": 16, "block_out_channels": (8, 16), "layers_per_block": 1, "norm_num_groups": 4,
    "down_block_types": ("DownBlock2D", "AttnDownBlock2D"), "up_block_types": ("AttnUpBlock2D", "UpBlock2D"),
}  # fmt: skip
WEIGHTS = "diffusion_pytorch_model.safetensors"


def unet(method: str = "", **options: Any) -> diffusers.UNet2DModel:
    torch.manual_seed(0)
    model = diffusers.UNet2DModel(**BLOCKS)
    if method:
        scalelong.apply(model, method, **options)
    return model


def output(model: Any) -> Tensor:
    x = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        return model(x, torch.tensor([3, 500])).sample


def average(model: diffusers.UNet2DModel) -> EMAModel:
    return EMAModel(model.parameters(), decay=0.5, model_cls=diffusers.UNet2DModel, model_config=model.config)


def train(folder: Path, method: str, start: int, stop: int) -> tuple[Any, EMAModel]:
    """Steps start .. stop of a loop that saves and resumes as diffusers' training scripts do."""
    from accelerate import Accelerator

    accelerator, model = Accelerator(cpu=True), unet(method)
    ema, optimizer = average(model), torch.optim.AdamW(model.parameters(), lr=1e-2)

    def save(models: list[Any], weights: list[Any], out: str) -> None:
        ema.save_pretrained(f"{out}/unet_ema")
        for each in models:
            each.save_pretrained(f"{out}/unet")
            weights.pop()

    def load(models: list[Any], source: str) -> None:
        ema.load_state_dict(EMAModel.from_pretrained(f"{source}/unet_ema", diffusers.UNet2DModel).state_dict())
        while models:
            model, loaded = models.pop(), diffusers.UNet2DModel.from_pretrained(source, subfolder="unet")
            model.register_to_config(**loaded.config)
            model.load_state_dict(loaded.state_dict())

    accelerator.register_save_state_pre_hook(save)
    accelerator.register_load_state_pre_hook(load)
    model, optimizer = accelerator.prepare(model, optimizer)
    if start:
        accelerator.load_state(str(folder / f"step-{start}"))
    for step in range(start, stop):
        x = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(step))
        accelerator.backward((model(x, step).sample - x).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        ema.step(model.parameters())
    accelerator.save_state(str(folder / f"step-{stop}"))
    return accelerator.unwrap_model(model), ema


@pytest.mark.parametrize("method", ["cs", "ls"])
def test_a_loop_that_is_interrupted_equals_one_that_is_not(method: str, tmp_path, recwarn) -> None:
    whole, whole_ema = train(tmp_path / "whole", method, 0, 4)
    train(tmp_path / "parts", method, 0, 2)
    parts, parts_ema = train(tmp_path / "parts", method, 2, 4)
    assert_same_weights(parts, whole)
    for mine, theirs in zip(parts_ema.shadow_params, whole_ema.shadow_params, strict=True):
        assert torch.equal(mine, theirs)
    assert not [str(w.message) for w in recwarn if "scaling" in str(w.message)]
    whole_ema.copy_to(whole.parameters())
    loaded = diffusers.UNet2DModel.from_pretrained(tmp_path / "whole" / "step-4" / "unet_ema")
    assert_close(output(loaded), output(whole))


def test_a_pipeline_is_loaded_with_its_scaling(tmp_path) -> None:
    model = unet("ls")
    diffusers.DDPMPipeline(model, diffusers.DDPMScheduler()).save_pretrained(tmp_path)
    assert json.loads((tmp_path / "model_index.json").read_text())["unet"] == ["scalelong.diffusers", "UNet2DModel"]
    for load in (
        diffusers.DiffusionPipeline.from_pretrained,
        lambda folder: scalelong.from_pretrained(diffusers.DDPMPipeline, folder),
    ):
        loaded = load(tmp_path).unet
        assert type(loaded) is diffusers.UNet2DModel
        assert_same_weights(loaded, model)
        assert_close(output(loaded), output(model))


def test_removing_the_scaling_leaves_a_plain_diffusers_model(tmp_path) -> None:
    model = unet("cs")
    scalelong.remove(model)
    diffusers.DDPMPipeline(model, diffusers.DDPMScheduler()).save_pretrained(tmp_path)
    assert json.loads((tmp_path / "model_index.json").read_text())["unet"] == ["diffusers", "UNet2DModel"]
    assert not scalelong.skips.is_scaled(diffusers.UNet2DModel.from_pretrained(tmp_path, subfolder="unet"))


def test_configs_without_a_scaling_and_schedulers_are_built_as_before() -> None:
    unet("cs")
    assert not scalelong.skips.is_scaled(diffusers.UNet2DModel.from_config(unet().config))
    assert diffusers.DDIMScheduler.from_config(diffusers.DDPMScheduler().config).config.num_train_timesteps == 1000
    built, unused = diffusers.UNet2DModel.from_config({**unet("cs").config, "decay": 0.5}, return_unused_kwargs=True)
    assert scalelong.skips.is_scaled(built)
    assert unused["decay"] == 0.5


def test_an_average_without_the_gates_is_refused() -> None:
    model = unet()
    ema = average(model)
    scalelong.apply(model, "ls")
    with pytest.raises(ValueError, match=r"EMAModel: it averages \d+ parameters, the model has \d+; build it after"):
        ema.step(model.parameters())
    with pytest.raises(ValueError, match="EMAModel: it averages"):
        ema.copy_to(model.parameters())


def test_a_class_that_needs_an_example_is_refused_without_one(tmp_path) -> None:
    model = unet("cs")
    config = {**model.config, "up_block_types": ("KUpBlock2D", "KUpBlock2D"), "down_block_types": ("KDownBlock2D",) * 2}
    with pytest.raises(
        ValueError, match=r"skips of this UNet2DConditionModel are not known.*from_pretrained\(\.\.\., example="
    ):
        diffusers.UNet2DConditionModel.from_config({"long_skip_scaling": config["long_skip_scaling"], **K_BLOCKS})
    with pytest.raises(ValueError, match="num_skips: the saved scaling has 7 skips"):
        diffusers.UNet2DModel.from_config({**model.config, "long_skip_scaling": {**stored(model), "num_skips": 7}})


K_BLOCKS: dict[str, Any] = {
    "block_out_channels": (32, 64), "layers_per_block": 1, "cross_attention_dim": 8, "attention_head_dim": 8,
    "down_block_types": ("KDownBlock2D", "KCrossAttnDownBlock2D"), "up_block_types": ("KCrossAttnUpBlock2D", "KUpBlock2D"),
    "mid_block_type": None, "act_fn": "gelu", "resnet_time_scale_shift": "scale_shift", "time_embedding_type": "fourier",
    "timestep_post_act": "gelu", "norm_num_groups": None, "conv_in_kernel": 1, "conv_out_kernel": 1,
}  # fmt: skip


def stored(model: Any) -> dict[str, Any]:
    return dict(model.config["long_skip_scaling"])


LOAD = """
import sys, torch, scalelong.diffusers
from diffusers import DiffusionPipeline

folder, x, found = sys.argv[1:]
with torch.no_grad():
    torch.save(DiffusionPipeline.from_pretrained(folder).unet(torch.load(x), torch.tensor([3, 500])).sample, found)
"""


def test_the_import_is_enough_in_a_fresh_process(tmp_path: Path) -> None:
    diffusers.DDPMPipeline(unet("cs"), diffusers.DDPMScheduler()).save_pretrained(tmp_path / "pipeline")
    torch.save(torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(1)), tmp_path / "x.pt")
    code = [sys.executable, "-c", LOAD, "pipeline", "x.pt", "found.pt"]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    done = subprocess.run(code, env=env, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert_close(torch.load(tmp_path / "found.pt"), output(unet("cs")))


@pytest.mark.slow
@pytest.mark.parametrize("method", ["cs", "ls"])
def test_the_example_script_of_diffusers_is_resumed_and_its_pipeline_loaded(method: str, tmp_path) -> None:
    script = path("diffusers") / SCRIPT
    if not script.exists() or not (FOLDER / ".installed").exists():
        pytest.skip("python -m tests.sources clones diffusers, make test-slow installs tests/packages.txt")
    (tmp_path / "images").mkdir()
    images = np.random.default_rng(0).integers(0, 255, (8, 16, 16, 3), dtype=np.uint8)
    for at, image in enumerate(images):
        Image.fromarray(image).save(tmp_path / "images" / f"{at}.png")
    unet().save_config(tmp_path / "config")
    ours = os.pathsep.join([str(ROOT), *sys.path])
    env = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "hf")}
    common = (
        "--train_data_dir images --model_config_name_or_path config --resolution 16 --train_batch_size 2 --use_ema \
        --num_epochs 2 --checkpointing_steps 4 --ddpm_num_inference_steps 2 --eval_batch_size 1 --lr_warmup_steps 1"
    )

    def run(out: str, stop: int, *more: str) -> None:
        command = [sys.executable, "-m", "tests.example_script", script, method, str(stop), *common.split()]
        done = subprocess.run([*command, "--output_dir", out, *more], cwd=tmp_path, capture_output=True, text=True,
                              env={**env, "PYTHONPATH": f"{FOLDER}{os.pathsep}{ours}"})  # fmt: skip
        assert done.returncode == (9 if stop else 0), done.stderr[-3000:]

    run("whole", 0)
    run("parts", 4)  # at the end of the first of two epochs
    run("parts", 0, "--resume_from_checkpoint", "latest")
    for file in (f"unet/{WEIGHTS}", f"checkpoint-8/unet/{WEIGHTS}", f"checkpoint-8/unet_ema/{WEIGHTS}"):
        whole, parts = load_file(tmp_path / "whole" / file), load_file(tmp_path / "parts" / file)
        assert whole.keys() == parts.keys()
        for name, tensor in whole.items():
            assert torch.equal(parts[name], tensor), (file, name)
    model = unet(method)
    model.load_state_dict(load_file(tmp_path / "parts" / f"checkpoint-8/unet_ema/{WEIGHTS}"))
    x = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(1))
    torch.save(x, tmp_path / "x.pt")
    code = [sys.executable, "-c", LOAD, "parts", "x.pt", "found.pt"]
    done = subprocess.run(code, env={**env, "PYTHONPATH": ours}, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert_close(torch.load(tmp_path / "found.pt"), output(model))


def test_a_conditioned_model_is_loaded_as_one(tmp_path: Path) -> None:
    model = unet()
    scalelong.condition_on_features(model)
    model.get_submodule("feature_conditioning").gate.data.fill_(0.5)
    diffusers.DDPMPipeline(model, diffusers.DDPMScheduler()).save_pretrained(tmp_path)
    loaded = diffusers.DDPMPipeline.from_pretrained(tmp_path).unet
    x = torch.randn(1, 3, 16, 16)
    assert_close(loaded(x, 5).sample, model(x, 5).sample)
    scalelong.apply(model, "cs")
    scalelong.remove(model, "scaling")
    model.save_pretrained(tmp_path / "again")
    assert_close(diffusers.UNet2DModel.from_pretrained(tmp_path / "again")(x, 5).sample, model(x, 5).sample)
