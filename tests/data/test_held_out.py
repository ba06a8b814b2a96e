"""Held-out captions are new combinations of seen words."""

from __future__ import annotations

from collections import Counter

from scalelong.data import load_source
from scalelong.data.held_out import held_out, words


def test_every_word_stays_and_no_caption_does() -> None:
    captions = ["red apple", "green apple", "red flag", "green flag", "an apple", "a flag", "red", "green"]
    chosen = held_out(captions, [0] * len(captions), seen=2)
    assert chosen
    staying = Counter(word for item, caption in enumerate(captions) if item not in chosen for word in words(caption))
    assert all(staying[word] >= 2 for item in chosen for word in words(captions[item]))
    assert all(len(words(captions[item])) >= 2 for item in chosen)


def test_the_emojis_splits_share_words_but_no_caption() -> None:
    seen, unseen = load_source("emoji32", split="seen"), load_source("emoji32", split="unseen")
    assert len(seen) + len(unseen) == len(load_source("emoji32")) == 1911
    known = Counter(word for caption in seen.captions for word in words(caption))
    assert all(known[word] >= 3 for caption in unseen.captions for word in words(caption))
    assert not {words(caption) for caption in seen.captions} & {words(caption) for caption in unseen.captions}
    assert seen.fingerprint != unseen.fingerprint
    assert int(unseen.labels.bincount().max()) == 16
    assert "large green square" in unseen.captions
    assert "green" in known
