"""The settings of a run: frozen dataclasses, stored as config.yaml in the run's folder. No torch.

Keys are dotted, in YAML, on the command line and in errors: `training.steps`.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from typing import Any, Literal

from scalelong.errors import SettingError, short
from scalelong.runs.validation import check_values

SamplingPrecision = Literal["fp32", "bf16", "fp16"]


@dataclass(frozen=True)
class DataSettings:
    """The training data."""

    name: str = "digits"  # digits, emoji32, cifar10, folder:PATH, latents:PATH, ...: see `scalelong data list`
    image_size: int | None = None  # crop and resize to this; default: the data's own size
    split: str = "train"
    flip: bool = True  # random horizontal flips
    workers: int = 2  # worker processes, for data that does not fit on the device
    worker_timeout: float = 300.0  # seconds before a hanging worker is replaced
    resident_mb: int = 2048  # data up to this size is kept on the device as uint8
    root: str | None = None  # cache folder; default: $SCALELONG_DATA or the user's cache


@dataclass(frozen=True)
class ModelSettings:
    """The denoiser; image size and channels come from the data."""

    backbone: Literal["uvit", "unet"] = "uvit"
    patch_size: int = 2  # uvit
    dim: int = 512  # uvit
    depth: int = 12  # uvit
    heads: int = 8  # uvit
    mlp_time_embed: bool = False  # uvit
    channels: tuple[int, ...] = (128, 256, 256, 256)  # unet, one per level
    layers_per_block: int = 2  # unet
    style: Literal["ddpm", "iddpm"] = "ddpm"  # unet: attention at the second level (ddpm) or the two deepest (iddpm)
    checkpointing: bool = False  # recompute activations to save memory


@dataclass(frozen=True)
class ScalingSettings:
    """How the long skips are scaled; options of other methods are ignored."""

    method: str = "cs"  # none, universal, rsqrt2, cs, cs_reversed, cs_annealed, subset, ls, mp_cat, layernorm, ...
    kappa: float = 0.7  # universal, cs, cs_reversed, cs_annealed
    allow_amplify: bool = False  # allow kappa > 1, as a control
    anneal_steps: int = 10_000  # cs_annealed: steps over which kappa decreases from 1
    removed: str = "inner"  # subset: remove the inner or the outer skips
    count: int = 1  # subset: number of skips removed
    shared: bool = True  # ls
    reduction: int = 16  # ls
    module: str = "se"  # ls: se, ie, learnable, time
    activation: str = "relu"  # ls: relu, elu, mish
    axis: str = "auto"  # ls: tokens, channels
    start: float | None = None  # ls: initial value of the gates, in (0, 1); default: 1/2
    t: float = 0.5  # mp_cat: weight of the skip
    affine: bool = True  # layernorm: weights and biases per channel
    eps: float = 1e-6  # layernorm
    tau: float = 0.1  # stable_tau
    placement: Literal["before", "after_norm"] = "before"  # after_norm: after a GroupNorm that would cancel kappa

    def options(self) -> dict[str, Any]:
        """The options of this method."""
        return {name: getattr(self, name) for name in _TAKES.get(self.method, ("kappa", "allow_amplify"))}

    @property
    def label(self) -> str:
        """Name of the method in tables and charts: "cs 0.7", "ls"."""
        return f"{self.method} {self.kappa:g}" if "kappa" in self.options() else self.method


# Options by method; other methods are constants with a kappa. Kept in sync with the registry by a test.
_TAKES: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("none", "rsqrt2", "skip_tuning", "freeu", "rezero"), ()),
    "cs_annealed": ("kappa", "allow_amplify", "anneal_steps"),
    "subset": ("removed", "count"),
    "ls": ("shared", "reduction", "module", "activation", "axis", "start"),
    "mp_cat": ("t",),
    "layernorm": ("affine", "eps"),
    "stable_tau": ("tau",),
}


@dataclass(frozen=True)
class FeatureSettings:
    """Condition later blocks on the network's own features; inspired by DDAE++."""

    conditioning: bool = False
    tap: str = ""  # the module whose output is pooled; default: the middle block
    pool: Literal["mean", "attention"] = "mean"
    detach: bool = False  # stop the gradient from the condition into the tap


@dataclass(frozen=True)
class DistillationSettings:
    """Contrastive self-distillation from the EMA weights; inspired by DDAE++."""

    weight: float = 0.0  # loss weight; 0: off
    form: Literal["infonce", "negative_free"] = "infonce"
    temperature: float = 0.2  # infonce
    t_range: tuple[float, float] = (0.0, 0.5)  # times of the teacher, as quantiles of the training times
    dim: int = 128  # of the projected features
    tap: str = ""  # the module whose output is pooled; default: the middle block


@dataclass(frozen=True)
class ConditionSettings:
    """Conditioning of the network."""

    kind: Literal["none", "class", "text"] = "none"
    drop: float = 0.1  # fraction of samples trained with the null condition, for guidance; 0: no null condition
    encoder: str = ""  # text: minilm, a hub name or a local transformers folder
    max_tokens: int = 77  # text: captions are truncated or padded to this length


@dataclass(frozen=True)
class DiffusionSettings:
    """The noise process and the prediction target."""

    process: str = "vp"  # vp, ddpm, cosine, edm, flow
    prediction: str = ""  # noise, x0, v; default: the process's own
    min_snr_gamma: float = 0.0  # gamma of min-SNR loss weighting, usually 5; 0: off


@dataclass(frozen=True)
class OptimizerSettings:
    """AdamW, or Muon for matrices, with a linear warm-up to a constant learning rate."""

    name: Literal["adamw", "muon"] = "adamw"  # muon: for linear weights, AdamW for the rest
    lr: float = 2e-4
    weight_decay: float = 0.03
    betas: tuple[float, float] = (0.99, 0.999)
    warmup_steps: int = 2500
    clip_norm: float = 0.0  # clip the gradient to this norm; 0: off


@dataclass(frozen=True)
class MupSettings:
    """muP: transfer the learning rate from a base width to model.dim (uvit) or model.channels (unet)."""

    base_width: int = 0  # model.dim or the first of model.channels at which optimizer.lr was tuned; 0: standard


@dataclass(frozen=True)
class TrainingSettings:
    """Length, batch size, precision and logging intervals."""

    steps: int = 500_000
    batch_size: int = 128  # total over ranks and accumulated micro-batches
    accumulate: int = 1  # micro-batches per step
    precision: Literal["auto", "fp32", "bf16", "fp16"] = "auto"  # auto: bf16 on a GPU, fp32 on a CPU
    compile: Literal["off", "auto", "default", "reduce-overhead", "step"] = "off"  # on a GPU; auto: step, or default
    shard: Literal["none", "full"] = "none"  # full: shard weights, gradients and optimizer state (FSDP2)
    ema_decay: float = 0.9999  # with warm-up: min(ema_decay, (1 + step) / (10 + step))
    seed: int = 0
    log_every: int = 50
    checkpoint_every: int = 5000
    keep: int = 2  # number of checkpoints to keep
    sample_every: int = 5000  # 0: never
    on_nonfinite: Literal["raise", "skip", "rewind"] = "raise"
    max_nonfinite: int = 10  # maximum number of skips and rewinds
    on_spike: Literal["warn", "skip", "rewind"] = "warn"  # when the loss exceeds spike_factor times its running mean
    spike_factor: float = 20.0
    rank_timeout: float = 300.0  # seconds before an unresponsive rank ends the run
    wandb_project: str | None = None  # also log to this Weights & Biases project


@dataclass(frozen=True)
class SamplingSettings:
    """Sampling settings: for grids during training, and defaults of `scalelong sample` and `evaluate`.

    >>> SamplingSettings("ddim", steps=25, guidance=2.0).precision
    'fp32'
    """

    sampler: str = ""  # ddpm, ddim, dpm++2m, dpm++3m, heun, euler_maruyama; default: the process's own
    steps: int = 0  # 0: the sampler's own
    count: int = 64  # number of images
    clip: bool = True  # clamp clean-image estimates to [-1, 1]
    guidance: float = 1.0  # classifier-free guidance scale; 1: off
    guidance_interval: tuple[float, float] = (0.0, math.inf)  # noise levels sigma / alpha with guidance
    skip_tuning: float = 1.0  # Skip-Tuning: scale skips linearly from 1 (outermost) to this (innermost); 1: off
    precision: SamplingPrecision = "fp32"  # of the denoiser, by autocast
    batch_size: int = 500
    compile: bool = False  # compile the denoiser; pays off for thousands of images


@dataclass(frozen=True)
class Conditioning:
    """Conditioning sizes, from data and text encoder; stored in checkpoints."""

    num_classes: int = 0
    null_class: bool = False  # an extra class for the null condition
    class_names: tuple[str, ...] = ()
    text_tokens: int = 0
    text_dim: int = 0
    encoder: str = ""  # sha256 of the text encoder's weights

    @classmethod
    def from_state(cls, state: dict[str, Any] | None) -> Conditioning:
        """From the state of a checkpoint; older ones lack this field."""
        known = {} if state is None else state
        if not isinstance(known, dict) or not known.keys() <= {each.name for each in dataclasses.fields(cls)}:
            raise SettingError(f"conditioning: must hold {', '.join(vars(cls()))}, got {short(state)}")
        names = known.get("class_names", ())
        found = cls(**{**known, "class_names": tuple(names) if isinstance(names, list) else names})
        check_values("conditioning", found)
        return found

    @property
    def label_rows(self) -> int:
        """Rows of the class embedding."""
        return self.num_classes + self.null_class


@dataclass(frozen=True)
class RunConfig:
    """All settings of a run.

    >>> RunConfig(scaling=ScalingSettings("cs", kappa=0.5)).scaling.label
    'cs 0.5'
    """

    data: DataSettings = field(default_factory=DataSettings)
    model: ModelSettings = field(default_factory=ModelSettings)
    scaling: ScalingSettings = field(default_factory=ScalingSettings)
    features: FeatureSettings = field(default_factory=FeatureSettings)
    distillation: DistillationSettings = field(default_factory=DistillationSettings)
    condition: ConditionSettings = field(default_factory=ConditionSettings)
    diffusion: DiffusionSettings = field(default_factory=DiffusionSettings)
    optimizer: OptimizerSettings = field(default_factory=OptimizerSettings)
    mup: MupSettings = field(default_factory=MupSettings)
    training: TrainingSettings = field(default_factory=TrainingSettings)
    sampling: SamplingSettings = field(
        default_factory=SamplingSettings
    )  # defaults of `sample`, `evaluate` and all grids


# Settings that may change on resume: they affect length, output and speed; shard and compile also rounding.
MAY_CHANGE = {
    *("training.steps", "training.log_every", "training.checkpoint_every", "training.sample_every", "training.keep"),
    *("training.wandb_project", "training.rank_timeout", "training.compile", "training.shard"),
    *("sampling.precision", "sampling.batch_size", "sampling.compile"),
    *("data.workers", "data.worker_timeout", "data.root"),
}


def dotted(config: RunConfig) -> dict[str, Any]:
    """Every setting under its dotted key."""
    return {f"{part}.{key}": value for part, settings in vars(config).items() for key, value in vars(settings).items()}


def differences(old: RunConfig, new: RunConfig) -> dict[str, tuple[Any, Any]]:
    """The settings that differ, as key -> (old, new)."""
    before, after = dotted(old), dotted(new)
    return {key: (before[key], after[key]) for key in before if before[key] != after[key]}


def check_settings(config: RunConfig) -> RunConfig:
    """Return the configuration if every value has its type and bounds; else raise an error that names the key."""
    for part, settings in vars(config).items():
        check_values(part, settings)
    return config
