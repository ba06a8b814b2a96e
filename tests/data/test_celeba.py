from __future__ import annotations

from pathlib import Path

import pytest
import torch
from PIL import Image

from scalelong.data import DataError, check, load_source
from scalelong.data.images import to_tensor

from .conftest import noise


@pytest.fixture
def celeba(tmp_path: Path) -> Path:
    """Six aligned images of 178 x 218 in the official layout."""
    home = tmp_path / "img_align_celeba"
    home.mkdir()
    for number in range(1, 7):
        Image.fromarray(noise(number, 218, 178, 3)).save(home / f"{number:06d}.png")
    lines = [f"{number:06d}.png {(number - 1) // 2}" for number in range(1, 7)]
    (tmp_path / "list_eval_partition.txt").write_text("\n".join(lines) + "\n")
    return tmp_path


def test_the_centre_is_cropped_and_resized(celeba: Path) -> None:
    source = load_source(f"celeba:{celeba}")
    assert (len(source), source.shape, source.labels) == (2, (3, 64, 64), None)
    picture = Image.fromarray(noise(2, 218, 178, 3)).crop((19, 39, 159, 179))
    assert torch.equal(source.read(1), to_tensor(picture.resize((64, 64), Image.Resampling.BICUBIC)))
    assert torch.equal(load_source(f"celeba:{celeba}", image_size=140).read(1), to_tensor(picture))
    (celeba / "list_eval_partition.txt").unlink()
    whole = load_source(f"folder:{celeba / 'img_align_celeba'}", image_size=64)  # the same files, cropped otherwise
    assert whole.fingerprint != load_source(f"celeba:{celeba}").fingerprint


def test_splits_follow_the_partition_file(celeba: Path) -> None:
    first = [load_source(f"celeba:{celeba}", split=split).files[0] for split in ("train", "val", "test")]  # type: ignore[attr-defined]
    assert first == ["000001.png", "000003.png", "000005.png"]
    with pytest.raises(DataError, match="CelebA has train, val, test, not 'dev'"):
        load_source(f"celeba:{celeba}", split="dev")
    (celeba / "img_align_celeba" / "000003.png").unlink()
    assert len(load_source(f"celeba:{celeba}")) == 2
    with pytest.raises(DataError, match=r"line 3: 000003\.png is not among the images"):
        load_source(f"celeba:{celeba}", split="val")
    (celeba / "list_eval_partition.txt").write_text("000001.png seven\n")
    with pytest.raises(DataError, match="line 1: expected a file name and 0, 1 or 2"):
        load_source(f"celeba:{celeba}")
    (celeba / "list_eval_partition.txt").unlink()
    assert len(load_source(f"celeba:{celeba}")) == 5
    with pytest.raises(DataError, match="only 'train' is known"):
        load_source(f"celeba:{celeba}", split="val")


def test_images_of_another_kind_are_refused(celeba: Path) -> None:
    Image.fromarray(noise(1, 100, 100, 3)).save(celeba / "img_align_celeba" / "000002.png")
    with pytest.raises(DataError, match="100 x 100 pixels, but 140 are cropped"):
        load_source(f"celeba:{celeba}").read(1)
    assert [str(problem).split(": ")[0][-10:] for problem in check(f"celeba:{celeba}")] == ["000002.png"]
