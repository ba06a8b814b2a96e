"""Named configurations: the demo's, and the columns of the paper's Table 6."""

from __future__ import annotations

import difflib
from collections.abc import Mapping

from scalelong.training.config import (
    DataSettings,
    DiffusionSettings,
    ModelSettings,
    OptimizerSettings,
    RunConfig,
    SamplingSettings,
    ScalingSettings,
    TrainingSettings,
)

_CIFAR10 = RunConfig(
    data=DataSettings("cifar10"),
    model=ModelSettings("uvit", patch_size=2, dim=512, depth=12, heads=8),
    scaling=ScalingSettings("cs", kappa=0.5),
    optimizer=OptimizerSettings(lr=2e-4, betas=(0.99, 0.999), warmup_steps=2500),
    training=TrainingSettings(steps=500_000, batch_size=128, compile="default"),
    sampling=SamplingSettings("dpm++2m", steps=50),
)

PRESETS: Mapping[str, RunConfig] = {
    "digits-demo": RunConfig(
        data=DataSettings("digits", flip=False),
        model=ModelSettings("uvit", patch_size=2, dim=64, depth=12, heads=4),
        scaling=ScalingSettings("cs", kappa=0.7),
        diffusion=DiffusionSettings("vp", "x0"),  # digits can be recognised after a few hundred steps
        optimizer=OptimizerSettings(lr=3e-3, betas=(0.9, 0.99), warmup_steps=50),
        training=TrainingSettings(
            steps=600, batch_size=32, ema_decay=0.99, log_every=5, checkpoint_every=100, sample_every=100
        ),
        sampling=SamplingSettings("dpm++2m", steps=25),
    ),
    "emoji32": RunConfig(
        data=DataSettings("emoji32", flip=False),
        model=ModelSettings("uvit", patch_size=4, dim=256, depth=12, heads=4),
        scaling=ScalingSettings("cs", kappa=0.7),
        optimizer=OptimizerSettings(lr=3e-4, betas=(0.9, 0.99), warmup_steps=500),
        training=TrainingSettings(steps=50_000, batch_size=128, ema_decay=0.999),
        sampling=SamplingSettings("dpm++2m", steps=50),
    ),
    "fashion-mnist-unet": RunConfig(
        data=DataSettings("fashion_mnist"),
        model=ModelSettings("unet", channels=(64, 128, 128)),
        scaling=ScalingSettings("cs", kappa=0.7),
        training=TrainingSettings(steps=50_000, batch_size=128, ema_decay=0.999),
        sampling=SamplingSettings("dpm++2m", steps=50),
    ),
    "cifar10-uvit-s2": _CIFAR10,
    "cifar10-unet": RunConfig(
        data=_CIFAR10.data,
        model=ModelSettings("unet"),
        scaling=_CIFAR10.scaling,
        diffusion=DiffusionSettings("ddpm"),
        optimizer=_CIFAR10.optimizer,
        training=_CIFAR10.training,
        sampling=_CIFAR10.sampling,
    ),
    "celeba64-uvit-s4": RunConfig(
        data=DataSettings("folder:data/celeba", image_size=64),
        model=ModelSettings("uvit", patch_size=4, dim=512, depth=12, heads=8),
        scaling=ScalingSettings("cs", kappa=0.5),
        optimizer=OptimizerSettings(lr=2e-4, betas=(0.99, 0.99), warmup_steps=4000),
        training=TrainingSettings(steps=500_000, batch_size=128, compile="default"),
        sampling=SamplingSettings("dpm++2m", steps=50),
    ),
}


def get_preset(name: str) -> RunConfig:
    """A preset by name; the nearest name is suggested for an unknown one."""
    if name not in PRESETS:
        near = difflib.get_close_matches(name, PRESETS, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"preset: unknown {name!r}{hint} Known: {', '.join(PRESETS)}")
    return PRESETS[name]
