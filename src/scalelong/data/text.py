"""Captions as features of a text encoder: computed once with any encoder of transformers, then read from a file.

The file is named after the encoder, the captions and the number of tokens, and can be carried to a machine that has
neither the encoder nor a network. Shapes: n captions, T tokens, D width of the encoder.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
import re
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from tqdm import tqdm

from scalelong.data.cache import cache_dir, file_digest, written_whole
from scalelong.data.errors import DataError
from scalelong.data.fetch import fetch

logger = logging.getLogger(__name__)

MINILM = "minilm"  # the encoder that `scalelong data fetch` can get


@dataclass(frozen=True)
class TextFeatures:
    """What the network is told of each caption."""

    rows: Tensor  # float16 (n, T, D)
    null: Tensor  # float16 (T, D), of the empty caption
    encoder: str  # sha256 of the encoder's weights


class TextEncoder:
    """A tokenizer and a text model; texts are cut or padded to `max_tokens`."""

    def __init__(self, name: str, max_tokens: int, root: str | Path | None = None, device: str | torch.device = "cpu"):
        where = str(fetch(MINILM, root)) if name == MINILM else str(Path(name).expanduser())
        where = where if Path(where).is_dir() else name
        self.name, self.max_tokens, self.device = name, max_tokens, torch.device(device)
        self.tokenizer, self.model, limit = _load(where, name)
        if max_tokens > limit:
            raise ValueError(f"condition.max_tokens: {max_tokens}, but {name} reads at most {limit}; use that or less")
        self.model.to(self.device).eval().requires_grad_(False)
        self._keeps_padding = type(self.model).__name__.startswith("CLIP")  # as those who condition on CLIP do
        self.fingerprint = _fingerprint(self.model)

    def __call__(self, texts: Sequence[str]) -> Tensor:
        """float16 (n, T, D) on the CPU; beyond the end of a text zeros, except for CLIP, which has features there too."""
        return torch.cat(list(self.batches(texts)))

    @torch.no_grad()
    def batches(self, texts: Sequence[str], batch_size: int = 64) -> Iterator[Tensor]:
        """The same in parts, for more captions than memory holds."""
        for start in tqdm(range(0, len(texts), batch_size), desc=f"encode with {self.name}", disable=None):
            tokens = self.tokenizer(
                list(texts[start : start + batch_size]),
                padding="max_length",
                truncation=True,
                max_length=self.max_tokens,
                return_tensors="pt",
            ).to(self.device)
            if self._keeps_padding:
                hidden = self.model(input_ids=tokens["input_ids"]).last_hidden_state
            else:
                mask = tokens["attention_mask"]
                hidden = self.model(input_ids=tokens["input_ids"], attention_mask=mask).last_hidden_state
                hidden = hidden * mask[..., None]
            yield hidden.half().cpu()


def encode_text(
    captions: Sequence[str],
    encoder: str,
    max_tokens: int,
    *,
    root: str | Path | None = None,
    device: str | torch.device = "cpu",
) -> TextFeatures:
    """The features of these captions, from the cache folder or computed into it."""
    path = feature_file(captions, encoder, max_tokens, root)
    if not path.is_file():
        _write(TextEncoder(encoder, max_tokens, root, device), captions, path)
        logger.info("%s: features of %d captions by %s", path, len(captions), encoder)
    return read_features(path, len(captions))


def feature_file(captions: Sequence[str], encoder: str, max_tokens: int, root: str | Path | None = None) -> Path:
    """Where the features of these captions lie; a folder's encoder goes by its weights, any other by its name."""
    folder = Path(encoder).expanduser()
    local = encoder != MINILM and folder.is_dir()
    weights = sorted(folder.glob("*.safetensors")) if local else []
    name = ",".join(["folder" if local else encoder, *(file_digest(file, "sha256") for file in weights)])
    digest = hashlib.sha256(f"{name}\0{max_tokens}\0".encode())
    for caption in captions:
        digest.update(caption.encode() + b"\0")
    label = re.sub(r"[^\w.-]+", "-", folder.name)
    return cache_dir(root) / "text" / f"{label}-{max_tokens}-{digest.hexdigest()[:16]}.safetensors"


def read_features(path: Path, count: int) -> TextFeatures:
    """A feature file, its rows mapped from the disk; refused where it is cut short or of another number of captions."""
    try:
        with safe_open(path, framework="pt") as file:
            metadata: dict[str, str] = file.metadata() or {}
            found = TextFeatures(file.get_tensor("rows"), file.get_tensor("null"), metadata.get("encoder", ""))
    except (SafetensorError, OSError) as error:
        raise DataError(
            f"{path}: not a whole feature file ({error}); delete it to make it again", "truncated"
        ) from error
    if len(found.rows) != count:
        raise DataError(f"{path}: features of {len(found.rows)} captions for {count}; delete it to make it again")
    return found


def _write(encoder: TextEncoder, captions: Sequence[str], path: Path) -> None:
    """A safetensors file, part by part: a table of contents, the features of the empty caption, then the rows."""
    null = encoder([""])[0]
    size, rows = null.nbytes, [len(captions), *null.shape]
    table = {
        "__metadata__": {"encoder": encoder.fingerprint},
        "null": {"dtype": "F16", "shape": list(null.shape), "data_offsets": [0, size]},
        "rows": {"dtype": "F16", "shape": rows, "data_offsets": [size, size * (len(captions) + 1)]},
    }
    header = json.dumps(table).encode()
    header += b" " * (-len(header) % 8)
    with written_whole(path) as file:
        file.write(struct.pack("<Q", len(header)) + header)
        for part in itertools.chain([null], encoder.batches(captions)):
            file.write(part.contiguous().numpy().tobytes())


def _load(where: str, name: str) -> tuple[Any, Any, int]:
    """(tokenizer, text model, how many tokens it reads)."""
    try:
        from transformers import AutoConfig, AutoModel, AutoModelForTextEncoding, AutoTokenizer, CLIPTextModel
    except ImportError as error:
        raise ImportError("condition.encoder: text needs transformers; pip install 'scalelong[text]'") from error
    try:
        config = AutoConfig.from_pretrained(where)
        tokenizer = AutoTokenizer.from_pretrained(where)
        half = AutoModelForTextEncoding if config.is_encoder_decoder else AutoModel  # of T5 the encoder alone
        kind = CLIPTextModel if config.model_type.startswith("clip") else half
        model = kind.from_pretrained(where, use_safetensors=True)
    except (OSError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise DataError(
            f"condition.encoder: {name!r} could not be loaded ({reason}); say minilm, a hub name or a folder of "
            "transformers with safetensors",
            "missing",
        ) from error
    limit = min(
        tokenizer.model_max_length, getattr(model.config, "max_position_embeddings", tokenizer.model_max_length)
    )
    return tokenizer, model, limit


def _fingerprint(model: torch.nn.Module) -> str:
    digest = hashlib.sha256()
    for name, value in sorted(model.state_dict().items()):
        digest.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
        digest.update(value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
