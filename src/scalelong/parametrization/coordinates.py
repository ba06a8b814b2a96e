"""Coordinate check: does the size of activations depend on width after a few steps of training?

In muP the mean |activation| of every module stays the same as the network widens; in the standard parametrization some grow.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from scalelong.errors import require, unknown_name
from scalelong.parametrization.attach import OUTPUT
from scalelong.parametrization.mup import apply_plan, param_groups, plan_for
from scalelong.parametrization.shapes import base_shapes, make_plan
from scalelong.skips.example import as_call, run_example, tensors_in
from scalelong.skips.families import generated_example

TOLERANCE = 0.1  # of a slope that counts as flat
Groups = list[dict[str, Any]]
Prepare = Callable[[nn.Module, nn.Module, float], Groups]  # (model, base, lr) -> parameter groups


def _mup(model: nn.Module, base: nn.Module, lr: float) -> Groups:
    apply_plan(model, plan_for(model, base, same_width=True))  # `parametrize` without its search for optimizers
    return param_groups(model, lr)


def _standard(model: nn.Module, base: nn.Module, lr: float) -> Groups:  # noqa: ARG001
    return param_groups(model, lr)


PARAMETRIZATIONS: dict[str, Prepare] = {"mup": _mup, "standard": _standard}


@dataclass(frozen=True)
class CoordinateCheck:
    """Mean |activation| of every module at several widths; prints as a table of slopes, steepest first.

    >>> net = lambda width: nn.Sequential(nn.Linear(3, width), nn.ReLU(), nn.Linear(width, width), nn.Linear(width, 1))
    >>> found = coordinate_check(net, (32, 64, 128, 256), example=torch.ones(1, 3))
    >>> sorted(found.slopes()), found.flat
    (['', '0', '1', '2', '3'], True)
    """

    widths: tuple[int, ...]
    activations: dict[str, np.ndarray[Any, Any]]  # by module: steps + 1, widths, seeds
    name: str = "mup"

    @property
    def steps(self) -> int:
        return len(next(iter(self.activations.values()))) - 1

    @property
    def seeds(self) -> int:
        return int(next(iter(self.activations.values())).shape[2])

    def slopes(self, step: int = -1) -> dict[str, float]:
        """d log |activation| / d log width of every module after `step` updates; modules whose output is 0 are left out."""
        found = {}
        for name, values in self.activations.items():
            if not np.isfinite(values[step]).all():
                found[name] = math.inf
            elif (values[step] > 0).all():
                found[name] = self._slope(values[step])
        return found

    def error(self, name: str, step: int = -1) -> float:
        """Standard error of one of the slopes over seeds, by the jackknife; nan with one seed."""
        values = self.activations[name][step]
        if values.shape[1] < 2 or not np.isfinite(values).all():
            return math.nan
        without_one = [self._slope(np.delete(values, seed, axis=1)) for seed in range(values.shape[1])]
        return float(np.std(without_one)) * math.sqrt(values.shape[1] - 1)

    def _slope(self, values: np.ndarray[Any, Any]) -> float:
        logs = np.log(np.asarray(self.widths, dtype=float))
        return float(np.polyfit(logs, np.log(values.mean(axis=1)), 1)[0])

    @property
    def worst(self) -> tuple[str, int, float]:
        """Module, step and slope of the largest deviation from flat, from step 2 on.

        Logits of attention may shrink: with 1 / d those of the initial weights do, by 1 / sqrt(d), and training adds to them.
        """
        every = [
            (n, step, s) for step in range(min(2, self.steps), self.steps + 1) for n, s in self.slopes(step).items()
        ]
        return max(every, key=lambda each: each[2] if each[0].endswith(".logits") else abs(each[2]))

    @property
    def flat(self) -> bool:
        """True if no slope is steeper than 0.1 from step 2 on."""
        name, _, slope = self.worst
        return slope <= TOLERANCE and (slope >= -TOLERANCE or name.endswith(".logits"))

    def __str__(self) -> str:
        steps = range(self.steps + 1)
        slopes = [self.slopes(step) for step in steps]
        names = sorted(slopes[-1], key=lambda name: -abs(slopes[-1][name]))
        wide = max(map(len, [*names, "(model)"]))
        lines = [f"{self.name}: slope of log |activation| over log width, {self.widths[0]} to {self.widths[-1]}"]
        lines.append("  ".join(["module".ljust(wide), *(f"step {step}".rjust(7) for step in steps)]))
        for name in names:
            cells = [f"{found[name]:+7.2f}" if name in found else "   zero" for found in slopes]
            lines.append("  ".join([(name or "(model)").ljust(wide), *cells]))
        name, step, slope = self.worst
        verdict, error = "flat" if self.flat else "not flat", self.error(name, step)
        size = f"{slope:+.3f}" if math.isnan(error) else f"{slope:+.3f} ± {error:.3f}"
        return "\n".join([*lines, f"{verdict}: at most {size}, {name or '(model)'} after step {step}"])


def coordinate_check(
    make_model: Callable[[int], nn.Module],
    widths: Sequence[int],
    *,
    parametrization: str | Prepare = "mup",
    base_width: int | None = None,
    example: Any = None,
    loss: Callable[[Tensor], Tensor] | None = None,
    lr: float = 0.005,
    steps: int = 3,
    seeds: int = 3,
) -> CoordinateCheck:
    """Train `make_model(width)` for a few steps of Adam at every width and seed, and record the activations.

    parametrization: "mup", "standard", or a function (model, base, lr) -> parameter groups. base_width: default: the first.
    example: as for `scalelong.apply`, or a function of the model that returns one; known classes need none. loss: a function
    of the model's output; default: the mean square of its distance to fixed random numbers. A small batch is best (1 to 4):
    few directions are trained, so that corrections at small widths are small too.

    Readouts start at 0: their initial part shrinks as 1 / sqrt(width) in muP and would hide what training adds. Tensors that
    do not depend on width start with the same values at every width, so that their noise is not taken for a slope.

    >>> net = lambda width: nn.Sequential(nn.Linear(3, width), nn.ReLU(), nn.Linear(width, width), nn.Linear(width, 1))
    >>> coordinate_check(net, (32, 64, 128, 256), parametrization="standard", example=torch.ones(1, 3)).flat
    False
    """
    valid = all(isinstance(width, int) and width >= 1 for width in widths)
    require(valid and len(set(widths)) >= 2, "widths", "at least two different widths", tuple(widths))
    require(
        steps >= 1 and seeds >= 1 and lr > 0, "steps", "at least 1, as seeds, with a positive lr", (steps, seeds, lr)
    )
    narrow = widths[0] if base_width is None else base_width
    require(isinstance(narrow, int) and narrow >= 1, "base_width", "a width", narrow)
    if not callable(parametrization) and parametrization not in PARAMETRIZATIONS:
        raise unknown_name("parametrization", parametrization, PARAMETRIZATIONS)
    prepare = parametrization if callable(parametrization) else PARAMETRIZATIONS[parametrization]
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        base, other = make_model(narrow), make_model(next(width for width in widths if width != narrow))
    if not isinstance(other, nn.Module):
        raise TypeError(f"make_model: must return a torch.nn.Module, got {type(other).__name__}")
    plan = make_plan(other, base_shapes(other, base))
    if all(found.role == "finite" for found in plan.roles.values()):
        raise ValueError(f"make_model: no tensor of this {type(base).__name__} depends on the width; pass it on")
    biases = {f"{path}.bias" for path in plan.inputs}
    readouts = [name for name, found in plan.roles.items() if found.role == "output" or name in biases]
    finite = [name for name, found in plan.roles.items() if found.role == "finite" and name not in readouts]
    records: dict[str, dict[tuple[int, int, int], float]] = {}
    first: list[Tensor] = []  # the weights of the first seed
    with torch.random.fork_rng(devices=[]):
        for seed in range(seeds):
            common: dict[str, Tensor] = {}  # values of tensors that do not depend on width
            for at, width in enumerate(widths):
                torch.default_generator.manual_seed(seed)
                model = make_model(width).eval()  # without dropout
                if at == 0:
                    drawn = [parameter.detach().clone() for parameter in model.parameters()]
                    if seed and all(map(torch.equal, first, drawn)):
                        raise ValueError("make_model: gives the same weights for every seed; leave the seed to the check, "
                                         "or pass seeds=1")  # fmt: skip
                    first = drawn
                call = example(model) if callable(example) else example
                call = generated_example(model) if call is None else as_call(call)
                for name in readouts:
                    nn.init.zeros_(model.get_parameter(name))
                with torch.no_grad():
                    for name in finite:
                        values = model.get_parameter(name)
                        values.copy_(common.setdefault(name, values.clone()))
                optimizer = torch.optim.Adam(prepare(model, base, lr), lr, eps=1e-12)  # eps is not part of the question
                for step in range(steps + 1):
                    with _recorded(model) as found:
                        tensors = tensors_in(run_example(model, call))
                    output = next((each for each in tensors if each.is_floating_point() and each.requires_grad), None)
                    if output is None:
                        none = "returns no tensor of real numbers that depends on trained parameters"
                        raise ValueError(f"make_model: the forward of {type(model).__name__} {none}")
                    if step == 0 and not output.isfinite().all():
                        start = f"the output of {type(model).__name__} is not finite before training"
                        norm = f"; if it is divided by the norm of {readouts[0]}, check it without" if readouts else ""
                        raise ValueError(f"make_model: {start}, with readouts at 0{norm}")
                    for name, size in found.items():
                        records.setdefault(name, {})[step, at, seed] = size
                    target = torch.randn(output.shape, generator=torch.Generator().manual_seed(1), dtype=output.dtype)
                    optimizer.zero_grad()
                    value = loss(output) if loss else F.mse_loss(output, target.to(output.device))
                    require(value.numel() == 1, "loss", "a function that returns a single number", tuple(value.shape))
                    value.backward()  # type: ignore[no-untyped-call]
                    optimizer.step()
    shape = (steps + 1, len(widths), seeds)
    whole = {name: values for name, values in records.items() if len(values) == math.prod(shape)}
    arrays = {name: np.array([values[i] for i in np.ndindex(*shape)]).reshape(shape) for name, values in whole.items()}
    return CoordinateCheck(
        tuple(widths), arrays, parametrization if isinstance(parametrization, str) else prepare.__name__
    )


@contextmanager
def _recorded(model: nn.Module) -> Iterator[dict[str, float]]:
    """Mean |activation| of all modules in the calls inside, and of the logits of attention, under `NAME.logits`."""
    found: dict[str, float] = {}
    names = {module: name for name, module in model.named_modules()}
    running: list[str] = []

    def enter(module: nn.Module, _args: Any) -> None:
        running.append(names[module])

    def leave(module: nn.Module, _args: Any, output: Any) -> None:
        running.pop()
        if isinstance(tensor := next(tensors_in(output), None), Tensor) and tensor.is_floating_point():
            multiplier = getattr(module, OUTPUT, 1.0)  # of queries: it is a part of the logits
            found[names[module]] = float(tensor.detach().abs().mean()) / multiplier

    class Logits(TorchFunctionMode):
        def __torch_function__(self, function: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs = kwargs or {}
            if function is F.scaled_dot_product_attention:
                query, key = (args[at] if at < len(args) else kwargs[name] for at, name in enumerate(("query", "key")))
                scale = kwargs.get("scale") or query.shape[-1] ** -0.5
                with torch.no_grad():
                    if kwargs.get("enable_gqa"):
                        key = key.repeat_interleave(query.shape[-3] // key.shape[-3], -3)
                    found[f"{running[-1]}.logits"] = float((query @ key.transpose(-1, -2)).abs().mean() * scale)
            return function(*args, **kwargs)

    hooks = [module.register_forward_pre_hook(enter) for module in names]
    hooks += [module.register_forward_hook(leave) for module in names]
    try:
        with Logits():
            yield found
    finally:
        for hook in hooks:
            hook.remove()


def plot(checks: Sequence[CoordinateCheck], title: str, path: str | Path) -> Path:
    """Mean |activation| against width, one panel per check and step, one line per module."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    from scalelong.report.plots import save_figure  # imports matplotlib, which training does not need

    steps = [step for step in range(checks[0].steps + 1) if step in (0, 2, checks[0].steps)]
    figure, axes = plt.subplots(len(checks), len(steps), sharex=True, sharey="row", squeeze=False, layout="constrained",
                                figsize=(3.2 * len(steps), 2.6 * len(checks)))  # fmt: skip
    for row, check in zip(axes, checks, strict=True):
        for axis, step in zip(row, steps, strict=True):
            for values in check.activations.values():
                if (values[step].mean(axis=1) > 0).all():
                    axis.plot(check.widths, values[step].mean(axis=1), linewidth=0.8, alpha=0.7)
            axis.set(xscale="log", yscale="log", title=f"{check.name}, step {step}")
            axis.set_xticks(check.widths, list(map(str, check.widths)), fontsize=8)
            axis.minorticks_off()
        row[0].set_ylabel("mean |activation|")
    for axis in axes[-1]:
        axis.set_xlabel("width")
    figure.suptitle(title)
    plt.close(figure)
    return save_figure(figure, path)
