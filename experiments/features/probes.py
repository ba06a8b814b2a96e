"""Data and heat maps of linear probes, shared by measure.py and features.py."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean

import matplotlib.pyplot as plt
import numpy as np
from output import save

from scalelong.data import Source, to_float
from scalelong.evaluation.linear_probe import Labelled, LinearProbe


def labelled(source: Source, count: int | None = None) -> Labelled:
    """The first `count` images of a source, or all, with their labels."""
    assert source.labels is not None
    labels = source.labels[:count]
    return to_float(source.read_many(range(len(labels)))), labels


def draw(probes: Mapping[str, Sequence[LinearProbe]], title: str, path: Path) -> None:
    """Held-out accuracy by block and noise level, a panel per variant: mean over seeds; dots: the choice of each seed."""
    columns = len(probes) if len(probes) < 5 else -(-len(probes) // 2)
    size = 3.4 * columns, 4.2 * -(-len(probes) // columns)
    figure, axes = plt.subplots(-(-len(probes) // columns), columns, figsize=size, layout="constrained", squeeze=False)
    means = {name: np.mean([probe.held_out for probe in own], axis=0) for name, own in probes.items()}
    low, high = min(mean.min() for mean in means.values()), max(mean.max() for mean in means.values())
    for axis, (name, own) in zip(axes.flat, probes.items(), strict=False):
        first = own[0]
        image = axis.imshow(means[name], vmin=low, vmax=high, aspect="auto", cmap="viridis")
        chosen = [(probe.noise.index(probe.level), probe.blocks.index(probe.block)) for probe in own]
        axis.plot(*zip(*chosen, strict=True), "o", color="white", markeredgecolor="black", markersize=5)
        axis.set_title(f"{name}: {100 * fmean(probe.accuracy for probe in own):.1f}%", fontsize=9.5, loc="left")
        axis.set_xticks(range(len(first.noise)), [f"{level:.2g}" for level in first.noise], fontsize=7, rotation=90)
        axis.set_yticks(range(len(first.blocks)), first.blocks if axis in axes[:, 0] else [], fontsize=7)
        axis.set_xlabel("noise level", fontsize=8)
    for axis in axes.flat[len(probes) :]:
        axis.set_axis_off()
    figure.colorbar(image, ax=axes, label="held-out accuracy")
    figure.suptitle(title, fontsize=10)
    save(figure, path)
