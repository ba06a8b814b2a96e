from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from scalelong.data import DataError
from scalelong.data.base import SOURCES, check, find_source, load_source


def test_unknown_name_gets_the_nearest_one_and_the_list() -> None:
    with pytest.raises(ValueError) as caught:
        find_source("cfar10")
    assert str(caught.value).startswith("data.name: unknown 'cfar10'; did you mean 'cifar10'? choose one of ")
    assert all(spec.form in str(caught.value) for spec in SOURCES.values())
    with pytest.raises(ValueError, match="did you mean 'fashion_mnist'"):
        find_source("Fashion-MNIST")
    for odd in ("", "qqq", "folder:", "hf:", "digits:", "digits:more", "folder"):
        with pytest.raises(ValueError, match=r"data\.name: unknown"):
            find_source(odd)


def test_paths_and_prefixes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert find_source("hf:owner/name") == (SOURCES["hf"], "owner/name")
    for prefix, spec in SOURCES.items():
        if ":" in spec.form:
            assert find_source(f"{prefix}:a:b/{{0..9}}.tar") == (spec, "a:b/{0..9}.tar")
    assert find_source(str(tmp_path)) == (SOURCES["folder"], str(tmp_path))
    (tmp_path / "digits").mkdir()
    monkeypatch.chdir(tmp_path)
    assert find_source("digits") == (SOURCES["digits"], "digits")  # a name wins over a folder of that name
    assert find_source("./digits") == (SOURCES["folder"], "./digits")
    with pytest.raises(DataError, match=r"data\.name: './dogs' is not an existing folder"):
        find_source("./dogs")


@pytest.mark.parametrize("name", ["digits", "emoji32"])
def test_the_registered_shape_is_that_of_the_items(name: str) -> None:
    assert SOURCES[name].shape == load_source(name).shape


def test_image_size_resizes_sets_in_memory() -> None:
    small = load_source("digits", image_size=16)
    assert small.shape == (1, 16, 16)
    plain = load_source("digits")
    assert small.images is not None and plain.images is not None
    means = [source.images.float().mean((1, 2, 3)) for source in (small, plain)]
    assert torch.corrcoef(torch.stack(means))[0, 1] > 0.98
    assert small.fingerprint != plain.fingerprint
    assert load_source("emoji32", image_size=16).captions == load_source("emoji32").captions


def test_wrong_arguments_name_their_key(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"data\.name: unknown 'emoji'; did you mean 'emoji32'"):
        load_source("emoji")
    with pytest.raises(ValueError, match=r"data\.split: digits has no 'test'; it has train"):
        load_source("digits", split="test")
    for size in (0, -3):
        with pytest.raises(ValueError, match=r"data\.image_size"):
            load_source("digits", image_size=size)
    with pytest.raises(ValueError, match="holds no images"):
        load_source(tmp_path)


def test_a_folder_is_loaded_by_its_path_or_prefix(image_folder: Path) -> None:
    by_path, by_prefix = load_source(image_folder, image_size=8), load_source(f"folder:{image_folder}", image_size=8)
    assert by_path.fingerprint == by_prefix.fingerprint
    assert len(by_path) == 22


def test_check_lists_every_bad_file_of_a_folder(image_folder: Path) -> None:
    whole = (image_folder / "cat" / "02.png").read_bytes()
    (image_folder / "cat" / "cut.png").write_bytes(whole[: len(whole) // 2])
    (image_folder / "cat" / "empty.jpg").write_bytes(b"")
    (image_folder / "dog" / "text.png").write_bytes(b"hello, this is not an image")
    (image_folder / "dog" / "gone.png").symlink_to(image_folder / "nowhere.png")
    Image.fromarray(np.full((4, 4), 1000, dtype=np.uint16)).save(image_folder / "dog" / "deep.png")
    found = check(str(image_folder), image_size=8)
    faults = {
        "cut.png": "truncated image",
        "empty.jpg": "truncated image",
        "text.png": "unreadable image",
        "gone.png": "no such file",
        "deep.png": "expected 8-bit RGB",
    }
    messages = {Path(str(problem).split(": ")[0]).name: str(problem) for problem in found}
    assert messages.keys() == faults.keys()
    assert all(f"{name}: {fault}" in messages[name] for name, fault in faults.items())
    (missing,) = check(f"folder:{image_folder}/none")
    assert "is not an existing folder" in str(missing)


def test_check_finds_images_of_several_sizes(image_folder: Path) -> None:
    """Training refuses them without data.image_size."""
    (found,) = check(f"folder:{image_folder}")
    assert "images of 22 sizes (14 x 9, 14 x 14, 14 x 19, ...); set data.image_size" in str(found)
    assert check(f"folder:{image_folder}", image_size=8) == []


def test_check_of_embedded_sets() -> None:
    assert check("digits") == []
    assert check("emoji32") == []
