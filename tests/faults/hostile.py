"""Hostile files: whoever sends a run, a data set or an encoder executes nothing, and writes nothing outside its folder."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import io
import json
import os
import pickle
import resource
import shutil
import struct
import tarfile
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from scalelong.errors import ScaleLongError
from scalelong.files import file_digest
from tests.faults.harness import case
from tests.training.tiny import newest, tiny

SECONDS, MEGABYTES = 5, 500
MOST = {"s": 0.0, "MB": 0.0}  # of one attack


class Payload:
    """Touches a file when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return os.system, (f"touch {self.marker}",)


def peak() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def attack(name: str, act: Callable[[], Any], *expected: type[BaseException]) -> None:
    """Run an attack: a typed error (if one is expected), within seconds and megabytes."""
    started, memory = time.process_time(), peak()
    try:
        act()
    except Exception as error:  # noqa: BLE001 (its type is checked)
        assert isinstance(error, expected or (ScaleLongError,)), f"{name}: {error!r}"
    else:
        assert not expected, f"{name}: not refused"
    seconds, grown = time.process_time() - started, peak() - memory
    MOST.update(s=max(MOST["s"], seconds), MB=max(MOST["MB"], grown))
    assert seconds < SECONDS, f"{name}: {seconds:.1f} s"
    assert grown < MEGABYTES, f"{name}: {grown:.0f} MB"


# --------------------------------------------------------------------------------------------------------------- links


def links(folder: Path, run: Path) -> int:
    """Links of every name in a run's folder, to a file or folder outside that must stay as it is."""
    from scalelong.training import train

    victims = folder / "victims"
    (victims / "inside").mkdir(parents=True)
    names = [".lock", "config.yaml", "metrics.jsonl", "checkpoints", "samples", ".config.yaml", "metrics.staged"]
    names += ["checkpoints/step-00000001", "samples/step-00000003.png", "tensorboard"]
    for name in names:
        attacked, victim = folder / "attacked", victims / "file"
        shutil.copytree(run, attacked)
        victim.write_text("precious")
        target = (
            victims / "inside"
            if name in ("checkpoints", "samples", "tensorboard") or "step-0000000" in name
            else victim
        )
        target = victim if name.endswith(".png") else target
        place = attacked / name
        if place.is_dir() and not place.is_symlink():
            shutil.rmtree(place)
        place.parent.mkdir(exist_ok=True)
        place.unlink(missing_ok=True)
        place.symlink_to(target)
        before = sorted(path.name for path in victims.rglob("*"))
        with contextlib.suppress(ScaleLongError, OSError, ValueError):
            train(tiny(training_steps=3, training_sample_every=1), attacked)
        with contextlib.suppress(ScaleLongError, OSError, ValueError):
            write(attacked)
        assert victim.read_text() == "precious", f"{name}: a file outside was written"
        assert sorted(path.name for path in victims.rglob("*")) == before, f"{name}: written outside"
        shutil.rmtree(attacked)

    return len(names)


def write(run: Path) -> None:
    from scalelong.report import read_runs, write_report

    write_report(read_runs([run])[0], run / "report.html")


# ------------------------------------------------------------------------------------------------------ runs and files


def forged(run: Path, name: str, content: bytes) -> None:
    """Replace a file of the newest checkpoint and put its hash into the manifest."""
    checkpoint = newest(run)
    (checkpoint / name).write_bytes(content)
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    manifest[name] = hashlib.sha256(content).hexdigest()
    (checkpoint / "manifest.json").write_text(json.dumps(manifest))


def header(table: dict[str, Any], data: bytes = b"") -> bytes:
    text = json.dumps(table).encode()
    return struct.pack("<Q", len(text)) + text + data


def runs(folder: Path, run: Path, marker: Path) -> int:
    """Checkpoints and settings that are whole by their hashes, and hostile."""
    from scalelong.training import load_run

    state = json.loads((newest(run) / "state.json").read_text())
    tensor = {"dtype": "F32", "shape": [10**9], "data_offsets": [0, 4]}
    files: list[tuple[str, bytes]] = [
        ("ema.safetensors", pickle.dumps(Payload(marker))),
        ("ema.safetensors", struct.pack("<Q", 2**62) + b"{}"),
        ("ema.safetensors", header({"x": tensor}, b"0000")),
        ("ema.safetensors", header({"x": {**tensor, "shape": [1]}}, b"0000")),
        ("ema.safetensors", b""),
        ("state.json", b"[" * 100_000),
        ("state.json", b"{}"),
        ("state.json", json.dumps({**state, "shape": [10**9, 8, 8]}).encode()),
        ("state.json", json.dumps({**state, "shape": [1, 8, "8"]}).encode()),
        ("state.json", json.dumps({**state, "condition": {"num_classes": 10**12}}).encode()),
        ("state.json", json.dumps({**state, "condition": {"num_classes": -1, "evil": 1}}).encode()),
    ]
    for number, (name, content) in enumerate(files):
        copy = folder / "forged"
        shutil.copytree(run, copy)
        forged(copy, name, content)
        attack(f"{name} ({number})", lambda copy=copy: load_run(copy, step=2), ScaleLongError)
        shutil.rmtree(copy)
    configs = [
        "a: &a [x, x]\nb: &b [*a, *a]\nc: &c [*b, *b]\nd: [*c, *c]\n",
        "data: " + "[" * 20_000,
        f"data: {{name: !!python/object/apply:os.system ['touch {marker}']}}",
        "model: {depth: 1000000}",
        "model: {dim: 65536, depth: 1000, heads: 1}",
        "training: {batch_size: 10000000}\nmodel: {patch_size: 1}",
        "x" * 10**7,
    ]
    for text in configs:
        copy = folder / "config"
        shutil.copytree(run, copy)
        for older in sorted((copy / "checkpoints").iterdir())[:-1]:  # with a copy of the settings
            shutil.rmtree(older)
        (copy / "config.yaml").write_text(text)
        forged(copy, "config.yaml", text.encode())  # the copy in the checkpoint as well
        attack(text[:40], lambda copy=copy: load_run(copy, step=2), ScaleLongError)
        shutil.rmtree(copy)
    copy = folder / "upwards"
    shutil.copytree(run, copy)
    manifest = json.loads((newest(copy) / "manifest.json").read_text())
    (copy / "outside.safetensors").write_bytes(b"x")
    outside = {"../../outside.safetensors": file_digest(copy / "outside.safetensors")}
    (newest(copy) / "manifest.json").write_text(json.dumps(manifest | outside))
    from scalelong.training.checkpoint import load_checkpoint

    attack("../ in a manifest", lambda: load_checkpoint(newest(copy)), ScaleLongError)
    (copy / "metrics.jsonl").unlink()
    os.mkfifo(copy / "metrics.jsonl")
    attack("a pipe for metrics.jsonl", lambda: write(copy), ScaleLongError, OSError, ValueError)
    return len(files) + len(configs) + 2


# ---------------------------------------------------------------------------------------------------------------- data


def npz(path: Path, data: np.ndarray[Any, Any] | None, labels: Any, marker: Path) -> Path:
    path.mkdir()
    arrays = {"labels": labels} if data is None else {"data": data, "labels": labels}
    np.savez_compressed(path / "train_data_batch_1.npz", **arrays, allow_pickle=True)
    return path


def bomb(path: Path, rows: int) -> Path:
    """An npz of kilobytes whose images are gigabytes of zeros."""
    path.mkdir()
    with zipfile.ZipFile(path / "train_data_batch_1.npz", "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        with archive.open("data.npy", "w", force_zip64=True) as member:
            np.lib.format.write_array_header_1_0(
                member, {"descr": "|u1", "fortran_order": False, "shape": (rows, 12288)}
            )
            for _ in range(rows // 1000):
                member.write(bytes(12288 * 1000))
        archive.writestr("labels.npy", b"")
    return path


def png(width: int, height: int) -> bytes:
    buffer = io.BytesIO()
    Image.new("1", (width, height)).save(buffer, "PNG")
    return buffer.getvalue()


def shard(path: Path, **members: bytes) -> Path:
    with tarfile.open(path, "w") as archive:
        for name, content in members.items():
            info = tarfile.TarInfo(name.replace("_", "."))
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return path


def data(folder: Path, marker: Path) -> int:
    from scalelong.data import load_source
    from scalelong.data.text import TextEncoder

    root = str(folder / "cache")
    objects = np.array([Payload(marker)] * 2, dtype=object)
    pixels = np.zeros((2, 12288), np.uint8)
    picture = png(8, 8)

    def load(name: str, **options: Any) -> Callable[[], Any]:
        return lambda: load_source(name, root=root, **options).read(0)

    tars = {
        "absurd class": shard(folder / "a.tar", x_png=picture, x_cls=b"9999999"),
        "class of 5,000 digits": shard(folder / "b.tar", x_png=picture, x_cls=b"9" * 5000),
        "superscript class": shard(folder / "c.tar", x_png=picture, x_cls="²".encode()),
        "caption of megabytes": shard(folder / "d.tar", x_png=picture, x_txt=b"x" * 2**22),
        "nested JSON": shard(folder / "e.tar", x_png=picture, x_json=b"[" * 100_000),
    }
    pictures = folder / "pictures"
    pictures.mkdir()
    (pictures / "a.png").write_bytes(png(14_000, 12_000))
    scripts = folder / "scripts"
    scripts.mkdir()
    script = f"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n(%pipe%touch {marker}) (w) file\n"
    (scripts / "a.png").write_text(script)
    attacks = {
        "pickled images": load(f"imagenet64:{npz(folder / 'n1', objects, np.ones(2, int), marker)}"),
        "pickled labels": load(f"imagenet64:{npz(folder / 'n2', pixels, objects, marker)}"),
        "npz bomb": load(f"imagenet64:{bomb(folder / 'n3', 60_000)}"),
        "labels without images": load(f"imagenet64:{npz(folder / 'n4', None, np.ones(2, int), marker)}"),
        "absurd label": load(f"imagenet64:{npz(folder / 'n5', pixels, np.array([1, 2**62]), marker)}"),
        "picture of 168 megapixels": load(f"folder:{pictures}"),
        "PostScript as PNG": load(f"folder:{scripts}"),
        **{name: load(f"webdataset:{path}") for name, path in tars.items()},
        "remote code in an encoder": lambda: TextEncoder(str(remote_code(folder / "encoder", marker)), 8, root),
        "pickled weights of an encoder": lambda: TextEncoder(str(pickled_encoder(folder / "bert", marker)), 8, root),
    }
    for name, act in attacks.items():
        attack(name, act, ScaleLongError)
    return len(attacks)


def remote_code(folder: Path, marker: Path) -> Path:
    folder.mkdir()
    code = f"import pathlib\npathlib.Path({str(marker)!r}).touch()\n"
    for name in ("configuration_evil", "modeling_evil", "tokenization_evil"):
        (folder / f"{name}.py").write_text(code + "class Evil: pass\n")
    maps = {
        "AutoConfig": "configuration_evil.Evil",
        "AutoModel": "modeling_evil.Evil",
        "AutoTokenizer": ["tokenization_evil.Evil", None],
    }
    (folder / "config.json").write_text(json.dumps({"model_type": "evil", "auto_map": maps}))
    (folder / "tokenizer_config.json").write_text(json.dumps({"auto_map": maps}))
    return folder


def pickled_encoder(folder: Path, marker: Path) -> Path:
    from transformers import BertConfig, BertTokenizer

    folder.mkdir()
    BertConfig(
        hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8, vocab_size=8
    ).save_pretrained(folder)
    (folder / "vocab.txt").write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\na\nb\nc\n")
    BertTokenizer(str(folder / "vocab.txt")).save_pretrained(folder)
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Payload(marker)))
    return folder


@case(
    13,
    "hostile files: pickles, npz, YAML and picture bombs, absurd classes, forged checkpoints, `../`, links, remote code",
    passes_when="nothing executes or asks, nothing outside is written, a typed error, under 5 s and 500 MB",
    protections=["files.inside", "data.limits"],
)
def hostile(folder: Path, protect: bool) -> str:
    from scalelong.training import train

    marker = folder / "executed"
    os.close(0)  # a prompt would raise
    os.open(os.devnull, os.O_RDONLY)
    run = train(dataclasses.replace(tiny(training_steps=2, training_checkpoint_every=1)), folder / "run")
    counts = {"links": links(folder, run), "runs": runs(folder, run, marker), "data": data(folder, marker)}
    assert not marker.exists(), "a file was executed"
    return (
        ", ".join(f"{count} {name}" for name, count in counts.items())
        + f"; at most {MOST['s']:.1f} s and {MOST['MB']:.0f} MB each"
    )
