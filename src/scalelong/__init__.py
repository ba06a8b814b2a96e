"""Scale the long skip connections of U-shaped diffusion models (ScaleLong, NeurIPS 2023).

Usage: `scalelong.apply(model, "cs", kappa=0.7)`. Public names are imported lazily.
"""

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from scalelong import parametrization as mup  # noqa: F401
    from scalelong.backbones import UViT, UViTConfig, load_official_uvit
    from scalelong.skips import (
        Handle,
        LongSkip,
        apply,
        coefficients,
        condition_on_features,
        find_skips,
        fold,
        from_pretrained,
        load,
        remove,
        save,
        skip_table,
        verify,
    )
    from scalelong.stability import OscillationProbe
    from scalelong.training import EMA, load_run

__version__ = "0.2.0.dev0"

__all__ = ["EMA", "Handle", "LongSkip", "OscillationProbe", "UViT", "UViTConfig", "apply", "coefficients", "find_skips"]
__all__ += [
    "condition_on_features",
    "fold",
    "from_pretrained",
    "load",
    "load_official_uvit",
    "load_run",
    "remove",
    "save",
    "skip_table",
    "verify",
]

_ELSEWHERE = {"EMA": "training", "load_run": "training", "OscillationProbe": "stability"}
_ELSEWHERE |= {"UViT": "backbones", "UViTConfig": "backbones", "load_official_uvit": "backbones"}


def __getattr__(name: str) -> Any:
    if name in __all__:
        value = getattr(import_module(f"{__name__}.{_ELSEWHERE.get(name, 'skips')}"), name)
    elif name == "mup":
        value = import_module(f"{__name__}.parametrization")
    elif not name.startswith("_") and find_spec(f"{__name__}.{name}") is not None:
        value = import_module(f"{__name__}.{name}")  # a subpackage: scalelong.skips after `import scalelong`
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
