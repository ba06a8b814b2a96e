"""Named configurations: the demo and the columns of the paper's Table 6."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from scalelong.errors import unknown_name
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

_SAMPLING = SamplingSettings("dpm++2m", steps=50)


def _uvit(
    data: str, patch: int, dim: int, depth: int, heads: int, kappa: float, lr: float, betas: tuple[float, float],
    warmup: int, steps: int, batch: int, **parts: Any,
) -> RunConfig:  # fmt: skip
    return RunConfig(
        data=DataSettings(data),
        model=ModelSettings("uvit", patch_size=patch, dim=dim, depth=depth, heads=heads),
        scaling=ScalingSettings("cs", kappa=kappa),
        optimizer=OptimizerSettings(lr=lr, betas=betas, warmup_steps=warmup),
        training=TrainingSettings(steps=steps, batch_size=batch, compile="auto"),
        **{"sampling": _SAMPLING} | parts,
    )


# fmt: off
#                   data                      patch dim  depth heads kappa lr  betas       warmup     steps   batch
_CIFAR10    = _uvit("cifar10",                    2, 512, 12,  8, 0.5, 2e-4, (0.99, 0.999), 2500,   500_000,  128)
_CELEBA     = _uvit("celeba:data/celeba",         4, 512, 12,  8, 0.5, 2e-4, (0.99, 0.99),  4000,   500_000,  128)
_IMAGENET64 = _uvit("imagenet64:data/imagenet64", 4, 768, 16, 12, 0.7, 3e-4, (0.99, 0.99),  5000,   300_000, 1024,
                    condition=ConditionSettings("class"))
_COCO       = _uvit("latents:data/coco-latents",  2, 512, 12,  8, 0.8, 2e-4, (0.9, 0.9),    5000, 1_000_000,  256,
                    condition=ConditionSettings("text", encoder="openai/clip-vit-large-patch14", max_tokens=77),
                    sampling=replace(_SAMPLING, clip=False, guidance=2.0))
_EMOJI32    = _uvit("emoji32",                    4, 256, 12,  4, 0.7, 3e-4, (0.9, 0.99),    500,    50_000,  128)
_DIGITS     = _uvit("digits",                     2,  64, 12,  4, 0.7, 3e-3, (0.9, 0.99),     50,       600,   32)
_EMOJI32 = replace(_EMOJI32, data=DataSettings("emoji32", flip=False),
                   training=replace(_EMOJI32.training, ema_decay=0.999, compile="off"))
# fmt: on

PRESETS: Mapping[str, RunConfig] = {
    "digits-demo": replace(
        _DIGITS,
        data=DataSettings("digits", flip=False),
        diffusion=DiffusionSettings("vp", "x0"),  # recognizable digits after a few hundred steps
        training=TrainingSettings(600, 32, ema_decay=0.99, log_every=5, checkpoint_every=100, sample_every=100),
        sampling=replace(_SAMPLING, steps=25),
    ),
    "emoji32": _EMOJI32,
    "emoji32-cond": replace(_EMOJI32, condition=ConditionSettings("class"), sampling=replace(_SAMPLING, guidance=2.0)),
    "emoji32-text": replace(
        _EMOJI32,
        model=replace(_EMOJI32.model, patch_size=2),
        condition=ConditionSettings("text", encoder="minilm", max_tokens=16),
        diffusion=DiffusionSettings("vp", "v"),  # weights the noisiest images, where the text matters most
        sampling=replace(_SAMPLING, guidance=3.0),
    ),
    "emoji32-latent": replace(
        _EMOJI32,
        data=DataSettings("latents:data/emoji32-latents", flip=False),  # by scalelong data encode emoji32, 4 x 16 x 16
        model=replace(_EMOJI32.model, patch_size=2),
        diffusion=DiffusionSettings("vp", "x0"),  # visible shapes after a few hundred steps
        sampling=replace(_SAMPLING, clip=False),
    ),
    "fashion-mnist-unet": RunConfig(
        data=DataSettings("fashion_mnist"),
        model=ModelSettings("unet", channels=(64, 128, 128)),
        training=TrainingSettings(steps=50_000, batch_size=128, ema_decay=0.999),
        sampling=_SAMPLING,
    ),
    "cifar10-uvit-s2": _CIFAR10,
    "cifar10-uvit-s2-cond": replace(_CIFAR10, condition=ConditionSettings("class")),
    "cifar10-unet": replace(_CIFAR10, model=ModelSettings("unet"), diffusion=DiffusionSettings("ddpm")),
    "celeba64-uvit-s4": _CELEBA,
    "imagenet64-uvit-m4": _IMAGENET64,
    "imagenet64-uvit-l4": replace(_IMAGENET64, model=replace(_IMAGENET64.model, dim=1024, depth=20, heads=16)),
    "imagenet64-unet": replace(_IMAGENET64, model=ModelSettings("unet", channels=(160, 320, 480, 640), style="iddpm")),
    "coco-uvit-s2": _COCO,
    "coco-uvit-s2-deep": replace(_COCO, model=replace(_COCO.model, depth=16)),
    "coco-unet": replace(_COCO, model=ModelSettings("unet", channels=(224, 448, 448, 672))),
}

# Shape and conditioning of data that is fetched or that the user provides, for estimates before it is there.
EXPECTED: Mapping[str, tuple[tuple[int, int, int], Conditioning]] = {
    "cifar10": ((3, 32, 32), Conditioning(num_classes=10, null_class=True)),
    "fashion_mnist": ((1, 28, 28), Conditioning(num_classes=10, null_class=True)),
    "celeba:data/celeba": ((3, 64, 64), Conditioning()),
    "imagenet64:data/imagenet64": ((3, 64, 64), Conditioning(num_classes=1000, null_class=True)),
    "latents:data/emoji32-latents": ((4, 16, 16), Conditioning()),
    "latents:data/coco-latents": ((4, 32, 32), Conditioning(text_tokens=77, text_dim=768)),
}


def get_preset(name: str) -> RunConfig:
    """A preset by name.

    >>> get_preset("cifar10-uvit-s2").model.dim
    512
    """
    if name not in PRESETS:
        raise unknown_name("preset", name, PRESETS)
    return PRESETS[name]
