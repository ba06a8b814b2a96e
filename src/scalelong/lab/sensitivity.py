"""Theorem 3.4: ||UNet(x') - UNet(x)|| <= ||x' - x|| [sum_i kappa_i M_0^i + c_0] (Eq. 7), and the order of CS (Sec. 4.1)."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from scalelong.lab.bounds import (
    composed_norms,
    counterexample,
    layer_norms,
    local_bound,
    path_bound,
    power_bound,
    product_bound,
    skip_part,
)
from scalelong.lab.findings import HOLDS, Finding, Study, fails, judged
from scalelong.lab.matrix_unet import MatrixUNet
from scalelong.lab.networks import (
    METHODS,
    PAPER_GAIN,
    UNIT_GAIN,
    coefficients_of,
    draw_weights_,
    noisy_inputs,
)
from scalelong.lab.segment import power_iteration, segment_jacobians

KAPPA = 0.7
TOLERANCE = 1 + 1e-9  # of a violation, in float64
BOUNDS = ("largest factor", "product", "local", "path")


def change_per_perturbation(model: MatrixUNet, x: Tensor, step: Tensor, coefficients: Sequence[float]) -> float:
    """||UNet(x + step) - UNet(x)|| / ||step||."""
    with torch.no_grad():
        before, after = model(torch.stack([x, x + step]), coefficients)
    return float((after - before).norm() / step.norm())


def random_case(number: int, seed: int) -> dict[str, Any]:
    """One random network, coefficients and perturbation, half of them along the direction that hurts most: every bound."""
    draw = random.Random(seed * 1_000_003 + number)
    num_skips, width, layers = draw.randint(1, 6), draw.choice((4, 8, 12)), draw.randint(1, 3)
    generator = torch.Generator().manual_seed(draw.getrandbits(32))
    model = draw_weights_(MatrixUNet(width, layers, num_skips).double(), generator, draw.uniform(0.5, 2))
    method = draw.choice((*METHODS, "random"))
    if method == "random":
        coefficients = [draw.random() for _ in range(num_skips)]
    else:
        coefficients = coefficients_of(method, num_skips, draw.uniform(0.3, 1))
    x = noisy_inputs(1, width, draw.getrandbits(31))[0][0].double()
    step = torch.randn(width, generator=generator, dtype=torch.float64)
    if number % 2:
        here = segment_jacobians(model, x, x + 1e-9 * step, coefficients).network(coefficients)[0]
        step = torch.linalg.svd(here).Vh[0]
    step = step * x.norm() * 10 ** draw.uniform(-3, -0.3) / step.norm()
    norms = layer_norms(model)
    jacobians = segment_jacobians(model, x, x + step, coefficients)
    case = {
        "method": method,
        "layers": layers,
        "pieces": len(jacobians.lengths),
        "measured": change_per_perturbation(model, x, step, coefficients),
        "largest factor": power_bound(coefficients, max(norms.factors), norms.middle),
        "product": product_bound(coefficients, norms.factors, norms.middle),
        "local": local_bound(jacobians, coefficients),
        "path": path_bound(jacobians, coefficients),
    }
    if layers == 1:
        case["printed"] = power_bound(coefficients, max(composed_norms(model)), norms.middle)
    return case


def violations(cases: list[dict[str, Any]], bound: str) -> int:
    """In how many cases the output moved by more than the bound allows; a number that is not finite counts as one."""
    return sum(not case["measured"] <= case[bound] * TOLERANCE for case in cases if bound in case)


def study_theorem34(quick: bool = False, seed: int = 0) -> Study:
    """Violations in random networks, the counterexample, tightness by method, and CS against universal scaling."""
    cases = [random_case(number, seed) for number in range(100 if quick else 1_200)]
    depths, width, networks = ((1, 2, 4), 16, 2) if quick else ((1, 2, 4, 8, 12, 16), 48, 3)
    tightness = [tightness_at(n, width, networks, seed) for n in depths]
    paper_gain = tightness_at(depths[-1], width, networks, seed, PAPER_GAIN)
    broken = [broken_case(stretch, m0) for m0 in (1.0, 1.5) for stretch in (1.0, 2.0, 4.0, 8.0)]
    findings = (
        _about_printed(cases, broken),
        _about_corrected(cases),
        _about_local(cases),
        *_about_tightness(tightness),
        _about_order(tightness[-1], paper_gain),
    )
    data = {"cases": cases, "tightness": tightness, "paper_gain": paper_gain, "broken": broken, "width": width}
    return Study("theorem34", findings, data)


def broken_case(stretch: float, m0: float) -> dict[str, float]:
    """The counterexample with N = 1, kappa = 1, pushed along its first axis."""
    model = counterexample(stretch, m0)
    x, step = torch.ones(2, dtype=torch.float64), torch.tensor([0.1, 0.0], dtype=torch.float64)
    norms = layer_norms(model)
    return {
        "stretch": stretch,
        "m0": max(composed_norms(model)),
        "measured": change_per_perturbation(model, x, step, [1.0]),
        "printed": power_bound([1.0], max(composed_norms(model)), norms.middle),
        "corrected": product_bound([1.0], norms.factors, norms.middle),
    }


def tightness_at(num_skips: int, width: int, networks: int, seed: int, gain: float = UNIT_GAIN) -> dict[str, Any]:
    """Geometric means over networks: ||J|| at x by power iteration, the change along a random direction, and every bound."""
    generator = torch.Generator().manual_seed(seed + num_skips)
    inputs, _ = noisy_inputs(networks, width, seed)
    logs: dict[str, list[dict[str, float]]] = {method: [] for method in METHODS}
    gap = 0.0
    for x in inputs.double():
        model = draw_weights_(MatrixUNet(width, 2, num_skips).double(), generator, gain)
        norms = layer_norms(model)
        push = 1e-6 * torch.randn(width, generator=generator, dtype=torch.float64)
        for method, rows in logs.items():
            kappas = coefficients_of(method, num_skips, KAPPA)
            jacobians = segment_jacobians(model, x, x + 1e-9 * push, kappas)
            exact = float(torch.linalg.matrix_norm(jacobians.network(kappas)[0], ord=2))
            worst, _ = power_iteration(partial(model, coefficients=kappas), x, 60)
            gap = max(gap, abs(worst / exact - 1))
            rows.append(
                {
                    "worst": worst,
                    "random": change_per_perturbation(model, x, push, kappas),
                    "largest factor": power_bound(kappas, max(norms.factors), norms.middle),
                    "product": product_bound(kappas, norms.factors, norms.middle),
                    "skips": skip_part(kappas, norms.factors),
                    "local": local_bound(jacobians, kappas),
                    "path": path_bound(jacobians, kappas),
                }
            )
    means = {method: _geometric_means(rows) for method, rows in logs.items()}
    return {"num_skips": num_skips, "power_iteration_gap": gap, "methods": means}


def _geometric_means(rows: list[dict[str, float]]) -> dict[str, float]:
    return {key: math.exp(sum(math.log(row[key]) for row in rows) / len(rows)) for key in rows[0]}


def _about_printed(cases: list[dict[str, Any]], broken: list[dict[str, float]]) -> Finding:
    worst = max(broken, key=lambda case: case["measured"] / case["printed"])
    tried = [case for case in cases if "printed" in case]
    return Finding(
        "Theorem 3.4, Eq. 7, with M_0 = max ||b_i o a_i||",
        "never exceeded",
        f"counterexample (m = 2, N = 1, M_0 = {worst['m0']:g}, L_0 = 1): output moves by {worst['measured']:.1f}, the bound "
        f"says {worst['printed']:.1f}; {violations(cases, 'printed')} of {len(tried)} random networks with linear blocks",
        judged(
            worst["measured"] > worst["printed"],
            fails("f_i stands between b_i and a_i; the true factor is ||b_i|| ||a_i||, not ||b_i o a_i||"),
        ),
    )


def _about_corrected(cases: list[dict[str, Any]]) -> Finding:
    count = violations(cases, "largest factor") + violations(cases, "product")
    tightest = max(case["measured"] / case["product"] for case in cases)
    return Finding(
        "Theorem 3.4 corrected: M = max ||b_i|| ||a_i||, and its product form",
        "never exceeded",
        f"{count} violations in {len(cases):,} random networks and perturbations; the closest reaches {tightest:.2f} of the "
        "product form",
        judged(count == 0),
    )


def _about_local(cases: list[dict[str, Any]]) -> Finding:
    count = violations(cases, "local") + violations(cases, "path")
    pieces = max(case["pieces"] for case in cases)
    shares = ", ".join(f"{bound} {_mean_share(cases, bound):.3f}" for bound in ("product", "local", "path"))
    return Finding(
        "Theorem 3.4 with Jacobians along the segment (singular values on each of its linear pieces)",
        "never exceeded",
        f"{count} violations in {len(cases):,}, up to {pieces} pieces a segment; mean share reached: {shares}",
        judged(count == 0),
    )


def _mean_share(cases: list[dict[str, Any]], bound: str) -> float:
    """measured / bound; networks whose ReLUs are all dead have a bound of 0 and are left out."""
    shares: list[float] = [case["measured"] / case[bound] for case in cases if case[bound] > 0]
    return sum(shares) / len(shares)


def _about_tightness(tightness: list[dict[str, Any]]) -> tuple[Finding, Finding]:
    first, last = tightness[0], tightness[-1]

    def shares(bound: str, at: dict[str, Any]) -> str:
        return ", ".join(f"{method} {row['worst'] / row[bound]:.1e}" for method, row in at["methods"].items())

    def never_above(bound: str) -> bool:
        rows = [row for at in tightness for row in at["methods"].values()]
        return all(row["worst"] <= row[bound] * TOLERANCE for row in rows)

    gap = max(row["power_iteration_gap"] for row in tightness)
    return (
        Finding(
            f"Tightness of the product form, {first['num_skips']} to {last['num_skips']} skips, worst direction",
            "1 if tight",
            f"N = {first['num_skips']}: {shares('product', first)}; N = {last['num_skips']}: {shares('product', last)}",
            judged(never_above("product"), HOLDS + ", but is loose: the share falls geometrically with N"),
        ),
        Finding(
            "Tightness of the local form (||J|| by power iteration on Jacobians)",
            "1 if tight",
            f"N = {first['num_skips']}: {shares('local', first)}; N = {last['num_skips']}: {shares('local', last)}; power "
            f"iteration within {gap:.0e} of singular values, from below",
            judged(never_above("local"), HOLDS + ", but is loose"),
        ),
    )


def cs_over_universal(tightness: dict[str, Any], key: str) -> float:
    """The number of CS over that of universal scaling."""
    return float(tightness["methods"]["cs"][key] / tightness["methods"]["universal"][key])


def _about_order(unit: dict[str, Any], paper: dict[str, Any]) -> Finding:
    n, skips, whole = unit["num_skips"], cs_over_universal(unit, "skips"), cs_over_universal(unit, "product")
    real, real_paper = cs_over_universal(unit, "worst"), cs_over_universal(paper, "worst")
    return Finding(
        "Sec. 4.1: the bound of CS is kappa^(N-2) times that of universal scaling",
        f"kappa = {KAPPA}, N = {n}: {KAPPA ** (n - 2):.1e}",
        f"sum over the skips {skips:.1e}; whole bound with c_0 = M^N L_0 {whole:.2f}; ||J|| measured "
        f"{real:.2f} with unit-gain blocks, {real_paper:.2f} with N(0, 2/m)",
        judged(
            abs(skips / KAPPA ** (n - 2) - 1) < 0.5 and whole > 0.8,
            fails(
                "true of the sum over skips only; c_0 is of order M^N for both, so the whole bounds are of one order"
            ),
        ),
    )
