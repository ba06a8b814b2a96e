"""The table of contents of one tar shard: where each sample's picture lies, and its label and caption.

Built by one pass over the headers and kept in the cache, so that any sample can be read on its own afterwards.
"""

from __future__ import annotations

import hashlib
import json
import tarfile
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from scalelong.data.cache import written_whole
from scalelong.data.errors import DataError
from scalelong.data.images import EXTENSIONS

_VERSION = 2
_TEXTS = frozenset({"txt", "text", "caption"})
_BLOCK = 512


@dataclass(frozen=True)
class TarIndex:
    """One entry per sample, in the order of the file."""

    keys: list[str]
    offsets: list[int]
    sizes: list[int]
    labels: list[int | None]
    captions: list[str | None]


@dataclass
class _Sample:
    picture: tuple[int, int] | None = None
    label: int | None = None
    caption: str | None = None


def tar_index(shard: Path, cache: Path) -> TarIndex:
    """The index of a shard, from the cache if the file has not changed since it was made."""
    try:
        status = shard.stat()
    except OSError as error:
        raise DataError(f"{shard}: cannot be opened ({error.strerror}); check the pattern", "missing") from error
    identity = f"{_VERSION} {shard.resolve()} {status.st_size} {status.st_mtime_ns}"
    kept = cache / f"{hashlib.sha256(identity.encode()).hexdigest()[:32]}.json"
    if kept.is_file():
        return TarIndex(**json.loads(kept.read_text()))
    index = _scan(shard, status.st_size)
    with written_whole(kept) as file:
        file.write(json.dumps(asdict(index)).encode())
    return index


def _scan(shard: Path, size: int) -> TarIndex:
    samples: dict[str, _Sample] = {}
    try:
        with tarfile.open(shard, "r:") as archive:
            for member in archive:
                if member.isreg():
                    _note(archive, member, samples, shard)
            end = archive.offset
    except (tarfile.TarError, EOFError, OSError) as error:
        raise DataError(f"{shard}: not a whole tar file ({error}); get it again", "truncated") from error
    if end + _BLOCK > size or not _ends_empty(shard, end):
        raise DataError(f"{shard}: cut short (no end of archive after {end:,} bytes); get it again", "truncated")
    return _index(samples, shard)


def _ends_empty(shard: Path, end: int) -> bool:
    """A tar file ends with blocks of zeros; one that was cut between two members does not."""
    with shard.open("rb") as file:
        file.seek(end)
        return file.read(_BLOCK) == b"\0" * _BLOCK


def _note(archive: tarfile.TarFile, member: tarfile.TarInfo, samples: dict[str, _Sample], shard: Path) -> None:
    """A member `key.extension` belongs to sample `key`, as in webdataset."""
    path = PurePosixPath(member.name)
    stem, _, extension = path.name.partition(".")
    extension = extension.lower()
    if not stem or path.name.startswith("."):
        return
    key = str(path.parent / stem)
    sample = samples.setdefault(key, _Sample())
    if f".{extension.rpartition('.')[2]}" in EXTENSIONS:
        if sample.picture is not None:
            raise DataError(
                f"{shard}: sample {key!r} has a second picture, {member.name}; make the shard again with one"
            )
        sample.picture = (member.offset_data, member.size)
        return
    if extension not in (*_TEXTS, "cls", "json"):
        return
    content = archive.extractfile(member)
    assert content is not None
    text = content.read().decode("utf-8", errors="replace").strip()
    where = f"{shard}: {member.name}"
    if extension in _TEXTS:
        sample.caption = text
    elif extension == "cls":
        sample.label = _whole(text, where)
    else:
        _note_json(sample, text, where)


def _note_json(sample: _Sample, text: str, where: str) -> None:
    try:
        content = json.loads(text)
    except ValueError as error:
        raise DataError(f"{where}: is not JSON ({error}); make the shard again", "unreadable") from error
    found: dict[str, Any] = content if isinstance(content, dict) else {}
    caption = next((found[key] for key in ("caption", "text") if isinstance(found.get(key), str)), None)
    label = next((found[key] for key in ("label", "cls") if found.get(key) is not None), None)
    sample.caption = caption if sample.caption is None else sample.caption
    sample.label = _whole(str(label), where) if label is not None and sample.label is None else sample.label


def _whole(text: str, where: str) -> int:
    if not text.isdigit():
        raise DataError(f"{where}: the class must be a whole number from 0, got {text[:40]!r}; make the shard again")
    return int(text)


def _index(samples: dict[str, _Sample], shard: Path) -> TarIndex:
    if not samples:
        raise DataError(f"{shard}: holds no samples; check the pattern", "missing")
    for key, sample in samples.items():
        if sample.picture is None:
            raise DataError(f"{shard}: sample {key!r} has no picture; make the shard again", "missing")
    places = [sample.picture or (0, 0) for sample in samples.values()]
    return TarIndex(
        list(samples),
        [offset for offset, _ in places],
        [size for _, size in places],
        [sample.label for sample in samples.values()],
        [sample.caption for sample in samples.values()],
    )
