"""The sizes of what a network is told beside the image."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Conditioning:
    """The sizes of a condition, known once the data and the encoder are; checkpoints remember them."""

    num_classes: int = 0
    null_class: bool = False  # one more class, which stands for "not told"
    class_names: tuple[str, ...] = ()
    text_tokens: int = 0
    text_dim: int = 0
    encoder: str = ""  # sha256 of the text encoder's weights

    @classmethod
    def from_state(cls, state: dict[str, Any] | None) -> Conditioning:
        """What a checkpoint remembers; those of before there were conditions remember nothing."""
        known = state or {}
        return cls(**{**known, "class_names": tuple(known.get("class_names", ()))})

    @property
    def label_rows(self) -> int:
        """Rows of the class embedding."""
        return self.num_classes + self.null_class
