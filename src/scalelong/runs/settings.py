"""The settings of a run: frozen dataclasses, stored as config.yaml in the run's folder. No torch.

Keys are dotted, in YAML, on the command line and in errors: `training.steps`.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from typing import Any, Literal

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
    kappa: float = 0.7  # universal, cs, cs_reversed
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

    def options(self) -> dict[str, Any]:
        """The options that this method takes."""
        return {name: getattr(self, name) for name in _TAKES.get(self.method, ("kappa", "allow_amplify"))}

    @property
    def label(self) -> str:
        """Name of the method in tables and charts: "cs 0.7", "ls"."""
        return f"{self.method} {self.kappa:g}" if "kappa" in self.options() else self.method


# Options by method; methods not listed are constants with a kappa. A test holds this equal to the registry's.
_TAKES: dict[str, tuple[str, ...]] = {
    "none": (),
    "rsqrt2": (),
    "ls": ("shared", "reduction", "module", "activation", "axis", "start"),
    "mp_cat": ("t",),
    "layernorm": ("affine", "eps"),
    "freeu": (),
    "rezero": (),
    "stable_tau": ("tau",),
}


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
class Conditioning:
    """The sizes of a condition, known once the data and the encoder are; checkpoints remember them."""

    num_classes: int = 0
    null_class: bool = False  # one more class, which stands for "not told"
    class_names: tuple[str, ...] = ()
    text_tokens: int = 0
    text_dim: int = 0
    encoder: str = ""  # sha256 of the text encoder's weights

    @classmethod
    def from_state(cls, state: dict[str, Any] | None) -> Conditioning:
        """What a checkpoint remembers; those of before there were conditions remember nothing."""
        known = state or {}
        return cls(**{**known, "class_names": tuple(known.get("class_names", ()))})

    @property
    def label_rows(self) -> int:
        """Rows of the class embedding."""
        return self.num_classes + self.null_class


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
