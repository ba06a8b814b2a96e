"""Images of a network, as uint8: image i is a function of (seed, i), whatever the batch size and the number of ranks.

A network whose kernels round differently at another batch size changes an image by that rounding, and by nothing else.
Shapes: N images uint8 (N, C, H, W), B in a batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from scalelong.backbones import fused
from scalelong.backbones.unet import DiffusersUNet
from scalelong.data import Shape, to_uint8
from scalelong.diffusion.objective import Network, Objective
from scalelong.diffusion.sampling import sample

Condition = Callable[[Tensor], Mapping[str, Any]]  # indices (B,) on the device -> keyword arguments of the network

_AUTOCAST = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


def generate(objective: Objective, net: Network, *, shape: Shape, **options: Any) -> Tensor:
    """All images at once, uint8 (N, C, H, W) on the CPU; the options are those of `generate_batches`."""
    batches = list(generate_batches(objective, net, shape=shape, **options))
    return torch.cat(batches) if batches else torch.empty((0, *shape), dtype=torch.uint8)


def generate_batches(
    objective: Objective,
    net: Network,
    *,
    shape: Shape,  # (C, H, W) of one image
    num_images: int | None = None,  # images 0 .. num_images - 1 ...
    indices: Sequence[int] | Tensor | None = None,  # ... or these
    seed: int = 0,
    batch_size: int = 256,
    sampler: str = "",
    steps: int = 0,
    device: str | torch.device | None = None,  # None: where the network's parameters are
    precision: str = "fp32",  # of the network, by autocast: fp32, bf16, fp16
    condition: Condition | None = None,  # the condition of each image, as a function of its index
    to_pixels: Callable[[Tensor], Tensor] = to_uint8,  # from what is drawn to uint8 images
    rank: int = 0,
    world_size: int = 1,
    progress: bool = True,
    **options: Any,  # of `scalelong.diffusion.sample`: spacing, eta, clip, and what every image's network call is given
) -> Iterator[Tensor]:
    """Batches of uint8 images on the CPU, in the order of their indices; a rank makes its own contiguous part of them."""
    check_drawing(batch_size, precision)
    mine = _part(_indices(num_images, indices), rank, world_size)
    module = _module_of(net)
    where = torch.device(device) if device is not None else _device_of(module)
    autocast = torch.autocast(where.type, _AUTOCAST[precision], enabled=precision != "fp32")

    def make(index: Tensor) -> Tensor:
        with (
            evaluating(module),
            autocast,
            fused.inference(module, enabled=where.type == "cuda" and precision != "fp32"),
        ):
            given = condition(index) if condition else {}
            return sample(objective, net, (seed, index, shape), sampler=sampler, steps=steps, **options, **given)

    return _batches(make, to_pixels, mine, batch_size, where, show=progress and rank == 0)


def check_drawing(batch_size: int, precision: str) -> None:
    """Raise if images cannot be drawn so; for callers with long work before the first image."""
    if precision not in _AUTOCAST:
        raise ValueError(f"evaluation.precision: must be one of {', '.join(_AUTOCAST)}, got {precision!r}")
    if batch_size < 1:
        raise ValueError(f"evaluation.batch_size: must be at least 1, got {batch_size}")


def _batches(
    make: Callable[[Tensor], Tensor],
    to_pixels: Callable[[Tensor], Tensor],
    indices: Tensor,
    batch_size: int,
    device: torch.device,
    show: bool,
) -> Iterator[Tensor]:
    size = min(batch_size, len(indices))
    with tqdm(total=len(indices), desc="generate", unit="img", disable=None if show else True) as bar:
        for index in torch.split(indices, size) if size else ():
            filled = torch.cat([index, index[-1:].expand(size - len(index))])  # one shape for compiled networks
            images = make(filled.to(device))[: len(index)]
            _require_finite(images, index)
            yield to_pixels(images).cpu()
            bar.update(len(index))


def _require_finite(images: Tensor, index: Tensor) -> None:
    good = images.flatten(1).isfinite().all(dim=1).cpu()
    if not good.all():
        first = int(index[~good][0])
        raise ValueError(
            f"evaluation.images: {int((~good).sum())} of {len(good)} images are not finite, the first is image {first}; "
            "the network has diverged, or its precision is too low for the sampler"
        )


def _indices(num_images: int | None, indices: Sequence[int] | Tensor | None) -> Tensor:
    if (num_images is None) == (indices is None):
        raise ValueError("evaluation.num_images: pass either num_images or indices")
    if indices is not None:
        chosen = torch.as_tensor(indices, dtype=torch.int64, device="cpu")
        if chosen.ndim != 1 or (len(chosen) and int(chosen.min()) < 0):
            raise ValueError(f"evaluation.indices: must be a list of numbers >= 0, got {indices!r}")
        return chosen
    if num_images is None or num_images < 1:
        raise ValueError(f"evaluation.num_images: must be at least 1, got {num_images}")
    return torch.arange(num_images)


def _part(indices: Tensor, rank: int, world_size: int) -> Tensor:
    """The contiguous part of one rank: parts in the order of ranks are the whole in its order."""
    if not 0 <= rank < world_size:
        raise ValueError(f"evaluation.rank: must be in 0 .. world_size - 1 = {world_size - 1}, got {rank}")
    n = len(indices)
    return indices[n * rank // world_size : n * (rank + 1) // world_size]


def _module_of(net: Network) -> nn.Module | None:
    """The module behind what is called; a plain function has none."""
    module = net.model if isinstance(net, DiffusersUNet) else net
    return module if isinstance(module, nn.Module) else None


def _device_of(module: nn.Module | None) -> torch.device:
    first = next(module.parameters(), None) if module is not None else None
    return torch.device("cpu") if first is None else first.device


@contextmanager
def evaluating(module: nn.Module | None) -> Iterator[None]:
    """Dropout and the like are off inside; afterwards every module is as it was."""
    training = [part for part in module.modules() if part.training] if module is not None else []
    for part in training:
        part.training = False
    try:
        yield
    finally:
        for part in training:
            part.training = True
