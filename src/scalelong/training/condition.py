"""Conditioning of a run: none, class or text.

The null condition is chosen by seed and global sample index.
Shapes: n rows, B samples; a row is () for a class and (T, D) for a text.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from scalelong.data import Batch, Source, sample_to_item
from scalelong.data.text import TextEncoder, encode_text
from scalelong.diffusion.process import per_sample
from scalelong.errors import did_you_mean
from scalelong.random import uniform
from scalelong.runs.settings import Conditioning, RunConfig, SamplingSettings

_RESIDENT_BYTES = 2**31


@dataclass(frozen=True, eq=False)
class Condition:
    """The network's conditioning arguments for training and sampling.

    >>> labels = Condition(torch.device("cpu"), name="class_labels", choices=torch.tensor([3, 7]))
    >>> labels.for_samples(torch.arange(4))
    {'class_labels': tensor([3, 7, 3, 7])}
    """

    device: torch.device
    conditioning: Conditioning = field(default_factory=Conditioning)
    name: str = ""  # the network's argument; "": unconditional
    rows: Tensor | None = None  # (n, ...), one for each item, or caption, of the data
    choices: Tensor | None = None  # (k, ...), used in turn by `for_samples`; None: random rows of the data
    null: Tensor | None = None  # (...), the null condition
    drop: float = 0.0
    seed: int = 0

    def for_batch(self, batch: Batch) -> dict[str, Tensor]:
        """Conditions of training samples; a fraction `drop` gets the null condition."""
        if not self.name:
            return {}
        own = batch.labels if self.name == "class_labels" and batch.labels is not None else self._at(batch.captions)
        if self.null is None or self.drop == 0:
            return {self.name: own}
        kept = uniform(self.seed, "drop", batch.index) >= self.drop
        return {self.name: torch.where(per_sample(kept, own), own, self.null)}

    def for_samples(self, index: Tensor) -> dict[str, Tensor]:
        """Conditions for sample grids: image i gets the i-th choice, by default all classes in turn."""
        if self.choices is None:
            return self.from_data(index)
        return {self.name: self.choices[index.to(self.device) % len(self.choices)]}

    def from_data(self, index: Tensor) -> dict[str, Tensor]:
        """Conditions for evaluation, distributed as in the data."""
        if not self.name:
            return {}
        if self.rows is None:
            raise ValueError("condition: has no rows of the data; load the data, or choose classes or prompts")
        return self.at_rows(sample_to_item(0, len(self.rows), index))

    def at_rows(self, rows: Tensor) -> dict[str, Tensor]:
        return {self.name: self._at(rows)} if self.name else {}

    def null_condition(self, sampling: SamplingSettings) -> dict[str, Tensor] | None:
        """The null condition of one sample; None without guidance."""
        if sampling.guidance == 1:
            return None
        if self.null is None:
            lacks = "was trained with condition.drop 0" if self.name else "has no condition"
            raise ValueError(f"sampling.guidance: {sampling.guidance}, but the run {lacks}; leave it at 1")
        return {self.name: self.null[None]}

    def _at(self, rows: Tensor) -> Tensor:
        if self.rows is None:
            raise ValueError(f"condition: the batch has no {self.name}")
        found = self.rows[rows.to(self.rows.device)].to(self.device, non_blocking=True)
        return found.float() if found.is_floating_point() else found


def make_condition(config: RunConfig, source: Source, device: torch.device) -> Condition:
    """Build the conditioning of a run; raise a ValueError if the data lacks labels or captions."""
    settings, root = config.condition, config.data.root
    if settings.kind == "class":
        if source.labels is None or not source.num_classes:
            raise ValueError(f"condition.kind: class, but {source.name} has no labels; use none, or data with classes")
        conditioning = Conditioning(source.num_classes, settings.drop > 0, tuple(source.class_names))
        return dataclasses.replace(choose_classes(config, conditioning, [], device), rows=source.labels.to(device))
    if settings.kind == "text":
        if source.captions is None:
            raise ValueError(f"condition.kind: text, but {source.name} has no captions; use none, or captioned data")
        found = encode_text(source.captions, settings.encoder, settings.max_tokens, root=root, device=device)
        rows = found.rows.to(device) if found.rows.nbytes <= _RESIDENT_BYTES else found.rows
        conditioning = Conditioning(text_tokens=rows.shape[1], text_dim=rows.shape[2], encoder=found.encoder)
        null = found.null.to(device).float() if settings.drop > 0 else None
        return Condition(device, conditioning, "context", rows, None, null, settings.drop, config.training.seed)
    return Condition(device)


def choose_classes(config: RunConfig, known: Conditioning, chosen: Sequence[str], device: torch.device) -> Condition:
    """Sample these classes (numbers, names or "null") in turn; default: every class."""
    settings = config.condition
    if settings.kind != "class":
        raise ValueError(f"classes: the run's condition is {settings.kind}; leave them out")
    numbers = {str(i): i for i in range(known.num_classes)} | {name: i for i, name in enumerate(known.class_names)}
    if known.null_class:
        numbers = {"null": known.num_classes, **numbers}
    for name in chosen:
        if name.strip() not in numbers:
            names = f", or a name such as {known.class_names[0]!r}" if known.class_names else ""
            names += ", or null for none" if known.null_class else ""
            near = did_you_mean(name.strip(), [each for each in numbers if not each.isdigit()])
            raise ValueError(f"classes: there is no {name!r}; {near}give 0 .. {known.num_classes - 1}{names}")
    choices = torch.tensor([numbers[name.strip()] for name in chosen] or range(known.num_classes), device=device)
    null = torch.tensor(known.num_classes, device=device) if known.null_class else None
    return Condition(device, known, "class_labels", None, choices, null, settings.drop, config.training.seed)


def choose_prompts(
    config: RunConfig, known: Conditioning, prompts: Sequence[str], device: torch.device, encoder: str = ""
) -> Condition:
    """Sample these texts in turn; an empty one is the null condition. `encoder` overrides condition.encoder."""
    settings = config.condition
    if settings.kind != "text":
        raise ValueError(f"prompt: the run's condition is {settings.kind}, not text; leave it out")
    model = TextEncoder(encoder or settings.encoder, known.text_tokens, config.data.root, device)
    rows = model(["", *prompts]).float().to(device)
    wrong = ""
    if rows.shape[2] != known.text_dim:
        wrong = f"has width {rows.shape[2]}, the run was trained with {known.text_dim}"
    elif known.encoder and model.fingerprint != known.encoder:
        wrong = f"has sha256 {model.fingerprint[:12]}, the run was trained with {known.encoder[:12]}"
    if wrong:
        raise ValueError(f"condition.encoder: {model.name} {wrong}; use {settings.encoder}")
    null = rows[0] if settings.drop > 0 else None
    return Condition(device, known, "context", None, rows[1:], null, settings.drop, config.training.seed)
