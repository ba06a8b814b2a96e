"""What the network is told beside the noisy image: nothing, a class, or a text; one table of rows, whichever it is.

The row of a sample is that of its item (or caption); which samples are trained without it is a function of the seed and
the global sample index. Shapes: n rows, B samples; a row is () for a class and (T, D) for a text.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from scalelong.data import Batch, Source, sample_to_item
from scalelong.data.text import TextEncoder, encode_text
from scalelong.diffusion import Guidance
from scalelong.random import uniform
from scalelong.runs.settings import Conditioning, ConditionSettings, RunConfig

Given = dict[str, Any]  # keyword arguments of the network, tensors

_RESIDENT_BYTES = 2**31


@dataclass(frozen=True, eq=False)
class Condition:
    """The condition of a run, for samples of the data and for images to be drawn."""

    device: torch.device
    sizes: Conditioning = field(default_factory=Conditioning)
    name: str = ""  # the network's argument; "": the network is told nothing
    rows: Tensor | None = None  # (n, ...), one for each item, or caption, of the data
    turns: Tensor | None = None  # (k, ...), what drawn images get in turn; None: rows of the data in a random order
    null: Tensor | None = None  # (...), what stands for "not told"
    drop: float = 0.0
    seed: int = 0

    def of_batch(self, batch: Batch) -> Given:
        """For training: each sample's own, or the null condition for a share `drop` of the samples."""
        if not self.name:
            return {}
        own = batch.labels if self.name == "class_labels" and batch.labels is not None else self._at(batch.captions)
        if self.null is None or self.drop == 0:
            return {self.name: own}
        told = uniform(self.seed, "drop", batch.index) >= self.drop
        return {self.name: torch.where(told.view(-1, *[1] * (own.ndim - 1)), own, self.null)}

    def of_drawn(self, index: Tensor) -> Given:
        """For images to look at: image i gets the i-th of what was chosen, by default the classes in turn."""
        if self.turns is None:
            return self.like_data(index)
        return {self.name: self.turns[index.to(self.device) % len(self.turns)]}

    def like_data(self, index: Tensor) -> Given:
        """For images to measure: as often as in the data."""
        if not self.name:
            return {}
        if self.rows is None:
            raise ValueError("condition: the data is needed to draw as it is; load it, or choose what to draw")
        return self.of_rows(sample_to_item(0, len(self.rows), index))

    def of_rows(self, rows: Tensor) -> Given:
        """Those of these rows of the labels, or of the captions."""
        return {self.name: self._at(rows)} if self.name else {}

    def guidance(self, scale: float, interval: tuple[float, float] = (0.0, math.inf)) -> Guidance | None:
        """Classifier-free guidance of this strength; None for 1, which is no guidance."""
        if scale == 1:
            return None
        if self.null is None:
            lacks = "was trained with condition.drop 0" if self.name else "has no condition"
            raise ValueError(f"guidance: {scale}, but the run {lacks}; leave it at 1")
        return Guidance(scale, {self.name: self.null[None]}, interval)

    def _at(self, items: Tensor) -> Tensor:
        if self.rows is None:
            raise ValueError(f"condition: the batch has no {self.name}")
        found = self.rows[items.to(self.rows.device)].to(self.device, non_blocking=True)
        return found.float() if found.is_floating_point() else found


def make_condition(config: RunConfig, source: Source, device: torch.device) -> Condition:
    """The condition of a run on this data, or a ValueError that says what the data lacks."""
    settings, seed = config.condition, config.training.seed
    if settings.kind == "class":
        if source.labels is None or not source.num_classes:
            raise ValueError(f"condition.kind: class, but {source.name} has no labels; use none, or data with classes")
        sizes = Conditioning(source.num_classes, settings.drop > 0, tuple(source.class_names))
        return _classes(sizes, settings, device, seed, source.labels.to(device))
    if settings.kind == "text":
        if source.captions is None:
            raise ValueError(
                f"condition.kind: text, but {source.name} has no captions; use none, or data with captions"
            )
        found = encode_text(
            source.captions, settings.encoder, settings.max_tokens, root=config.data.root, device=device
        )
        rows = found.rows.to(device) if found.rows.nbytes <= _RESIDENT_BYTES else found.rows
        sizes = Conditioning(text_tokens=rows.shape[1], text_dim=rows.shape[2], encoder=found.encoder)
        null = found.null.to(device).float() if settings.drop > 0 else None
        return Condition(device, sizes, "context", rows, None, null, settings.drop, seed)
    return Condition(device)


def _classes(
    sizes: Conditioning, settings: ConditionSettings, device: torch.device, seed: int, rows: Tensor | None
) -> Condition:
    turns = torch.arange(sizes.num_classes, device=device)
    null = torch.tensor(sizes.num_classes, device=device) if sizes.null_class else None
    return Condition(device, sizes, "class_labels", rows, turns, null, settings.drop, seed)


def choose_classes(config: RunConfig, sizes: Conditioning, chosen: Sequence[str], device: torch.device) -> Condition:
    """Draw these classes, by number or by name, in turn; none chosen: every class in turn."""
    if config.condition.kind != "class":
        raise ValueError(f"classes: the run's condition is {config.condition.kind}; leave them out")
    condition = _classes(sizes, config.condition, device, config.training.seed, None)
    if not chosen:
        return condition
    numbers = torch.tensor([_class_number(name.strip(), sizes) for name in chosen], device=device)
    return dataclasses.replace(condition, turns=numbers)


def _class_number(name: str, sizes: Conditioning) -> int:
    if name in sizes.class_names:
        return sizes.class_names.index(name)
    if name.isdecimal() and int(name) < sizes.num_classes:
        return int(name)
    names = f", or a name such as {sizes.class_names[0]!r}" if sizes.class_names else ""
    raise ValueError(f"classes: there is no {name!r}; give 0 .. {sizes.num_classes - 1}{names}")


def choose_prompts(
    config: RunConfig, sizes: Conditioning, prompts: Sequence[str], device: torch.device, encoder: str = ""
) -> Condition:
    """Draw these texts in turn; an empty one is the null condition. `encoder` replaces the name in the configuration."""
    settings = config.condition
    if settings.kind != "text":
        raise ValueError(f"prompt: the run's condition is {settings.kind}, not text; leave it out")
    model = TextEncoder(encoder or settings.encoder, sizes.text_tokens, config.data.root, device)
    rows = model(["", *prompts]).float().to(device)
    if rows.shape[2] != sizes.text_dim:
        raise ValueError(
            f"condition.encoder: {model.name} has width {rows.shape[2]}, the run was trained with {sizes.text_dim}; "
            f"use {settings.encoder}"
        )
    if sizes.encoder and model.fingerprint != sizes.encoder:
        raise ValueError(
            f"condition.encoder: {model.name} has other weights (sha256 {model.fingerprint[:12]}) than the run was "
            f"trained with ({sizes.encoder[:12]}); use those of {settings.encoder}"
        )
    null = rows[0] if settings.drop > 0 else None
    return Condition(device, sizes, "context", None, rows[1:], null, settings.drop, config.training.seed)
