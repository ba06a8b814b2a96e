"""Theorem 3.4: ||UNet(x') - UNet(x)|| <= ||x' - x|| [sum_i kappa_i M_0^i + c_0] (Eq. 7), and the order of CS (Sec. 4.1)."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from functools import partial
from statistics import geometric_mean, mean
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor

from scalelong.lab import METHOD_COLOURS, Finding, Study, bounds, judge
from scalelong.lab.matrix_unet import GAINS, METHODS, MatrixUNet, coefficients_of, noisy_inputs
from scalelong.report.colours import BLUE, GREEN, GREY, ORANGE, PINK
from scalelong.report.plots import finish, panels

KAPPA = 0.7
TOLERANCE = 1 + 1e-9  # of a violation, in float64
BOUNDS = ("largest factor", "product", "local", "path")
_STYLES = {"product": "o--", "local": "s-", "path": "^:"}


def change_per_perturbation(model: MatrixUNet, x: Tensor, step: Tensor, coefficients: Sequence[float]) -> float:
    """||UNet(x + step) - UNet(x)|| / ||step||."""
    with torch.no_grad():
        before, after = model(torch.stack([x, x + step]), coefficients)
    return float((after - before).norm() / step.norm())


def random_case(number: int, seed: int) -> dict[str, Any]:
    """Every bound on a random network, coefficients and perturbation; odd numbers perturb along the worst direction."""
    draw = random.Random(seed * 1_000_003 + number)
    num_skips, width, layers = draw.randint(1, 6), draw.choice((4, 8, 12)), draw.randint(1, 3)
    generator = torch.Generator().manual_seed(draw.getrandbits(32))
    model = MatrixUNet(width, layers, num_skips).double().sample_weights_(generator, draw.uniform(0.5, 2))
    method = draw.choice((*METHODS, "random"))
    if method == "random":
        coefficients = [draw.random() for _ in range(num_skips)]
    else:
        coefficients = coefficients_of(method, num_skips, draw.uniform(0.3, 1))
    x = noisy_inputs(1, width, draw.getrandbits(31))[0][0].double()
    step = torch.randn(width, generator=generator, dtype=torch.float64)
    if number % 2:
        here = bounds.segment_jacobians(model, x, x + 1e-9 * step, coefficients).network(coefficients)[0]
        step = torch.linalg.svd(here).Vh[0]
    step = step * x.norm() * 10 ** draw.uniform(-3, -0.3) / step.norm()
    jacobians = bounds.segment_jacobians(model, x, x + step, coefficients)
    case: dict[str, Any] = {"method": method, "layers": layers, "pieces": len(jacobians.lengths)}
    case["measured"] = change_per_perturbation(model, x, step, coefficients)
    case |= all_bounds(model, jacobians, coefficients)
    if layers == 1:
        m0, middle = max(bounds.composed_norms(model)), bounds.block_norms(model)[1]
        case["printed"] = bounds.power_bound(coefficients, m0, middle)
    return case


def all_bounds(model: MatrixUNet, jacobians: bounds.Jacobians, coefficients: Sequence[float]) -> dict[str, float]:
    """The value of each of BOUNDS."""
    factors, middle = bounds.block_norms(model)
    return {
        "largest factor": bounds.power_bound(coefficients, max(factors), middle),
        "product": bounds.product_bound(coefficients, factors, middle),
        "local": bounds.local_bound(jacobians, coefficients),
        "path": bounds.path_bound(jacobians, coefficients),
    }


def violations(cases: list[dict[str, Any]], bound: str) -> int:
    """How many cases exceed the bound; one that is not finite counts."""
    return sum(not case["measured"] <= case[bound] * TOLERANCE for case in cases if bound in case)


def study(quick: bool = False, seed: int = 0) -> Study:
    """Violations in random networks, the counterexample, tightness by method, and CS against universal scaling."""
    cases = [random_case(number, seed) for number in range(100 if quick else 1_200)]
    depths, width, networks = ((1, 2, 4), 16, 2) if quick else ((1, 2, 4, 8, 12, 16), 48, 3)
    tightness = [tightness_at(n, width, networks, seed) for n in depths]
    paper_gain = tightness_at(depths[-1], width, networks, seed, GAINS["paper"])
    broken = [broken_case(stretch, m0) for m0 in (1.0, 1.5) for stretch in (1.0, 2.0, 4.0, 8.0)]
    findings = (
        _about_printed(cases, broken),
        *_about_valid(cases),
        *_about_tightness(tightness),
        _about_order(tightness[-1], paper_gain),
    )
    data = {"cases": cases, "tightness": tightness, "paper_gain": paper_gain, "broken": broken, "width": width}
    return Study("theorem34", findings, data)


def broken_case(stretch: float, m0: float) -> dict[str, float]:
    """The counterexample with N = 1, kappa = 1, perturbed along its first axis."""
    model = bounds.counterexample(stretch, m0)
    x, step = torch.ones(2, dtype=torch.float64), torch.tensor([0.1, 0.0], dtype=torch.float64)
    factors, middle = bounds.block_norms(model)
    return {
        "stretch": stretch,
        "m0": max(bounds.composed_norms(model)),
        "measured": change_per_perturbation(model, x, step, [1.0]),
        "printed": bounds.power_bound([1.0], max(bounds.composed_norms(model)), middle),
        "corrected": bounds.product_bound([1.0], factors, middle),
    }


def tightness_at(num_skips: int, width: int, networks: int, seed: int, gain: float = GAINS["unit"]) -> dict[str, Any]:
    """Geometric means over networks: ||J|| at x by power iteration, the change along a random direction, and every bound."""
    generator = torch.Generator().manual_seed(seed + num_skips)
    inputs, _ = noisy_inputs(networks, width, seed)
    logs: dict[str, list[dict[str, float]]] = {method: [] for method in METHODS}
    gap = 0.0
    for x in inputs.double():
        model = MatrixUNet(width, 2, num_skips).double().sample_weights_(generator, gain)
        push = 1e-6 * torch.randn(width, generator=generator, dtype=torch.float64)
        for method, rows in logs.items():
            kappas = coefficients_of(method, num_skips, KAPPA)
            jacobians = bounds.segment_jacobians(model, x, x + 1e-9 * push, kappas)
            exact = float(torch.linalg.matrix_norm(jacobians.network(kappas)[0], ord=2))
            worst, _ = bounds.power_iteration(partial(model, coefficients=kappas), x, 60)
            gap = max(gap, abs(worst / exact - 1))
            row = {"worst": worst, "random": change_per_perturbation(model, x, push, kappas)}
            row["skips"] = bounds.product_bound(kappas, bounds.block_norms(model)[0], middle=0.0)
            rows.append(row | all_bounds(model, jacobians, kappas))
    methods = {name: {key: geometric_mean(row[key] for row in rows) for key in rows[0]} for name, rows in logs.items()}
    return {"num_skips": num_skips, "power_iteration_gap": gap, "methods": methods}


def _about_printed(cases: list[dict[str, Any]], broken: list[dict[str, float]]) -> Finding:
    worst = max(broken, key=lambda case: case["measured"] / case["printed"])
    tried = [case for case in cases if "printed" in case]
    return judge(
        "Theorem 3.4, Eq. 7, with M_0 = max ||b_i o a_i||",
        "never exceeded",
        f"counterexample (m = 2, N = 1, M_0 = {worst['m0']:g}, L_0 = 1): output moves by {worst['measured']:.1f}, the bound "
        f"says {worst['printed']:.1f}; {violations(cases, 'printed')} of {len(tried)} random networks with linear blocks",
        worst["measured"] > worst["printed"],
        "fails as printed: f_i lies between b_i and a_i; the true factor is ||b_i|| ||a_i||, not ||b_i o a_i||",
    )


def _about_valid(cases: list[dict[str, Any]]) -> tuple[Finding, Finding]:
    count = violations(cases, "largest factor") + violations(cases, "product")
    tightest = max(case["measured"] / case["product"] for case in cases)
    corrected = judge(
        "Theorem 3.4 corrected: M = max ||b_i|| ||a_i||, and its product form",
        "never exceeded",
        f"{count} violations in {len(cases):,} random networks and perturbations; the closest reaches {tightest:.2f} of the "
        "product form",
        count == 0,
    )
    count = violations(cases, "local") + violations(cases, "path")
    pieces = max(case["pieces"] for case in cases)
    shares = ", ".join(f"{bound} {mean(_shares(cases, bound)):.3f}" for bound in ("product", "local", "path"))
    local = judge(
        "Theorem 3.4 with Jacobians along the segment (singular values on each of its linear pieces)",
        "never exceeded",
        f"{count} violations in {len(cases):,}, up to {pieces} pieces a segment; mean share reached: {shares}",
        count == 0,
    )
    return corrected, local


def _shares(cases: list[dict[str, Any]], bound: str) -> list[float]:
    """measured / bound, without networks whose ReLUs are all dead (bound 0)."""
    return [case["measured"] / case[bound] for case in cases if case[bound] > 0]


def _about_tightness(tightness: list[dict[str, Any]]) -> tuple[Finding, Finding]:
    first, last = tightness[0], tightness[-1]
    gap = max(row["power_iteration_gap"] for row in tightness)

    def about(bound: str, statement: str, verdict: str, note: str = "") -> Finding:
        shares = [
            ", ".join(f"{method} {row['worst'] / row[bound]:.1e}" for method, row in at["methods"].items())
            for at in (first, last)
        ]
        measurement = f"N = {first['num_skips']}: {shares[0]}; N = {last['num_skips']}: {shares[1]}{note}"
        rows = [row for at in tightness for row in at["methods"].values()]
        never_above = all(row["worst"] <= row[bound] * TOLERANCE for row in rows)
        return judge(f"Tightness of the {statement}", "1 if tight", measurement, never_above, verdict)

    product = f"product form, {first['num_skips']} to {last['num_skips']} skips, worst direction"
    local = "local form (||J|| by power iteration on Jacobians)"
    note = f"; power iteration within {gap:.0e} of singular values, from below"
    return (
        about("product", product, "holds, but is loose: the share falls geometrically with N"),
        about("local", local, "holds, but is loose", note),
    )


def cs_over_universal(tightness: dict[str, Any], key: str) -> float:
    """A value of CS divided by that of universal scaling."""
    return float(tightness["methods"]["cs"][key] / tightness["methods"]["universal"][key])


def _about_order(unit: dict[str, Any], paper: dict[str, Any]) -> Finding:
    n, skips, whole = unit["num_skips"], cs_over_universal(unit, "skips"), cs_over_universal(unit, "product")
    real, real_paper = cs_over_universal(unit, "worst"), cs_over_universal(paper, "worst")
    return judge(
        "Sec. 4.1: the bound of CS is kappa^(N-2) times that of universal scaling",
        f"kappa = {KAPPA}, N = {n}: {KAPPA ** (n - 2):.1e}",
        f"sum over the skips {skips:.1e}; whole bound with c_0 = M^N L_0 {whole:.2f}; ||J|| measured "
        f"{real:.2f} with unit-gain blocks, {real_paper:.2f} with N(0, 2/m)",
        abs(skips / KAPPA ** (n - 2) - 1) < 0.5 and whole > 0.8,
        "fails as printed: true of the sum over skips only; c_0 is of order M^N for both, so the whole bounds are of the "
        "same order",
    )


def figure(data: Mapping[str, Any]) -> Figure:
    """Share of each bound reached, tightness against N, and CS over universal scaling."""
    canvas, (share, tight, order) = panels(3)
    bins = np.logspace(-12, 2, 57).tolist()
    for bound, colour in zip(BOUNDS, (GREY, BLUE, ORANGE, GREEN), strict=True):
        # a share of 1 belongs to the bin below 1
        values = [min(value, 1 - 1e-9) if value <= TOLERANCE else value for value in _shares(data["cases"], bound)]
        share.hist(np.clip(values, bins[0], None), bins, histtype="step", color=colour, linewidth=1.4, label=bound)
    broken = [case["measured"] / case["printed"] for case in data["broken"] if case["stretch"] > 1]
    share.plot(broken, np.full(len(broken), 8.0), "x", color=PINK, markersize=7, label="counterexamples to Eq. 7")
    share.axvline(1, color="black", linewidth=1)
    title = f"{len(data['cases']):,} random networks: none beyond 1"
    finish(share, title, "measured / bound (first bar: this or less)", "networks", log="x")
    depths = [row["num_skips"] for row in data["tightness"]]
    for method, colour in METHOD_COLOURS.items():
        rows = [row["methods"][method] for row in data["tightness"]]
        for bound, style in _STYLES.items():
            tight.plot(depths, [row["worst"] / row[bound] for row in rows], style, color=colour, markersize=4)
        tight.plot([], [], color=colour, label=method)
    for bound, style in _STYLES.items():
        tight.plot([], [], style, color=GREY, markersize=4, label=f"{bound} form")
    finish(tight, "||J|| at x over each bound (1 = tight)", "number of skips N", "share of the bound reached", log="y")
    n = np.array(depths, dtype=float)
    for key, colour, label in (
        ("skips", GREEN, "sum over the skips"),
        ("product", BLUE, "whole bound, with c₀"),
        ("worst", PINK, "||J|| measured"),
    ):
        values = [cs_over_universal(row, key) for row in data["tightness"]]
        order.plot(n, values, "o-", color=colour, markersize=4, label=label)
    order.plot(n, KAPPA ** (n - 2), ":", color="black", linewidth=1.6, label="claimed: κ^(N-2)")
    finish(order, f"CS over universal scaling, κ = {KAPPA}", "number of skips N", "ratio", log="y")
    return canvas
