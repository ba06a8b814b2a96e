"""Usage examples in docstrings run, and every public name has one."""

from __future__ import annotations

import doctest
import importlib
import inspect
import pkgutil
from pathlib import Path
from typing import Any

import pytest

import scalelong

PACKAGES = ("scaling", "skips", "backbones", "diffusion", "data", "training", "evaluation", "stability", "report")
OPTIONAL = (
    "scalelong.backbones.attention_kernel",
    "scalelong.backbones.mlp_kernel",
    "scalelong.training.adamw_kernel",
)  # need triton
MODULES = sorted(
    module.name for module in pkgutil.walk_packages(scalelong.__path__, "scalelong.") if module.name not in OPTIONAL
)
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


@pytest.mark.parametrize("name", MODULES)
def test_examples_run(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = importlib.import_module(name)
    monkeypatch.chdir(tmp_path)
    failed, _ = doctest.testmod(module, optionflags=FLAGS)
    assert failed == 0


def public_objects() -> list[Any]:
    packages = [scalelong, *(importlib.import_module(f"scalelong.{name}") for name in PACKAGES)]
    names = [(package, name) for package in packages for name in package.__all__ if not name.startswith("__")]
    found = [getattr(package, name) for package, name in names]
    kept = {id(each): each for each in found if inspect.isclass(each) or inspect.isfunction(each)}
    return [each for each in kept.values() if not issubclass_of_exception(each)]


def issubclass_of_exception(each: Any) -> bool:
    return inspect.isclass(each) and issubclass(each, BaseException)


@pytest.mark.parametrize("public", public_objects(), ids=lambda each: f"{each.__module__}.{each.__name__}")
def test_public_names_have_an_example(public: Any) -> None:
    assert ">>>" in (inspect.getdoc(public) or "")
