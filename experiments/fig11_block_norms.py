"""Fig. 11: the norms ||b_i o a_i|| of the matrix UNet of Eq. 16 while it learns to denoise.

    python experiments/fig11_block_norms.py                            # a minute on one core: digits, m = 64
    python experiments/fig11_block_norms.py --scale gpu                # CIFAR-10, m = 3072

The network has no time input: it predicts the noise from x_t alone. Blocks of one small matrix are measured exactly, by
their singular values; others by power iteration on the Jacobian at training inputs, which comes from below.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import torch
import tyro
from common import Options
from output import Claim, dress, print_claims, print_table, save, write_csv, write_summary
from torch import Tensor
from tqdm import tqdm

from scalelong.backbones import MatrixUNet
from scalelong.data import load_source, make_loader
from scalelong.diffusion import VPSDE, draw_time_and_noise
from scalelong.stability.theory.networks import matrices
from scalelong.stability.theory.segment import power_iteration

NAME = "fig11-block-norms"
SKIPS, LAYERS, POINTS = 6, (1, 2), 10


@dataclass(frozen=True)
class Figure11(Options):
    """All options."""

    lr: float = 1e-3  # Adam's


def main() -> None:
    options = tyro.cli(Figure11, description=__doc__)
    out = options.folder(NAME)
    torch.set_num_threads(1)
    rows = [row for layers in LAYERS for seed in options.seeds for row in train(options, layers, seed)]
    write_csv(rows, out / "norms.csv")
    draw(rows, out / "fig11.png")
    claims = [claim for layers in LAYERS for claim in judged([r for r in rows if r["layers"] == layers], layers)]
    steps, name = steps_of(options), data_name(options)
    told = (
        f"matrix UNet, N = {SKIPS}, m = {rows[0]['width']}, {name}, {steps} steps of Adam at {options.lr:g}, batch 64"
    )
    write_summary(out, claims, told, table=averages(rows))
    print_claims(claims)
    print()
    print_table(averages(rows))


def steps_of(options: Options) -> int:
    return options.steps or (2000 if options.scale == "cpu" else 1500)


def data_name(options: Options) -> str:
    return "digits" if options.scale == "cpu" else "cifar10"


def train(options: Figure11, layers: int, seed: int) -> list[dict[str, Any]]:
    """Norms over the training of one network."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    source, process, steps = load_source(data_name(options)), VPSDE(), steps_of(options)
    width = source.shape[0] * source.shape[1] * source.shape[2]
    torch.manual_seed(seed)
    model = MatrixUNet(width, layers, SKIPS).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=options.lr)
    loader, rows = make_loader(source, seed, device, flip=False), []
    batches = loader.batches(torch.arange(steps * 64).split(64))
    bar = tqdm(enumerate(batches), total=steps, desc=f"{layers} layers, seed {seed}", disable=None)
    for step, batch in bar:
        t, noise = draw_time_and_noise(process, seed, batch.index, source.shape)
        alpha, sigma = (value.float()[:, None] for value in process.marginal(t))
        x, target = alpha * batch.images.flatten(1) + sigma * noise.flatten(1), noise.flatten(1)
        if step % max(1, steps // POINTS) == 0 or step == steps - 1:
            rows += measured(model, x, {"layers": layers, "width": width, "seed": seed, "step": step})
        loss = (model(x) - target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return rows


def measured(model: MatrixUNet, x: Tensor, where: dict[str, Any]) -> list[dict[str, Any]]:
    """||b_i o a_i|| of every i."""
    with torch.no_grad():
        loss_free = [x]
        for encode in model.a:
            loss_free.append(encode(loss_free[-1]))
    return [
        where | {"skip": i, "norm": composed_norm(model, i, loss_free[i - 1])} for i in range(1, model.num_skips + 1)
    ]


def composed_norm(model: MatrixUNet, index: int, inputs: Tensor) -> float:
    """The l2 norm of b_i a_i: exact for small single matrices, else of the Jacobian, the largest over 2 inputs of a_i."""
    encode, decode = matrices(model.a[index - 1]), matrices(model.b[index - 1])
    if len(encode) == len(decode) == 1 and model.width <= 512:
        return float(torch.linalg.matrix_norm((decode[0] @ encode[0]).detach().double(), ord=2))
    block = model.composed(index)
    return max(power_iteration(block, point, 20)[0] for point in inputs[:2])


def judged(rows: list[dict[str, Any]], layers: int) -> list[Claim]:
    """Above 1 throughout, and growing."""
    least = min(row["norm"] for row in rows)
    last = max(row["step"] for row in rows)
    curves = [
        [row["norm"] for row in rows if (row["seed"], row["skip"]) == key]
        for key in dict.fromkeys((row["seed"], row["skip"]) for row in rows)
    ]
    grown = sum(curve[-1] > curve[0] for curve in curves)
    rises = [sum(b > a for a, b in pairwise(curve)) / (len(curve) - 1) for curve in curves]
    return [
        Claim(
            "||b_i o a_i|| is above 1 at any iteration (Fig. 11)",
            f"{layers} matrices a block: the smallest of all is {least:.3f}",
            least > 1,
        ),
        Claim(
            "||b_i o a_i|| increases monotonically with training (Fig. 11)",
            f"{layers} matrices a block: larger at step {last} than at 0 for {grown} of {len(curves)} (seed, skip) pairs; "
            f"{sum(rises) / len(rises):.0%} of the intervals between records rise",
            all(rise == 1 for rise in rises),
        ),
    ]


def averages(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """First and last norms of each skip, means over the seeds."""
    table = []
    for layers, skip in dict.fromkeys((row["layers"], row["skip"]) for row in rows):
        here = [row for row in rows if (row["layers"], row["skip"]) == (layers, skip)]
        ends = min(row["step"] for row in here), max(row["step"] for row in here)
        values = [[row["norm"] for row in here if row["step"] == step] for step in ends]
        first, last = (sum(v) / len(v) for v in values)
        table.append(
            {"layers": layers, "skip": skip, "norm_at_start": first, "norm_at_end": last, "growth": last / first}
        )
    return table


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """The norms over training, a panel for each number of layers."""
    figure, panels = plt.subplots(1, len(LAYERS), figsize=(11, 4), layout="constrained")
    shades = plt.get_cmap("viridis")
    for axes, layers in zip(panels, LAYERS, strict=True):
        for skip in range(1, SKIPS + 1):
            here = [row for row in rows if (row["layers"], row["skip"]) == (layers, skip)]
            steps = sorted({row["step"] for row in here})
            means = [sum(v) / len(v) for v in ([r["norm"] for r in here if r["step"] == s] for s in steps)]
            axes.plot(steps, means, color=shades((skip - 1) / SKIPS), marker=".", label=f"i = {skip}")
        axes.axhline(1, color="#444444", linestyle="--", linewidth=1)
        dress(axes, f"||b_i ∘ a_i||, {layers} matrices a block, mean over seeds", "step", "operator norm")
        axes.set_ylim(bottom=0)
    panels[0].legend(frameon=False, fontsize=8, ncols=2)
    save(figure, path)


if __name__ == "__main__":
    main()
