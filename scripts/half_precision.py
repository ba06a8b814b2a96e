"""Convert the FID Inception weights to half precision (44 MB) for transfer, and back.

    python scripts/half_precision.py inception-half.pt

The network's TorchScript file is a zip archive; its entries under data/ are float32 tensors in little-endian order. The
copy is the same archive with those entries rounded to float16. Its bytes depend on the original alone. What `restore`
writes computes in float32: `InceptionFeatures(weights=path, name="fp16-weights")`; its distances are not FID.
"""

from __future__ import annotations

import sys
import zipfile
from pathlib import Path

import numpy as np

from scalelong.evaluation.weights import INCEPTION_SHA256, find_weights
from scalelong.files import atomic_write, file_digest

HALF_SHA256 = "2129e16b703cc951b14e197f6563b2066d1f8c3af0e7c8ffc41fccf68eddd7c4"


def half_precision_copy(path: Path, weights: Path | None = None) -> Path:
    """Write the network (default: the cached or fetched one) with float16 weights to `path`."""
    original = find_weights(weights)
    if original.sha256 != INCEPTION_SHA256:
        raise ValueError(f"weights: must be the original network, got {original.name}")
    convert(original.path, path, "<f4", "<f2")
    if file_digest(path) != HALF_SHA256:
        raise RuntimeError(f"{path}: the copy does not have the expected hash")
    return path


def restore(half: Path, path: Path) -> Path:
    """Write the network of a half-precision copy with float32 weights to `path`."""
    if file_digest(half) != HALF_SHA256:
        raise ValueError(f"{half}: is not a half-precision copy of the network")
    convert(half, path, "<f2", "<f4")
    return path


def convert(source: Path, target: Path, stored: str, wanted: str) -> None:
    """Copy the archive with its tensors in another precision; dates and attributes are fixed, and so are the bytes."""
    with zipfile.ZipFile(source) as old, atomic_write(target) as file, zipfile.ZipFile(file, "w") as new:
        for entry in old.infolist():
            content = old.read(entry)
            if "/data/" in entry.filename:
                content = np.frombuffer(content, stored).astype(wanted).tobytes()
            plain = zipfile.ZipInfo(entry.filename)
            plain.create_system, plain.external_attr = 3, 0o600 << 16
            new.writestr(plain, content)


if __name__ == "__main__":
    sys.stdout.write(f"{half_precision_copy(Path(sys.argv[1]))}\n")
