"""Exported pipelines sample what the run does, and load as runs."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import DDPMPipeline, DiffusionPipeline, DPMSolverMultistepScheduler
from torch import Tensor

from scalelong.backbones import as_network
from scalelong.cli.main import main
from scalelong.data.text import TextEncoder
from scalelong.diffusion import Objective, get_process, sample
from scalelong.diffusion.sampling import SAMPLERS
from scalelong.pipelines import Exported, _pipeline_file, _uvit_file, export_pipeline, scheduler_for
from scalelong.runs.settings import SamplingSettings
from scalelong.training import TrainedRun, load_run, train
from scalelong.training.checkpoint import CheckpointError
from scalelong.training.run import load_pixels
from tests.training.tiny import tiny

from .settings import UNET, setting

STEPS = 6
SHORT: dict[str, Any] = {"training_steps": 2, "training_checkpoint_every": 2, "training_batch_size": 4}


def trained(folder: Path, **changes: Any) -> TrainedRun:
    """A short run, whose samples differ by at least 0.09 without its scaling."""
    train(tiny(**SHORT, **changes), folder)
    return load_run(folder)


def exported(run: TrainedRun, folder: Path, sampler: str = "", **options: Any) -> tuple[Exported, Any]:
    found = export_pipeline(run, folder, sampler, **options)
    pipe = DiffusionPipeline.from_pretrained(str(folder), trust_remote_code=not found.plain)
    pipe.set_progress_bar_config(disable=True)
    return found, pipe


def reference(run: TrainedRun, noise: Tensor, guidance: float = 1.0, **options: Any) -> Tensor:
    settings = replace(run.config.sampling, steps=STEPS, guidance=guidance)
    return sample(run.objective, as_network(run.model), noise, settings, **options)


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
    expected = reference(run, noise)
    sampled = pipe(latents=noise, num_inference_steps=STEPS, output_type="latent").images
    assert expected.std() > 0.1
    code = [file.read_text() for file in (tmp_path / "pipe").rglob("*.py")]
    assert any("\nimport scalelong" in text or "\nfrom scalelong" in text for text in code) == (case == "unet ls")
    torch.testing.assert_close(sampled, expected, rtol=1e-4, atol=1e-4)


AFTER_NORM = {"scaling_method": "cs", "scaling_placement": "after_norm"}


@pytest.mark.parametrize(
    ("changes", "sampler"),
    [
        ({"scaling_method": "none"}, "dpm++2m"),
        ({**AFTER_NORM, "diffusion_process": "ddpm"}, "dpm++3m"),
        ({**AFTER_NORM, "sampling_clip": False}, "ddim"),
    ],
)
def test_unets_become_plain_diffusers(tmp_path: Path, changes: dict[str, Any], sampler: str) -> None:
    run = trained(tmp_path / "run", **UNET, **changes, sampling_sampler=sampler, diffusion_prediction="v")
    found, pipe = exported(load_run(tmp_path / "run"), tmp_path / "pipe", plain=True)
    assert found.plain
    assert type(pipe) is DDPMPipeline
    assert not list((tmp_path / "pipe").rglob("*.py"))
    noise = torch.randn(2, *run.shape, generator=torch.Generator().manual_seed(3))
    images = pipe(2, torch.Generator().manual_seed(3), 50, output_type="pt").images
    settings = SamplingSettings(sampler, 50, clip=run.config.sampling.clip)
    expected = sample(run.objective, as_network(run.model), noise, settings)
    torch.testing.assert_close(images, (expected / 2 + 0.5).clamp(0, 1), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sampling_sampler": "ddim"}, "DDPMPipeline cannot sample by ddim with the process vp, clipped; choose"),
        ({"sampling_sampler": "heun"}, "DDPMPipeline cannot sample by heun"),
        (
            {"sampling_sampler": "euler_maruyama"},
            "no scheduler for 'euler_maruyama' with the process 'vp'; choose one of",
        ),
        ({"diffusion_process": "cosine"}, "DDPMPipeline cannot sample by dpm[+][+]2m with the process cosine"),
        ({"scaling_method": "ls"}, "plain: the weights alone are not the model"),
        ({"model_backbone": "uvit"}, "plain: diffusers has a pipeline only for unconditional UNets"),
    ],
)
def test_what_plain_diffusers_cannot_do_is_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    trained(tmp_path / "run", **{**UNET, "scaling_method": "none", "sampling_sampler": "dpm++2m", **changes})
    with pytest.raises(ValueError, match=message):
        export_pipeline(load_run(tmp_path / "run"), tmp_path / "pipe", plain=True)
    assert not (tmp_path / "pipe").exists()


@pytest.mark.parametrize("interval", [(0.0, math.inf), (0.3, 3.0)])
def test_classes_and_guidance(tmp_path: Path, interval: tuple[float, float]) -> None:
    changes = {"scaling_method": "cs", "sampling_guidance": 3.0, "sampling_guidance_interval": interval}
    run = trained(tmp_path / "run", **setting("class", tmp_path), **changes)
    _, pipe = exported(load_run(tmp_path / "run"), tmp_path / "pipe")
    noise, labels = noise_of(run), torch.tensor([4, 0, 9])
    null = {"class_labels": torch.tensor([10])}
    expected = reference(run, noise, 3.0, null=null, class_labels=labels)
    sampled = pipe(class_labels=["4", 0, 9], latents=noise, num_inference_steps=STEPS, output_type="latent").images
    torch.testing.assert_close(sampled, expected, rtol=1e-4, atol=1e-4)
    none = pipe(
        class_labels="null", latents=noise, guidance_scale=1, num_inference_steps=1, output_type="latent"
    ).images
    settings = replace(run.config.sampling, steps=1, guidance=1.0)
    expected = sample(run.objective, as_network(run.model), noise, settings, class_labels=torch.full((3,), 10))
    torch.testing.assert_close(none, expected, rtol=1e-4, atol=1e-4)
    many = noise_of(run, 12)
    in_turn = pipe(latents=many, num_inference_steps=1, output_type="latent").images
    chosen = pipe(class_labels=[*range(10), 0, 1], latents=many, num_inference_steps=1, output_type="latent").images
    torch.testing.assert_close(in_turn, chosen, rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError, match=r"unknown 10; choose 0 \.\. 9 or a class name"):
        pipe(class_labels=[10])
    noise = many[:2]
    four = [
        pipe(class_labels=form, batch_size=2, latents=noise, num_inference_steps=1, output_type="latent").images
        for form in ([4, 4], 4, "4", torch.tensor([4, 4]), np.array([4, 4]))
    ]
    for each in four:
        torch.testing.assert_close(each, four[0], rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError, match="is not conditioned on text"):
        pipe(prompt="an apple")


@pytest.mark.parametrize("network", [{"model_patch_size": 4}, UNET])
def test_texts_and_their_encoder(tmp_path: Path, network: dict[str, Any]) -> None:
    changes = setting("text", tmp_path)
    run = trained(tmp_path / "run", **network, **changes, scaling_method="ls")
    _, pipe = exported(load_run(tmp_path / "run"), tmp_path / "pipe")
    noise = noise_of(run, 2)
    rows = TextEncoder(changes["condition_encoder"], 6)(["", "red apple", "green flag"]).float()
    expected = reference(run, noise, 2.0, null={"context": rows[:1]}, context=rows[1:])
    prompts = ["red apple", "green flag"]
    sampled = pipe(prompt=prompts, guidance_scale=2.0, latents=noise, num_inference_steps=STEPS, output_type="latent")
    torch.testing.assert_close(sampled.images, expected, rtol=1e-3, atol=2e-3)


@pytest.mark.parametrize("kind", ["class", "text"])
def test_a_model_without_a_null_condition_is_not_guided(tmp_path: Path, kind: str) -> None:
    changes = setting(kind, tmp_path) | {"condition_drop": 0.0, "model_patch_size": 4}
    run = trained(tmp_path / "run", **changes)
    _, pipe = exported(run, tmp_path / "pipe")
    assert len(pipe(batch_size=2, num_inference_steps=1, output_type="latent").images) == 2
    with pytest.raises(ValueError, match=r"guidance_scale: 2\.0, but this model has no null condition; leave it at 1"):
        pipe(batch_size=2, guidance_scale=2.0)


def test_latents_are_decoded_by_their_autoencoder(tmp_path: Path) -> None:
    run = trained(tmp_path / "run", **setting("latent", tmp_path), scaling_method="cs", model_patch_size=2)
    _, pipe = exported(load_run(tmp_path / "run"), tmp_path / "pipe")
    noise = noise_of(run)
    expected = reference(run, noise)
    sampled = pipe(latents=noise, num_inference_steps=STEPS, output_type="pt").images
    pixels = load_pixels(run, torch.device("cpu"))(expected)
    assert sampled.shape == (3, 1, 8, 8)
    assert ((sampled * 255).round() - pixels.float()).abs().max() <= 1
    Path(run.config.data.name.removeprefix("latents:")).rename(tmp_path / "elsewhere")
    alone = load_pixels(load_run(tmp_path / "pipe"), torch.device("cpu"))(expected)
    assert (alone.float() - pixels.float()).abs().max() <= 1


SAMPLED = [
    *(
        (process, sampler, clip)
        for process in ("vp", "cosine", "ddpm")
        for sampler in ("dpm++2m", "dpm++3m", "heun", "ddim")
        for clip in (False, True)
    ),
    *(("edm", sampler, clip) for sampler in ("dpm++2m", "dpm++3m") for clip in (False, True)),
]


@pytest.mark.parametrize(("process", "sampler", "clip"), SAMPLED)
def test_the_scheduler_solves_as_our_sampler_does(process: str, sampler: str, clip: bool) -> None:
    """Up to the rounding of timesteps."""
    objective = Objective(get_process(process), "" if process == "edm" else "v")
    mix = torch.randn(192, 192, generator=torch.Generator().manual_seed(1)) / 14
    noise = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(2))

    def net(x: Tensor, time: Tensor) -> Tensor:
        return 0.9 * x + 0.3 * torch.tanh(x.flatten(1) @ mix).view_as(x) * torch.cos(time / 300)[:, None, None, None]

    expected = sample(objective, net, noise, SamplingSettings(sampler, 50, clip=clip))
    scheduler = scheduler_for(objective, sampler, clip)
    scheduler.set_timesteps(50)
    options = {"use_clipped_model_output": True} if sampler == "ddim" else {}
    x = noise * scheduler.init_noise_sigma
    for t in scheduler.timesteps:
        x = scheduler.step(net(scheduler.scale_model_input(x, t), t.expand(4)), t, x, **options).prev_sample
    error = (x - expected).abs().mean() / expected.std()
    assert error < 2e-3


def test_samplers_without_a_scheduler_are_refused() -> None:
    vp, edm = Objective(get_process("vp")), Objective(get_process("edm"))
    with pytest.raises(ValueError, match=r"'euler_maruyama' with the process 'vp'; choose one of ddim, ddpm, .*heun"):
        scheduler_for(vp, "euler_maruyama")
    with pytest.raises(ValueError, match=r"no scheduler for 'heun' with the process 'edm'; choose one of dpm\+\+2m"):
        scheduler_for(edm, "heun")


@pytest.mark.parametrize("process", ["vp", "cosine", "ddpm", "edm"])
def test_every_sampler_is_exported_as_itself(tmp_path: Path, process: str) -> None:
    """The pipeline's images of a seed are those of `scalelong sample`, stochastic samplers included."""
    run = trained(tmp_path / "run", scaling_method="cs", diffusion_process=process, diffusion_prediction="")
    for sampler in SAMPLERS:
        if sampler == "euler_maruyama" and process in ("ddpm", "edm"):
            with pytest.raises(ValueError, match="euler_maruyama needs continuous time"):
                export_pipeline(load_run(tmp_path / "run"), tmp_path / sampler, sampler)
            continue
        _, pipe = exported(load_run(tmp_path / "run"), tmp_path / sampler, sampler)
        assert f"{sampler} with {pipe.config.default_steps} steps" in (tmp_path / sampler / "README.md").read_text()
        settings = replace(load_run(tmp_path / sampler).config.sampling, steps=5, count=4)
        assert settings.sampler == sampler
        expected = run.sample(settings, seed=3).float()
        found = pipe(batch_size=4, seed=3, num_inference_steps=5, output_type="pt").images * 255
        assert expected.std() > 10
        assert (found.round() - expected).abs().max() <= 1, sampler


def test_a_generator_gives_the_noise_of_every_step(tmp_path: Path) -> None:
    trained(tmp_path / "run", scaling_method="cs")
    _, pipe = exported(load_run(tmp_path / "run"), tmp_path / "pipe", "ddpm")
    again = [
        pipe(generator=torch.Generator().manual_seed(seed), num_inference_steps=4, output_type="latent").images
        for seed in (1, 1, 2)
    ]
    torch.testing.assert_close(again[0], again[1], rtol=1e-5, atol=1e-5)
    assert (again[0] - again[2]).abs().max() > 0.1


def test_a_scheduler_of_diffusers_can_be_set(tmp_path: Path) -> None:
    run = trained(tmp_path / "run", scaling_method="cs", diffusion_prediction="x0")
    _, pipe = exported(load_run(tmp_path / "run"), tmp_path / "pipe", "dpm++2m")
    noise = noise_of(run)
    expected = pipe(latents=noise, num_inference_steps=20, output_type="latent").images
    pipe.scheduler = DPMSolverMultistepScheduler.from_pretrained(tmp_path / "pipe", subfolder="scheduler")
    found = pipe(latents=noise, num_inference_steps=20, output_type="latent").images
    assert 0 < (found - expected).abs().mean() < 0.05 * expected.std()


@pytest.mark.parametrize("sampler", ["ddim", "dpm++2m"])
@pytest.mark.parametrize("process", ["vp", "cosine", "ddpm"])
def test_the_scheduler_has_the_noise_levels_of_the_process(process: str, sampler: str) -> None:
    objective = Objective(get_process(process))
    alpha_bar = scheduler_for(objective, sampler).alphas_cumprod
    assert len(alpha_bar) == (994 if (process, sampler) == ("cosine", "dpm++2m") else 1000)
    index = torch.arange(1, 994)  # the cosine process is sampled from there
    alpha, _ = objective.process.marginal(index if process == "ddpm" else index.double() / 999)
    torch.testing.assert_close(alpha_bar[index].double(), alpha.double().square(), rtol=1e-3, atol=1e-6)
    assert (alpha_bar[:994].diff() < 0).all()


def test_dpm_solver_clips_as_ours_does() -> None:
    scheduler = scheduler_for(Objective(get_process("vp")), "dpm++2m", clip=True)
    scheduler.set_timesteps(1)
    x0 = scheduler.step(torch.full((1, 1, 2, 2), 50.0), scheduler.timesteps[0], torch.ones(1, 1, 2, 2)).prev_sample
    assert x0.abs().max() <= 1.0


@pytest.mark.parametrize(
    "changes", [{"scaling_method": "cs"}, {"scaling_method": "ls"}, {"scaling_method": "ls", **UNET}]
)
def test_an_exported_pipeline_loads_as_a_run(tmp_path: Path, changes: dict[str, Any]) -> None:
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
            as_network(back.model)(x, time), as_network(run.model)(x, time), rtol=1e-5, atol=1e-5
        )
    with pytest.raises(ValueError, match="is of step 2, not 7"):
        load_run(tmp_path / "pipe", step=7)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trained(tmp_path / "run", scaling_method="ls")
    out = tmp_path / "pipe"
    assert main(["export", str(tmp_path / "run"), "--format", "diffusers", "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    assert "trust_remote_code=True" in printed
    assert "Loading requires scalelong" in printed
    assert "library_name: diffusers" in (out / "README.md").read_text()
    assert main(["sample", str(out), "--num", "2", "--out", str(tmp_path / "images")]) == 0
    assert (tmp_path / "images.png").is_file()
    assert main(["export", str(tmp_path / "run"), "--format", "diffusers", "--out", str(out)]) == 1
    assert "already exists" in capsys.readouterr().err
    assert load_run(out).weights == "ema"
    with pytest.raises(ValueError, match="holds the averaged ones only"):
        load_run(out, weights="model")
    description = json.loads((out / "scalelong_run.json").read_text())
    (out / "scalelong_run.json").write_text(json.dumps({"step": description["step"]}))
    with pytest.raises(CheckpointError, match=r"scalelong_run\.json: has another sha256"):
        load_run(out)
    (out / "manifest.json").unlink()  # as in exports of older versions
    with pytest.raises(CheckpointError, match="is damaged"):
        load_run(out)


def test_the_file_of_an_exported_uvit_imports_nothing_of_ours() -> None:
    """Not even where it is needed only on a GPU: diffusers refuses a file with an import that is not there."""
    for text in (_uvit_file(), _pipeline_file()):
        assert not re.findall(r"^\s*(?:from|import) scalelong.*", text, flags=re.M)


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
    subprocess.run([sys.executable, "-c", program, str(tmp_path / "images.pt")], check=True, timeout=300)
    expected = reference(run, noise_of(run))
    sampled = torch.load(tmp_path / "images.pt", weights_only=True)
    torch.testing.assert_close(sampled, expected, rtol=1e-3, atol=1e-3)
