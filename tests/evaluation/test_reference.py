from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch

from scalelong.data import MemorySource, load_source
from scalelong.evaluation import (
    FeatureStatistics,
    RandomConvFeatures,
    collect_statistics,
    image_batches,
    reference_statistics,
)

from .test_extractors import images


class Counted(RandomConvFeatures):
    def __init__(self, seed: int = 0) -> None:
        super().__init__(channels=2, seed=seed)
        self.seen = 0

    def __call__(self, images: torch.Tensor) -> torch.Tensor:
        self.seen += len(images)
        return super().__call__(images)


def source(n: int = 40, seed: int = 0) -> MemorySource:
    return MemorySource("some/odd name", images(n, seed=seed))


def test_batches_cover_the_range_in_order(tmp_path: Path) -> None:
    from PIL import Image

    whole = source(11)
    assert torch.equal(torch.cat(list(image_batches(whole, 2, 9, batch_size=3))), whole.images[2:9])
    for number, image in enumerate(whole.images):
        Image.fromarray(image.permute(1, 2, 0).numpy()).save(tmp_path / f"{number:02d}.png")
    folder = load_source(tmp_path)
    assert folder.images is None
    assert torch.equal(torch.cat(list(image_batches(folder, batch_size=4))), whole.images)


def test_computed_once_and_kept(tmp_path: Path) -> None:
    extractor = Counted()
    first = reference_statistics(source(), extractor, root=tmp_path)
    again = reference_statistics(source(), extractor, root=tmp_path)
    assert extractor.seen == 40
    assert torch.equal(first.cov, again.cov)
    assert (again.n, again.data, again.extractor_hash) == (40, source().fingerprint, extractor.hash)
    expected = FeatureStatistics.from_features(extractor(source().images))
    torch.testing.assert_close(first.cov, expected.cov)
    (path,) = (tmp_path / "statistics").iterdir()
    assert path.name.startswith("some-odd-name-random-conv-8-seed0-n40-")


def test_other_data_extractor_or_number_is_computed_anew(tmp_path: Path) -> None:
    reference_statistics(source(), Counted(), root=tmp_path)
    for data, extractor, n in ((source(seed=1), Counted(), 40), (source(), Counted(1), 40), (source(), Counted(), 30)):
        found = reference_statistics(data, extractor, num_images=n, root=tmp_path)
        assert (extractor.seen, found.n) == (n, n)
    assert len(list((tmp_path / "statistics").iterdir())) == 4


def test_without_cache_nothing_is_written(tmp_path: Path) -> None:
    extractor = Counted()
    reference_statistics(source(), extractor, cache=False, root=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_damaged_or_exchanged_files_are_computed_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    extractor = Counted()
    whole = reference_statistics(source(), extractor, root=tmp_path)
    (path,) = (tmp_path / "statistics").iterdir()
    path.write_bytes(path.read_bytes()[:100])
    with caplog.at_level(logging.WARNING):
        assert torch.equal(reference_statistics(source(), extractor, root=tmp_path).cov, whole.cov)
        assert "cannot be read" in caplog.text
        reference_statistics(source(seed=1), extractor, cache=False).save(path)
        assert torch.equal(reference_statistics(source(), extractor, root=tmp_path).cov, whole.cov)
        assert "holds other statistics" in caplog.text
    before = extractor.seen
    reference_statistics(source(), extractor, root=tmp_path)
    assert extractor.seen == before


def test_errors() -> None:
    for n in (0, 1, 41):
        with pytest.raises(ValueError, match=rf"evaluation\.num_images: must be in 2 \.\. 40 .*got {n}"):
            reference_statistics(source(), Counted(), num_images=n)
    with pytest.raises(ValueError, match=r"evaluation\.images: there are none"):
        collect_statistics([], Counted())
