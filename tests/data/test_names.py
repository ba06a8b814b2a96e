from __future__ import annotations

from pathlib import Path

import pytest

from scalelong.data.errors import DataError
from scalelong.data.names import KNOWN, PREFIXED, parse_name


def test_unknown_name_gets_the_nearest_one_and_the_list() -> None:
    with pytest.raises(ValueError) as caught:
        parse_name("cfar10")
    assert str(caught.value).startswith("data.name: unknown 'cfar10'; did you mean 'cifar10'? Known: ")
    assert all(name in str(caught.value) for name in KNOWN)
    with pytest.raises(ValueError, match="did you mean 'fashion_mnist'"):
        parse_name("Fashion-MNIST")
    for odd in ("", "qqq", "folder:", "hf:"):
        with pytest.raises(ValueError, match=r"data\.name: unknown"):
            parse_name(odd)


def test_paths_and_prefixes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert parse_name("folder:a/b") == ("folder", "a/b")
    assert parse_name("hf:owner/name") == ("hf", "owner/name")
    for form, kind in PREFIXED.items():
        assert parse_name(f"{form.partition(':')[0]}:a:b/{{0..9}}.tar") == (kind, "a:b/{0..9}.tar")
    assert parse_name(str(tmp_path)) == ("folder", str(tmp_path))
    (tmp_path / "digits").mkdir()
    monkeypatch.chdir(tmp_path)
    assert parse_name("digits") == ("named", "digits")  # a name wins over a folder of that name
    assert parse_name("./digits") == ("folder", "./digits")
    with pytest.raises(DataError, match=r"data\.name: './dogs' is not an existing folder"):
        parse_name("./dogs")
