"""Fetch, check and encode data sets.

Example: scalelong data fetch cifar10

Example: scalelong data encode emoji32 --autoencoder runs/emoji-autoencoder --out data/emoji32-latents

Example: scalelong data encode-text emoji32 --encoder minilm --max-tokens 16
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Annotated

import torch
import tyro

from scalelong.backbones.autoencoder import load_autoencoder
from scalelong.cli import DataName
from scalelong.data import SOURCES, check, load_source
from scalelong.data.download import fetch
from scalelong.data.encode import Origin, encode
from scalelong.data.text import encode_captions


@dataclass(frozen=True)
class Fetch:
    """Get a data set, verify it by hash and keep it in the cache."""

    name: DataName  # cifar10, fashion_mnist, or minilm (a text encoder)
    source: str | None = None  # your own copy: an archive or a folder
    root: str | None = None  # cache folder; default: $SCALELONG_DATA or the user's cache


@dataclass(frozen=True)
class Check:
    """List every bad file of a data set."""

    name: DataName  # a name, or one of the forms of `scalelong data list`
    image_size: int | None = None  # the size images will be cropped and resized to; without it all must have one size
    root: str | None = None
    split: str = "train"


@dataclass(frozen=True)
class Encode:
    """Encode a set of images as latents of an autoencoder; the same command again continues an interrupted one."""

    name: DataName  # a data set of images
    autoencoder: str  # a diffusers AutoencoderKL: a folder, or a name on the hub
    out: str  # the folder of the latents; train on latents:FOLDER
    batch_size: int = 64
    per_shard: int = 1024  # images per file
    scale: float | None = None  # latents are multiplied by this; default: the autoencoder's scaling factor
    image_size: int | None = None  # crop and resize to this
    split: str = "train"
    root: str | None = None
    device: str = "cuda" if torch.cuda.is_available() else "cpu"


@dataclass(frozen=True)
class EncodeText:
    """Compute the features of a data set's captions once; training finds them in the cache."""

    name: DataName  # a data set with captions
    encoder: str = "minilm"  # minilm, a hub name or a folder of transformers
    max_tokens: int = 77  # captions are cut or padded to this many
    split: str = "train"
    root: str | None = None
    device: str = "cuda" if torch.cuda.is_available() else "cpu"


@dataclass(frozen=True)
class List:
    """List the sources that `data.name` takes."""


Command = (
    Annotated[Fetch, tyro.conf.subcommand("fetch")]
    | Annotated[Check, tyro.conf.subcommand("check")]
    | Annotated[Encode, tyro.conf.subcommand("encode")]
    | Annotated[EncodeText, tyro.conf.subcommand("encode-text")]
    | Annotated[List, tyro.conf.subcommand("list")]
)


def main(arguments: list[str]) -> None:
    """Run one of fetch, check, encode, encode-text, list."""
    command: Fetch | Check | Encode | EncodeText | List = tyro.cli(
        Command, args=arguments, prog="scalelong data", description=__doc__
    )
    match command:
        case Fetch(name, source, root):
            print(f"{name}: verified in {fetch(name, root, source)}")
        case Check(name, image_size, root, split):
            _check(name, image_size, root, split)
        case Encode():
            _encode(command)
        case EncodeText():
            _encode_text(command)
        case List():
            for spec in sorted(SOURCES.values(), key=lambda spec: (":" in spec.form, spec.form)):
                print(f"{spec.form:24}  {spec.description}")


def _encode(command: Encode) -> None:
    source = load_source(command.name, image_size=command.image_size, split=command.split, root=command.root)
    autoencoder = load_autoencoder(command.autoencoder, command.device, command.scale)
    origin = Origin(command.name, command.image_size, command.split)
    folder = encode(
        source, autoencoder, command.out, origin, batch_size=command.batch_size, per_shard=command.per_shard
    )
    shape = " x ".join(map(str, autoencoder.latent_shape(source.shape)))
    print(f"{len(source):,} images and their mirror images as latents of {shape}: train on latents:{folder}")


def _encode_text(command: EncodeText) -> None:
    source = load_source(command.name, split=command.split, root=command.root)
    path, features = encode_captions(
        source, command.encoder, command.max_tokens, root=command.root, device=command.device
    )
    captions, tokens, width = features.rows.shape
    print(f"{captions:,} captions as {tokens} tokens of {width}: {path}")


def _check(name: str, image_size: int | None, root: str | None, split: str) -> None:
    problems = check(name, image_size=image_size, root=root, split=split)
    for problem in problems:
        print(problem)
    if problems:
        sys.exit(f"{name}: {len(problems)} problem(s)")
    source = load_source(name, image_size=image_size, root=root, split=split)
    print(f"{name}: {len(source):,} images of {' x '.join(map(str, source.shape))}, no problem found")
