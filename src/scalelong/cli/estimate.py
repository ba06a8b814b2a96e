"""Estimate parameters, memory and time for `scalelong train --dry-run`."""

from __future__ import annotations

import json
import timeit
from pathlib import Path

import torch

from scalelong.backbones import as_network
from scalelong.data import DataError, Shape
from scalelong.data.download import DOWNLOADS
from scalelong.diffusion import draw_time_and_noise
from scalelong.report.numbers import duration
from scalelong.runs.config import to_yaml
from scalelong.runs.presets import EXPECTED
from scalelong.runs.settings import Conditioning, RunConfig
from scalelong.training.build import build_model, build_objective, build_source, check_config
from scalelong.training.step import autocast, resolve_precision


def print_estimate(config: RunConfig) -> None:
    """Print the estimate; missing data is assumed to match the preset."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    check_config(config, on_gpu=device.type == "cuda")
    shape, conditioning, about = _expected_data(config)
    with torch.device("meta"):
        model = build_model(config, shape, conditioning)
    parameters = sum(p.numel() for p in model.parameters())
    gates = sum(p.numel() for p in model.get_submodule("scalelong").parameters())
    seconds, batch = _seconds_per_step(config, shape, conditioning, device)
    images = " x ".join(map(str, shape))
    total = f"{duration(seconds * config.training.steps)} total on this {device.type}"
    print(to_yaml(config))
    print(f"data        {config.data.name}: {about} of {images}")
    print(f"parameters  {parameters:,}, including {gates:,} in the gates")
    print(f"memory      {parameters * 20 / 2**30:.2f} GiB for weights, gradients, AdamW and EMA, plus activations")
    print(f"time        about {duration(seconds)} per step, {total}")
    images = "1 random image" if batch == 1 else f"{batch} random images"
    scaled = f", scaled up to batch {config.training.batch_size}" if batch < config.training.batch_size else ""
    print(f"            (gradients of {images}{scaled}; not compiled)")


def estimated_seconds(config: RunConfig) -> float:
    """Estimated training seconds on this machine, without compilation."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    shape, conditioning, _ = _expected_data(config)
    return _seconds_per_step(config, shape, conditioning, device)[0] * config.training.steps


def _expected_data(config: RunConfig) -> tuple[Shape, Conditioning, str]:
    """Shape, conditioning and number of images of the data, without downloading or encoding."""
    data, condition = config.data, config.condition
    missing = data.name.startswith("hf:") or (data.name in DOWNLOADS and DOWNLOADS[data.name].check(data.root))
    try:
        source = None if missing else build_source(config)
    except (DataError, OSError):
        if data.name not in EXPECTED:
            raise
        source = None
    if source is not None:
        shape, about, classes = source.shape, f"{len(source):,} images", source.num_classes
    else:
        shape, known = EXPECTED.get(data.name, ((3, 0, 0), Conditioning()))
        shape = (shape[0], data.image_size, data.image_size) if data.image_size else shape
        about, classes = "not available; assuming images", known.num_classes
        if not shape[1]:
            raise DataError(f"data.name: {data.name} is not available, so its size is unknown; set data.image_size")
    if condition.kind == "class":
        return shape, Conditioning(classes or 10, condition.drop > 0), about
    if condition.kind == "text":
        return shape, Conditioning(text_tokens=condition.max_tokens, text_dim=_text_dim(condition.encoder)), about
    return shape, Conditioning(), about


def _text_dim(encoder: str) -> int:
    """Width of a text encoder, from its local folder if available."""
    file = Path(encoder) / "config.json"
    if file.is_file():
        config = json.loads(file.read_text())
        return int((config.get("text_config") or config).get("hidden_size", 768))
    return 384 if encoder == "minilm" else 768


def _seconds_per_step(
    config: RunConfig, shape: Shape, conditioning: Conditioning, device: torch.device
) -> tuple[float, int]:
    """Seconds for the gradients of a batch, extrapolated from a few random images if slow; and the number of images."""
    size, batch = min(1 if device.type == "cpu" else 16, config.training.batch_size), config.training.batch_size
    seconds = _seconds_of(size, config, shape, conditioning, device) * batch / size
    return (seconds, size) if seconds > 5 else (_seconds_of(batch, config, shape, conditioning, device), batch)


def _seconds_of(size: int, config: RunConfig, shape: Shape, conditioning: Conditioning, device: torch.device) -> float:
    """Seconds for the gradients of this many random images."""
    model, objective = build_model(config, shape, conditioning).to(device), build_objective(config)
    index = torch.arange(size, device=device)
    t, noise = draw_time_and_noise(objective.process, 0, index, shape)
    given: dict[str, torch.Tensor] = {}
    if conditioning.num_classes:
        given["class_labels"] = index % conditioning.num_classes
    if conditioning.text_dim:
        given["context"] = torch.zeros(size, conditioning.text_tokens, conditioning.text_dim, device=device)
    net, precision = as_network(model), autocast(device, resolve_precision(config, device))

    def gradients() -> None:
        with precision:
            loss = objective.loss(net, noise, noise, t, **given).mean()
        loss.backward()  # type: ignore[no-untyped-call]
        if device.type == "cuda":
            torch.cuda.synchronize()

    seconds = timeit.timeit(gradients, number=1)
    if seconds < 10:  # the first call may be slower
        seconds = min(timeit.repeat(gradients, number=1, repeat=3))
    return seconds
