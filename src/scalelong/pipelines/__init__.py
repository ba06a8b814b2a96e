"""Export a trained run: its weights for `scalelong.load`, or a pipeline that diffusers loads.

The folder contains the code of the run's sampler, and of U-ViT if used, so the pipeline samples as the run does. A `plain`
pipeline only uses diffusers, whose schedulers round the times.
"""

from __future__ import annotations

import inspect
import json
import math
import re
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any, get_args

import diffusers
import torch

import scalelong
from scalelong import errors, parametrization, random
from scalelong.backbones import UViT, uvit
from scalelong.backbones.autoencoder import Autoencoder
from scalelong.data.latents import decoder
from scalelong.data.text import TextEncoder
from scalelong.diffusion import DDPM, EDM, Objective, objective, process, resolve_sampling, sampling
from scalelong.diffusion.process import LAST_TIME, TIME_SCALE, ContinuousVP, Process
from scalelong.files import atomic_folder, write_manifest, write_text
from scalelong.pipelines import pipeline, uvit_model
from scalelong.pipelines.uvit_model import UViTModel
from scalelong.report import read_run
from scalelong.report.card import model_card, pipeline_card
from scalelong.runs import CONFIG, validation
from scalelong.runs.config import to_yaml
from scalelong.runs.settings import Conditioning, SamplingPrecision, SamplingSettings
from scalelong.skips import is_scaled, scaling_of
from scalelong.skips.feature_conditioning import conditioning_of, is_conditioned
from scalelong.skips.feature_conditioning import to_json as features_to_json
from scalelong.skips.persistence import SCALING_NAME
from scalelong.training import TrainedRun
from scalelong.training.run import AUTOENCODER, DENOISER, DESCRIPTION, INDEX, ExportedRun

__all__ = ["Exported", "export_pipeline", "export_weights", "scheduler_for"]

Component = tuple[str | None, str | None]  # library or file, class

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
    """An exported pipeline folder and its requirements."""

    folder: Path
    plain: bool  # pure diffusers, without code in the folder
    needs_us: str  # why loading requires scalelong; "" if it does not
    sampler: str

    def loading(self) -> str:
        """Python code that loads the pipeline."""
        trust = "" if self.plain else ", trust_remote_code=True"
        return f'from diffusers import DiffusionPipeline\n\npipe = DiffusionPipeline.from_pretrained("{self.folder}"{trust})'


def export_weights(run: TrainedRun, folder: str | Path) -> Path:
    """Write the weights for `scalelong.load` with their configuration and a model card; returns the folder.

    The folder must be new, empty or an earlier export.
    """
    folder = Path(folder)
    if folder.is_dir() and any(folder.iterdir()) and not (folder / SCALING_NAME).is_file():
        raise ValueError(f"out: {folder} is not empty and holds no export; choose another folder")
    card = model_card(read_run(run.folder), run.step, run.weights, run.shape, run.conditioning)
    out = scalelong.save(run.model, folder)
    write_text(out / CONFIG, to_yaml(run.config))
    write_text(out / "README.md", card)
    return out


def export_pipeline(run: TrainedRun, folder: str | Path, sampler: str = "", *, plain: bool = False) -> Exported:
    """Write a diffusers pipeline with a model card, atomically; the scaling of `run.model` is folded if that is exact.

    sampler: default: the run's. plain: no code, for unconditional UNets on pixels; see `scheduler_for`.

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
    if settings.skip_tuning != 1:
        tuned = f"the run samples with Skip-Tuning {settings.skip_tuning:g}, which a pipeline cannot"
        raise ValueError(f"sampling.skip_tuning: {tuned}; train with 1 and tune in scalelong sample and evaluate")
    steps = settings.steps if sampler in ("", settings.sampler) else 0
    settings = resolve_sampling(
        replace(settings, sampler=sampler or settings.sampler, steps=steps), run.objective.process
    )
    scheduler = _scheduler(run, settings, plain)
    autoencoder = decoder(run.config.data.name, "cpu", run.data)
    parametrization.fold(run.model)
    needs_us = "model: is conditioned on its own features" if is_conditioned(run.model) else ""
    folded = True
    try:
        scalelong.fold(run.model)
    except ValueError as error:  # not exact; the model is unchanged
        needs_us, folded = str(error), False
    if plain and needs_us:
        raise ValueError(f"plain: the weights alone are not the model ({needs_us}); leave plain out")
    with atomic_folder(folder) as stage:
        if scheduler is not None:
            scheduler.save_pretrained(stage / "scheduler")
        components = {
            "scheduler": ("diffusers", type(scheduler).__name__) if plain else (None, None),
            DENOISER: _write_denoiser(run.model, stage / DENOISER, changed=bool(needs_us)),
            **_write_encoders(run, stage, autoencoder),
        }
        name = "DDPMPipeline" if plain else ["pipeline", "ScaleLongPipeline"]
        options = {} if plain else _options(run, settings, autoencoder)
        index = {"_class_name": name, "_diffusers_version": diffusers.__version__, **components, **options}
        description = ExportedRun(run.step, run.weights, run.shape, folded, run.data, run.conditioning)
        (stage / INDEX).write_text(json.dumps(index, indent=2) + "\n")
        (stage / DESCRIPTION).write_text(json.dumps(asdict(description), indent=1) + "\n")
        (stage / CONFIG).write_text(to_yaml(replace(run.config, sampling=settings)))
        card = pipeline_card(read_run(run.folder), run.step, run.weights, settings, plain)
        (stage / "README.md").write_text(card, encoding="utf-8")
        if not plain:
            (stage / "pipeline.py").write_text(_pipeline_file(), encoding="utf-8")
        write_manifest(stage)
    return Exported(folder, plain, needs_us, settings.sampler)


def _scheduler(run: TrainedRun, settings: SamplingSettings, plain: bool) -> Any:
    """The diffusers scheduler for the folder; None if there is none and it is not needed."""
    if not plain:
        try:
            return scheduler_for(run.objective, settings.sampler, settings.clip)
        except ValueError:
            return None
    conditional, latent = run.conditioning != Conditioning(), run.config.data.name.startswith("latents:")
    if run.config.model.backbone != "unet" or conditional or latent:
        raise ValueError("plain: diffusers has a pipeline only for unconditional UNets on pixels; leave plain out")
    scheduler = scheduler_for(run.objective, settings.sampler, settings.clip)
    clipped_ddim = settings.sampler == "ddim" and settings.clip  # DDPMPipeline continues from the unclipped image
    if scheduler.init_noise_sigma != 1.0 or clipped_ddim or run.objective.process.name == "cosine":
        about = f"{settings.sampler} with the process {run.objective.process.name}{', clipped' * clipped_ddim}"
        raise ValueError(f"plain: DDPMPipeline cannot sample by {about}; choose sampler dpm++2m, or leave plain out")
    return scheduler


def _write_denoiser(model: Any, folder: Path, changed: bool) -> Component:
    if not isinstance(model, UViT):
        model.save_pretrained(folder)
        name = type(model).__name__
        if not changed:
            return "diffusers", name
        (folder / "modeling_scaled.py").write_text(_SCALED_UNET.format(name=name), encoding="utf-8")
        return "modeling_scaled", f"Scaled{name}"
    config = scaling_of(model).config if is_scaled(model) else None
    scaling = {"method": config.method, "options": dict(config.options)} if config else None
    sizes = asdict(model.config)
    del sizes["checkpointing"]
    features = features_to_json(conditioning_of(model)) if is_conditioned(model) else None
    added = {"long_skip_scaling": scaling, "condition_on_features": features}
    wrapped = UViTModel(sample_size=sizes.pop("image_size"), **sizes, **added)
    wrapped.uvit.load_state_dict(model.state_dict())
    wrapped.save_pretrained(folder)
    (folder / "modeling_uvit.py").write_text(_uvit_file(), encoding="utf-8")
    return "modeling_uvit", UViTModel.__name__


def _uvit_file() -> str:
    """uvit.py and uvit_model.py as one file, since diffusers loads one file per component."""
    return _joined(uvit, uvit_model)


def _pipeline_file() -> str:
    """pipeline.py with its dependencies, as one file."""
    precisions = f"SamplingPrecision = Literal{list(get_args(SamplingPrecision))}\n\n\n"
    settings = "from dataclasses import dataclass\nfrom typing import Literal\n\n" + precisions
    settings += inspect.getsource(SamplingSettings)
    return _joined(errors, validation, random, settings, process, objective, sampling, pipeline)


def _joined(*parts: ModuleType | str) -> str:
    """Join modules (or texts) into one file without imports of scalelong."""
    texts = [part if isinstance(part, str) else inspect.getsource(part) for part in parts]
    whole = "\n\n".join(texts).replace(_FUTURE, "")
    return _FUTURE + re.sub(r"^from scalelong.*\n", "", whole, flags=re.M)


def _write_encoders(run: TrainedRun, folder: Path, autoencoder: Autoencoder | None) -> dict[str, Component]:
    """Write the autoencoder and the text encoder with its tokenizer, if used."""
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


def _options(run: TrainedRun, sampling: SamplingSettings, autoencoder: Autoencoder | None) -> dict[str, Any]:
    """The arguments of ScaleLongPipeline that are not components."""
    sizes = asdict(run.conditioning)
    options = {key: sizes[key] for key in ("num_classes", "null_class", "class_names", "text_tokens")} | {
        "null_text": bool(run.conditioning.text_dim) and run.config.condition.drop > 0,
        "process": run.objective.process.name,
        "prediction": run.objective.prediction,
        "sampler": sampling.sampler,
        "clip": sampling.clip,
        "default_steps": sampling.steps,
        "default_guidance": sampling.guidance,
        "guidance_interval": [bound if math.isfinite(bound) else None for bound in sampling.guidance_interval],
    }
    if autoencoder is not None:
        options |= {"latent_scale": autoencoder.scale, "latent_shift": autoencoder.shift}
    return options


def scheduler_for(objective: Objective, sampler: str = "dpm++2m", clip: bool = False) -> Any:
    """The diffusers scheduler that matches `sampler`, with the noise levels of the process at integer timesteps.

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
