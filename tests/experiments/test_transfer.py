"""The transfer sweep, small and on a CPU."""

from __future__ import annotations

import json

import pytest

from experiments import transfer_cifar10


@pytest.mark.slow
def test_it_trains_summarizes_and_plots(tmp_path, monkeypatch, capsys) -> None:
    small = [
        "--data",
        "digits",
        "--widths",
        "64",
        "128",
        "--rates",
        "1e-3",
        "--seeds",
        "0",
        "1",
        "--steps",
        "1",
        "--batch-size",
        "2",
        "--compile",
        "off",
    ]
    folders = ["--runs", str(tmp_path / "runs"), "--out", str(tmp_path)]
    monkeypatch.setattr(transfer_cifar10, "SEEDED", 64)
    for what in ("rates", "plot"):
        monkeypatch.setattr("sys.argv", ["transfer_cifar10.py", what, *small, *folders])
        transfer_cifar10.main()
        assert "moves by a factor of 1;" in capsys.readouterr().out
    points = json.loads((tmp_path / "runs" / "rates" / "transfer.json").read_text())
    assert sorted((point["parametrization"], point["width"], point["seed"]) for point in points) == [
        (kind, *run) for kind in ("mup", "standard") for run in ((64, 0), (64, 1), (128, 0))
    ]
    assert (tmp_path / "transfer-rates.png").is_file()


@pytest.mark.parametrize("width, heads", [(128, 2), (256, 4), (1024, 16)])
def test_heads_keep_their_size(width: int, heads: int) -> None:
    preset = transfer_cifar10.config("cifar10", 4000, 128, "default")
    grid = transfer_cifar10.transfer_grid(preset, (128, width) if width > 128 else (128, 256), (1e-3,))
    assert {each.model.heads for point, each in grid.items() if point.width == width} == {heads}
