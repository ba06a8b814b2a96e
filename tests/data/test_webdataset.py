from __future__ import annotations

import io
import pickle
import tarfile
from functools import lru_cache
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from scalelong.data import DataError, check, load_source, webdataset
from scalelong.data.base import threaded
from scalelong.data.loader import DeviceLoader, StreamLoader
from scalelong.data.webdataset import expand

from .conftest import noise


def png(seed: int) -> bytes:
    content = io.BytesIO()
    Image.fromarray(noise(seed, 8, 8, 3)).save(content, "PNG")
    return content.getvalue()


def write(path: Path, members: dict[str, bytes]) -> Path:
    with tarfile.open(path, "w") as archive:
        for name, content in members.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
    return path


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    """Three shards of four samples with classes and captions."""
    for shard in range(3):
        members = {}
        for number in range(4 * shard, 4 * shard + 4):
            members[f"{number:04d}.png"] = png(number)
            members[f"{number:04d}.cls"] = str(number % 3).encode()
            members[f"{number:04d}.txt"] = f"picture {number}".encode()
        write(tmp_path / f"{shard:03d}.tar", members)
    return tmp_path


def name_of(folder: Path) -> str:
    return f"webdataset:{folder}/{{000..002}}.tar"


def test_samples_are_read_at_any_place(shards: Path, tmp_path: Path) -> None:
    source = load_source(name_of(shards), root=tmp_path / "cache")
    assert (len(source), source.shape, source.num_classes) == (12, (3, 8, 8), 3)
    assert source.captions is not None
    for item in (11, 0, 5):
        assert np.array_equal(source.read(item).permute(1, 2, 0).numpy(), noise(item, 8, 8, 3))
        assert source.captions[item] == f"picture {item}"
        assert source.labels is not None
        assert source.labels[item] == item % 3
    index = torch.arange(40)
    whole = DeviceLoader(source, seed=2).batch(index)
    parts = list(StreamLoader(source, seed=2, workers=2).batches([index[:9], index[9:]]))
    assert torch.equal(torch.cat([part.images for part in parts]), whole.images)
    assert check(name_of(shards), root=tmp_path / "cache") == []


def test_the_index_is_kept_and_renewed_when_a_shard_changes(shards: Path, tmp_path: Path) -> None:
    before = load_source(name_of(shards), root=tmp_path / "cache")
    kept = {file: file.stat().st_mtime_ns for file in (tmp_path / "cache" / "webdataset").iterdir()}
    assert len(kept) == 3
    again = load_source(name_of(shards), root=tmp_path / "cache")
    assert {file: file.stat().st_mtime_ns for file in kept} == kept
    assert again.fingerprint == before.fingerprint
    members = {"x.png": png(50), "x.cls": b"1", "x.txt": b"new"}
    write(shards / "001.tar", members)
    changed = load_source(name_of(shards), root=tmp_path / "cache")
    assert len(changed) == 9
    assert changed.fingerprint != before.fingerprint


@pytest.mark.parametrize("lost", [100, 1024, 9000, "end"])
def test_a_shard_cut_short_is_refused(shards: Path, tmp_path: Path, lost: int | str) -> None:
    shard = shards / "001.tar"
    content = shard.read_bytes()
    if lost == "end":  # between two members
        with tarfile.open(shard) as archive:
            shard.write_bytes(content[: archive.getmembers()[3].offset])
    else:
        shard.write_bytes(content.rstrip(b"\0")[: -int(lost)])
    with pytest.raises(DataError, match=r"001\.tar: (not a whole tar file|cut short)"):
        load_source(name_of(shards), root=tmp_path / "cache")


def test_a_shard_cut_short_after_indexing_is_refused(shards: Path, tmp_path: Path) -> None:
    source = load_source(name_of(shards), root=tmp_path / "cache")
    (shards / "002.tar").write_bytes((shards / "002.tar").read_bytes()[:600])
    with pytest.raises(DataError, match=r"002\.tar: 0011: cut short since it was indexed"):
        source.read(11)


@pytest.mark.parametrize(
    ("members", "match"),
    [
        ({"a.png": png(1), "a.cls": b"0", "b.png": png(2)}, "b: has no class, but other samples have"),
        ({"a.png": png(1), "a.cls": b"cat"}, "the class must be a whole number from 0, got 'cat'"),
        ({"a.png": png(1), "a.cls": b"-1"}, "the class must be a whole number from 0"),
        ({"a.txt": b"hello"}, "sample 'a' has no image"),
        ({"x/a.png": png(1), "x/a.mask.png": png(2)}, r"sample 'x/a' has a second image, x/a\.mask\.png"),
        ({"a.png": png(1), "a.json": b"{"}, "is not JSON"),
        ({}, "holds no samples"),
    ],
)
def test_bad_members_are_named(tmp_path: Path, members: dict[str, bytes], match: str) -> None:
    shard = write(tmp_path / "0.tar", members)
    with pytest.raises(DataError, match=match):
        load_source(f"webdataset:{shard}", root=tmp_path / "cache")


def test_json_gives_captions_and_classes_and_bad_images_are_listed(tmp_path: Path) -> None:
    members = {"a/x.jpg": png(1), "a/x.json": b'{"caption": "hello", "label": 2}', "b/x.webp": png(2)[:60]}
    members["b/x.json"] = b'{"caption": "there", "label": 0}'
    shard = write(tmp_path / "0.tar", members)
    source = load_source(f"webdataset:{shard}", root=tmp_path / "cache")
    assert (source.captions, source.num_classes) == (["hello", "there"], 3)
    assert [str(problem).split(": ")[1] for problem in check(f"webdataset:{shard}", root=tmp_path / "cache")] == ["b/x"]


def test_patterns(tmp_path: Path) -> None:
    for name in ("a-08", "a-09", "a-10", "b"):
        (tmp_path / f"{name}.tar").touch()
    assert [path.stem for path in expand(f"{tmp_path}/a-{{08..10}}.tar")] == ["a-08", "a-09", "a-10"]
    assert [path.stem for path in expand(f"{tmp_path}/{{b,a-10}}.tar")] == ["b", "a-10"]
    assert [path.stem for path in expand(f"{tmp_path}/a-*.tar")] == ["a-08", "a-09", "a-10"]
    with pytest.raises(DataError, match=r"missing: 1 shard\(s\), the first is .*a-11\.tar"):
        expand(f"{tmp_path}/a-{{08..11}}.tar")
    with pytest.raises(DataError, match="no shard matches"):
        expand(f"{tmp_path}/c*.tar")
    with pytest.raises(DataError, match="shards have no splits"):
        load_source(f"webdataset:{tmp_path}/b.tar", split="val")


def test_threads_share_few_open_files(shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(webdataset, "_opened", lru_cache(maxsize=1)(webdataset._opened.__wrapped__))
    source = pickle.loads(pickle.dumps(load_source(name_of(shards), root=tmp_path / "cache")))
    items = [0, 4, 8, 1, 5, 9] * 20
    for item, image in zip(items, threaded(source.read, items), strict=True):
        assert np.array_equal(image.permute(1, 2, 0).numpy(), noise(item, 8, 8, 3))
