"""Write a trained run as a diffusers pipeline: plain diffusers where that is exact, else with its own code in the folder."""

from __future__ import annotations

import importlib
import inspect
import json
import math
import re
import shutil
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import diffusers
from torch import nn

import scalelong
from scalelong.backbones import UViT
from scalelong.backbones.autoencoder import Autoencoder
from scalelong.data.latents import decoder
from scalelong.data.text import TextEncoder
from scalelong.pipelines import pipeline as pipeline_code
from scalelong.pipelines import scaled_unet as scaled_unet_code
from scalelong.pipelines import uvit_model as uvit_model_code
from scalelong.pipelines.schedulers import scheduler_for
from scalelong.pipelines.uvit_model import UViTModel
from scalelong.skips import scaling_of
from scalelong.training import TrainedRun
from scalelong.training.exported import AUTOENCODER, DENOISER, Description

_UVIT_FILE = "modeling_uvit"
_UNET_FILE = "modeling_scaled"
_FUTURE = "from __future__ import annotations\n"
_OUR_IMPORT = re.compile(r"^from (scalelong\.[\w.]+) import [^(\n]+\n", re.MULTILINE)

Entry = tuple[str, str]  # library or file, class


@dataclass(frozen=True)
class Exported:
    """What was written, and what loading it needs."""

    folder: Path
    plain: bool  # diffusers alone loads it
    needs_us: str  # why loading it needs this package; "": it does not

    def loading(self) -> str:
        """The lines that load it."""
        trust = "" if self.plain else ", trust_remote_code=True"
        return f'from diffusers import DiffusionPipeline\n\npipe = DiffusionPipeline.from_pretrained("{self.folder}"{trust})'


def export_pipeline(run: TrainedRun, folder: str | Path, weights: str = "ema", card: str = "") -> Exported:
    """Write the folder, whole or not at all; the run's model is folded in place where that is exact."""
    folder = Path(folder)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"out: {folder} is there already; choose another folder, or remove it")
    autoencoder = decoder(run.config.data.name, "cpu", run.data)
    reason = _fold(run.model)
    staged = folder.parent / f".{folder.name}-staged"
    shutil.rmtree(staged, ignore_errors=True)
    staged.mkdir(parents=True)
    try:
        plain = _write(run, staged, autoencoder, scaled=bool(reason))
        Description(run.step, weights, run.shape, not reason, run.data, run.conditioning).write(staged, run.config)
        exported = Exported(folder, plain, reason)
        if card:
            (staged / "README.md").write_text(card)
        if folder.is_dir():
            folder.rmdir()
        staged.replace(folder)
    finally:
        shutil.rmtree(staged, ignore_errors=True)
    return exported


def _fold(model: nn.Module) -> str:
    """Bake the coefficients into the weights; where that is not exact, why, and nothing is changed."""
    try:
        scalelong.fold(model)
    except ValueError as error:
        return str(error)
    return ""


def _write(run: TrainedRun, folder: Path, autoencoder: Autoencoder | None, scaled: bool) -> bool:
    """All parts and the list of them; whether plain diffusers is enough."""
    sampling, sizes = run.config.sampling, run.conditioning
    scheduler = scheduler_for(run.objective, sampling.sampler or "dpm++2m", sampling.clip)
    scheduler.save_pretrained(folder / "scheduler")
    parts: dict[str, Entry] = {
        "scheduler": ("diffusers", type(scheduler).__name__),
        DENOISER: _write_denoiser(run.model, folder / DENOISER, scaled),
    }
    told = bool(sizes.num_classes or sizes.text_dim)
    steps_alone = hasattr(scheduler, "alphas_cumprod")  # DDPMPipeline neither scales its inputs nor its first noise
    if parts[DENOISER] == ("diffusers", "UNet2DModel") and not told and autoencoder is None and steps_alone:
        _write_index(folder, "DDPMPipeline", parts, {})
        return True
    settings = {
        "num_classes": sizes.num_classes,
        "null_class": sizes.null_class,
        "class_names": list(sizes.class_names),
        "text_tokens": sizes.text_tokens,
        "null_text": bool(sizes.text_dim) and run.config.condition.drop > 0,
        "default_steps": sampling.steps or 50,
        "default_guidance": sampling.guidance,
        "guidance_interval": [bound if math.isfinite(bound) else None for bound in sampling.guidance_interval],
    }
    if autoencoder is not None:
        autoencoder.model.save_pretrained(folder / AUTOENCODER)
        parts[AUTOENCODER] = ("diffusers", type(autoencoder.model).__name__)
        settings |= {"latent_scale": autoencoder.scale, "latent_shift": autoencoder.shift}
    if sizes.text_dim:
        parts |= _write_text_encoder(run, folder)
    (folder / "pipeline.py").write_text(inspect.getsource(pipeline_code))
    _write_index(folder, ["pipeline", "ScaleLongPipeline"], parts, settings)
    return False


def _write_denoiser(model: Any, folder: Path, scaled: bool) -> Entry:
    if not isinstance(model, UViT):
        model.save_pretrained(folder)
        name = type(model).__name__
        if not scaled:
            return "diffusers", name
        (folder / f"{_UNET_FILE}.py").write_text(inspect.getsource(scaled_unet_code))
        return _UNET_FILE, f"Scaled{name}"
    scaling = None
    if scaled:
        config = scaling_of(model).config
        scaling = {"method": config.method, "options": dict(config.options)}
    taken = {field.name: getattr(model.config, field.name) for field in fields(model.config)}
    taken.pop("checkpointing")
    wrapped = UViTModel(sample_size=taken.pop("image_size"), **taken, long_skip_scaling=scaling)
    wrapped.uvit.load_state_dict(model.state_dict())
    wrapped.save_pretrained(folder)
    (folder / f"{_UVIT_FILE}.py").write_text(_uvit_file())
    return _UVIT_FILE, UViTModel.__name__


def _uvit_file() -> str:
    """The network and its model for diffusers in one file, which is what diffusers fetches of a part."""
    parts: dict[str, str] = {}
    _gather(uvit_model_code.__name__, parts)
    return f"{_FUTURE}\n" + "\n\n".join(parts.values())


def _gather(name: str, parts: dict[str, str]) -> None:
    """The source of a module, after that of the modules of ours that it imports, without these imports."""
    source = inspect.getsource(importlib.import_module(name))
    for inner in _OUR_IMPORT.findall(source):
        if inner not in parts:
            _gather(inner, parts)
    source = _OUR_IMPORT.sub("", source).replace(_FUTURE, "")
    parts[name] = source.replace('"scalelong::', '"scalelong_exported::')  # an operator's name is given only once


def _write_text_encoder(run: TrainedRun, folder: Path) -> dict[str, Entry]:
    """The encoder that the run was trained with; another one would say something else."""
    encoder = TextEncoder(run.config.condition.encoder, run.conditioning.text_tokens, run.config.data.root)
    if run.conditioning.encoder and encoder.fingerprint != run.conditioning.encoder:
        raise ValueError(
            f"condition.encoder: {encoder.name} has other weights than the run was trained with; put the right ones back"
        )
    encoder.model.save_pretrained(folder / "text_encoder")
    encoder.tokenizer.save_pretrained(folder / "tokenizer")
    return {
        "text_encoder": ("transformers", type(encoder.model).__name__),
        "tokenizer": ("transformers", type(encoder.tokenizer).__name__),
    }


def _write_index(folder: Path, name: str | list[str], parts: dict[str, Entry], settings: dict[str, Any]) -> None:
    content = {"_class_name": name, "_diffusers_version": diffusers.__version__, **parts, **settings}
    (folder / "model_index.json").write_text(json.dumps(content, indent=2) + "\n")
