"""Networks of other people's packages, small, with their long skips counted by hand.

Those that import torchvision run in a process of their own, `python -m tests.packages found.json`, with the folder that
`tests/packages.txt` is installed into on the path: no CPU build of torchvision exists on the index, so its two compiled
operators are declared (and never called) before it is imported, and nothing else should see it.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

import scalelong

FOLDER = Path(os.environ.get("SCALELONG_PACKAGES", Path(__file__).parents[1] / ".venv" / "packages"))


@dataclass(frozen=True)
class Packaged:
    """A network; `skips` is None where it must be refused with `refusal`, 0 where it has none."""

    name: str
    package: str
    build: Callable[[], nn.Module]
    inputs: Callable[[], tuple[Any, ...]]
    skips: int | None
    refusal: str = ""
    kwargs: tuple[tuple[str, Any], ...] = ()


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(7))


def _image(size: int = 16, channels: int = 3) -> Callable[[], tuple[Any, ...]]:
    return lambda: (randn(2, channels, size, size),)


def _image_and_time(size: int = 16, channels: int = 3) -> Callable[[], tuple[Any, ...]]:
    return lambda: (randn(2, channels, size, size), torch.tensor([3.0, 500.0]))


def monai_networks() -> list[Packaged]:
    """MONAI imports without torchvision."""
    from monai.networks import nets

    x = _image(32, 1)
    return [
        Packaged("UNet", "monai", lambda: nets.UNet(2, 1, 2, (4, 8, 16), (2, 2)), x, 2),
        Packaged("UNet, residual units", "monai",
                 lambda: nets.UNet(2, 1, 2, (4, 8, 16, 16), (2, 2, 2), num_res_units=2), x, 3),
        Packaged("BasicUNet", "monai", lambda: nets.BasicUNet(2, 1, 2, features=(4, 4, 8, 8, 16, 4)), x, 4),
        Packaged("DynUNet", "monai", lambda: nets.DynUNet(2, 1, 2, (3, 3, 3), (1, 2, 2), (2, 2), filters=(4, 8, 8)), x, 2),
        Packaged("UNETR", "monai", lambda: nets.UNETR(1, 2, 32, 4, 16, 32, 2, spatial_dims=2), x, None, "cannot be scaled"),
        Packaged("SegResNet", "monai", lambda: nets.SegResNet(2, init_filters=8, in_channels=1), x, None, "joined by add in"),
        Packaged("AttentionUnet", "monai", lambda: nets.AttentionUnet(2, 1, 2, (4, 8, 16), (2, 2)), x, None,
                 "cannot be scaled"),
        Packaged("resnet18", "monai", lambda: nets.resnet18(spatial_dims=2, n_input_channels=1), x, 0),
    ]  # fmt: skip


def lucidrains_networks() -> list[Packaged]:
    from denoising_diffusion_pytorch import KarrasUnet, Unet, Unet1D
    from denoising_diffusion_pytorch.classifier_free_guidance import Unet as ClassUnet
    from denoising_diffusion_pytorch.simple_diffusion import UViT

    package = "denoising-diffusion-pytorch"
    return [
        Packaged("Unet", package, lambda: Unet(dim=8, dim_mults=(1, 2, 4)), _image_and_time(), 7),
        Packaged("Unet1D", package, lambda: Unet1D(dim=8, dim_mults=(1, 2), channels=3),
                 lambda: (randn(2, 3, 16), torch.tensor([3.0, 500.0])), 5),
        Packaged("Unet with classes", package, lambda: ClassUnet(dim=8, dim_mults=(1, 2), num_classes=4),
                 lambda: (*_image_and_time()(), torch.tensor([0, 1])), 5, kwargs=(("cond_drop_prob", 0.0),)),
        Packaged("UViT (simple diffusion)", package, lambda: UViT(dim=8, dim_mults=(1, 2), vit_depth=2),
                 _image_and_time(), 5),
        Packaged("KarrasUnet", package, lambda: KarrasUnet(image_size=16, dim=8, dim_max=16, channels=3, num_downsamples=1,
                                                           num_blocks_per_stage=1, attn_res=()), _image_and_time(), 4),
    ]  # fmt: skip


def imagen_networks() -> list[Packaged]:
    import transformers

    configured = transformers.T5Config.from_pretrained
    transformers.T5Config.from_pretrained = classmethod(
        lambda cls, name, **_: cls(d_model=768)
    )  # asked of the hub on import
    from imagen_pytorch import Unet, Unet3D

    transformers.T5Config.from_pretrained = configured
    options = {"dim": 8, "dim_mults": (1, 2), "num_resnet_blocks": 1, "layer_attns": False, "cond_on_text": False}
    package = "imagen-pytorch"
    return [
        Packaged("Unet", package, lambda: Unet(**options), _image_and_time(), 4),
        Packaged(
            "Unet3D", package, lambda: Unet3D(**options), lambda: (randn(1, 3, 2, 16, 16), torch.tensor([3.0])), 4
        ),
    ]


def katherine_networks() -> list[Packaged]:
    from k_diffusion.models import ImageDenoiserModelV1, ImageTransformerDenoiserModelV1

    package = "k-diffusion"
    return [
        Packaged("ImageDenoiserModelV1", package,
                 lambda: ImageDenoiserModelV1(3, 16, (1, 1, 1), (16, 16, 32), (False, False, True)), _image_and_time(), 2),
        Packaged("ImageTransformerDenoiserModelV1", package,
                 lambda: ImageTransformerDenoiserModelV1(3, 64, 64, 3, 3, (4, 4)), _image_and_time(), 0),
    ]  # fmt: skip


def segmentation_networks() -> list[Packaged]:
    import segmentation_models_pytorch as smp

    package, x = "segmentation_models_pytorch", _image(64)

    def build(name: str) -> Callable[[], nn.Module]:
        return lambda: getattr(smp, name)(encoder_name="resnet18", encoder_weights=None)

    return [
        Packaged("Unet (resnet18)", package, build("Unet"), x, 4),
        Packaged("MAnet (resnet18)", package, build("MAnet"), x, None, "it is ambiguous which to scale"),
        Packaged("Linknet (resnet18)", package, build("Linknet"), x, 4),
        # all its skips are joined several at once: none by itself
        Packaged("UnetPlusPlus (resnet18)", package, build("UnetPlusPlus"), x, 0, "several at once, as in decoder"),
        Packaged("FPN (resnet18)", package, build("FPN"), x, None, "cannot be scaled"),
        Packaged("DeepLabV3 (resnet18)", package, build("DeepLabV3"), x, 0),
    ]


def declare_torchvision() -> None:
    """The compiled operators of torchvision, without code; to be called before it is imported."""
    library = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _kept.append(library)


def with_torchvision() -> list[Packaged]:
    """Every network whose package imports torchvision."""
    declare_torchvision()
    return [*lucidrains_networks(), *imagen_networks(), *katherine_networks(), *segmentation_networks()]


_kept: list[Any] = []  # a library that is collected takes its operators with it


def tried(packaged: Packaged) -> dict[str, Any]:
    """What detection finds, how far the oracle disagrees at most, and where kappa reaches; or the refusal."""
    torch.manual_seed(0)
    model = packaged.build().eval()
    call = (packaged.inputs(), dict(packaged.kwargs))
    row: dict[str, Any] = {"name": packaged.name, "package": packaged.package, "expected": packaged.skips}
    row["refusal"] = packaged.refusal
    try:
        handle = scalelong.apply(model, "cs", kappa=0.7, example=call)
    except ValueError as error:  # of one that is to be found, the number will not be as counted
        none = "no long skip connections" in str(error)
        return {**row, "found": 0 if none else None, "said": str(error)}
    report = scalelong.verify(model, example=call)
    worst = max(max(check.output_error, check.gradient_error or 0.0) for check in report.checks)
    effect = min(check.effect for check in report.checks)
    return {
        **row,
        "found": len(handle.skips),
        "worst": worst,
        "effect": effect,
        "reach": [skip.reach for skip in handle.skips],
    }


def main() -> None:
    torch.set_num_threads(1)
    rows = [tried(packaged) for packaged in with_torchvision()]
    Path(sys.argv[1]).write_text(json.dumps(rows))


if __name__ == "__main__":
    main()
