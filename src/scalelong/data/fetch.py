"""Get a data set once, verified by hash."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from scalelong.data import cifar10, fashion_mnist, minilm
from scalelong.data.cache import Expected, Problem, bad_files, cache_dir, staged
from scalelong.data.errors import DataError

logger = logging.getLogger(__name__)

_Route = Callable[[Path, Path], None]  # fills its first folder; what it leaves in the second is thrown away


@dataclass(frozen=True)
class _Recipe:
    """How one set is had."""

    files: Mapping[str, Expected]
    algorithm: str
    own_copies: tuple[str, ...]  # names under which a user's copy is found in the cache folder
    unpack: Callable[[Path, Path, Path], None]  # (source, files, scratch)
    routes: tuple[_Route, ...]  # tried in order
    remedy: str


def _recipe(name: str) -> _Recipe:
    rooms = {"cifar10": cifar10, "fashion_mnist": fashion_mnist, "minilm": minilm}
    if name not in rooms:
        raise DataError(f"data.name: nothing to fetch for {name!r}; what can be fetched: {', '.join(rooms)}")
    room = rooms[name]
    return _Recipe(room.FILES, room.ALGORITHM, room.OWN_COPIES, room.unpack, room.ROUTES, room.REMEDY)


def fetch(name: str, root: str | Path | None = None, source: str | Path | None = None) -> Path:
    """The folder of a verified set, fetched if it is not there; `source` is the user's own copy of it."""
    recipe = _recipe(name)
    home = cache_dir(root) / name
    if source is not None:
        source = Path(source).expanduser()
        if not source.exists():
            raise DataError(f"{source}: the file is not there; correct source=, or leave it out to fetch", "missing")
    elif not bad_files(home, recipe.files, recipe.algorithm, recipe.remedy):
        return home
    own = [home.parent / copy for copy in recipe.own_copies if (home.parent / copy).exists()]
    routes = _from_copies(recipe, own) + list(recipe.routes) if source is None else _from_copies(recipe, [source])
    errors: list[DataError] = []
    for route in routes:
        try:
            with staged(home) as (files, scratch):
                route(files, scratch)
                _verify(files, recipe)
        except DataError as error:
            logger.info("%s: %s", name, error)
            errors.append(error)
        else:
            logger.info("%s: verified, in %s", name, home)
            return home
    if source is not None:
        raise DataError(f"{source}: {errors[0]}", errors[0].kind)
    places = " or ".join(str(home.parent / copy) for copy in recipe.own_copies)
    tried = "".join(f"\n  {error}" for error in errors)
    raise DataError(f"{name}: could not be fetched; {recipe.remedy}, or put it at {places}. Tried:{tried}", "missing")


def _from_copies(recipe: _Recipe, copies: list[Path]) -> list[_Route]:
    """The routes that start from files the user already has."""
    return [partial(recipe.unpack, copy) for copy in copies]


def _verify(files: Path, recipe: _Recipe) -> None:
    problems = bad_files(files, recipe.files, recipe.algorithm, "")
    if problems:
        listed = ", ".join(f"{Path(problem.path).name} {problem.kind}" for problem in problems)
        raise DataError(f"refused, nothing was kept ({listed}); get a whole copy and try again", problems[0].kind)


def bad_fetched(name: str, root: str | Path | None = None) -> list[Problem]:
    """Every bad file of a set that can be fetched."""
    recipe = _recipe(name)
    return bad_files(cache_dir(root) / name, recipe.files, recipe.algorithm, f"run fetch({name!r})")
