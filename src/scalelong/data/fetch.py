"""Get a data set once, verified by hash, and list what is wrong with one that is there."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from tqdm import tqdm

from scalelong.data import cifar10, emoji, fashion_mnist
from scalelong.data.cache import Expected, Problem, bad_files, cache_dir, staged
from scalelong.data.errors import DataError
from scalelong.data.folder import image_files
from scalelong.data.huggingface import HuggingFaceSource
from scalelong.data.images import open_rgb, threaded
from scalelong.data.names import parse_name

__all__ = ["Problem", "cache_dir", "check", "fetch"]

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
    if name not in ("cifar10", "fashion_mnist"):
        raise DataError(f"data.name: nothing to fetch for {name!r}; what can be fetched: cifar10, fashion_mnist")
    room = cifar10 if name == "cifar10" else fashion_mnist
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


def check(name: str, *, root: str | Path | None = None, split: str = "train") -> list[Problem]:
    """Every bad file (or row) of a source; an empty list means that all of it was read and is right."""
    kind, rest = parse_name(name)
    if kind == "folder":
        return _check_folder(Path(rest).expanduser())
    if kind == "hf":
        return _check_rows(rest, split, root)
    if rest == "emoji32":
        return bad_files(emoji.ASSETS, emoji.FILES, emoji.ALGORITHM, "install the package again")
    if rest == "digits":
        return []  # inside scikit-learn
    recipe = _recipe(rest)
    return bad_files(cache_dir(root) / rest, recipe.files, recipe.algorithm, f"run fetch({rest!r})")


def _check_folder(folder: Path) -> list[Problem]:
    try:
        files = image_files(folder)
    except DataError as error:
        return [Problem(str(folder), error.kind, str(error))]
    found = threaded(_file_problem, [folder / name for name in files])
    return [problem for problem in tqdm(found, total=len(files), desc=folder.name, disable=None) if problem]


def _file_problem(path: Path) -> Problem | None:
    try:
        open_rgb(path, str(path))
    except DataError as error:
        return Problem(str(path), error.kind, str(error))
    return None


def _check_rows(name: str, split: str, root: str | Path | None) -> list[Problem]:
    try:
        source = HuggingFaceSource(name, image_size=1, split=split, root=root)  # a size, so that no row is read yet
    except DataError as error:
        return [Problem(name, error.kind, str(error))]
    problems = []
    for item in tqdm(range(len(source)), desc=name, disable=None):
        try:
            source.open(item)
        except DataError as error:
            problems.append(Problem(f"{name} row {item}", error.kind, str(error)))
    return problems
