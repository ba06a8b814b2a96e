from __future__ import annotations

import functools
import hashlib
import http.server
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from scalelong.data.download import debian_unpack, http_get, npm_pack
from scalelong.data.errors import DataError


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def server(tmp_path: Path) -> Iterator[str]:
    (tmp_path / "served").mkdir()
    handler = functools.partial(Quiet, directory=str(tmp_path / "served"))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as running:
        thread = threading.Thread(target=running.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{running.server_address[1]}"
        running.shutdown()
        thread.join()


def fake_tool(folder: Path, name: str, script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    folder.mkdir(exist_ok=True)
    tool = folder / name
    tool.write_text(f"#!/bin/sh\n{script}\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")


def test_http_get_brings_the_bytes(tmp_path: Path, server: str) -> None:
    content = bytes(range(256)) * 5000
    (tmp_path / "served" / "file").write_bytes(content)
    assert http_get(f"{server}/file", tmp_path / "got").read_bytes() == content


def test_http_get_says_what_failed(tmp_path: Path, server: str) -> None:
    with pytest.raises(DataError, match="404"):
        http_get(f"{server}/nothing", tmp_path / "got")
    with pytest.raises(DataError, match=r"127\.0\.0\.1:1/file"):
        http_get("http://127.0.0.1:1/file", tmp_path / "got")


def test_npm_pack_checks_the_hash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_tool(tmp_path / "bin", "npm", 'printf "%s %s" "$1" "$2" > thing-1.0.0.tgz', monkeypatch)
    right = hashlib.sha256(b"pack thing@1.0.0").hexdigest()
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    assert npm_pack("thing@1.0.0", right, scratch).name == "thing-1.0.0.tgz"
    with pytest.raises(DataError, match="do not use it") as caught:
        npm_pack("thing@1.0.0", "0" * 64, scratch)
    assert caught.value.kind == "wrong hash"


def test_failing_tools_tell_their_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_tool(tmp_path / "bin", "npm", "echo no such package >&2; exit 3", monkeypatch)
    with pytest.raises(DataError, match=r"npm pack thing@1.*status 3.*no such package"):
        npm_pack("thing@1", "", tmp_path)
    fake_tool(tmp_path / "bin", "npm", "exit 0", monkeypatch)
    with pytest.raises(DataError, match="expected one"):
        npm_pack("thing@1", "", tmp_path)


def test_missing_tools_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(DataError, match=r"npm is not on the PATH; install Node\.js"):
        npm_pack("thing@1", "", tmp_path)
    with pytest.raises(DataError, match="apt-get is not on the PATH"):
        debian_unpack("thing", tmp_path)
