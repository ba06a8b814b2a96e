"""diffusers' UNets with scaled long skips that no weights can stand for. An exported folder holds this file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from diffusers import UNet2DConditionModel, UNet2DModel

import scalelong


class ScaledUNet2DModel(UNet2DModel):  # type: ignore[misc]
    """A UNet2DModel that gets its scaling back when it is loaded."""

    @classmethod
    def from_pretrained(cls, folder: str | Path, **options: Any) -> Any:
        """The UNet with the gates and coefficients that it was saved with."""
        return scalelong.from_pretrained(UNet2DModel, folder, **_kept(options))


class ScaledUNet2DConditionModel(UNet2DConditionModel):  # type: ignore[misc]
    """A UNet2DConditionModel that gets its scaling back when it is loaded."""

    @classmethod
    def from_pretrained(cls, folder: str | Path, **options: Any) -> Any:
        """The UNet with the gates and coefficients that it was saved with."""
        return scalelong.from_pretrained(UNet2DConditionModel, folder, **_kept(options))


def _kept(options: dict[str, Any]) -> dict[str, Any]:
    """What a pipeline passes on that matters here."""
    return {key: options[key] for key in ("torch_dtype", "dtype") if options.get(key) is not None}
