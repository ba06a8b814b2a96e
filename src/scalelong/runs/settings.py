"""What a run is: frozen dataclasses, checked as a whole, written as YAML beside the run.

Every error names the dotted key as it is written in YAML and on the command line.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from typing import Any, Literal

from scalelong.backbones import UViTConfig
from scalelong.diffusion import SAMPLERS, Objective, get_process
from scalelong.scaling.registry import METHODS, ScalingConfig
from scalelong.skips.auto import AUTO, auto_kappa
from scalelong.runs.conditioning import Conditioning

Precision = Literal["auto", "fp32", "bf16", "fp16"]
Compile = Literal["off", "default", "reduce-overhead"]
OnNonFinite = Literal["raise", "skip", "rewind"]
ConditionKind = Literal["none", "class", "text"]


@dataclass(frozen=True)
class DataSettings:
    """What is learnt from."""

    name: str = "digits"  # digits, emoji32, cifar10, folder:PATH, latents:PATH, ...: see `scalelong data list`
    image_size: int | None = None  # crop and resize to this; default: the data's own size
    split: str = "train"
    flip: bool = True  # mirror half of the images
    workers: int = 2  # reading processes, for sets that do not fit on the device
    resident_mb: int = 2048  # sets up to this size live on the device as uint8
    root: str | None = None  # cache folder; default: $SCALELONG_DATA or the user's cache


@dataclass(frozen=True)
class ModelSettings:
    """The denoiser; image size and colour channels come from the data."""

    backbone: Literal["uvit", "unet"] = "uvit"
    patch_size: int = 2  # uvit
    dim: int = 512  # uvit
    depth: int = 12  # uvit
    heads: int = 8  # uvit
    mlp_time_embed: bool = False  # uvit
    channels: tuple[int, ...] = (128, 256, 256, 256)  # unet, one per level
    layers_per_block: int = 2  # unet
    style: Literal["ddpm", "iddpm"] = "ddpm"  # unet without text: attention at the second level, or at the two deepest
    checkpointing: bool = False  # recompute activations to save memory


@dataclass(frozen=True)
class ScalingSettings:
    """How the long skips are scaled; options that the method does not have are left alone."""

    method: str = "cs"  # none, universal, rsqrt2, cs, cs_reversed, ls, mp_cat, layernorm, rezero, stable_tau
    kappa: float | Literal["auto"] = 0.7  # universal, cs, cs_reversed; auto (cs): as scalelong.skips.auto chooses
    allow_amplify: bool = False  # permit kappa > 1, as a control
    shared: bool = True  # ls
    reduction: int = 16  # ls
    module: str = "se"  # ls: se, ie, learnable
    activation: str = "relu"  # ls: relu, elu, mish
    axis: str = "auto"  # ls: tokens, channels
    start: float | None = None  # ls: the value the gates open at, in (0, 1); default: 1/2
    t: float = 0.5  # mp_cat: the skip's part
    affine: bool = True  # layernorm: weights and biases per channel
    eps: float = 1e-6  # layernorm
    tau: float = 0.1  # stable_tau
    placement: Literal["before", "after_norm"] = "before"  # after_norm: behind a GroupNorm that would cancel kappa

    def __post_init__(self) -> None:
        if self.kappa == AUTO:
            object.__setattr__(self, "kappa", auto_kappa(self.method))

    def options(self) -> dict[str, Any]:
        """The options that this method takes."""
        taken = METHODS[self.method].defaults if self.method in METHODS else {}
        return {name: getattr(self, name) for name in taken if hasattr(self, name)}


@dataclass(frozen=True)
class ConditionSettings:
    """What the network is told beside the noisy image."""

    kind: ConditionKind = "none"
    drop: float = 0.1  # the share of samples trained without it, for guidance; 0: no null condition at all
    encoder: str = ""  # text: minilm, a hub name or a folder of transformers
    max_tokens: int = 77  # text: a caption is cut or padded to this many


@dataclass(frozen=True)
class DiffusionSettings:
    """How noise is added and what is predicted."""

    process: str = "vp"  # vp, ddpm, cosine, edm
    prediction: str = ""  # noise, x0, v; default: the process's own


@dataclass(frozen=True)
class OptimizerSettings:
    """AdamW with a linear warm-up to a constant rate."""

    lr: float = 2e-4
    weight_decay: float = 0.03
    betas: tuple[float, float] = (0.99, 0.999)
    warmup_steps: int = 2500
    clip_norm: float = 0.0  # clip the gradient to this norm; 0: never


@dataclass(frozen=True)
class TrainingSettings:
    """How long, how large, how exact, and what is written when."""

    steps: int = 500_000
    batch_size: int = 128  # over all ranks and accumulated micro-batches
    accumulate: int = 1  # micro-batches per step
    precision: Precision = "auto"  # auto: bf16 on a GPU, fp32 on a CPU
    compile: Compile = "off"
    ema_decay: float = 0.9999  # warmed up: min(ema_decay, (1 + step) / (10 + step))
    seed: int = 0
    log_every: int = 50
    checkpoint_every: int = 5000
    keep: int = 2  # newest checkpoints to keep
    sample_every: int = 5000  # 0: never
    on_nonfinite: OnNonFinite = "raise"
    max_nonfinite: int = 10  # skip and rewind give up after this many
    wandb_project: str | None = None  # also log to Weights & Biases, under this project


@dataclass(frozen=True)
class SamplingSettings:
    """How grids are drawn during training, and the default of `scalelong sample`."""

    sampler: str = ""  # default: the process's own
    steps: int = 0  # 0: the sampler's own
    count: int = 64  # images in a grid
    clip: bool = True  # clamp each guess at the image to [-1, 1]
    guidance: float = 1.0  # classifier-free guidance; 1: none
    guidance_interval: tuple[float, float] = (0.0, math.inf)  # guide only at these noise levels sigma / alpha


@dataclass(frozen=True)
class RunConfig:
    """A whole run."""

    data: DataSettings = field(default_factory=DataSettings)
    model: ModelSettings = field(default_factory=ModelSettings)
    scaling: ScalingSettings = field(default_factory=ScalingSettings)
    condition: ConditionSettings = field(default_factory=ConditionSettings)
    diffusion: DiffusionSettings = field(default_factory=DiffusionSettings)
    optimizer: OptimizerSettings = field(default_factory=OptimizerSettings)
    training: TrainingSettings = field(default_factory=TrainingSettings)
    sampling: SamplingSettings = field(default_factory=SamplingSettings)

    def checked(self, world_size: int = 1, on_gpu: bool = False) -> RunConfig:
        """Itself, if every value makes sense and they go together; else a ValueError that names the key."""
        ScalingConfig.create(self.scaling.method, **self.scaling.options())
        if self.scaling.method == "freeu":
            raise ValueError("scaling.method: 'freeu' is for sampling from a trained model; train with another method")
        Objective(get_process(self.diffusion.process), self.diffusion.prediction)
        for key, least in _LEAST.items():
            value = dotted(self)[key]
            if value < least:
                raise ValueError(f"{key}: must be at least {least}, got {value}")
        _check_optimizer(self.optimizer)
        _check_condition(self.condition, self.sampling)
        if not 0 <= self.training.ema_decay < 1:
            raise ValueError(f"training.ema_decay: must be in [0, 1), got {self.training.ema_decay}")
        if self.data.name.startswith("latents:") and self.sampling.clip:
            raise ValueError("sampling.clip: latents are not bound to [-1, 1]; set it to false (--sampling.no-clip)")
        if self.sampling.sampler and self.sampling.sampler not in SAMPLERS:
            raise ValueError(f"sampling.sampler: unknown {self.sampling.sampler!r}; one of {', '.join(SAMPLERS)}")
        parts = world_size * self.training.accumulate
        if self.training.batch_size % parts:
            raise ValueError(
                f"training.batch_size: {self.training.batch_size} is not divisible by {world_size} ranks x "
                f"{self.training.accumulate} micro-batches; use a multiple of {parts}"
            )
        if self.training.accumulate > 1 and self.training.compile == "reduce-overhead":
            raise ValueError(
                "training.compile: reduce-overhead replays a step in place, over the gradients that training.accumulate = "
                f"{self.training.accumulate} adds up; use default"
            )
        if self.training.precision == "fp16" and not on_gpu:
            raise ValueError("training.precision: fp16 needs a GPU; use fp32 (or bf16) on a CPU")
        return self

    def check_shape(self, shape: tuple[int, int, int], given: Conditioning | None = None) -> None:
        """Refuse a model that does not fit images of this shape, before anything is built."""
        channels, height, width = shape
        if height != width:
            raise ValueError(f"data.image_size: images must be square, got {height} x {width}; set data.image_size")
        if self.model.backbone == "uvit":
            uvit_config(self.model, channels, height, given)
        factor = 2 ** (len(self.model.channels) - 1)
        if self.model.backbone == "unet" and height % factor:
            raise ValueError(
                f"model.channels: {len(self.model.channels)} levels halve the image {len(self.model.channels) - 1} times, "
                f"but {height} is not divisible by {factor}; use fewer levels or another data.image_size"
            )


def uvit_config(model: ModelSettings, channels: int, image_size: int, given: Conditioning | None = None) -> UViTConfig:
    """The U-ViT for images of this size; its errors carry this file's keys."""
    given = given or Conditioning()
    try:
        return UViTConfig(
            image_size=image_size,
            patch_size=model.patch_size,
            in_channels=channels,
            dim=model.dim,
            depth=model.depth,
            heads=model.heads,
            mlp_time_embed=model.mlp_time_embed,
            checkpointing=model.checkpointing,
            num_classes=given.label_rows,
            text_dim=given.text_dim,
            text_tokens=given.text_tokens,
        )
    except ValueError as error:
        raise ValueError(str(error).replace("uvit.", "model.", 1)) from None


def _check_optimizer(optimizer: OptimizerSettings) -> None:
    if not optimizer.lr > 0:
        raise ValueError(f"optimizer.lr: must be positive, got {optimizer.lr}")
    if not all(0 <= beta < 1 for beta in optimizer.betas):
        raise ValueError(f"optimizer.betas: must lie in [0, 1), got {optimizer.betas}")


def _check_condition(condition: ConditionSettings, sampling: SamplingSettings) -> None:
    if not 0 <= condition.drop < 1:
        raise ValueError(f"condition.drop: must be in [0, 1), got {condition.drop}")
    if condition.kind == "text" and not condition.encoder:
        raise ValueError("condition.encoder: text needs one; say minilm, a hub name or a folder of transformers")
    if sampling.guidance < 0 or not math.isfinite(sampling.guidance):
        raise ValueError(f"sampling.guidance: must be a number of at least 0, got {sampling.guidance}; 1 is none")
    low, high = sampling.guidance_interval
    if not 0 <= low < high:
        raise ValueError(f"sampling.guidance_interval: must be 0 <= low < high, got ({low}, {high})")
    if sampling.guidance != 1 and (condition.kind == "none" or condition.drop == 0):
        lacks = "no condition" if condition.kind == "none" else "condition.drop 0, so no null condition"
        raise ValueError(f"sampling.guidance: {sampling.guidance} with {lacks}; leave it at 1")


_LEAST = {
    "training.steps": 1,
    "training.batch_size": 1,
    "training.accumulate": 1,
    "training.log_every": 1,
    "training.checkpoint_every": 1,
    "training.keep": 2,
    "training.sample_every": 0,
    "training.max_nonfinite": 0,
    "training.seed": 0,
    "sampling.count": 1,
    "sampling.steps": 0,
    "optimizer.weight_decay": 0,
    "optimizer.warmup_steps": 0,
    "optimizer.clip_norm": 0,
    "data.workers": 0,
    "data.resident_mb": 0,
    "model.layers_per_block": 1,
    "condition.max_tokens": 1,
}

# What may differ when a run is continued: it changes how long a run is or what is written, not what is computed.
MAY_CHANGE = frozenset(
    {
        "training.steps",
        "training.log_every",
        "training.checkpoint_every",
        "training.keep",
        "training.sample_every",
        "training.wandb_project",
        "data.workers",
        "data.root",
    }
)


def dotted(config: RunConfig) -> dict[str, Any]:
    """Every setting under its dotted key."""
    return {
        f"{part.name}.{setting.name}": getattr(getattr(config, part.name), setting.name)
        for part in dataclasses.fields(config)
        for setting in dataclasses.fields(getattr(config, part.name))
    }


def differences(old: RunConfig, new: RunConfig) -> dict[str, tuple[Any, Any]]:
    """The settings that differ, as key -> (old, new)."""
    before, after = dotted(old), dotted(new)
    return {key: (before[key], after[key]) for key in before if before[key] != after[key]}
