from __future__ import annotations

import fcntl
import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from scalelong.backbones.autoencoder import Autoencoder, autoencoder_digest, load_autoencoder, small_autoencoder
from scalelong.data import DataError, MemorySource, check, load_source, to_float
from scalelong.data.latent_index import ANNOTATIONS, AUTOENCODER, INDEX
from scalelong.data.latents import LOCK, Origin, decoder, encode, original_images
from scalelong.data.loader import DeviceLoader, StreamLoader, flip_mask
from scalelong.random import normal

from .conftest import noise

COUNT = 11


def autoencoder(seed: int = 0) -> Autoencoder:
    torch.manual_seed(seed)
    model = small_autoencoder(3, (8, 8), latent_channels=2, size=8).eval().requires_grad_(False)
    return Autoencoder(model, autoencoder_digest(model), scale=1.7)


def images() -> MemorySource:
    pixels = torch.from_numpy(noise(1, COUNT, 3, 8, 8))
    return MemorySource("toy", pixels, torch.arange(COUNT) % 3, ["a", "b", "c"], [f"number {k}" for k in range(COUNT)])


def assert_same_latents(one: Path, other: Path) -> None:
    shards = sorted(path.name for path in one.glob("shard-*"))
    assert shards == sorted(path.name for path in other.glob("shard-*"))
    for name in shards:
        torch.testing.assert_close(load_file(one / name), load_file(other / name), rtol=1e-5, atol=1e-5)
    for name in (ANNOTATIONS, "autoencoder/config.json"):
        assert (one / name).read_bytes() == (other / name).read_bytes()


@pytest.fixture(scope="module")
def encoded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("latents") / "toy"
    return encode(images(), autoencoder(), folder, Origin("toy"), batch_size=3, per_shard=4)


def test_latents_are_those_of_the_autoencoder_with_the_annotations(encoded: Path) -> None:
    source = load_source(f"latents:{encoded}")
    assert (len(source), source.shape, source.num_classes) == (COUNT, (2, 4, 4), 3)
    assert source.labels is not None
    assert source.labels.tolist() == (torch.arange(COUNT) % 3).tolist()
    assert source.captions == images().captions
    pixels = to_float(images().images)
    moments = torch.stack([autoencoder().moments(pixels), autoencoder().moments(pixels.flip(-1))], dim=1)
    torch.testing.assert_close(source.read_many(range(COUNT)), moments, rtol=1e-5, atol=1e-5)
    assert not torch.equal(moments[:, 0], moments[:, 1])


def test_samples_are_a_function_of_seed_and_index(encoded: Path) -> None:
    source = load_source(f"latents:{encoded}")
    index = torch.arange(30)
    whole = DeviceLoader(source, seed=5).batch(index)
    stored = source.read_many(whole.items.tolist())
    chosen = stored[torch.arange(30), flip_mask(5, index).long()]
    expected = (chosen[:, 0] + torch.exp(0.5 * chosen[:, 1]) * normal(5, "latent", index, (2, 4, 4))) * 1.7
    assert torch.equal(whole.images, expected)
    for workers in (0, 2):
        parts = list(StreamLoader(source, seed=5, workers=workers).batches([index[:7], index[7:]]))
        assert torch.equal(torch.cat([part.images for part in parts]), whole.images)
    again = DeviceLoader(source, seed=6).batch(index).images
    assert not torch.equal(again, whole.images)
    unflipped = DeviceLoader(source, seed=5, flip=False).batch(index).images
    same = ~flip_mask(5, index)
    assert torch.equal(unflipped[same], whole.images[same])


def test_interrupted_encoding_continues_to_the_same_latents(
    encoded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []
    real = Autoencoder.moments

    def dies(self: Autoencoder, pixels: torch.Tensor) -> torch.Tensor:
        calls.append(len(pixels))
        if len(calls) == 6:  # in the second of three shards
            raise KeyboardInterrupt
        return real(self, pixels)

    monkeypatch.setattr(Autoencoder, "moments", dies)
    folder = tmp_path / "toy"
    with pytest.raises(KeyboardInterrupt):
        encode(images(), autoencoder(), folder, Origin("toy"), batch_size=3, per_shard=4)
    with pytest.raises(DataError, match="the encoding is not finished; run the same"):
        load_source(f"latents:{folder}")
    kept = (folder / "shard-00000.safetensors").stat().st_mtime_ns
    calls.clear()
    calls.extend([0] * 6)
    encode(images(), autoencoder(), folder, Origin("toy"), batch_size=3, per_shard=4)
    assert (folder / "shard-00000.safetensors").stat().st_mtime_ns == kept
    names = {path.relative_to(folder) for path in folder.rglob("*") if path.is_file()}
    assert names == {path.relative_to(encoded) for path in encoded.rglob("*") if path.is_file()}
    assert_same_latents(folder, encoded)


@pytest.mark.parametrize(("keep", "fault"), [(-40, "truncated"), (None, "wrong hash")])
def test_a_damaged_shard_is_refused_and_made_anew(encoded: Path, tmp_path: Path, keep: int | None, fault: str) -> None:
    folder = shutil.copytree(encoded, tmp_path / "toy")
    shard = folder / "shard-00001.safetensors"
    good = shard.read_bytes()
    shard.write_bytes(good[:keep] if keep else good[:-1] + bytes([good[-1] ^ 1]))
    with pytest.raises(DataError, match=rf"shard-00001\.safetensors: {fault}"):
        load_source(f"latents:{folder}")
    (problem,) = check(f"latents:{folder}")
    assert f"shard-00001.safetensors: {fault}" in str(problem)
    encode(images(), autoencoder(), folder, Origin("toy"), batch_size=3, per_shard=4)
    assert_same_latents(folder, encoded)
    assert check(f"latents:{folder}") == []


def test_another_autoencoder_is_refused(encoded: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="holds latents of another encoding"):
        encode(images(), autoencoder(seed=1), encoded, Origin("toy"), per_shard=4)
    folder = shutil.copytree(encoded, tmp_path / "toy")
    shutil.rmtree(folder / AUTOENCODER)
    autoencoder(seed=1).model.save_pretrained(folder / AUTOENCODER)
    with pytest.raises(DataError, match="is another autoencoder"):
        decoder(f"latents:{folder}", "cpu")
    assert ["is another autoencoder" in str(problem) for problem in check(f"latents:{folder}")] == [True]
    with pytest.raises(DataError, match="other latents than the model was trained on"):
        decoder(f"latents:{encoded}", "cpu", fingerprint="f00")


def test_decoding_undoes_the_scale(encoded: Path) -> None:
    source = load_source(f"latents:{encoded}")
    found = decoder(source.name, "cpu", source.fingerprint)
    assert found is not None
    latents = torch.randn(2, 2, 4, 4, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(
        found.decode(latents), autoencoder().model.decode(latents / 1.7).sample, rtol=1e-5, atol=1e-5
    )
    assert decoder("emoji32", "cpu") is None


def test_one_encoding_at_a_time(encoded: Path) -> None:
    with (encoded / LOCK).open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        with pytest.raises(RuntimeError, match="another process is encoding into"):
            encode(images(), autoencoder(), encoded, Origin("toy"), per_shard=4)


def test_unfit_sources_and_folders_are_refused(encoded: Path, tmp_path: Path) -> None:
    name = f"latents:{encoded}"
    with pytest.raises(DataError, match=r"data\.image_size: .* of 8 pixels already"):
        load_source(name, image_size=16)
    with pytest.raises(DataError, match=r"data\.split: .* has 'train' only"):
        load_source(name, split="test")
    with pytest.raises(DataError, match="are latents already"):
        encode(load_source(name), autoencoder(), tmp_path / "x", Origin(name))
    odd = MemorySource("odd", torch.zeros(1, 3, 9, 9, dtype=torch.uint8))
    with pytest.raises(ValueError, match="divides each side by 2"):
        encode(odd, autoencoder(), tmp_path / "x", Origin("odd"))
    with pytest.raises(DataError, match=r"not latents .*; check the path"):
        load_source(f"latents:{tmp_path}")
    (tmp_path / INDEX).write_text(json.dumps({"format": "of tomorrow"}))
    with pytest.raises(DataError, match="format 'of tomorrow'"):
        load_source(f"latents:{tmp_path}")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    with pytest.raises(ValueError, match="is not empty"):
        encode(images(), autoencoder(), tmp_path / "full", Origin("toy"))
    with pytest.raises(FileNotFoundError, match=r"not a folder with a config\.json"):
        load_autoencoder(tmp_path / "nowhere")


def test_original_images_of_latents(tmp_path: Path) -> None:
    source = load_source("digits")
    torch.manual_seed(0)
    model = small_autoencoder(1, (8, 8), latent_channels=1, size=8).eval().requires_grad_(False)
    folder = encode(source, Autoencoder(model, autoencoder_digest(model), 1.0), tmp_path / "d", Origin("digits"))
    assert original_images(load_source(f"latents:{folder}")).fingerprint == source.fingerprint
    assert original_images(source) is source


@pytest.mark.slow
def test_killed_encoding_continues_to_the_same_latents(tmp_path: Path) -> None:
    autoencoder().model.save_pretrained(tmp_path / "ae")

    def start(out: str) -> subprocess.Popen[bytes]:
        line = f"data encode emoji32 --autoencoder {tmp_path}/ae --out {tmp_path}/{out} --batch-size 16 --per-shard 128"
        return subprocess.Popen([sys.executable, "-m", "scalelong.cli.main", *line.split()])

    assert start("whole").wait(timeout=300) == 0
    killed = start("killed")
    deadline = time.monotonic() + 300
    while not (tmp_path / "killed" / "shard-00001.json").is_file():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    killed.kill()
    assert killed.wait() == -9
    assert not (tmp_path / "killed" / INDEX).is_file()
    kept = (tmp_path / "killed" / "shard-00001.safetensors").stat().st_mtime_ns
    assert start("killed").wait(timeout=300) == 0
    assert (tmp_path / "killed" / "shard-00001.safetensors").stat().st_mtime_ns == kept
    assert_same_latents(tmp_path / "killed", tmp_path / "whole")
    assert not list((tmp_path / "killed").glob(".*-staging-*"))
