"""Download, check and encode datasets.

Example: scalelong data fetch cifar10

Example: scalelong data encode emoji32 --autoencoder runs/emoji-autoencoder --out data/emoji32-latents
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import torch

from scalelong.backbones.autoencoder import load_autoencoder
from scalelong.cli.arguments import DataName, parse_subcommand
from scalelong.data import Source, check, load_source
from scalelong.data.base import SOURCES
from scalelong.data.download import fetch
from scalelong.data.latents import Origin, encode
from scalelong.data.text import encode_text, feature_file


@dataclass(frozen=True, kw_only=True)
class DataFlags:
    name: DataName  # see `scalelong data list`
    image_size: int | None = None  # crop and resize to this; otherwise all images must have the same size
    split: str = "train"
    root: str | None = None  # cache folder; default: $SCALELONG_DATA or the user's cache

    def load(self) -> Source:
        return load_source(self.name, image_size=self.image_size, split=self.split, root=self.root)


@dataclass(frozen=True)
class Fetch:
    """Download a dataset into the cache and verify its hashes."""

    name: DataName  # cifar10, fashion_mnist, or minilm (a text encoder)
    source: str | None = None  # your own copy: an archive or a folder
    root: str | None = None  # cache folder; default: $SCALELONG_DATA or the user's cache

    def __call__(self) -> None:
        print(f"{self.name}: verified in {fetch(self.name, self.root, self.source)}")


@dataclass(frozen=True, kw_only=True)
class Check(DataFlags):
    """List every bad file of a dataset."""

    def __call__(self) -> None:
        problems = check(self.name, image_size=self.image_size, root=self.root, split=self.split)
        if problems:
            print(*problems, sep="\n")
            sys.exit(f"{self.name}: {len(problems)} problem(s)")
        source = self.load()
        print(f"{self.name}: {len(source):,} images of {' x '.join(map(str, source.shape))}, no problem found")


@dataclass(frozen=True, kw_only=True)
class Encode(DataFlags):
    """Encode images as latents of an autoencoder; run again to continue."""

    autoencoder: str  # a diffusers AutoencoderKL: a folder, or a name on the hub
    out: str  # output folder; train with --data latents:FOLDER
    batch_size: int = 64
    per_shard: int = 1024  # images per file
    scale: float | None = None  # latents are multiplied by this; default: the autoencoder's scaling factor
    device: str = "cuda" if torch.cuda.is_available() else "cpu"

    def __call__(self) -> None:
        source, model = self.load(), load_autoencoder(self.autoencoder, self.device, self.scale)
        origin = Origin(self.name, self.image_size, self.split)
        folder = encode(source, model, self.out, origin, batch_size=self.batch_size, per_shard=self.per_shard)
        shape = " x ".join(map(str, model.latent_shape(source.shape)))
        print(f"{len(source):,} images and their flips encoded as latents of {shape}: train on latents:{folder}")


@dataclass(frozen=True, kw_only=True)
class EncodeText(DataFlags):
    """Compute and cache the features of a dataset's captions."""

    encoder: str = "minilm"  # minilm, a hub name or a local transformers folder
    max_tokens: int = 77  # captions are truncated or padded to this length
    device: str = "cuda" if torch.cuda.is_available() else "cpu"

    def __call__(self) -> None:
        captions = self.load().captions
        if captions is None:
            raise ValueError(f"data.name: {self.name} has no captions; nothing to encode")
        found = encode_text(captions, self.encoder, self.max_tokens, root=self.root, device=self.device)
        path = feature_file(captions, self.encoder, self.max_tokens, self.root)
        print("{:,} captions as {} tokens of {}: {}".format(*found.rows.shape, path))


@dataclass(frozen=True)
class List:
    """List the supported values of `data.name`."""

    def __call__(self) -> None:
        for spec in sorted(SOURCES.values(), key=lambda spec: (":" in spec.form, spec.form)):
            print(f"{spec.form:24}  {spec.description}")


def main(arguments: list[str]) -> None:
    """Run one of fetch, check, encode, encode-text, list."""
    verbs: Any = {"fetch": Fetch, "check": Check, "encode": Encode, "encode-text": EncodeText, "list": List}
    parse_subcommand(verbs, arguments, "data", __doc__)()
