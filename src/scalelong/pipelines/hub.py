"""Upload an exported folder to the Hugging Face hub."""

from __future__ import annotations

from pathlib import Path

from huggingface_hub import HfApi
from huggingface_hub.errors import HfHubHTTPError, HFValidationError
from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

FAILURES: tuple[type[Exception], ...] = (OSError, *HfHubHTTPError.__bases__)  # with the HTTP client's own errors


class HubError(RuntimeError):
    """A failed upload to the hub."""


def check_repository(repository: str) -> None:
    """Raise a ValueError unless this is a valid repository name; works offline."""
    try:
        validate_repo_id(repository)
    except HFValidationError as error:
        raise ValueError(f"push_to_hub: {error}; write it as USER/NAME") from None


def push_to_hub(folder: str | Path, repository: str, *, private: bool = False, endpoint: str | None = None) -> str:
    """Upload all files of an exported folder as one commit, and return the repository's address.

    Uses the token of `hf auth login` or $HF_TOKEN. The local folder is not modified.

    >>> push_to_hub("exported/digits-cs", "me/digits-cs", private=True)  # doctest: +SKIP
    """
    check_repository(repository)
    folder = Path(folder)
    if not (folder / "README.md").is_file():
        raise ValueError(f"push_to_hub: {folder} is not an exported folder; export the run first")
    hub = HfApi(endpoint=endpoint)
    try:
        address = hub.create_repo(repository, private=private, exist_ok=True)
        hub.upload_folder(repo_id=address.repo_id, folder_path=folder, commit_message="Upload a model of scalelong")
    except FAILURES as error:
        why = " ".join(str(error).split())[:300]
        remedy = "check the name, log in with `hf auth login`, and push again"
        raise HubError(f"push_to_hub: {repository} was not uploaded ({why}); {remedy}; {folder} is complete") from error
    return str(address)
