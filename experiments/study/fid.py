"""FID of samples as they appear in a folder, beside the training processes.

    python experiments/study/fid.py FOLDER DATA.npz INCEPTION.pt

Reads FOLDER/samples/RUN@STEP.npy, appends {"run", "step", "fid"} to FOLDER/fid.jsonl and deletes the samples; ends when
FOLDER/finished exists and nothing is left.

Shapes: D features.
"""

from __future__ import annotations

import hashlib
import json
import sys
import time
import warnings
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

INCEPTION_SHA256 = "7ff4a85c3a6378f0dfc8433ffd789663b01176bec0a683a435651739c091fa34"


@dataclass(frozen=True)
class Gaussian:
    """Mean (D,) and covariance (D, D) of features, float64 on the CPU."""

    mean: Tensor
    cov: Tensor

    @classmethod
    def fit(cls, features: Tensor) -> Gaussian:
        x = features.double()
        return cls(x.mean(0).cpu(), torch.cov(x.T).cpu())


class Reference:
    """The Gaussian that others are compared with; its root is computed once."""

    def __init__(self, gaussian: Gaussian) -> None:
        self.gaussian = gaussian
        values, vectors = torch.linalg.eigh(gaussian.cov)
        self.root = vectors * values.clamp(min=0).sqrt()

    def distance(self, other: Gaussian) -> float:
        """|m1 - m2|^2 + tr C1 + tr C2 - 2 tr (S1^T C2 S1)^(1/2) with C1 = S1 S1^T."""
        product = self.root.T @ other.cov @ self.root
        common = torch.linalg.eigvalsh((product + product.T) / 2).clamp(min=0).sqrt().sum()
        traces = self.gaussian.cov.trace() + other.cov.trace()
        return float((self.gaussian.mean - other.mean).square().sum() + traces - 2 * common)


class Inception:
    """uint8 images (n, 3, H, W) -> features (n, 2048), float32: the TorchScript network that FID is defined with."""

    def __init__(self, path: Path, device: torch.device) -> None:
        found = hashlib.sha256(path.read_bytes()).hexdigest()
        if found != INCEPTION_SHA256:
            raise ValueError(f"fid.inception: {path} has sha256 {found}, expected {INCEPTION_SHA256}; fetch it again")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            self.network = torch.jit.load(str(path), map_location=device).eval()
        self.device = device

    @torch.no_grad()
    def __call__(self, images: Tensor, batch: int = 500) -> Tensor:
        found = []
        for part in images.split(batch):
            x = F.interpolate(part.to(self.device).float(), size=(299, 299), mode="bilinear", align_corners=False)
            found.append(self.network(x / 127.5 - 1).float())
        return torch.cat(found)


def serve(folder: Path, data: Path, inception: Path, device: torch.device) -> None:
    """Compute the reference once, then the FID of every file of samples until the folder says it is finished."""
    network = Inception(inception, device)
    with np.load(data) as arrays:
        reference = Reference(Gaussian.fit(network(torch.from_numpy(arrays["train"]))))
    print("reference ready", flush=True)
    with (folder / "fid.jsonl").open("a") as log:
        while True:
            finished = (folder / "finished").exists()
            waiting = sorted((folder / "samples").glob("*.npy"), key=lambda path: path.stat().st_mtime)
            for path in waiting:
                run, _, step = path.stem.rpartition("@")
                fid = reference.distance(Gaussian.fit(network(torch.from_numpy(np.load(path)))))
                log.write(json.dumps({"run": run, "step": int(step), "fid": round(fid, 4)}) + "\n")
                log.flush()
                path.unlink()
            if finished and not waiting:
                return
            if not waiting:
                time.sleep(1)


def main() -> None:
    torch.backends.cudnn.allow_tf32 = False
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    folder, data, inception = map(Path, sys.argv[1:4])
    serve(folder, data, inception, device)


if __name__ == "__main__":
    main()
