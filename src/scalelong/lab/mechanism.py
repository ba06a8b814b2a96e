"""What scaling is on a U-ViT: an initial size and a learning rate of W_s under Adam, and the gradients at the start.

An out-block joins `x W_x + kappa_i (s W_s) + b`. Adam divides a gradient by its own size, so a factor in front of W_s changes
its effective value kappa_i W_s in two ways only: it starts kappa_i times as large and moves kappa_i times as fast.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from torch import Tensor, nn

from scalelong.backbones import UViT, UViTConfig, as_network
from scalelong.diffusion import VPSDE, Objective, draw_time_and_noise
from scalelong.lab import Finding, Study, judge
from scalelong.report.plots import finish, panels
from scalelong.runs.settings import RunConfig
from scalelong.scaling.constant import constant_coefficients
from scalelong.skips import apply, remove
from scalelong.training.build import build_model, build_objective, build_source

KAPPA, ADAM_KAPPA = 0.5, 0.7  # powers of 0.5 would only move exponents, and the identity would be exact
METHODS: tuple[tuple[str, str, dict[str, Any]], ...] = (  # label, method, options
    ("none", "none", {}),
    ("cs 0.5", "cs", {"kappa": KAPPA}),
    ("cs_reversed 0.5", "cs_reversed", {"kappa": KAPPA}),
    ("universal 0.5", "universal", {"kappa": KAPPA}),
    ("ls", "ls", {}),
    ("none, Xavier joins", "none", {}),
)


def study(quick: bool, seed: int) -> Study:
    distances = adam_distances(seed=seed)
    depths, width, seeds = ((12, 20), 512, range(seed, seed + 3)) if not quick else ((8,), 64, range(seed, seed + 1))
    ratios = {depth: gradient_ratios(depth, width, seeds) for depth in depths}
    findings = (_identity(distances), *(_ratios(depth, ratios[depth], width) for depth in depths))
    return Study("mechanism", findings, {"distances": distances, "ratios": {str(k): v for k, v in ratios.items()}})


# --------------------------------------------------------------------------------------------------- CS under Adam


class SplitJoin(nn.Module):
    """x W_x + factor * (s W_s) + b with W_x and W_s as parameters of their own, so that each has its own rate."""

    def __init__(self, joined: nn.Linear, factor: float = 1.0) -> None:
        super().__init__()
        main, skip = joined.weight.detach().chunk(2, dim=1)
        self.main, self.skip, self.factor = nn.Parameter(main.clone()), nn.Parameter(skip.clone()), factor
        self.bias = nn.Parameter(joined.bias.detach().clone())

    def forward(self, x: Tensor, skip: Tensor) -> Tensor:
        return F.linear(x, self.main, self.bias) + self.factor * F.linear(skip, self.skip)


def split_joins(model: UViT, factors: Sequence[float], sizes: Sequence[float]) -> UViT:
    """A copy with split joins: factor of each skip (outermost first), and what its initial W_s is multiplied by."""
    model = copy.deepcopy(model)
    for block, factor, size in zip(reversed(model.out_blocks), factors, sizes, strict=True):
        join: Any = block
        join.skip_linear = SplitJoin(join.skip_linear, factor)
        with torch.no_grad():
            join.skip_linear.skip *= size
    return model


def adam_distances(steps: int = 30, seed: int = 0) -> dict[str, float]:
    """How far models are from CS after training in float64: largest difference of outputs over the largest output.

    "size and rate" has no factors, but W_s times kappa_i at the start, its rate times kappa_i and its decay divided by it.

    >>> found = adam_distances(steps=2)
    >>> found["size and rate"] < 1e-12 < found["none"]
    True
    """
    torch.manual_seed(seed)
    plain = UViT(UViTConfig(image_size=8, patch_size=2, dim=32, depth=6, heads=2)).double()
    kappa = constant_coefficients(plain.num_skips, ADAM_KAPPA)
    ones = [1.0] * len(kappa)
    variants = {  # factors, initial sizes, rates of W_s
        "cs": (kappa, ones, ones),
        "size and rate": (ones, kappa, kappa),
        "size only": (ones, kappa, ones),
        "rate only": (ones, ones, kappa),
        "none": (ones, ones, ones),
    }
    outputs = {
        name: _trained(split_joins(plain, factors, sizes), rates, steps)
        for name, (factors, sizes, rates) in variants.items()
    }
    scale = float(outputs["cs"].abs().max())
    return {name: float((out - outputs["cs"]).abs().max()) / scale for name, out in outputs.items() if name != "cs"}


def _trained(model: UViT, rates: Sequence[float], steps: int, lr: float = 1e-3, decay: float = 0.03) -> Tensor:
    """The output on a fixed input after AdamW steps on fixed batches; decay per step is the same for all weights."""
    joins: list[Any] = [block.skip_linear for block in reversed(model.out_blocks)]
    own = {id(join.skip) for join in joins}
    groups: list[dict[str, Any]] = [{"params": [p for p in model.parameters() if id(p) not in own]}]
    for join, rate in zip(joins, rates, strict=True):
        groups.append({"params": [join.skip], "lr": lr * rate, "weight_decay": decay / rate})
    optimizer = torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.99), eps=1e-60, weight_decay=decay)
    random = torch.Generator().manual_seed(1)
    for _ in range(steps):
        x, target = (torch.randn(4, 3, 8, 8, dtype=torch.float64, generator=random) for _ in range(2))
        time = 999 * torch.rand(4, dtype=torch.float64, generator=random)
        optimizer.zero_grad()
        (model(x, time) - target).square().mean().backward()
        optimizer.step()
    with torch.no_grad():
        x = torch.randn(4, 3, 8, 8, dtype=torch.float64, generator=random)
        return model(x, torch.full((4,), 500.0, dtype=torch.float64))  # type: ignore[no-any-return]


def _identity(distances: Mapping[str, float]) -> Finding:
    rest = ", ".join(f"{name} {value:.2g}" for name, value in distances.items() if name != "size and rate")
    return judge(
        "Ours: under Adam, kappa_i on a skip is W_s of kappa_i times the initial size and the learning rate",
        "the same outputs after training",
        f"30 AdamW steps in float64: outputs differ from CS by {distances['size and rate']:.1e} of the largest; {rest}",
        distances["size and rate"] < 1e-12 < min(v for k, v in distances.items() if k != "size and rate"),
    )


# ------------------------------------------------------------------------------------------- gradients at the start


def gradient_ratios(depth: int, width: int, seeds: Sequence[int]) -> dict[str, list[float]]:
    """|gradient of the middle block| / |gradient of the last block| of a fresh U-ViT, by method, one number per seed.

    >>> found = gradient_ratios(depth=4, width=32, seeds=[0])
    >>> found["none"][0] < found["cs 0.5"][0]
    True
    """
    found: dict[str, list[float]] = {label: [] for label, _, _ in METHODS}
    for seed in seeds:
        torch.manual_seed(seed)
        model = UViT(UViTConfig(image_size=32, patch_size=4, dim=width, depth=depth, heads=8))
        for label, method, options in METHODS:
            if label.endswith("Xavier joins"):  # the last one: it changes the weights
                for block in model.out_blocks:
                    nn.init.xavier_uniform_(block.skip_linear.weight)  # type: ignore[union-attr, arg-type]
            apply(model, method, **options)
            images = 2 * torch.rand(4, 3, 32, 32, generator=torch.Generator().manual_seed(seed)) - 1
            found[label].append(gradient_ratio(model, Objective(VPSDE()), images, seed))
            remove(model)
    return found


def gradient_ratio(model: UViT, objective: Objective, images: Tensor, seed: int) -> float:
    """|gradient of the middle block| / |gradient of the last block| of the loss on these images."""
    t, noise = draw_time_and_noise(objective.process, seed, torch.arange(len(images)), images.shape[1:])
    model.zero_grad()
    objective.loss(as_network(model), images, noise, t).mean().backward()  # type: ignore[no-untyped-call]
    middle, last = (
        torch.stack([p.grad.norm() for p in block.parameters() if p.grad is not None]).norm()
        for block in (model.mid_block, model.out_blocks[-1])
    )
    return float(middle / last)


def start_ratio(config: RunConfig) -> float:
    """`gradient_ratio` of a run's U-ViT before its first step, on the first 128 images of its data.

    >>> from scalelong.runs.presets import get_preset
    >>> 0 < start_ratio(get_preset("digits-demo")) < 1
    True
    """
    source = build_source(config)
    images = source.prepare(source.read_many(range(min(128, len(source)))), 0, torch.arange(128), None)
    model = build_model(config, source.shape)
    assert isinstance(model, UViT)
    return gradient_ratio(model, build_objective(config), images, config.training.seed)


def _ratios(depth: int, ratios: Mapping[str, list[float]], width: int) -> Finding:
    means = {label: sum(values) / len(values) for label, values in ratios.items()}
    spread = {label: (max(values) - min(values)) / 2 for label, values in ratios.items()}
    shown = [f"{label} {mean:.2g} (± {spread[label]:.1g})" for label, mean in means.items()]
    return judge(
        f"Ours: |gradient of the middle block| / |of the last| at the start, U-ViT of width {width}, depth {depth}",
        "without scaling the deep path is nearly untrained at first",
        f"{', '.join(shown)}; {len(next(iter(ratios.values())))} seeds, half the range",
        all(means["none"] < mean / 2 for label, mean in means.items() if label != "none"),
    )


def figure(data: Mapping[str, Any]) -> Figure:
    """Gradient ratios by method and depth, and the distances from CS after 30 Adam steps."""
    canvas, (left, right) = panels(2)
    ratios = data["ratios"]
    for i, (depth, by_method) in enumerate(ratios.items()):
        places = [j + 0.8 * (i + 0.5) / len(ratios) - 0.4 for j in range(len(by_method))]
        means = [sum(values) / len(values) for values in by_method.values()]
        left.bar(places, means, 0.8 / len(ratios), label=f"depth {depth}")
    left.set_xticks(range(len(METHODS)), [label.replace(" ", "\n", 1) for label, _, _ in METHODS])
    finish(left, "Gradients at the start", "", "|grad middle block| / |grad last block|", "y")
    distances = data["distances"]
    right.bar(
        range(len(distances)), [max(value, 1e-17) for value in distances.values()], 0.6, label="30 AdamW steps, float64"
    )
    right.set_xticks(range(len(distances)), list(distances))
    finish(right, f"Distance from CS {ADAM_KAPPA:g} after training", "", "difference of outputs / largest output", "y")
    return canvas
