"""Fig. 11: the norms ||b_i o a_i|| of the matrix UNet of Eq. 16 while it learns to denoise.

The network has no time input: it predicts the noise from x_t alone. Blocks of one small matrix are measured exactly, by
their singular values; others by power iteration on the Jacobian at fixed inputs, which comes from below. Eq. 17 starts
from N(0, 2 / m), where the norms are large; torch's own, smaller start is measured too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import torch
from output import Claim, Outcome, dress, save, write_csv
from settings import Experiment
from torch import Tensor, nn
from tqdm import tqdm

from scalelong.data import load_source, make_loader
from scalelong.diffusion import VPSDE, draw_time_and_noise
from scalelong.lab.bounds import power_iteration
from scalelong.lab.matrix_unet import MatrixUNet, matrices

SKIPS, POINTS = 6, 10


@dataclass(frozen=True)
class Variant:
    """A kind of network: matrices in a block, and how they start."""

    layers: int
    kaiming: bool

    def __str__(self) -> str:
        matrices = "1 matrix" if self.layers == 1 else f"{self.layers} matrices"
        return f"{matrices} a block, {'N(0, 2/m)' if self.kaiming else 'torch default'}"


VARIANTS = (Variant(1, True), Variant(2, True), Variant(1, False))


def measure(experiment: Experiment, _: object, out: Path) -> Outcome:
    torch.set_num_threads(1)
    options = experiment.options
    rows = [row for variant in VARIANTS for seed in experiment.seeds for row in train(options, variant, seed)]
    write_csv(rows, out / "norms.csv")
    draw(rows, out / "fig11.png")
    claims = [claim for kind in map(str, VARIANTS) for claim in judged([r for r in rows if r["network"] == kind], kind)]
    network = f"matrix UNet, N = {SKIPS}, m = {rows[0]['width']}, {options['data']}"
    setting = f"{network}, {options['steps']} steps of Adam at {options['lr']:g}, batch 64"
    return Outcome(claims, setting, {"table": averages(rows)})


def train(options: Mapping[str, Any], variant: Variant, seed: int) -> list[dict[str, Any]]:
    """Norms over the training of one network."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    source, process, steps = load_source(options["data"]), VPSDE(), options["steps"]
    width = source.shape[0] * source.shape[1] * source.shape[2]
    torch.manual_seed(seed)
    model = MatrixUNet(width, variant.layers, SKIPS)
    for layer in [] if variant.kaiming else [m for m in model.modules() if isinstance(m, nn.Linear)]:
        layer.reset_parameters()
    model.to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=options["lr"])
    loader, rows = make_loader(source, seed, device, flip=False), []
    fixed: Tensor | None = None  # the inputs at which norms are measured: the first batch
    batches = loader.batches(torch.arange(steps * 64).split(64))
    bar = tqdm(enumerate(batches), total=steps, desc=f"{variant}, seed {seed}", disable=None)
    for step, batch in bar:
        t, noise = draw_time_and_noise(process, seed, batch.index, source.shape)
        target = noise.flatten(1)
        x, _, _ = process.diffuse(batch.images.flatten(1), target, t)
        fixed = x if fixed is None else fixed
        loss = (model(x) - target).square().mean()
        if step % max(1, steps // POINTS) == 0 or step == steps - 1:
            where = {"network": str(variant), "width": width, "seed": seed, "step": step, "loss": loss.item()}
            rows += measured(model, fixed, where)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return rows


def measured(model: MatrixUNet, x: Tensor, where: dict[str, Any]) -> list[dict[str, Any]]:
    """||b_i o a_i|| of every i."""
    with torch.no_grad():
        inputs = [x]
        for encode in model.a:
            inputs.append(encode(inputs[-1]))
    return [where | {"skip": i, "norm": composed_norm(model, i, inputs[i - 1])} for i in range(1, model.num_skips + 1)]


def composed_norm(model: MatrixUNet, index: int, inputs: Tensor) -> float:
    """The l2 norm of b_i a_i: exact for small single matrices, else of the Jacobian, the largest over 2 inputs of a_i."""
    encode, decode = matrices(model.a[index - 1]), matrices(model.b[index - 1])
    if len(encode) == len(decode) == 1 and model.width <= 512:
        return float(torch.linalg.matrix_norm((decode[0] @ encode[0]).detach().double(), ord=2))
    block = nn.Sequential(model.a[index - 1], model.b[index - 1])
    return max(power_iteration(block, point, 20)[0] for point in inputs[:2])


def judged(rows: list[dict[str, Any]], kind: str) -> list[Claim]:
    """Above 1 throughout, and growing."""
    least = min(row["norm"] for row in rows)
    last = max(row["step"] for row in rows)
    ends = [[row["loss"] for row in rows if row["step"] == step] for step in (0, last)]
    losses = [sum(values) / len(values) for values in ends]
    curves = [
        [row["norm"] for row in rows if (row["seed"], row["skip"]) == key]
        for key in dict.fromkeys((row["seed"], row["skip"]) for row in rows)
    ]
    grown = sum(curve[-1] > curve[0] for curve in curves)
    rises = [sum(b > a for a, b in pairwise(curve)) / (len(curve) - 1) for curve in curves]
    return [
        Claim(
            "||b_i o a_i|| is above 1 at any iteration (Fig. 11)",
            f"{kind}: the smallest of all is {least:.3f} (mean loss from {losses[0]:.3g} to {losses[1]:.3g})",
            least > 1,
        ),
        Claim(
            "||b_i o a_i|| increases monotonically with training (Fig. 11)",
            f"{kind}: larger at step {last} than at 0 for {grown} of {len(curves)} (seed, skip) pairs; "
            f"{sum(rises) / len(rises):.0%} of the intervals between records rise",
            all(rise == 1 for rise in rises),
        ),
    ]


def averages(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """First and last norms of each skip, means over the seeds."""
    table = []
    for kind, skip in dict.fromkeys((row["network"], row["skip"]) for row in rows):
        here = [row for row in rows if (row["network"], row["skip"]) == (kind, skip)]
        ends = min(row["step"] for row in here), max(row["step"] for row in here)
        values = [[row["norm"] for row in here if row["step"] == step] for step in ends]
        first, last = (sum(v) / len(v) for v in values)
        table.append(
            {"network": kind, "skip": skip, "norm_at_start": first, "norm_at_end": last, "growth": last / first}
        )
    return table


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """The norms over training, a panel for each kind of network."""
    figure, panels = plt.subplots(1, len(VARIANTS), figsize=(14, 4), layout="constrained")
    shades = plt.get_cmap("viridis")
    for axes, kind in zip(panels, map(str, VARIANTS), strict=True):
        for skip in range(1, SKIPS + 1):
            here = [row for row in rows if (row["network"], row["skip"]) == (kind, skip)]
            steps = sorted({row["step"] for row in here})
            means = [sum(v) / len(v) for v in ([r["norm"] for r in here if r["step"] == s] for s in steps)]
            axes.plot(steps, means, color=shades((skip - 1) / SKIPS), marker=".", label=f"i = {skip}")
        axes.axhline(1, color="#444444", linestyle="--", linewidth=1)
        dress(axes, kind, "step", "||b_i ∘ a_i||, mean over seeds" if axes is panels[0] else "")
        axes.set_ylim(bottom=0)
    panels[0].legend(frameon=False, fontsize=8, ncols=2)
    save(figure, path)
