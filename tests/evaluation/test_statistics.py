"""Statistics of features: accumulated, merged, saved, and cached for a data set."""

from __future__ import annotations

import logging
import warnings
from pathlib import Path

import pytest
import torch
from torch import Tensor

from scalelong.data import MemorySource, load_source
from scalelong.evaluation import (
    FeatureStatistics,
    FewSamplesWarning,
    RandomConvFeatures,
    reference_statistics,
)
from scalelong.evaluation.statistics import collect_statistics, image_batches
from tests.evaluation.distance import frechet_distance_of_features

from .test_extractors import images
from .test_frechet import features

ABOUT = {"extractor": "thing", "extractor_hash": "abc", "data": "f00d"}


def streamed(x: Tensor, *sizes: int) -> FeatureStatistics:
    statistics = FeatureStatistics(x.shape[1], **ABOUT)
    for part in x.split(list(sizes)):
        statistics.update(part)
    return statistics


def assert_same(a: FeatureStatistics, b: FeatureStatistics) -> None:
    assert a.n == b.n
    torch.testing.assert_close(a.mean, b.mean, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(a.cov, b.cov, rtol=1e-11, atol=1e-12)


def test_batches_add_up_to_the_whole() -> None:
    x = features(200, 12, 0, shift=30.0)
    for sizes in ((200,), (1, 199), (64, 64, 64, 8), (1,) * 200):
        found = streamed(x, *sizes)
        assert_same(found, FeatureStatistics.from_features(x))
        torch.testing.assert_close(found.cov, torch.cov(x.T), rtol=1e-11, atol=1e-12)


def test_large_means_and_float32_batches_lose_no_digits() -> None:
    x = (features(400, 6, 1) + 1e4).float()
    found = streamed(x, 100, 100, 100, 100)
    torch.testing.assert_close(found.cov, torch.cov(x.double().T), rtol=1e-9, atol=1e-9)


def test_merged_parts_give_the_whole() -> None:
    x = features(101, 9, 2)
    parts = [FeatureStatistics.from_features(part, **ABOUT) for part in x.split(40)]
    before = parts[0].mean.clone()
    whole = parts[0].merge(parts[1]).merge(parts[2]).merge(FeatureStatistics(9, **ABOUT))
    assert_same(whole, FeatureStatistics.from_features(x))
    assert torch.equal(parts[0].mean, before)
    assert (whole.extractor, whole.extractor_hash, whole.data) == ("thing", "abc", "f00d")
    assert parts[0].merge(FeatureStatistics.from_features(x, extractor_hash="abc", data="else")).data == ""


def test_gather_alone_changes_nothing() -> None:
    own = streamed(features(30, 5, 3), 30)
    assert_same(own.gather(), own)


def test_distance_is_that_of_the_features() -> None:
    x, y = features(90, 10, 4), features(80, 10, 5, shift=0.3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = streamed(x, 50, 40).distance(streamed(y, 80))
    assert found == pytest.approx(frechet_distance_of_features(x, y), rel=1e-10)


def test_distance_warns_of_few_samples() -> None:
    x, y = features(90, 10, 6), features(10, 10, 7)
    with pytest.warns(FewSamplesWarning, match="cov2: rank 9 of 10 features.*10,000"):
        streamed(x, 90).distance(streamed(y, 10))


def test_other_extractors_are_refused() -> None:
    x = features(20, 4, 8)
    other = FeatureStatistics.from_features(x, extractor="other", extractor_hash="def")
    for act in (streamed(x, 20).distance, streamed(x, 20).merge):
        with pytest.raises(ValueError, match=r"made by 'other' \(4 features\), not by 'thing'"):
            act(other)


def test_bad_features_are_refused_and_leave_the_statistics_alone() -> None:
    statistics = streamed(features(20, 4, 9), 20)
    for bad, message in (
        (torch.zeros(3, 5), r"must be \(n, 4\), got \(3, 5\)"),
        (torch.zeros(4), r"must be \(n, 4\), got \(4,\)"),
        (torch.full((3, 4), torch.nan), "12 of 12 values are not finite"),
    ):
        with pytest.raises(ValueError, match=message):
            statistics.update(bad)
    statistics.update(torch.empty(0, 4))
    assert_same(statistics, streamed(features(20, 4, 9), 20))
    with pytest.raises(ValueError, match="at least 2 samples for a covariance, got 1"):
        FeatureStatistics.from_features(torch.zeros(1, 4)).cov  # noqa: B018
    with pytest.raises(ValueError, match=r"statistics\.dim"):
        FeatureStatistics(0)


def test_saved_and_loaded(tmp_path: Path) -> None:
    own = streamed(features(40, 6, 10), 40)
    path = own.save(tmp_path / "deep" / "er" / "own.safetensors")
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]
    found = FeatureStatistics.load(path)
    assert torch.equal(found.mean, own.mean)
    assert torch.equal(found.scatter, own.scatter)
    about = (found.n, found.extractor, found.extractor_hash, found.data)
    assert about == (40, "thing", "abc", "f00d")


def test_bad_files_are_named(tmp_path: Path) -> None:
    path = streamed(features(40, 6, 11), 40).save(tmp_path / "own.safetensors")
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(ValueError, match=r"own\.safetensors cannot be read"):
        FeatureStatistics.load(path)
    with pytest.raises(ValueError, match=r"none\.safetensors cannot be read"):
        FeatureStatistics.load(tmp_path / "none.safetensors")
    from safetensors.torch import save_file

    save_file({"mean": torch.zeros(3)}, str(path))
    with pytest.raises(ValueError, match="not a file of statistics"):
        FeatureStatistics.load(path)


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


def test_statistics_of_a_data_set_are_cached(tmp_path: Path) -> None:
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
    for data, extractor, n in (
        (source(seed=1), Counted(), 40),
        (source(), Counted(1), 40),
        (source(30), Counted(), 30),
    ):
        found = reference_statistics(data, extractor, root=tmp_path)
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
        torch.testing.assert_close(reference_statistics(source(), extractor, root=tmp_path).cov, whole.cov)
        assert "cannot be read" in caplog.text
        reference_statistics(source(seed=1), extractor, cache=False).save(path)
        torch.testing.assert_close(reference_statistics(source(), extractor, root=tmp_path).cov, whole.cov)
        assert "holds other statistics" in caplog.text
    before = extractor.seen
    reference_statistics(source(), extractor, root=tmp_path)
    assert extractor.seen == before


def test_no_images_are_refused() -> None:
    with pytest.raises(ValueError, match=r"evaluation\.images: got none"):
        collect_statistics([], Counted())
