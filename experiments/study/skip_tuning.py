"""Skip-Tuning: the skips of a trained, unscaled network shrunk at sampling only.

    python experiments/study/skip_tuning.py WORK none-seed1 --inception INCEPTION.pt --until 600

Reads WORK/RUN.json, WORK/RUN.pt and WORK/data.npz of a finished piece and appends test loss and FID of each way of shrinking
to WORK/RUN.skip_tuning.csv, most interesting first; starts none after `--until` seconds.
"""

from __future__ import annotations

import argparse
import csv
import json
import time
from dataclasses import replace
from pathlib import Path

import torch
from evaluator import Evaluator
from fid import Gaussian, Inception, Reference
from network import read_images, read_spec
from variants import scale_skip_weights

from scalelong.scaling.constant import CONSTANT_METHODS

WAYS = (("cs", 1.0), ("cs", 0.95), ("cs", 0.9), ("universal", 0.95), ("cs", 0.98), ("cs", 1.02), ("cs", 0.8))
WAYS += (("universal", 0.9), ("universal", 1.05), ("cs", 0.7))
COLUMNS = ("run", "step", "method", "kappa", "test_loss", "fid")


def last_step(folder: Path, run: str) -> int:
    """The step at which the run ended."""
    return int(json.loads((folder / f"{run}.jsonl").read_text().splitlines()[-1])["step"])


@torch.no_grad()
def evaluate(folder: Path, run: str, inception: Path | None, until: float, num_samples: int = 0) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    spec = read_spec(folder / f"{run}.json")
    spec = replace(spec, num_samples=num_samples or spec.num_samples)
    images, test = read_images(spec)
    evaluator = Evaluator(spec, test.to(device))
    state = torch.load(folder / f"{run}.pt", map_location=device, weights_only=True)
    network = reference = None
    if inception is not None:
        network = Inception(inception, device)
        with torch.backends.cudnn.flags(enabled=True, benchmark=True, allow_tf32=False):
            reference = Reference(Gaussian.fit(network(images)))
    with (folder / f"{run}.skip_tuning.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(COLUMNS)
        for method, kappa in WAYS:
            if time.time() > until:
                break
            evaluator.model.load_state_dict(state)
            scale_skip_weights(evaluator.model, CONSTANT_METHODS[method](spec.depth // 2, kappa))
            loss, fid = float(evaluator.losses()[0].mean()), ""
            if network is not None and reference is not None:
                pixels = evaluator.samples()
                with torch.backends.cudnn.flags(enabled=True, benchmark=True, allow_tf32=False):
                    fid = f"{reference.distance(Gaussian.fit(network(pixels))):.4f}"
            writer.writerow((run, last_step(folder, run), method, kappa, f"{loss:.6g}", fid))
            file.flush()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("work", type=Path, help="folder of a finished piece")
    parser.add_argument("run", help="an unscaled run of it")
    parser.add_argument("--inception", type=Path, help="TorchScript file of the FID network; without it no FID")
    parser.add_argument("--until", type=float, default=float("inf"), metavar="SECONDS")
    options = parser.parse_args()
    torch.backends.cudnn.benchmark = True
    torch.set_float32_matmul_precision("high")
    evaluate(options.work, options.run, options.inception, time.time() + options.until)


if __name__ == "__main__":
    main()
