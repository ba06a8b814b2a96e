"""Bad data: `data check` lists every fault, and training names the file and the item."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from scalelong.data import MemorySource, check, load_source
from scalelong.data.base import DataError
from scalelong.data.latents import Origin, encode
from scalelong.data.loader import StreamLoader, load_images
from scalelong.files import file_digest
from tests.data.test_latents import autoencoder
from tests.faults.harness import case, expect
from tests.faults.hostile import png, shard


def pictures(folder: Path) -> Path:
    """Ten images, five of them bad."""
    folder.mkdir()
    for item in range(10):
        Image.fromarray(np.random.default_rng(item).integers(0, 255, (8, 8, 3), np.uint8)).save(folder / f"{item}.png")
    good = (folder / "0.png").read_bytes()
    (folder / "1.png").write_bytes(good[: len(good) // 2])
    (folder / "3.png").write_bytes(b"")
    Image.new("I;16", (8, 8)).save(folder / "4.png")  # 16 bits a channel
    (folder / "6.png").unlink()
    (folder / "6.png").symlink_to(folder / "nowhere.png")
    Image.new("RGB", (9, 8)).save(folder / "8.png")
    return folder


def images_in_a_folder(folder: Path) -> int:
    name = f"folder:{pictures(folder)}"
    problems = [str(problem) for problem in check(name)]
    for item in (1, 3, 4, 6):
        assert any(f"{item}.png: " in problem for problem in problems), f"{item} is not listed: {problems}"
    assert any("sizes" in problem for problem in problems), problems
    with expect(DataError, "1.png", "(item 1)"):
        load_images(load_source(name))
    for item in (1, 3, 4, 6):
        (folder / f"{item}.png").unlink()
        shutil.copy(folder / "0.png", folder / f"{item}.png")
    with expect(DataError, "8.png", "(item 8)"):
        list(StreamLoader(load_source(name), 0, workers=0).batches([torch.arange(10)]))
    (folder / "6.png").unlink()
    (folder / "6.png").symlink_to(folder / "nowhere.png")
    with expect(DataError, "6.png"):
        _ = load_source(name).fingerprint
    return 5


def latents(folder: Path) -> int:
    """Latents: a shard of another form, not finite, changed, missing; labels and index damaged."""
    pixels = torch.randint(0, 256, (6, 3, 8, 8), dtype=torch.uint8)
    source = MemorySource("toy", pixels, torch.arange(6) % 3)
    whole = encode(source, autoencoder(), folder / "latents", Origin("toy"), per_shard=3)
    name = "shard-00001.safetensors"

    def with_shard(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Path], None]:
        def act(home: Path) -> None:
            moments = change(load_file(home / name)["moments"])
            save_file({"moments": moments.contiguous()}, home / name)
            entry = {"sha256": file_digest(home / name), "bytes": (home / name).stat().st_size}
            edit("index.json", lambda index: index["shards"][1].update(entry))(home)

        return act

    def edit(file: str, change: Callable[[Any], Any]) -> Callable[[Path], None]:
        def act(home: Path) -> None:
            content = json.loads((home / file).read_text())
            change(content)
            (home / file).write_text(json.dumps(content))
            if file == "annotations.json":
                edit("index.json", lambda index: index.update(annotations=file_digest(home / file)))(home)

        return act

    def nan(moments: torch.Tensor) -> torch.Tensor:
        moments[1, 0, 0, 0, 0, 0] = torch.nan
        return moments

    faults: dict[str, tuple[Callable[[Path], None], str]] = {
        "NaN": (with_shard(nan), f"{name} row 1 (item 4)"),
        "wrong channels": (with_shard(lambda m: m[:, :, :, :1]), name),
        "changed since indexed": (lambda home: (home / name).write_bytes(b"x" * (home / name).stat().st_size), name),
        "truncated": (lambda home: os.truncate(home / name, 100), name),
        "missing": (lambda home: (home / name).unlink(), name),
        "label out of range": (edit("annotations.json", lambda notes: notes["labels"].__setitem__(2, 7)), "item 2 has"),
        "too few labels": (edit("annotations.json", lambda notes: notes["labels"].pop()), "5 labels for 6"),
        "no labels key": (edit("annotations.json", lambda notes: notes.pop("labels")), "annotations.json"),
        "index: {}": (lambda home: (home / "index.json").write_text("{}"), "index.json"),
        "index: []": (lambda home: (home / "index.json").write_text("[]"), "index.json"),
        "index: empty": (lambda home: (home / "index.json").write_text(""), "index.json"),
        "index: no shards": (edit("index.json", lambda index: index.pop("shards")), "index.json"),
        "index: text for a count": (edit("index.json", lambda index: index["shards"][0].update(count="3")), "index.json"),
        "index: ../": (edit("index.json", lambda index: index["shards"][0].update(file="../x")), "index.json"),
        "index: scale 0": (edit("index.json", lambda index: index.update(scale=0)), "index.json"),
        "autoencoder missing": (lambda home: shutil.rmtree(home / "autoencoder"), "autoencoder"),
    }  # fmt: skip
    for fault, (damage, named) in faults.items():
        home = folder / "damaged"
        shutil.copytree(whole, home)
        damage(home)
        problems = " | ".join(map(str, check(f"latents:{home}")))
        assert named in problems, f"{fault}: not listed: {problems}"
        if fault != "autoencoder missing":
            with expect(DataError, named):
                load_images(load_source(f"latents:{home}"))
        shutil.rmtree(home)
    return len(faults)


def shards(folder: Path) -> int:
    """A cached index that is damaged is made again; a shard that changed under a run is named."""
    packed, cache = shard(folder / "a.tar", a_png=png(8, 8), a_cls=b"0", b_png=png(8, 8), b_cls=b"1"), folder / "cache"
    name = f"webdataset:{packed}"
    expected = load_source(name, root=cache).read_many([0, 1])
    beyond = {"key": "a", "offset": 9e9, "size": 1, "label": 0, "caption": None}
    contents = ("", "{}", "[]", "[1]", '[{"key": "a"}]', "[" * 50_000, json.dumps([beyond]))
    for content in contents:
        (index,) = (cache / "webdataset").iterdir()
        index.write_text(content)
        assert torch.equal(load_source(name, root=cache).read_many([0, 1]), expected), content
    source = load_source(name, root=cache)
    os.truncate(folder / "a.tar", 600)
    with expect(DataError, "a.tar: b", "since it was indexed", "(item 1)"):
        source.read(1)
    assert any("a.tar" in str(problem) for problem in check(name, root=cache))
    return len(contents) + 1


@case(
    9,
    "bad data: truncated, empty, wrong channels, NaN, label out of range, changed since indexed, dangling link, index",
    passes_when="`data check` lists all; training names path and item",
    protections=["data.finite"],
)
def bad_data(folder: Path, protect: bool) -> str:
    counts = images_in_a_folder(folder / "pictures"), latents(folder), shards(folder)
    return f"{counts[0]} bad images, {counts[1]} damages to latents and {counts[2]} to shards and indices named"
