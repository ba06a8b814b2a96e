"""Linear probes: how much of the classes can be read off a denoiser's features with one linear layer.

Features are a block's output for the noisy image, averaged over positions. The block and the noise level are chosen on
held-out training images; the test images are used once. Noise levels are sigma / alpha, the same for every process.

Shapes: n images, D channels of a block, K classes.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm import tqdm

from scalelong.backbones import as_network
from scalelong.data import DataError, Source, load_source
from scalelong.data.loader import augmented
from scalelong.diffusion import Process, get_process
from scalelong.errors import did_you_mean, require, unknown_name
from scalelong.evaluation.block_features import BlockFeatures, times_at
from scalelong.random import uniform
from scalelong.runs.settings import RunConfig
from scalelong.skips.families import stages
from scalelong.skips.feature_layout import split_item
from scalelong.training import TrainedRun
from scalelong.training.build import build_model

logger = logging.getLogger(__name__)

Protocol = Literal["held-out", "ddae"]
Labelled = tuple[Tensor, Tensor]  # images (n, C, H, W) in [-1, 1], labels (n,)
LOWEST, HIGHEST = 0.03, 3.0  # default noise levels lie between these, evenly in their logarithm
SELECTION_ITERATIONS = 50  # of a fit that only ranks blocks and levels; the final one runs to convergence
DDAE = {"lr": 1e-3, "epochs": 15, "batch_size": 128}


@dataclass(frozen=True)
class LinearProbe:
    """The accuracies of a linear probe; `accuracy` is on the test images, `held_out` on held-out training images.

    Of the protocol "ddae", which selects on the test images as published, both are on the test images.
    """

    accuracy: float
    block: str
    level: float  # sigma / alpha
    blocks: list[str]
    noise: list[float]
    held_out: list[list[float]]  # a row for each block, a column for each noise level
    protocol: str
    n_train: int
    n_test: int
    n_held_out: int
    random_network: float | None = None  # test accuracy of the same network, untrained
    pixels: float | None = None  # test accuracy of a linear layer on the pixels
    seconds: float = 0.0

    def record(self) -> dict[str, Any]:
        """The values of an event of kind "linear_probe"."""
        rows = [[round(value, 4) for value in row] for row in self.held_out]
        return asdict(self) | {"held_out": rows, "seconds": round(self.seconds, 1)}

    def __str__(self) -> str:
        width = max(map(len, self.blocks))
        head = " ".join([" " * width, *(f"{level:6.2g}" for level in self.noise)])
        rows = [
            " ".join([name.ljust(width), *(f"{100 * value:6.1f}" for value in row)])
            for name, row in zip(self.blocks, self.held_out, strict=True)
        ]
        return "\n".join([head, *rows])


@torch.inference_mode(False)  # and with gradients, for fitting
def linear_probe(
    model: nn.Module,
    train: Labelled,
    test: Labelled,
    *,
    process: str | Process = "vp",
    blocks: str | Sequence[str] | None = None,
    levels: int | Sequence[float] = 9,
    images: int = 10_000,
    held_out: float = 0.2,
    protocol: Protocol = "held-out",
    call: Callable[..., Any] | None = None,
    condition: Mapping[str, Tensor] | None = None,
    random_network: nn.Module | None = None,
    pixels: bool = False,
    cache: str | Path | None = None,
    seed: int = 0,
    batch_size: int = 500,
) -> LinearProbe:
    """Probe the features of any denoiser at every block and noise level.

    blocks: module names ("blocks.3[1]": the second of several outputs), default: the stages of the U.
    levels: noise levels sigma / alpha, or how many.
    images: training images for the choice of block and level, of which a share `held_out` is held out; the final layer is
    fitted on all. call: call(x, time, **condition) runs the model, for models that take other arguments.
    condition: of one sample, (1, ...) each. random_network, pixels: also measure these floors. cache: folder of features;
    use another one for another `call`.

    >>> from scalelong import UViT, UViTConfig
    >>> model = UViT(UViTConfig(image_size=8, patch_size=4, in_channels=1, dim=16, depth=2, heads=2))
    >>> images, labels = torch.randn(40, 1, 8, 8), torch.arange(40) % 2
    >>> found = linear_probe(model, (images + labels[:, None, None, None], labels), (images, labels), levels=[0.1])
    >>> found.blocks, len(found.held_out)
    (['in_blocks.0', 'mid_block', 'out_blocks.0'], 3)
    """
    started = time.perf_counter()
    classes = _check_data(train, test, held_out)
    # a copy of the labels: those made in inference mode cannot be fitted to
    train, test = ((part[0].detach(), part[1].to(torch.int64, copy=True)) for part in (train, test))
    require(images >= 2 * classes, "images", f"at least {2 * classes}, two for every class", images)
    if protocol not in ("held-out", "ddae"):
        raise unknown_name("protocol", protocol, ("held-out", "ddae"))
    if random_network is not None and call is not None:
        raise ValueError("random_network: cannot be run by `call`; probe it separately")
    process = get_process(process) if isinstance(process, str) else process
    names = stages(model) if blocks is None else [blocks] if isinstance(blocks, str) else list(dict.fromkeys(blocks))
    modules = dict(model.named_modules())
    require(len(names) > 0, "blocks", "at least one module", names)
    for name in names:
        if split_item(name)[0] not in modules:
            raise ValueError(f"blocks: no module {name!r}; {did_you_mean(name, modules)}see model.named_modules()")
    require(not isinstance(levels, int) or levels >= 1, "levels", "at least 1", levels)
    require(batch_size >= 1, "batch_size", "at least 1", batch_size)
    wanted = np.geomspace(LOWEST, HIGHEST, levels).tolist() if isinstance(levels, int) else [float(v) for v in levels]
    require(len(wanted) > 0 and min(wanted) > 0, "levels", "positive noise levels", wanted)
    noise, times = times_at(process, sorted(wanted))
    probed = BlockFeatures(
        model, call or as_network(model), process, names, dict(condition or {}), seed, batch_size, cache
    )
    if protocol == "ddae":
        result = _ddae(probed, train, test, classes, noise, times)
    else:
        result = _select_and_test(probed, train, test, classes, noise, times, images, held_out)
    if random_network is not None:
        options = {"blocks": names, "levels": wanted, "images": images, "held_out": held_out, "protocol": protocol}
        given = {"process": process, "condition": condition, "seed": seed, "batch_size": batch_size}
        untrained = linear_probe(random_network, train, test, cache=cache, **options, **given).accuracy  # type: ignore[arg-type]
        result = replace(result, random_network=untrained)
    if pixels:
        flat = [part[0].flatten(1).to(probed.device) for part in (train, test)]
        result = replace(result, pixels=_test(flat[0], train[1], flat[1], test[1], classes))
    return replace(result, seconds=time.perf_counter() - started)


def fit_linear(features: Tensor, labels: Tensor, classes: int, iterations: int = 300) -> tuple[Tensor, Tensor]:
    """Weight (K, D) and bias (K,) of multinomial logistic regression with scikit-learn's default penalty (C = 1).

    >>> weight, bias = fit_linear(torch.tensor([[-1.0], [1.0]]), torch.tensor([0, 1]), classes=2)
    >>> bool(weight[1] > weight[0])
    True
    """
    weight = torch.zeros(classes, features.shape[1], device=features.device, requires_grad=True)
    bias = torch.zeros(classes, device=features.device, requires_grad=True)
    optimizer = torch.optim.LBFGS(
        [weight, bias], max_iter=iterations, tolerance_grad=1e-6, tolerance_change=1e-7, line_search_fn="strong_wolfe"
    )

    def objective() -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(F.linear(features, weight, bias), labels)
        loss = loss + 0.5 * weight.square().sum() / len(features)
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    with torch.enable_grad():
        optimizer.step(objective)  # type: ignore[no-untyped-call]
    return weight.detach(), bias.detach()


def _check_data(train: Labelled, test: Labelled, held_out: float) -> int:
    require(0 < held_out < 1, "held_out", "in (0, 1)", held_out)
    for name, (images, labels) in (("train", train), ("test", test)):
        if labels is None or len(labels) != len(images) or len(images) < 2:
            given = "none" if labels is None else f"{len(labels)} labels for {len(images)} images"
            raise ValueError(f"{name}: a probe needs a label for each image, got {given}; use data with labels")
        if not isinstance(images, Tensor) or not images.is_floating_point():
            raise ValueError(
                f"{name}: images must be a tensor of floats in [-1, 1], got {_described(images)}; convert them"
            )
        if (
            not isinstance(labels, Tensor)
            or labels.ndim != 1
            or labels.is_floating_point()
            or labels.dtype is torch.bool
        ):
            raise ValueError(f"{name}: labels must be integers from 0 on, (n,), got {_described(labels)}; convert them")
        if int(labels.min()) < 0:
            raise ValueError(
                f"{name}: labels must be integers from 0 on, got {int(labels.min())}; leave these images out"
            )
    classes = int(max(train[1].max(), test[1].max())) + 1
    absent = sorted(set(range(classes)) - set(train[1].tolist()))
    if absent or classes < 2:
        have = f"{classes - len(absent)} of {classes} classes" + (f" ({absent[0]} is absent)" if absent else "")
        raise ValueError(f"train: has images of {have}; a probe needs images of every class, and two classes at least")
    return classes


def _described(value: Any) -> str:
    return f"{value.dtype} {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__


def _standardized(train: Tensor, *others: Tensor) -> list[Tensor]:
    mean, sd = train.mean(0), train.std(0, correction=0).clamp(min=1e-6)
    return [(part - mean) / sd for part in (train, *others)]


def _test(
    train: Tensor, train_labels: Tensor, test: Tensor, test_labels: Tensor, classes: int, iterations: int = 300
) -> float:
    """The accuracy on `test` of a linear layer fitted on `train`."""
    with torch.autocast(train.device.type, enabled=False):
        fitted, tested = _standardized(train.float(), test.float())
        weight, bias = fit_linear(fitted, train_labels.to(fitted.device), classes, iterations)
        return float((F.linear(tested, weight, bias).argmax(1) == test_labels.to(tested.device)).float().mean())


def _select_and_test(
    probed: BlockFeatures, train: Labelled, test: Labelled, classes: int, noise: list[float], times: list[float],
    images: int, held_out: float,
) -> LinearProbe:  # fmt: skip
    order = uniform(probed.seed, "linear-probe-split", torch.arange(len(train[0]))).argsort()[:images]
    part = train[0][order], train[1][order]
    first = min(max(1, round((1 - held_out) * len(order))), len(order) - 1)
    table = np.zeros((len(probed.blocks), len(times)))
    for column, t in enumerate(tqdm(times, desc="probe", unit="level", disable=None)):
        found = probed(part[0], order, t)
        for row, name in enumerate(probed.blocks):
            value = found[name]
            halves = value[:first], part[1][:first], value[first:], part[1][first:]
            table[row, column] = _test(*halves, classes, SELECTION_ITERATIONS)
    row, column = divmod(int(table.argmax()), len(times))
    block = probed.blocks[row]
    indices = torch.arange(len(train[0])), torch.arange(len(test[0])) + len(train[0])
    fitted, tested = (
        probed(data[0], index, times[column], [block])[block]
        for data, index in zip((train, test), indices, strict=True)
    )
    accuracy = _test(fitted, train[1], tested, test[1], classes)
    sizes = (len(train[0]), len(test[0]), len(order) - first)
    return LinearProbe(accuracy, block, noise[column], probed.blocks, noise, table.tolist(), "held-out", *sizes)


def _ddae(
    probed: BlockFeatures, train: Labelled, test: Labelled, classes: int, noise: list[float], times: list[float]
) -> LinearProbe:
    """The published protocol: Adam 1e-3 with a cosine, 15 epochs, batches of 128, flips and crops, selection on test."""
    table, precise = np.zeros((len(probed.blocks), len(times))), torch.autocast(probed.device.type, enabled=False)
    n, size, epochs = len(train[0]), int(DDAE["batch_size"]), int(DDAE["epochs"])
    for column, t in enumerate(tqdm(times, desc="probe", unit="level", disable=None)):
        index = torch.arange(n, n + len(test[0]))
        tested = probed(test[0], index, t)
        heads = {name: nn.Linear(tested[name].shape[1], classes, device="meta") for name in probed.blocks}
        for head in heads.values():
            head.to_empty(device=probed.device)  # no random numbers are drawn
            nn.init.zeros_(head.weight)
            nn.init.zeros_(head.bias)
        optimizer = torch.optim.Adam([p for head in heads.values() for p in head.parameters()], lr=DDAE["lr"])
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs * -(-n // size))
        for epoch in range(epochs):
            order = uniform(probed.seed, f"ddae-order-{epoch}", torch.arange(n)).argsort()
            for rows in torch.split(order, size):
                images = augmented(train[0][rows], probed.seed, epoch * n + rows).to(probed.device)
                features = probed.of_batch(images, epoch * n + rows, t, probed.blocks)
                labels = train[1][rows].to(probed.device)
                with precise:
                    losses = [F.cross_entropy(head(features[name]), labels) for name, head in heads.items()]
                optimizer.zero_grad()
                torch.stack(losses).sum().backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                schedule.step()
        labels = test[1].to(probed.device)
        with precise:
            found = [head(tested[name]).argmax(1) for name, head in heads.items()]
        table[:, column] = [float((predicted == labels).float().mean()) for predicted in found]
    row, column = divmod(int(table.argmax()), len(times))
    about = (probed.blocks[row], noise[column], probed.blocks, noise, table.tolist(), "ddae, selected on test")
    return LinearProbe(float(table.max()), *about, n, len(test[0]), len(test[0]))


# --------------------------------------------------------------------------------------------------- trained runs


def probe_run(run: TrainedRun, *, floors: bool = True, cache: bool = True, **options: Any) -> LinearProbe:
    """`linear_probe` of a run on its own data; the features of class-conditional runs are those without a class.

    >>> probe_run(load_run("runs/cs")).accuracy  # doctest: +SKIP
    """
    train, test = labelled_data(run.config)
    device = next(run.model.parameters()).device
    condition: dict[str, Tensor] = {}
    if run.conditioning.num_classes:
        given = len({*train[1].tolist(), *test[1].tolist()})
        if given != run.conditioning.num_classes:
            classes = f"{run.config.data.name} has images of {given} classes, and the run was trained for"
            raise DataError(
                f"data.name: {classes} {run.conditioning.num_classes}; probe it on the data it was trained on"
            )
        if not run.conditioning.null_class:
            leak = "the run was trained with condition.drop 0, and its network sees the class it is probed for"
            raise ValueError(f"condition.drop: {leak}; probe a run with a null class, or without classes")
        condition = {"class_labels": torch.full((1,), run.conditioning.num_classes)}
    elif run.conditioning.text_dim:
        raise ValueError("condition.kind: probes of runs on text are not supported; probe a run on classes or on none")
    model = run.model
    if floors:
        other = replace(run.config, training=replace(run.config.training, seed=run.config.training.seed + 1))
        options["random_network"] = build_model(other, run.shape, run.conditioning).to(device)
    if cache:
        options["cache"] = run.folder / "features"
    return linear_probe(
        model, train, test, process=run.objective.process, condition=condition, pixels=floors, **options
    )


def labelled_data(config: RunConfig) -> tuple[Labelled, Labelled]:
    """The training and test images of a run's data; without a test split, every fifth image is kept for the test."""
    data = config.data
    load = partial(load_source, data.name, image_size=data.image_size, root=data.root)
    training = load(split=data.split)
    try:
        unseen = load(split="test")
    except DataError:
        logger.info("%s has no test split: every fifth image is kept for the test", data.name)
    else:
        unseen.require_same_classes(training, "data.split: 'test'")
        return _all_images(training), _all_images(unseen)
    images, labels = _all_images(training)
    kept = torch.arange(len(images)) % 5 == 4
    return (images[~kept], labels[~kept]), (images[kept], labels[kept])


def _all_images(source: Source) -> Labelled:
    if source.labels is None or not source.num_classes:
        raise DataError(f"data.name: {source.name} has no labels; a linear probe needs data with classes")
    index = torch.arange(len(source))
    return source.prepare(source.read_many(index.tolist()), 0, index, None), source.labels
