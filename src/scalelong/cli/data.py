"""Fetch and check data sets.

Example: scalelong data fetch cifar10
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Annotated

import tyro

from scalelong.data import KNOWN, check, load_source
from scalelong.data.fetch import fetch


@dataclass(frozen=True)
class Fetch:
    """Get a data set, verify it by hash and keep it in the cache."""

    name: tyro.conf.Positional[str]  # cifar10 or fashion_mnist
    source: str | None = None  # your own copy: an archive or a folder
    root: str | None = None  # cache folder; default: $SCALELONG_DATA or the user's cache


@dataclass(frozen=True)
class Check:
    """List every bad file of a data set."""

    name: tyro.conf.Positional[str]  # a name, folder:PATH or hf:NAME
    root: str | None = None
    split: str = "train"


@dataclass(frozen=True)
class List:
    """List the names that `data.name` takes."""


Command = (
    Annotated[Fetch, tyro.conf.subcommand("fetch")]
    | Annotated[Check, tyro.conf.subcommand("check")]
    | Annotated[List, tyro.conf.subcommand("list")]
)


def main(arguments: list[str]) -> None:
    """Run one of fetch, check, list."""
    command: Fetch | Check | List = tyro.cli(Command, args=arguments, prog="scalelong data", description=__doc__)
    match command:
        case Fetch(name, source, root):
            print(f"{name}: verified in {fetch(name, root, source)}")
        case Check(name, root, split):
            _check(name, root, split)
        case List():
            print("\n".join(KNOWN))


def _check(name: str, root: str | None, split: str) -> None:
    problems = check(name, root=root, split=split)
    for problem in problems:
        print(f"{problem.path}: {problem.message}")
    if problems:
        sys.exit(f"{name}: {len(problems)} problem(s)")
    source = load_source(name, root=root, split=split)
    print(f"{name}: {len(source):,} images of {' x '.join(map(str, source.shape))}, no problem found")
