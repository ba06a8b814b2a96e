"""Lemma 3.2: E||x_t||^2 = (1 - 2 E[abar] / 3) m for x_0 ~ U[-1, 1]."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import Tensor

from scalelong.data import load_source, to_float
from scalelong.diffusion import DDPM, VPSDE, Process, draw_time_and_noise
from scalelong.lab import Finding, Study, judge
from scalelong.random import uniform
from scalelong.report.colours import BLUE, GREEN, ORANGE, PINK
from scalelong.report.plots import finish, panels

UNIFORM_SECOND_MOMENT = 1 / 3  # E[x^2] of U[-1, 1]


def printed_alpha_bar(square_root: bool) -> float:
    """The proof's E_t prod_{i <= t} sqrt(1 - 0.02 i / 1000), as printed or without its square root."""
    factor = 1 - 0.02 * torch.arange(1, 1001, dtype=torch.float64) / 1000
    return float((factor.sqrt() if square_root else factor).cumprod(0).mean())


def expected_squared_norm(mean_alpha_bar: float, second_moment: float = UNIFORM_SECOND_MOMENT) -> float:
    """E||x_t||^2 / m = 1 - (1 - v) E[abar], v = E[x_0^2] per value; v = 1/3 gives Eq. 5."""
    return 1 - (1 - second_moment) * mean_alpha_bar


def input_norms(process: Process, images: Tensor | None, count: int, width: int, seed: int) -> tuple[Tensor, Tensor]:
    """(u, ||x_t||^2 / m), (count,) each: u in [0, 1) is the quantile of t; x_0 is uniform, or rows of `images`."""
    index = torch.arange(count)
    if images is None:
        x0 = uniform(seed, "lemma-x0", index, (width,)) * 2 - 1
    else:
        x0 = to_float(images[index % len(images)]).flatten(1).double()
    t, noise = draw_time_and_noise(process, seed, index, (x0.shape[1],))
    x_t, _, _ = process.diffuse(x0, noise.double(), t.double())
    return uniform(seed, "time", index), x_t.square().mean(1)


def study(quick: bool = False, seed: int = 0) -> Study:
    """Closed form against Monte Carlo for both schedules, the printed E[abar], and data that are not uniform."""
    samples, width = (2_000, 128) if quick else (16_000, 256)
    findings: list[Finding] = []
    data: dict[str, dict[str, Any]] = {"curves": {}, "second_moments": {}}
    vp, ddpm = VPSDE(), DDPM()
    for label, process, stream in (("VP-SDE", vp, seed), ("DDPM", ddpm, seed + 1)):
        times, values = input_norms(process, None, samples, width, stream)
        mean = process.mean_alpha_bar()
        predicted = expected_squared_norm(mean)
        measured, error = float(values.mean()), float(values.std() / math.sqrt(samples))
        z = (measured - predicted) / error
        findings.append(
            judge(
                f"Lemma 3.2, {label}: E||x_t||^2 = (1 - 2 E[abar]/3) m",
                f"{predicted:.4f} m with E[abar] = {mean:.4f}",
                f"{measured:.4f} m, standard error {error:.4f}, {abs(z):.1f} standard errors away",
                abs(z) < 3,
            )
        )
        data["curves"][label] = _binned(times, values)
    findings += [_printed_product(ddpm.mean_alpha_bar()), _real_data(vp, seed, quick, data)]
    return Study("lemma32", tuple(findings), data)


def _printed_product(true: float) -> Finding:
    with_root, without = printed_alpha_bar(True), printed_alpha_bar(False)
    return judge(
        "Lemma 3.2, proof: E[abar] = E prod sqrt(1 - 0.02 i/1000) = 0.27 for DDPM",
        "0.27",
        f"that product gives {with_root:.4f}; without the square root {without:.4f}; DDPM's schedule {true:.4f}",
        abs(with_root - 0.27) > 0.05 and abs(without - 0.27) < 0.015,
        "fails as printed: the square root is one too many; without it the value is close",
    )


def _real_data(process: VPSDE, seed: int, quick: bool, data: dict[str, dict[str, Any]]) -> Finding:
    """The lemma's condition, x_0 ~ U[-1, 1], on two embedded data sets."""
    mean, measured, corrected, agree = process.mean_alpha_bar(), [], [], True
    for name in ("digits", "emoji32"):
        images = load_source(name).images
        assert images is not None
        samples = 400 if quick else 1_500
        items = images[torch.randperm(len(images), generator=torch.Generator().manual_seed(seed))]
        times, values = input_norms(process, items, samples, 0, seed)
        second = float(to_float(items).double().square().mean())
        expected, found = expected_squared_norm(mean, second), float(values.mean())
        agree &= abs(found - expected) < 4 * float(values.std()) / math.sqrt(samples)
        measured.append(f"{name} {found:.3f} m")
        corrected.append(f"{expected:.3f}")
        data["curves"][name] = _binned(times, values)
        data["second_moments"][name] = second
    return judge(
        "Lemma 3.2, text: its condition holds on common data",
        f"{expected_squared_norm(mean):.3f} m on any data",
        ", ".join(measured),
        agree,
        "fails as printed: x_0 is not uniform there; (1 - (1 - v) E[abar]) m with v = E[x_0^2] gives "
        f"{', '.join(corrected)}",
    )


def _binned(times: Tensor, values: Tensor) -> dict[str, list[float]]:
    """Mean of the values in 25 equal bins of time, for the figure."""
    bins = 25
    place = (times * bins).long().clamp(max=bins - 1)
    counts = torch.bincount(place, minlength=bins).clamp(min=1)
    means = torch.zeros(bins, dtype=torch.float64).index_add_(0, place, values) / counts
    return {"u": [(i + 0.5) / bins for i in range(bins)], "mean": means.tolist()}


def figure(data: Mapping[str, Any]) -> Figure:
    """E||x_t||^2 / m against time: formulas and samples."""
    canvas, (axes,) = panels(1)
    u = torch.linspace(0, 1, 201, dtype=torch.float64)
    for label, process, colour, marker in (("VP-SDE", VPSDE(), BLUE, "o"), ("DDPM", DDPM(), ORANGE, "x")):
        alpha, _ = process.marginal(process.time_from_uniform(u.clamp(max=1 - 1e-9)).double())
        style = "-" if label == "VP-SDE" else "--"
        axes.plot(u, 1 - 2 * alpha.square() / 3, style, color=colour, linewidth=1.6, label=f"{label}: 1 - 2 abar / 3")
        curve = data["curves"][label]
        axes.plot(curve["u"], curve["mean"], marker, color=colour, markersize=5, label=f"{label}: Monte Carlo")
    alpha, _ = VPSDE().marginal(u)
    for name, colour in (("digits", GREEN), ("emoji32", PINK)):
        second = data["second_moments"][name]
        axes.plot(u, 1 - (1 - second) * alpha.square(), color=colour, linewidth=1.2)
        curve = data["curves"][name]
        axes.plot(curve["u"], curve["mean"], "s", color=colour, markersize=4, label=f"{name}: v = {second:.2f}, VP-SDE")
    finish(axes, "Lemma 3.2: the size of the network's input", "t / T", "E||x_t||² / m", legend="lower right")
    return canvas
