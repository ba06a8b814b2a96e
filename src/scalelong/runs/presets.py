"""Named configurations: the demo's, and the columns of the paper's Table 6."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping

from scalelong.runs.settings import (
    Conditioning,
    ConditionSettings,
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

_EMOJI = RunConfig(
    data=DataSettings("emoji32", flip=False),
    model=ModelSettings("uvit", patch_size=4, dim=256, depth=12, heads=4),
    scaling=ScalingSettings("cs", kappa=0.7),
    optimizer=OptimizerSettings(lr=3e-4, betas=(0.9, 0.99), warmup_steps=500),
    training=TrainingSettings(steps=50_000, batch_size=128, ema_decay=0.999),
    sampling=SamplingSettings("dpm++2m", steps=50),
)

_IMAGENET64 = RunConfig(
    data=DataSettings("imagenet64:data/imagenet64"),
    model=ModelSettings("uvit", patch_size=4, dim=768, depth=16, heads=12),
    scaling=ScalingSettings("cs", kappa=0.7),
    condition=ConditionSettings("class"),
    optimizer=OptimizerSettings(lr=3e-4, betas=(0.99, 0.99), warmup_steps=5000),
    training=TrainingSettings(steps=300_000, batch_size=1024, compile="default"),
    sampling=SamplingSettings("dpm++2m", steps=50),
)

_COCO = RunConfig(
    data=DataSettings("latents:data/coco-latents"),  # of scalelong data encode coco:PATH
    model=ModelSettings("uvit", patch_size=2, dim=512, depth=12, heads=8),
    scaling=ScalingSettings("cs", kappa=0.8),
    condition=ConditionSettings("text", encoder="openai/clip-vit-large-patch14", max_tokens=77),
    optimizer=OptimizerSettings(lr=2e-4, betas=(0.9, 0.9), warmup_steps=5000),
    training=TrainingSettings(steps=1_000_000, batch_size=256, compile="default"),
    sampling=SamplingSettings("dpm++2m", steps=50, clip=False, guidance=2.0),
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
    "emoji32": _EMOJI,
    "emoji32-cond": dataclasses.replace(
        _EMOJI,
        condition=ConditionSettings("class"),
        sampling=dataclasses.replace(_EMOJI.sampling, guidance=2.0),
    ),
    "emoji32-text": dataclasses.replace(
        _EMOJI,
        model=dataclasses.replace(_EMOJI.model, patch_size=2),
        condition=ConditionSettings("text", encoder="minilm", max_tokens=16),
        diffusion=DiffusionSettings("vp", "v"),  # weighs the noisiest images, where the text decides
        sampling=dataclasses.replace(_EMOJI.sampling, guidance=3.0),
    ),
    "emoji32-latent": dataclasses.replace(
        _EMOJI,
        data=DataSettings("latents:data/emoji32-latents", flip=False),  # of scalelong data encode emoji32, 4 x 16 x 16
        model=dataclasses.replace(_EMOJI.model, patch_size=2),
        diffusion=DiffusionSettings("vp", "x0"),  # shapes and colours can be seen after a few hundred steps
        sampling=dataclasses.replace(_EMOJI.sampling, clip=False),
    ),
    "fashion-mnist-unet": RunConfig(
        data=DataSettings("fashion_mnist"),
        model=ModelSettings("unet", channels=(64, 128, 128)),
        scaling=ScalingSettings("cs", kappa=0.7),
        training=TrainingSettings(steps=50_000, batch_size=128, ema_decay=0.999),
        sampling=SamplingSettings("dpm++2m", steps=50),
    ),
    "cifar10-uvit-s2": _CIFAR10,
    "cifar10-uvit-s2-cond": dataclasses.replace(_CIFAR10, condition=ConditionSettings("class")),
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
        data=DataSettings("celeba:data/celeba"),
        model=ModelSettings("uvit", patch_size=4, dim=512, depth=12, heads=8),
        scaling=ScalingSettings("cs", kappa=0.5),
        optimizer=OptimizerSettings(lr=2e-4, betas=(0.99, 0.99), warmup_steps=4000),
        training=TrainingSettings(steps=500_000, batch_size=128, compile="default"),
        sampling=SamplingSettings("dpm++2m", steps=50),
    ),
    "imagenet64-uvit-m4": _IMAGENET64,
    "imagenet64-uvit-l4": dataclasses.replace(
        _IMAGENET64, model=ModelSettings("uvit", patch_size=4, dim=1024, depth=20, heads=16)
    ),
    "imagenet64-unet": dataclasses.replace(
        _IMAGENET64, model=ModelSettings("unet", channels=(160, 320, 480, 640), style="iddpm")
    ),
    "coco-uvit-s2": _COCO,
    "coco-uvit-s2-deep": dataclasses.replace(_COCO, model=dataclasses.replace(_COCO.model, depth=16)),
    "coco-unet": dataclasses.replace(_COCO, model=ModelSettings("unet", channels=(224, 448, 448, 672))),
}

_IMAGENET64_CLASSES = Conditioning(num_classes=1000, null_class=True)
_CLIP_TEXT = Conditioning(text_tokens=77, text_dim=768)

# The shape and the condition of data that the user brings, for what can be told before it is there.
EXPECTED: Mapping[str, tuple[tuple[int, int, int], Conditioning]] = {
    "celeba:data/celeba": ((3, 64, 64), Conditioning()),
    "imagenet64:data/imagenet64": ((3, 64, 64), _IMAGENET64_CLASSES),
    "latents:data/emoji32-latents": ((4, 16, 16), Conditioning()),
    "latents:data/coco-latents": ((4, 32, 32), _CLIP_TEXT),
}


def get_preset(name: str) -> RunConfig:
    """A preset by name; the nearest name is suggested for an unknown one."""
    if name not in PRESETS:
        near = difflib.get_close_matches(name, PRESETS, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else "."
        raise ValueError(f"preset: unknown {name!r}{hint} Known: {', '.join(PRESETS)}")
    return PRESETS[name]
