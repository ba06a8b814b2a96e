"""`import scalelong.diffusers`: from now on diffusers loads models with their scaling, conditioning and muP.

Pipelines with a scaled model name this module in their model_index.json, so that diffusers asks for this import where it is
missing. Its attributes are those of diffusers.

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
