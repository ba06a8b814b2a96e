"""`scalelong train --dry-run`: parameters, memory and time, measured on a small batch before anything is written."""

from __future__ import annotations

import dataclasses
import time

import torch

from scalelong.data import DataError, Source, make_loader
from scalelong.runs.presets import EXPECTED
from scalelong.runs.settings import Conditioning
from scalelong.training import RunConfig, to_yaml
from scalelong.training.build import build_model, build_objective, build_source, check_config
from scalelong.training.condition import Condition, make_condition
from scalelong.training.step import Stepper


def print_estimate(config: RunConfig, probe_batch: int = 4) -> None:
    """Print the settings, and the cost scaled up from small steps: an order of magnitude, not a promise."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    print(to_yaml(check_config(config, on_gpu=device.type == "cuda")))
    try:
        source = build_source(config)
        condition = make_condition(config, source, device)
    except (DataError, OSError) as error:
        if config.data.name not in EXPECTED:
            raise
        _print_expected(config, error)
        return
    model = build_model(config, source.shape, condition.conditioning).to(device)
    size = min(probe_batch, config.training.batch_size)
    seconds = _seconds_per_step(config, model, source, condition, size) * config.training.batch_size / size
    hours = seconds * config.training.steps / 3600
    print(f"data        {source.name}: {len(source):,} images of {' x '.join(map(str, source.shape))}")
    _print_size(model)
    if device.type == "cuda":
        print(f"            {torch.cuda.max_memory_allocated() / 2**30:.2f} GiB was the peak at batch {size}")
    print(f"time        about {seconds:.3g} s a step, {hours:.3g} h in all on this {device.type}")
    print(f"            (scaled up from batch {size}, not compiled)")


def _print_expected(config: RunConfig, error: Exception) -> None:
    """Print the size of a preset's model before its data is there."""
    shape, known = EXPECTED[config.data.name]
    null_class = known.num_classes > 0 and config.condition.drop > 0
    conditional = config.condition.kind != "none"
    with torch.device("meta"):
        conditioning = dataclasses.replace(known, null_class=null_class) if conditional else Conditioning()
        model = build_model(config, shape, conditioning)
    print(f"data        not there yet: {error}")
    print(f"            computed for {' x '.join(map(str, shape))}, as this preset expects it")
    _print_size(model)


def _print_size(model: torch.nn.Module) -> None:
    parameters = sum(p.numel() for p in model.parameters())
    gates = sum(p.numel() for p in model.get_submodule("scalelong").parameters())
    print(f"parameters  {parameters:,}, of them {gates:,} in the skips' gates")
    print(f"memory      {parameters * 20 / 2**30:.2f} GiB for weights, gradients, AdamW and EMA, plus activations")


def _seconds_per_step(
    config: RunConfig, model: torch.nn.Module, source: Source, condition: Condition, size: int
) -> float:
    device = condition.device
    small = dataclasses.replace(config.training, batch_size=size, accumulate=1, compile="off")
    stepper = Stepper(
        dataclasses.replace(config, training=small), model, build_objective(config), device, condition=condition
    )
    loader = make_loader(source, 0, device, flip=config.data.flip, workers=0)
    times = []
    for _ in range(3):
        started = time.perf_counter()
        pending = stepper.compute(1, loader.batches([torch.arange(size)]))
        stepper.update(pending)
        pending.read()
        stepper.clear()
        times.append(time.perf_counter() - started)
    return min(times)
