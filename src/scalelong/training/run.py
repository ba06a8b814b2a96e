"""Load a trained run, from its folder or from an exported pipeline, and sample images from it.

Image i is a function of (seed, i), up to the rounding of kernels that depend on the batch size.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from scalelong import skips
from scalelong.backbones import as_network, fused
from scalelong.backbones.autoencoder import Autoencoder, load_autoencoder
from scalelong.data import Shape, to_uint8
from scalelong.data.latents import decoder
from scalelong.diffusion import Network, Objective, resolve_sampling, sample
from scalelong.errors import require, require_number, short
from scalelong.files import MANIFEST, check_manifest, inside, naming_damage, read_json
from scalelong.progress import Progress
from scalelong.runs import CHECKPOINTS, CONFIG
from scalelong.runs.config import from_yaml, short_lines
from scalelong.runs.folder import checkpoints, read_config
from scalelong.runs.settings import (
    Conditioning,
    DistillationSettings,
    MupSettings,
    RunConfig,
    SamplingSettings,
    ScalingSettings,
)
from scalelong.scaling.baselines import TunedScaling
from scalelong.skips.hooks import replace_scaling, scaling_of
from scalelong.skips.persistence import SCALING_NAME
from scalelong.training.build import build_model, build_objective
from scalelong.training.checkpoint import CheckpointError, load_checkpoint, load_newest
from scalelong.training.condition import Condition
from scalelong.training.distillation import remove_head
from scalelong.training.step import DTYPES, autocast

logger = logging.getLogger(__name__)

INDEX = "model_index.json"  # diffusers' names, except the next one
DESCRIPTION = "scalelong_run.json"
DENOISER = "unet"
AUTOENCODER = "vae"
_WEIGHTS = "diffusion_pytorch_model*.safetensors"
ToPixels = Callable[[Tensor], Tensor]  # samples, float (B, C, H, W), -> uint8 images


@dataclass(frozen=True)
class TrainedRun:
    """A trained model with everything needed for sampling.

    >>> from scalelong.runs.settings import ModelSettings, TrainingSettings
    >>> from scalelong.training import train
    >>> model = ModelSettings(patch_size=4, dim=16, depth=4, heads=2)
    >>> folder = train(RunConfig(model=model, training=TrainingSettings(steps=1, batch_size=8)), "sampled-run")
    >>> load_run(folder).sample(SamplingSettings("ddim", steps=2, count=16)).shape
    torch.Size([16, 1, 8, 8])
    """

    folder: Path
    config: RunConfig
    model: nn.Module
    objective: Objective
    shape: Shape
    step: int
    conditioning: Conditioning = field(default_factory=Conditioning)
    data: str = ""  # fingerprint of the training data
    weights: str = "ema"  # or "model": raw weights

    def sample(self, settings: SamplingSettings, condition: Condition | None = None, **options: Any) -> Tensor:
        """Sample uint8 images (N, C, H, W) on the CPU; see `sample_batches` for the arguments."""
        return torch.cat(list(self.sample_batches(settings, condition, **options)))

    def sample_batches(
        self,
        settings: SamplingSettings,
        condition: Condition | None = None,  # default: none
        *,
        from_data: bool = False,  # conditions distributed as in the data
        to_pixels: ToPixels | None = None,  # default: loaded
        **options: Any,  # of the function `sample_batches`
    ) -> Iterator[Tensor]:
        """Batches of uint8 images on the CPU, in the order of their indices."""
        device = next(self.model.parameters()).device
        condition = condition or Condition(device)
        options["condition"] = condition.from_data if from_data else condition.for_samples
        options["null"] = condition.null_condition(settings)
        options["to_pixels"] = to_pixels or load_pixels(self, device)
        return sample_batches(self.objective, as_network(self.model), self.shape, settings, **options)


def load_run(
    folder: str | Path, *, weights: str = "ema", step: int | None = None, device: str | torch.device = "cpu"
) -> TrainedRun:
    """Load a run or diffusers export at its newest checkpoint, with "ema" or raw ("model") weights.

    >>> from dataclasses import replace
    >>> from scalelong.training import get_preset, train
    >>> preset = get_preset("digits-demo")
    >>> short = replace(preset.training, steps=1, sample_every=0)
    >>> run = load_run(train(replace(preset, training=short), "short-run"))
    >>> run.sample(SamplingSettings("ddim", steps=2, count=3), seed=1).shape
    torch.Size([3, 1, 8, 8])
    """
    folder = Path(folder)
    if str(device).partition(":")[0] not in ("cpu", "cuda"):
        raise ValueError(f"device: must be cpu or cuda, got {device}; sampling needs float64 on the device, use cpu")
    if torch.device(device).type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device: {device} is asked for, but torch finds no GPU; use cpu")
    run = (_load_exported if is_exported(folder) else _load_checkpoint)(folder, weights, step)
    run.model.to(device).eval().requires_grad_(False)
    return run


def _load_checkpoint(folder: Path, weights: str, step: int | None) -> TrainedRun:
    config, found = read_config(folder), checkpoints(folder)
    require(weights in ("ema", "model"), "weights", "ema or model", weights)
    if not found and (folder / SCALING_NAME).is_file():
        raise CheckpointError(
            f"{folder}: holds weights for scalelong.load, it is not a run folder; give the run itself"
        )
    if not found and (folder / MANIFEST).is_file():
        raise CheckpointError(
            f"{folder}: is a checkpoint, not a run folder; give the run, and checkpoint to choose a step"
        )
    if not found:
        raise CheckpointError(f"{folder}: holds no checkpoint yet; train it further")
    if step is not None and step not in found:
        raise ValueError(f"step: no checkpoint at {step}; available: {', '.join(map(str, found))}")
    newest = load_newest(inside(folder, CHECKPOINTS), weights) if step is None else None
    path, tensors, state = newest or (found[step or 0], *load_checkpoint(found[step or 0], weights))
    shape, conditioning = image_shape(state.get("shape"), path), Conditioning.from_state(state.get("condition"))
    model = build_model(config, shape, conditioning)
    _load_weights(model, tensors[weights], path)
    remove_head(model)  # only used in training
    require_number(f"{path}: step", state.get("step"), 0, 10**12, whole=True)
    step, data, objective = state["step"], str(state.get("data", "")), build_objective(config)
    return TrainedRun(folder, config, model, objective, shape, step, conditioning, data, weights)


def _load_weights(model: nn.Module, tensors: Mapping[str, Tensor], path: Path) -> None:
    try:
        model.load_state_dict(tensors)
    except (RuntimeError, ValueError) as error:
        text = f"{path}: holds weights of another model ({short_lines(error)}); restore it and its {CONFIG}"
        raise CheckpointError(text) from error


def image_shape(stored: Any, where: Path) -> Shape:
    """(C, H, W) as stored, checked."""
    if not isinstance(stored, list) or len(stored) != 3:
        raise CheckpointError(f"{where}: is damaged (its shape is {short(stored)}); restore it")
    for value in stored:
        require_number(f"{where}: shape", value, 1, 2**16, whole=True)
    return stored[0], stored[1], stored[2]


def load_pixels(run: TrainedRun, device: torch.device) -> ToPixels:
    """Return a function from samples to uint8 images; loads the autoencoder for latents."""
    autoencoder = exported_autoencoder(run.folder, device) or decoder(run.config.data.name, device, run.data)
    return to_uint8 if autoencoder is None else lambda latents: to_uint8(autoencoder.decode(latents))


def sample_batches(
    objective: Objective,
    net: Network,
    shape: Shape,  # (C, H, W) of one sample
    settings: SamplingSettings,
    *,
    indices: Sequence[int] | None = None,  # default: 0 .. settings.count - 1
    seed: int = 0,
    condition: Callable[[Tensor], Mapping[str, Any]] | None = None,  # indices (B,) -> arguments of the network
    null: Mapping[str, Tensor] | None = None,  # the null condition of one sample, for guidance
    to_pixels: ToPixels = to_uint8,
    progress: bool = True,
) -> Iterator[Tensor]:
    """Batches of uint8 images on the CPU, in the order of their indices.

    >>> from scalelong.diffusion import VPSDE
    >>> settings = SamplingSettings("ddim", steps=5, count=3, batch_size=2)
    >>> batches = sample_batches(Objective(VPSDE(), "x0"), lambda x, time: 0 * x, (1, 8, 8), settings)
    >>> [len(images) for images in batches]
    [2, 1]
    """
    settings = resolve_sampling(settings, objective.process)
    chosen = torch.as_tensor(range(settings.count) if indices is None else indices, dtype=torch.int64)
    listed = chosen.ndim == 1 and (not len(chosen) or int(chosen.min()) >= 0)
    require(listed, "indices", "a list of numbers >= 0", indices)
    module: nn.Module | None = net if isinstance(net, nn.Module) else getattr(net, "model", None)
    parameter = next(module.parameters(), None) if module is not None else None
    device = torch.device("cpu") if parameter is None else parameter.device
    if settings.compile and module is not None:
        net = as_network(torch.compile(module))  # type: ignore[arg-type]
    context = autocast(device, DTYPES[settings.precision])
    fast = device.type == "cuda" and settings.precision != "fp32"
    size = min(settings.batch_size, len(chosen))
    parts = torch.split(chosen, size) if size else ()
    expected = len(parts) * settings.steps * (2 if settings.sampler == "heun" else 1)  # calls of the network

    def batches() -> Iterator[Tensor]:
        calls = 0

        def counted(*args: Any, **kwargs: Any) -> Tensor:  # progress within a batch
            nonlocal calls
            calls += 1
            bar.update(calls * len(chosen) // expected - bar.n)
            return net(*args, **kwargs)

        with Progress(total=len(chosen), desc="sample", unit="img", disable=not progress) as bar:
            for index in parts:
                padding = index[-1:].expand(size - len(index))  # constant shape, for compile
                padded = torch.cat([index, padding]).to(device)
                tuned = skip_tuned(module, settings.skip_tuning)
                with evaluating(module), tuned, context, fused.inference(module, enabled=fast):
                    given = condition(padded) if condition else {}
                    start = (seed, padded, shape)
                    images = sample(objective, counted, start, settings, null=null, **given)[: len(index)]
                good = images.flatten(1).isfinite().all(dim=1).cpu()
                if not good.all():
                    bad = f"{(~good).sum()} of {len(good)} images are not finite, the first is image {index[~good][0]}"
                    raise ValueError(f"sampling: {bad}; the network has diverged, or sampling.precision is too low")
                yield to_pixels(images).cpu()
            bar.update(len(chosen) - bar.n)

    return batches()  # validate eagerly, not with the first batch


@contextmanager
def skip_tuned(module: nn.Module | None, inner: float) -> Iterator[None]:
    """Context with Skip-Tuning: scale skips linearly from 1 (outermost) to `inner` (innermost)."""
    if inner == 1 or module is None:
        yield
        return
    scaling = scaling_of(module)
    replace_scaling(module, TunedScaling(scaling, inner))
    try:
        yield
    finally:
        replace_scaling(module, scaling)


@contextmanager
def evaluating(module: nn.Module | None) -> Iterator[None]:
    """Context in eval mode; restores every submodule's mode."""
    training = [part for part in module.modules() if part.training] if module is not None else []
    for part in training:
        part.training = False
    try:
        yield
    finally:
        for part in training:
            part.training = True


# ------------------------------------------------------------------------------------ exported pipelines


@dataclass(frozen=True)
class ExportedRun:
    """Metadata of a run stored with its exported pipeline."""

    step: int
    weights: str  # ema or model
    shape: Shape  # of what is diffused
    folded: bool  # coefficients are folded into the weights
    data: str  # fingerprint of the training data
    condition: Conditioning


def is_exported(folder: Path) -> bool:
    return (folder / DESCRIPTION).is_file()


def _load_exported(folder: Path, weights: str, step: int | None) -> TrainedRun:
    """The run in an exported pipeline, as it was sampled."""
    if not check_manifest(folder):
        logger.warning("%s: has no %s, so its files cannot be verified; export the run again", folder, MANIFEST)
    try:
        stored: dict[str, Any] = read_json(folder, DESCRIPTION)
        shape, condition = image_shape(stored["shape"], folder), Conditioning.from_state(stored["condition"])
        found = ExportedRun(**{**stored, "shape": shape, "condition": condition})
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{folder / DESCRIPTION}: is damaged ({error}); export the run again") from error
    config = replace(from_yaml(inside(folder, CONFIG)), mup=MupSettings())  # export folds the multipliers of muP
    if weights == "model" and found.weights != "model":
        raise ValueError(f"weights: {folder} holds the averaged ones only; give the run itself for those as trained")
    if step not in (None, found.step):
        raise ValueError(f"step: {folder} is of step {found.step}, not {step}; leave it out")
    if found.folded:
        config = replace(config, scaling=ScalingSettings("none"))
    without_head = replace(config, distillation=DistillationSettings())
    model = build_model(without_head, shape, condition)
    if found.folded:
        skips.remove(model, "scaling")  # folded weights have no scaling state
    files = sorted((folder / DENOISER).glob(_WEIGHTS))
    if not files:
        raise CheckpointError(f"{folder / DENOISER}: holds no {_WEIGHTS}; export the run again")
    tensors: dict[str, Tensor] = {}
    for file in files:
        with naming_damage(file):
            tensors |= {name.removeprefix("uvit."): value for name, value in load_file(file).items()}
    _load_weights(model, tensors, folder / DENOISER)
    if found.folded:
        skips.apply(model, config.scaling.method)
    objective = build_objective(config)
    return TrainedRun(folder, config, model, objective, shape, found.step, condition, found.data, found.weights)


def exported_autoencoder(folder: Path, device: torch.device) -> Autoencoder | None:
    """The autoencoder in an exported pipeline of latents; None for any other folder."""
    if not is_exported(folder) or not (folder / AUTOENCODER).is_dir():
        return None
    scale = read_json(folder, INDEX).get("latent_scale")
    require_number(f"{folder / INDEX}: latent_scale", scale, 1e-6, 1e6)
    return load_autoencoder(folder / AUTOENCODER, device, scale)
