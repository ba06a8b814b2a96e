"""Uploads: a hub that refuses and one that is not there, each by HTTP on this machine."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from scalelong.cli.main import main
from scalelong.pipelines.hub import HubError, push_to_hub
from tests.training.tiny import tiny


@contextmanager
def refusing(status: int, message: str) -> Iterator[tuple[str, list[str]]]:
    """A hub that answers every request with this status; its address, and what it was asked."""
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length") or 0))
            asked.append(f"{self.command} {self.path}")
            body = json.dumps({"error": message}).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_GET = do_POST  # noqa: N815

        def log_message(self, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", asked
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HF_TOKEN", "hf_not_a_token")
    exported = tmp_path / "exported"
    exported.mkdir()
    (exported / "README.md").write_text("# A model\n")
    return exported


@pytest.mark.parametrize(("status", "message"), [(401, "Invalid username or password"), (403, "no rights to create")])
def test_a_refusal_is_told_with_what_to_do(folder: Path, status: int, message: str) -> None:
    with refusing(status, message) as (endpoint, asked), pytest.raises(HubError) as refused:
        push_to_hub(folder, "me/model", endpoint=endpoint)
    assert asked[0] == "POST /api/repos/create"
    assert not any("commit" in each for each in asked), "something was uploaded"
    text = str(refused.value)
    assert text.startswith("push_to_hub: me/model was not uploaded (")
    assert str(status) in text and "hf auth login" in text
    assert "hf_not_a_token" not in text
    assert [path.name for path in folder.iterdir()] == ["README.md"]


def test_a_hub_that_is_not_there(folder: Path) -> None:
    with refusing(200, "") as (endpoint, _):
        pass  # its port is free now
    with pytest.raises(HubError, match="was not uploaded"):
        push_to_hub(folder, "me/model", endpoint=endpoint)


def test_bad_names_are_refused_before_anything_is_done(folder: Path, tmp_path: Path, capsys) -> None:
    with pytest.raises(ValueError, match=r"push_to_hub: .*write it as USER/NAME"):
        push_to_hub(folder, "me//model")
    with pytest.raises(ValueError, match="is not an exported folder"):
        push_to_hub(tmp_path / "nothing", "me/model")
    assert main(["export", str(tmp_path / "no-run"), "--push-to-hub", "a/b/c"]) == 1
    assert "error: push_to_hub: " in capsys.readouterr().err


def test_the_command_keeps_the_folder_when_the_hub_refuses(tmp_path: Path, monkeypatch, capsys) -> None:
    from huggingface_hub import constants

    from scalelong.training import train

    run = train(tiny(training_steps=1), tmp_path / "run")
    monkeypatch.setenv("HF_TOKEN", "hf_not_a_token")
    with refusing(401, "no") as (endpoint, asked):
        monkeypatch.setattr(constants, "ENDPOINT", endpoint)
        assert main(["export", str(run), "--out", str(tmp_path / "out"), "--push-to-hub", "me/model"]) == 1
    assert asked[0] == "POST /api/repos/create"
    assert not any("commit" in each for each in asked), "something was uploaded"
    printed = capsys.readouterr()
    assert "was not uploaded" in printed.err
    assert "uploaded to" not in printed.out
    assert (tmp_path / "out" / "model.safetensors").is_file()
