from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
from torch import Tensor

from scalelong.evaluation import FeatureStatistics, FewSamplesWarning, frechet_distance_of_features

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


def test_batches_give_what_the_whole_gives() -> None:
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
    with pytest.warns(FewSamplesWarning, match="10 samples for 10 features.*10,000"):
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
    with pytest.raises(ValueError, match="at least 2 samples, got 1"):
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
    with pytest.raises(ValueError, match=r"none\.safetensors is not there"):
        FeatureStatistics.load(tmp_path / "none.safetensors")
    from safetensors.torch import save_file

    save_file({"mean": torch.zeros(3)}, str(path))
    with pytest.raises(ValueError, match="no file of statistics"):
        FeatureStatistics.load(path)
