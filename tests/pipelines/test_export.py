"""Exported pipelines draw what our own network draws with the same scheduler from the same noise, and come back."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import DDPMPipeline, DiffusionPipeline
from torch import Tensor

from scalelong.backbones import as_network
from scalelong.cli.main import main
from scalelong.data.text import TextEncoder
from scalelong.diffusion import DDPM, Objective, get_process, guided, sample
from scalelong.pipelines import Exported, export_pipeline, scheduler_for
from scalelong.pipelines import export as export_code
from scalelong.runs.settings import SamplingSettings
from scalelong.training import TrainedRun, load_run, train
from scalelong.training.build import build_pixels
from scalelong.training.checkpoint import CheckpointError
from scalelong.training.run import load_pixels
from tests.training.tiny import tiny

from .settings import UNET, setting

STEPS = 6
SHORT: dict[str, Any] = {"training_steps": 2, "training_checkpoint_every": 2, "training_batch_size": 4}


def trained(folder: Path, **changes: Any) -> TrainedRun:
    """A short run; without its scaling it would draw something else, by 0.09 and more."""
    train(tiny(**SHORT, **changes), folder)
    return load_run(folder)


def exported(run: TrainedRun, folder: Path) -> tuple[Exported, Any]:
    found = export_pipeline(run, folder)
    pipe = DiffusionPipeline.from_pretrained(str(folder), trust_remote_code=not found.plain)
    pipe.set_progress_bar_config(disable=True)
    return found, pipe


def reference(run: TrainedRun, net: Any, scheduler: Any, noise: Tensor, **condition: Tensor) -> Tensor:
    """Our objective's guesses at the image, stepped by the same scheduler."""
    stepper = type(scheduler).from_config(scheduler.config, prediction_type="sample")
    stepper.set_timesteps(STEPS)
    x = noise
    for t in stepper.timesteps:
        time = t if isinstance(run.objective.process, DDPM) else t / 999.0
        x0, _ = run.objective.denoise(net, x, time.expand(len(x)), **condition)
        x = stepper.step(x0, t, x).prev_sample
    return x


def noise_of(run: TrainedRun, count: int = 3) -> Tensor:
    return torch.randn(count, *run.shape, generator=torch.Generator().manual_seed(7))


CASES = {
    "uvit cs": ({"scaling_method": "cs"}, True),
    "uvit ls": ({"scaling_method": "ls"}, False),
    "uvit mp_cat": ({"scaling_method": "mp_cat"}, False),
    "uvit v cosine": ({"scaling_method": "cs", "diffusion_process": "cosine", "diffusion_prediction": "v"}, True),
    "unet ls": ({"scaling_method": "ls", **UNET}, False),
}


@pytest.mark.parametrize("case", CASES)
def test_samples_are_those_of_our_network(tmp_path: Path, case: str) -> None:
    changes, folds = CASES[case]
    run = trained(tmp_path / "run", **changes)
    noise = noise_of(run)
    found, pipe = exported(load_run(tmp_path / "run"), tmp_path / "pipe")
    assert (found.plain, not found.needs_us) == (False, folds)
    with torch.no_grad():
        expected = reference(run, as_network(run.model), pipe.scheduler, noise)
    drawn = pipe(latents=noise, num_inference_steps=STEPS, output_type="latent").images
    assert expected.std() > 0.1
    code = [file.read_text() for file in (tmp_path / "pipe").rglob("*.py")]
    assert any("\nimport scalelong" in text or "\nfrom scalelong" in text for text in code) == (case == "unet ls")
    torch.testing.assert_close(drawn, expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    "changes",
    [
        {"scaling_method": "none"},
        {"scaling_method": "cs", "scaling_placement": "after_norm", "diffusion_process": "ddpm"},
    ],
)
def test_unets_become_plain_diffusers(tmp_path: Path, changes: dict[str, Any]) -> None:
    run = trained(tmp_path / "run", **UNET, **changes)
    found, pipe = exported(load_run(tmp_path / "run"), tmp_path / "pipe")
    assert found.plain
    assert type(pipe) is DDPMPipeline
    assert not list((tmp_path / "pipe").rglob("*.py"))
    noise = torch.randn(2, *run.shape, generator=torch.Generator().manual_seed(3))
    drawn = pipe(2, torch.Generator().manual_seed(3), STEPS, output_type="pt").images
    with torch.no_grad():
        expected = reference(run, as_network(run.model), pipe.scheduler, noise)
    torch.testing.assert_close(drawn, (expected / 2 + 0.5).clamp(0, 1), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("interval", [(0.0, math.inf), (0.3, 3.0)])
def test_classes_and_guidance_go_along(tmp_path: Path, interval: tuple[float, float]) -> None:
    changes = {"scaling_method": "cs", "sampling_guidance": 3.0, "sampling_guidance_interval": interval}
    run = trained(tmp_path / "run", **setting("class", tmp_path), **changes)
    _, pipe = exported(load_run(tmp_path / "run"), tmp_path / "pipe")
    noise, labels = noise_of(run), torch.tensor([4, 0, 9])
    null = {"class_labels": torch.tensor([10])}

    def net(x: Tensor, time: Tensor, **condition: Tensor) -> Tensor:
        alpha, sigma = run.objective.process.marginal(time[:1] / 999)
        scale = 3.0 if interval[0] <= float(sigma / alpha) <= interval[1] else 1.0
        return guided(as_network(run.model), null, scale)(x, time, **condition)

    with torch.no_grad():
        expected = reference(run, net, pipe.scheduler, noise, class_labels=labels)
    drawn = pipe(class_labels=["4", 0, 9], latents=noise, num_inference_steps=STEPS, output_type="latent").images
    torch.testing.assert_close(drawn, expected, rtol=1e-3, atol=1e-3)
    many = noise_of(run, 12)
    in_turn = pipe(latents=many, num_inference_steps=1, output_type="latent").images
    chosen = pipe(class_labels=[*range(10), 0, 1], latents=many, num_inference_steps=1, output_type="latent").images
    assert torch.equal(in_turn, chosen)
    with pytest.raises(ValueError, match=r"there is no 10; give 0 \.\. 9 or a class name"):
        pipe(class_labels=[10])
    noise = many[:2]
    four = [
        pipe(class_labels=form, batch_size=2, latents=noise, num_inference_steps=1, output_type="latent").images
        for form in ([4, 4], 4, "4", torch.tensor([4, 4]), np.array([4, 4]))
    ]
    assert all(torch.equal(each, four[0]) for each in four)
    with pytest.raises(ValueError, match="is not told texts"):
        pipe(prompt="an apple")


@pytest.mark.parametrize("network", [{"model_patch_size": 4}, UNET])
def test_texts_go_along_with_their_encoder(tmp_path: Path, network: dict[str, Any]) -> None:
    changes = setting("text", tmp_path)
    run = trained(tmp_path / "run", **network, **changes, scaling_method="ls")
    _, pipe = exported(load_run(tmp_path / "run"), tmp_path / "pipe")
    noise = noise_of(run, 2)
    rows = TextEncoder(changes["condition_encoder"], 6)(["", "red apple", "green flag"]).float()
    net = guided(as_network(run.model), {"context": rows[:1]}, 2.0)
    with torch.no_grad():
        expected = reference(run, net, pipe.scheduler, noise, context=rows[1:])
    prompts = ["red apple", "green flag"]
    drawn = pipe(prompt=prompts, guidance_scale=2.0, latents=noise, num_inference_steps=STEPS, output_type="latent")
    torch.testing.assert_close(drawn.images, expected, rtol=1e-3, atol=2e-3)


@pytest.mark.parametrize("kind", ["class", "text"])
def test_a_model_that_was_always_told_is_not_guided(tmp_path: Path, kind: str) -> None:
    changes = setting(kind, tmp_path) | {"condition_drop": 0.0, "model_patch_size": 4}
    run = trained(tmp_path / "run", **changes)
    _, pipe = exported(run, tmp_path / "pipe")
    assert len(pipe(batch_size=2, num_inference_steps=1, output_type="latent").images) == 2
    with pytest.raises(
        ValueError, match=r"guidance_scale: 2\.0, but this model knows no null condition; leave it at 1"
    ):
        pipe(batch_size=2, guidance_scale=2.0)


def test_latents_are_decoded_by_their_autoencoder(tmp_path: Path) -> None:
    run = trained(tmp_path / "run", **setting("latent", tmp_path), scaling_method="cs", model_patch_size=2)
    _, pipe = exported(load_run(tmp_path / "run"), tmp_path / "pipe")
    noise = noise_of(run)
    with torch.no_grad():
        expected = reference(run, as_network(run.model), pipe.scheduler, noise)
    drawn = pipe(latents=noise, num_inference_steps=STEPS, output_type="pt").images
    pixels = build_pixels(run.config, torch.device("cpu"), run.data)(expected)
    assert drawn.shape == (3, 1, 8, 8)
    assert ((drawn * 255).round() - pixels.float()).abs().max() <= 1
    Path(run.config.data.name.removeprefix("latents:")).rename(tmp_path / "elsewhere")
    alone = load_pixels(load_run(tmp_path / "pipe"), torch.device("cpu"))(expected)
    assert torch.equal(alone, pixels)


def test_edm_draws_as_our_own_solver_does(tmp_path: Path) -> None:
    run = trained(tmp_path / "run", scaling_method="cs", diffusion_process="edm", sampling_clip=False)
    _, pipe = exported(load_run(tmp_path / "run"), tmp_path / "pipe")
    noise = noise_of(run)
    expected = sample(run.objective, as_network(run.model), noise, SamplingSettings("dpm++2m", STEPS, clip=False))
    drawn = pipe(latents=noise, num_inference_steps=STEPS, output_type="latent").images
    torch.testing.assert_close(drawn, expected, rtol=1e-2, atol=1e-2)


def test_dpm_solver_draws_nearly_as_our_own_does(tmp_path: Path) -> None:
    """Its grid is ours but for the times told to the network, which it rounds to whole timesteps."""
    run = trained(tmp_path / "run", scaling_method="cs", sampling_sampler="dpm++2m", diffusion_prediction="x0")
    _, pipe = exported(load_run(tmp_path / "run"), tmp_path / "pipe")
    noise = noise_of(run)
    expected = sample(run.objective, as_network(run.model), noise, SamplingSettings("dpm++2m", 20))
    drawn = pipe(latents=noise, num_inference_steps=20, output_type="latent").images
    assert expected.std() > 0.01
    assert (drawn - expected).abs().mean() < 0.05 * expected.std()


@pytest.mark.parametrize("process", ["vp", "cosine", "ddpm"])
def test_the_scheduler_has_the_noise_levels_of_the_process(process: str) -> None:
    objective = Objective(get_process(process))
    scheduler = scheduler_for(objective, "ddim")
    index = torch.arange(1, 995)
    alpha, _ = objective.process.marginal(index if process == "ddpm" else index.double() / 999)
    torch.testing.assert_close(scheduler.alphas_cumprod[index].double(), alpha.double().square(), rtol=1e-3, atol=1e-6)
    assert (scheduler.alphas_cumprod.diff() < 0).all()
    names = {name: type(scheduler_for(objective, name)).__name__ for name in ("dpm++2m", "ddpm", "heun")}
    assert list(names.values()) == ["DPMSolverMultistepScheduler", "DDPMScheduler", "DDIMScheduler"]


def test_dpm_solver_clips_as_ours_does() -> None:
    scheduler = scheduler_for(Objective(get_process("vp")), "dpm++2m", clip=True)
    scheduler.set_timesteps(1)
    x0 = scheduler.step(torch.full((1, 1, 2, 2), 50.0), scheduler.timesteps[0], torch.ones(1, 1, 2, 2)).prev_sample
    assert x0.abs().max() <= 1.0


@pytest.mark.parametrize(
    "changes", [{"scaling_method": "cs"}, {"scaling_method": "ls"}, {"scaling_method": "ls", **UNET}]
)
def test_an_exported_pipeline_is_a_run_again(tmp_path: Path, changes: dict[str, Any]) -> None:
    run = trained(tmp_path / "run", **changes)
    _, pipe = exported(load_run(tmp_path / "run"), tmp_path / "pipe")
    back = load_run(tmp_path / "pipe")
    theirs = {name.removeprefix("uvit."): value for name, value in pipe.unet.state_dict().items()}
    ours = {name: value for name, value in back.model.state_dict().items() if name != "scalelong.kappa"}  # of "none"
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert (back.step, back.shape, back.data, back.conditioning) == (run.step, run.shape, run.data, run.conditioning)
    x, time = noise_of(run), torch.full((3,), 300.0)
    with torch.no_grad():
        torch.testing.assert_close(
            as_network(back.model)(x, time), as_network(run.model)(x, time), rtol=1e-5, atol=1e-6
        )
    with pytest.raises(ValueError, match="is of step 2, not 7"):
        load_run(tmp_path / "pipe", step=7)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trained(tmp_path / "run", scaling_method="ls")
    out = tmp_path / "pipe"
    assert main(["export", str(tmp_path / "run"), "--format", "diffusers", "--out", str(out)]) == 0
    told = capsys.readouterr().out
    assert "trust_remote_code=True" in told
    assert "Loading it needs scalelong" in told
    assert "library_name: diffusers" in (out / "README.md").read_text()
    assert main(["sample", str(out), "--num", "2", "--out", str(tmp_path / "drawn")]) == 0
    assert (tmp_path / "drawn.png").is_file()
    assert main(["export", str(tmp_path / "run"), "--format", "diffusers", "--out", str(out)]) == 1
    assert "is there already" in capsys.readouterr().err
    assert load_run(out).weights == "ema"
    with pytest.raises(ValueError, match="holds the averaged ones only"):
        load_run(out, weights="model")
    description = json.loads((out / "scalelong_run.json").read_text())
    (out / "scalelong_run.json").write_text(json.dumps({"step": description["step"]}))
    with pytest.raises(CheckpointError, match="is damaged"):
        load_run(out)


def test_the_file_of_an_exported_uvit_imports_nothing_of_ours() -> None:
    """Not even where it is needed only on a GPU: diffusers refuses a file with an import that is not there."""
    assert not re.findall(r"^\s*(?:from|import) scalelong.*", export_code._uvit_file(), flags=re.M)


@pytest.mark.slow
def test_a_folded_uvit_needs_nothing_of_ours(tmp_path: Path) -> None:
    run = trained(tmp_path / "run", scaling_method="cs")
    found = export_pipeline(load_run(tmp_path / "run"), tmp_path / "pipe")
    program = (
        "import sys, torch; sys.modules['scalelong'] = None\n"
        f"{found.loading()}\n"
        "pipe.set_progress_bar_config(disable=True)\n"
        "noise = torch.randn(3, 1, 8, 8, generator=torch.Generator().manual_seed(7))\n"
        f"torch.save(pipe(latents=noise, num_inference_steps={STEPS}, output_type='latent').images, sys.argv[1])\n"
    )
    subprocess.run([sys.executable, "-c", program, str(tmp_path / "drawn.pt")], check=True, timeout=300)
    with torch.no_grad():
        scheduler = scheduler_for(run.objective, "ddim", run.config.sampling.clip)
        expected = reference(run, as_network(run.model), scheduler, noise_of(run))
    drawn = torch.load(tmp_path / "drawn.pt", weights_only=True)
    torch.testing.assert_close(drawn, expected, rtol=1e-3, atol=1e-3)
