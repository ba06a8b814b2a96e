"""List everything that is wrong with a data set: every file, row or sample of it is read."""

from __future__ import annotations

from pathlib import Path

from tqdm import tqdm

from scalelong.data import emoji
from scalelong.data.cache import Problem, bad_files
from scalelong.data.errors import DataError
from scalelong.data.fetch import bad_fetched
from scalelong.data.folder import image_files
from scalelong.data.images import open_rgb, threaded
from scalelong.data.latents import check_latents, latent_autoencoder, read_index
from scalelong.data.names import parse_name
from scalelong.data.pictures import PictureSource
from scalelong.data.sources import load_source


def check(
    name: str, *, image_size: int | None = None, root: str | Path | None = None, split: str = "train"
) -> list[Problem]:
    """Every bad file (or row) of a source; an empty list means that all of it was read and is right.

    image_size: what pictures will be cut to; without it those of a folder must be of one size.
    """
    kind, rest = parse_name(name)
    if kind == "folder":
        return _check_folder(Path(rest).expanduser(), image_size)
    if kind == "latents":
        return _check_latents(Path(rest).expanduser())
    if kind != "named":
        return _check_items(name, split, root)
    if rest == "emoji32":
        return bad_files(emoji.ASSETS, emoji.FILES, emoji.ALGORITHM, "install the package again")
    if rest == "digits":
        return []  # inside scikit-learn
    return bad_fetched(rest, root)


def _check_folder(folder: Path, image_size: int | None) -> list[Problem]:
    try:
        files = image_files(folder)
    except DataError as error:
        return [Problem(str(folder), error.kind, str(error))]
    found = threaded(_size_or_problem, [folder / name for name in files])
    read = list(tqdm(found, total=len(files), desc=folder.name, disable=None))
    problems = [each for each in read if isinstance(each, Problem)]
    sizes = sorted({each for each in read if not isinstance(each, Problem)})
    if image_size is None and len(sizes) > 1:
        shown = ", ".join(f"{width} x {height}" for width, height in sizes[:3])
        told = f"{folder}: pictures of {len(sizes)} sizes ({shown}{', ...' if len(sizes) > 3 else ''}); set data.image_size"
        problems.append(Problem(str(folder), "invalid", told))
    return problems


def _size_or_problem(path: Path) -> tuple[int, int] | Problem:
    try:
        return open_rgb(path, str(path)).size
    except DataError as error:
        return Problem(str(path), error.kind, str(error))


def _check_latents(folder: Path) -> list[Problem]:
    try:
        index = read_index(folder)
        problems = check_latents(folder, index)
        latent_autoencoder(folder, index)
    except (DataError, FileNotFoundError) as error:
        return [Problem(str(folder), getattr(error, "kind", "missing"), str(error))]
    return problems


def _check_items(name: str, split: str, root: str | Path | None) -> list[Problem]:
    try:
        source = load_source(name, image_size=1, split=split, root=root)  # a size, so that no picture is read yet
    except DataError as error:
        return [Problem(name, error.kind, str(error))]
    problems = []
    for item in tqdm(range(len(source)), desc=name, disable=None):
        try:
            source.open(item) if isinstance(source, PictureSource) else source.read(item)
        except DataError as error:
            place = source.where(item) if isinstance(source, PictureSource) else f"{name} row {item}"
            problems.append(Problem(place, error.kind, str(error)))
    return problems
