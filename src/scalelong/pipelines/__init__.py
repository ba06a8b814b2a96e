"""Export a trained run: its weights for `scalelong.load`, or a pipeline that diffusers loads.

A pipeline is plain diffusers where that is exact; otherwise the folder also holds the code of its pipeline and model.
"""

from __future__ import annotations

import inspect
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import diffusers
import torch

import scalelong
from scalelong.backbones import UViT, uvit
from scalelong.backbones.autoencoder import Autoencoder
from scalelong.data.latents import decoder
from scalelong.data.text import TextEncoder
from scalelong.diffusion import DDPM, EDM, Objective, resolve_sampling
from scalelong.diffusion.process import LAST_TIME, TIME_SCALE, ContinuousVP, Process
from scalelong.files import atomic_folder, write_manifest, write_text
from scalelong.pipelines import pipeline, uvit_model
from scalelong.pipelines.uvit_model import UViTModel
from scalelong.report import read_run
from scalelong.report.card import model_card, pipeline_card
from scalelong.runs import CONFIG
from scalelong.runs.settings import to_yaml
from scalelong.skips import scaling_of
from scalelong.training import TrainedRun
from scalelong.training.run import AUTOENCODER, DENOISER, DESCRIPTION, INDEX, ExportedRun

__all__ = ["Exported", "export_pipeline", "export_weights", "scheduler_for"]

Component = tuple[str, str]  # library or file, class

_PREDICTIONS = {"noise": "epsilon", "x0": "sample", "v": "v_prediction"}
_FUTURE = "from __future__ import annotations\n"
_SCALED_UNET = '''"""A {name} of diffusers that is loaded with its scaled long skips."""

import scalelong
from diffusers import {name}


class Scaled{name}({name}):
    @classmethod
    def from_pretrained(cls, folder, **options):
        dtypes = {{key: options[key] for key in ("torch_dtype", "dtype") if options.get(key) is not None}}
        return scalelong.from_pretrained({name}, folder, **dtypes)
'''


@dataclass(frozen=True)
class Exported:
    """A written pipeline folder and what loading it requires."""

    folder: Path
    plain: bool  # diffusers alone loads it, without code in the folder
    needs_us: str  # why loading requires this package; "": it does not

    def loading(self) -> str:
        """Python code that loads the pipeline."""
        trust = "" if self.plain else ", trust_remote_code=True"
        return f'from diffusers import DiffusionPipeline\n\npipe = DiffusionPipeline.from_pretrained("{self.folder}"{trust})'


def export_weights(run: TrainedRun, folder: str | Path) -> Path:
    """Write the weights for `scalelong.load` with their configuration and a model card; returns the folder."""
    card = model_card(read_run(run.folder), run.step, run.weights, run.shape, run.conditioning)
    out = scalelong.save(run.model, folder)
    write_text(out / CONFIG, to_yaml(run.config))
    write_text(out / "README.md", card)
    return out


def export_pipeline(run: TrainedRun, folder: str | Path, sampler: str = "") -> Exported:
    """Write a diffusers pipeline with a model card, atomically; the scaling of `run.model` is folded if that is exact.

    sampler: of the exported scheduler; default: the run's, or "dpm++2m" if it has none.

    >>> from dataclasses import replace
    >>> from scalelong.runs.presets import get_preset
    >>> from scalelong.training import load_run, train
    >>> config = get_preset("digits-demo")
    >>> run = load_run(train(replace(config, training=replace(config.training, steps=1, sample_every=0)), "run"))
    >>> export_pipeline(run, "pipeline").plain  # a U-ViT: loading needs trust_remote_code=True
    False
    """
    folder = Path(folder)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"out: {folder} already exists; choose another folder, or remove it")
    settings = run.config.sampling
    steps = settings.steps if sampler in ("", settings.sampler) else 0
    settings = replace(settings, sampler=sampler or settings.sampler or "dpm++2m", steps=steps)
    settings = resolve_sampling(settings, run.objective.process)
    scheduler = scheduler_for(run.objective, settings.sampler, settings.clip)
    autoencoder = decoder(run.config.data.name, "cpu", run.data)
    card = pipeline_card(read_run(run.folder), run.step, run.weights)
    needs_us = ""
    try:
        scalelong.fold(run.model)
    except ValueError as error:  # not exact; the model is unchanged
        needs_us = str(error)
    with atomic_folder(folder) as stage:
        scheduler.save_pretrained(stage / "scheduler")
        components = {
            "scheduler": ("diffusers", type(scheduler).__name__),
            DENOISER: _write_denoiser(run.model, stage / DENOISER, scaled=bool(needs_us)),
            **_write_encoders(run, stage, autoencoder),
        }
        plain = _is_plain(run, components, scheduler)
        name = "DDPMPipeline" if plain else ["pipeline", "ScaleLongPipeline"]
        options = {} if plain else _options(run, settings.steps, autoencoder)
        index = {"_class_name": name, "_diffusers_version": diffusers.__version__, **components, **options}
        description = ExportedRun(run.step, run.weights, run.shape, not needs_us, run.data, run.conditioning)
        (stage / INDEX).write_text(json.dumps(index, indent=2) + "\n")
        (stage / DESCRIPTION).write_text(json.dumps(asdict(description), indent=1) + "\n")
        (stage / CONFIG).write_text(to_yaml(run.config))
        (stage / "README.md").write_text(card, encoding="utf-8")
        if not plain:
            (stage / "pipeline.py").write_text(inspect.getsource(pipeline), encoding="utf-8")
        write_manifest(stage)
    return Exported(folder, plain, needs_us)


def _is_plain(run: TrainedRun, components: Mapping[str, Component], scheduler: Any) -> bool:
    """Whether DDPMPipeline samples as the run does: it scales no noise, does not let DDIM continue from the clipped image,
    and does not set the first step, so that DPM-Solver++ fails where two timesteps round to it (cosine)."""
    alone = components.keys() == {"scheduler", DENOISER} and components[DENOISER] == ("diffusers", "UNet2DModel")
    clipped_ddim = isinstance(scheduler, diffusers.DDIMScheduler) and scheduler.config.clip_sample
    supported = scheduler.init_noise_sigma == 1.0 and not clipped_ddim and run.objective.process.name != "cosine"
    return alone and supported and not run.conditioning.num_classes


def _write_denoiser(model: Any, folder: Path, scaled: bool) -> Component:
    if not isinstance(model, UViT):
        model.save_pretrained(folder)
        name = type(model).__name__
        if not scaled:
            return "diffusers", name
        (folder / "modeling_scaled.py").write_text(_SCALED_UNET.format(name=name), encoding="utf-8")
        return "modeling_scaled", f"Scaled{name}"
    config = scaling_of(model).config if scaled else None
    scaling = {"method": config.method, "options": dict(config.options)} if config else None
    sizes = asdict(model.config)
    del sizes["checkpointing"]
    wrapped = UViTModel(sample_size=sizes.pop("image_size"), **sizes, long_skip_scaling=scaling)
    wrapped.uvit.load_state_dict(model.state_dict())
    wrapped.save_pretrained(folder)
    (folder / "modeling_uvit.py").write_text(_uvit_file(), encoding="utf-8")
    return "modeling_uvit", UViTModel.__name__


def _uvit_file() -> str:
    """uvit.py and uvit_model.py as one file: diffusers loads a single one per component."""
    model = inspect.getsource(uvit_model).replace("from scalelong.backbones.uvit import UViT, UViTConfig\n", "")
    return _FUTURE + f"{inspect.getsource(uvit)}\n\n{model}".replace(_FUTURE, "")


def _write_encoders(run: TrainedRun, folder: Path, autoencoder: Autoencoder | None) -> dict[str, Component]:
    """The autoencoder of latents and the text encoder with its tokenizer, where the run has them."""
    parts = {AUTOENCODER: ("diffusers", autoencoder.model)} if autoencoder is not None else {}
    if run.conditioning.text_dim:
        encoder = TextEncoder(run.config.condition.encoder, run.conditioning.text_tokens, run.config.data.root)
        if run.conditioning.encoder and encoder.fingerprint != run.conditioning.encoder:
            raise ValueError(
                f"condition.encoder: the weights of {encoder.name} changed since the training; restore them"
            )
        parts |= {"text_encoder": ("transformers", encoder.model), "tokenizer": ("transformers", encoder.tokenizer)}
    for name, (_, part) in parts.items():
        part.save_pretrained(folder / name)
    return {name: (library, type(part).__name__) for name, (library, part) in parts.items()}


def _options(run: TrainedRun, steps: int, autoencoder: Autoencoder | None) -> dict[str, Any]:
    """The arguments of ScaleLongPipeline that are not components."""
    sampling, sizes = run.config.sampling, asdict(run.conditioning)
    options = {key: sizes[key] for key in ("num_classes", "null_class", "class_names", "text_tokens")} | {
        "null_text": bool(run.conditioning.text_dim) and run.config.condition.drop > 0,
        "default_steps": steps,
        "default_guidance": sampling.guidance,
        "guidance_interval": [bound if math.isfinite(bound) else None for bound in sampling.guidance_interval],
    }
    if autoencoder is not None:
        options |= {"latent_scale": autoencoder.scale, "latent_shift": autoencoder.shift}
    return options


def scheduler_for(objective: Objective, sampler: str = "dpm++2m", clip: bool = False) -> Any:
    """The scheduler of diffusers that solves as `sampler` does, with the noise levels and times of the process.

    >>> from scalelong.diffusion import VPSDE
    >>> type(scheduler_for(Objective(VPSDE()), "heun")).__name__
    'HeunDiscreteScheduler'
    """
    process = objective.process
    exact = ("dpm++2m", "dpm++3m") if isinstance(process, EDM) else ("ddim", "ddpm", "dpm++2m", "dpm++3m", "heun")
    if sampler not in exact:
        choices = f"choose one of {', '.join(exact)}"
        raise ValueError(f"sampler: no scheduler for {sampler!r} with the process {process.name!r}; {choices}")
    clipping = {"thresholding": True, "sample_max_value": 1.0, "dynamic_thresholding_ratio": 1.0} if clip else {}
    order = {"solver_order": 3 if sampler == "dpm++3m" else 2, "final_sigmas_type": "zero"}
    if isinstance(process, EDM):
        sigmas = {key: getattr(process, key) for key in ("sigma_min", "sigma_max", "sigma_data", "rho")}
        return diffusers.EDMDPMSolverMultistepScheduler(**sigmas, **clipping, **order)
    divides = sampler in ("ddim", "ddpm")
    common = {**_noise_levels(process, divides), "prediction_type": _PREDICTIONS[objective.prediction]}
    if sampler == "ddim":
        return diffusers.DDIMScheduler(**common, clip_sample=clip, set_alpha_to_one=True, timestep_spacing="trailing")
    if sampler == "ddpm":
        return diffusers.DDPMScheduler(**common, clip_sample=clip, timestep_spacing="trailing")
    if sampler == "heun":
        return diffusers.HeunDiscreteScheduler(**common, clip_sample=clip, use_exponential_sigmas=True)
    return diffusers.DPMSolverMultistepScheduler(**common, **clipping, **order, use_lu_lambdas=True)


def _noise_levels(process: Process, divides: bool) -> dict[str, Any]:
    """beta_i = 1 - alpha_i^2 / alpha_{i-1}^2 of the timesteps; in continuous time, timestep i is t = i / 999.

    Schedulers divide by the noise, which is 0 at t = 0, so entry 0 is just below LAST_TIME. Entries beyond the start time
    are left out, or, for solvers that divide the number of timesteps by that of the steps, stay at its noise level.
    """
    if isinstance(process, DDPM):
        betas = {"beta_start": process.beta_start, "beta_end": process.beta_end, "beta_schedule": "linear"}
        return {"num_train_timesteps": process.num_steps, **betas}
    if not isinstance(process, ContinuousVP):
        raise ValueError(f"export: diffusers has no scheduler for the process {process.name!r}")
    times = torch.arange(int(TIME_SCALE) + 1, dtype=torch.float64) / TIME_SCALE
    times[0] = 0.9 * LAST_TIME
    times = times.clamp(max=process.start_time) if divides else times[times <= process.start_time]
    alpha, _ = process.marginal(times)
    alpha_bar = torch.cat([alpha.new_ones(1), alpha.square()])
    return {"num_train_timesteps": len(times), "trained_betas": (1 - alpha_bar[1:] / alpha_bar[:-1]).tolist()}
