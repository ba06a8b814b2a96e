"""Which captions to keep from training: new combinations of words that are all seen elsewhere."""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Sequence


def words(caption: str) -> frozenset[str]:
    """The words and numbers of a caption, in lower case."""
    return frozenset(re.findall(r"[a-z0-9]+", caption.lower()))


def held_out(captions: Sequence[str], groups: Sequence[int], seen: int = 3, per_group: int = 16) -> list[int]:
    """Items of at least two words, each in `seen` or more captions that stay; at most so many of each group.

    The order of choice is that of the captions' hashes, so that it does not depend on the order of the list.
    """
    bags = [words(caption) for caption in captions]
    staying = Counter(word for bag in bags for word in bag)
    twins, taken = Counter(bags), Counter[int]()
    chosen = []
    for item in sorted(range(len(captions)), key=lambda item: hashlib.sha256(captions[item].encode()).digest()):
        bag, group = bags[item], groups[item]
        known = all(staying[word] > seen for word in bag)
        if len(bag) >= 2 and known and twins[bag] == 1 and taken[group] < per_group:
            chosen.append(item)
            staying.subtract(bag)
            taken[group] += 1
    return sorted(chosen)
