from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from scalelong.data import DataError, to_float, to_uint8
from scalelong.data.base import threaded
from scalelong.data.images import fit, open_rgb, resize_all, to_tensor

from .conftest import noise


def saved(image: Image.Image, kind: str = "PNG", **options: object) -> io.BytesIO:
    file = io.BytesIO()
    image.save(file, kind, **options)
    file.seek(0)
    return file


def test_float_and_back_is_exact_symmetric_and_reaches_both_ends() -> None:
    every = torch.arange(256, dtype=torch.uint8)
    values = to_float(every)
    assert values.dtype == torch.float32
    assert (values[0].item(), values[255].item()) == (-1.0, 1.0)
    assert torch.equal(values, -values.flip(0))
    assert torch.equal(to_uint8(values), every)
    assert to_uint8(torch.tensor([-3.0, 3.0])).tolist() == [0, 255]


def test_rgb_pixels_arrive_unchanged_and_channels_first() -> None:
    pixels = noise(0, 5, 7, 3)
    tensor = to_tensor(open_rgb(saved(Image.fromarray(pixels)), "x"))
    assert tensor.shape == (3, 5, 7)
    assert np.array_equal(tensor.permute(1, 2, 0).numpy(), pixels)


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGBA", "CMYK"])
def test_eight_bit_modes_become_rgb(mode: str) -> None:
    image = Image.new("RGB", (6, 6), (255, 0, 0)).convert(mode)
    kind = "TIFF" if mode == "CMYK" else "PNG"
    assert open_rgb(saved(image, kind), "x").mode == "RGB"


def test_transparent_becomes_white() -> None:
    image = Image.new("RGBA", (2, 1), (10, 20, 30, 0))
    image.putpixel((1, 0), (10, 20, 30, 255))
    rgb = open_rgb(saved(image), "x")
    assert [rgb.getpixel((x, 0)) for x in range(2)] == [(255, 255, 255), (10, 20, 30)]
    palette = Image.new("P", (1, 1), 0)
    assert open_rgb(saved(palette, transparency=0), "x").getpixel((0, 0)) == (255, 255, 255)


def test_photographs_are_turned_upright() -> None:
    image = Image.new("RGB", (4, 2))
    exif = Image.Exif()
    exif[0x0112] = 6  # turned by a quarter
    assert open_rgb(saved(image, "JPEG", exif=exif), "x").size == (2, 4)


def test_fit_takes_the_centre_square() -> None:
    wide = np.zeros((8, 24, 3), dtype=np.uint8)
    wide[:, 8:16] = 200
    assert np.array_equal(np.asarray(fit(Image.fromarray(wide), 4)), np.full((4, 4, 3), 200))
    tall = Image.fromarray(wide.transpose(1, 0, 2))
    assert np.array_equal(np.asarray(fit(tall, 4)), np.full((4, 4, 3), 200))


def test_resize_all_agrees_with_single_files() -> None:
    for channels in (1, 3):
        images = torch.from_numpy(noise(channels, 3, channels, 8, 8))
        small = resize_all(images, 5)
        pixels = images[1].permute(1, 2, 0).squeeze(-1).numpy()
        assert torch.equal(small[1], to_tensor(fit(Image.fromarray(pixels), 5)))
    assert resize_all(images, 8) is images


def test_sixteen_bits_are_refused_as_wrong_channels(tmp_path: Path) -> None:
    path = tmp_path / "deep.png"
    Image.fromarray(np.full((4, 4), 40000, dtype=np.uint16)).save(path)
    with pytest.raises(DataError, match=r"deep\.png.*I;16.*convert"):
        open_rgb(path, str(path))


def test_broken_files_say_how_they_are_broken(tmp_path: Path) -> None:
    whole = saved(Image.fromarray(noise(1, 32, 32, 3))).getvalue()
    files = {
        "cut.png": (whole[: len(whole) // 2], "truncated"),
        "empty.png": (b"", "truncated"),
        "text.png": (b"this is no picture", "unreadable"),
        "flipped.png": (whole[:60] + bytes(8) + whole[68:], "unreadable"),
    }
    for name, (content, fault) in files.items():
        path = tmp_path / name
        path.write_bytes(content)
        with pytest.raises(DataError, match=f"{name}: {fault} image"):
            open_rgb(path, str(path))
    with pytest.raises(DataError, match=r"gone\.png: no such file"):
        open_rgb(tmp_path / "gone.png", "gone.png")


def test_threads_keep_the_order_and_raise() -> None:
    assert list(threaded(lambda x: x * x, range(3000))) == [x * x for x in range(3000)]
    with pytest.raises(ZeroDivisionError):
        list(threaded(lambda x: 1 // x, [1, 0]))
