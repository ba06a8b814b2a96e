"""Make diffusers restore scaling, feature conditioning and muP when it loads models.

Pipelines with a scaled model name this module in their model_index.json, so diffusers asks for this import if it is missing.
The module re-exports the attributes of diffusers.

>>> import scalelong, scalelong.diffusers
>>> from diffusers import UNet1DModel
>>> scalelong.apply(UNet1DModel(), "cs", kappa=0.6).model.save_pretrained("unet")
>>> scalelong.coefficients(UNet1DModel.from_pretrained("unet"))
[1.0, 0.6, 0.36]
"""

from importlib import import_module
from typing import Any

import diffusers.configuration_utils
import diffusers.training_utils  # noqa: F401  (both are to be patched)

from scalelong import parametrization  # noqa: F401  (restores muP)
from scalelong.skips.patches import install

install()


def __getattr__(name: str) -> Any:
    return getattr(import_module("diffusers"), name)
