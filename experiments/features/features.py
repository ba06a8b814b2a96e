"""Do weaker long skips and conditioning on features add up? {none, cs, ls} x {plain, conditioned}, over seeds: FID and the
accuracy of linear probes, with heat maps of where in the network the classes can be read off.

    python experiments/features/features.py --data FOLDER --inception FILE   # h-features-seed0: 50,000 steps
    python experiments/features/features.py h-features-seed0 h-features-seed1 ...   # and another; runs that are there stay
    python experiments/features/features.py h-features-s2 --out FOLDER ...   # U-ViT-S/2
    python experiments/features/features.py --tiny   # minutes on a CPU

The names are pieces of study/queue.yaml. Runs are trained by the study's worker, all at once on one GPU under CUDA MPS; each
is then probed. Results are written after every run.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[1] / "study"))

from entries import Piece, Recipe, Run, StudyError, check_startable, read_queue
from measures import mean_and_sd
from network import build_model
from output import print_table, write_csv, write_summary
from piece import FINAL_SECONDS, run_piece, specs
from probes import draw, labelled
from results import collect, outcomes

from scalelong.data import load_source
from scalelong.evaluation import linear_probe
from scalelong.evaluation.linear_probe import Labelled, LinearProbe
from scalelong.files import write_text

KINDS = {"features": "conditioned", "distill": "distilled"}
PUBLISHED = {
    "DDPM, CIFAR-10, probe": "90.0%",
    "EDM, CIFAR-10, probe": "94.5%",
    "LightningDiT-B, ImageNet-256, FID-10k without and with DDAE++": "21.26, 20.85",
    "LightningDiT-B, ImageNet-256, probe without and with DDAE++": "64.9%, 66.6%",
}
TINY = {"dim": 32, "depth": 4, "heads": 2, "patch": 8, "batch": 16, "steps": 40, "warmup": 5, "loss_every": 20}
TINY |= {"fid_at": ()}


@dataclass(frozen=True)
class Data:
    """CIFAR-10 as the workers and the probes read it."""

    train: Labelled
    test: Labelled
    file: str

    @classmethod
    def load(cls, root: Path | None, work: Path, count: int | None) -> Data:
        """The first `count` images of either split, or all."""
        parts, arrays = {}, {}
        for split in ("train", "test"):
            source = load_source("cifar10", split=split, root=root)
            parts[split], arrays[split] = labelled(source, count), source.images[:count].numpy()
        np.savez(work / "data.npz", **arrays)
        return cls(parts["train"], parts["test"], str(work / "data.npz"))


def main() -> None:
    try:
        run(arguments(sys.argv[1:]))
    except StudyError as error:
        sys.exit(f"error: {error}")


def run(options: argparse.Namespace) -> None:
    """Train what is missing, then probe."""
    begun, work = time.time(), options.work.resolve()
    work.mkdir(parents=True, exist_ok=True)
    whole, speed = joined(options.pieces), read_queue().speed
    if options.tiny:
        whole = replace(whole, **TINY)
    there = {path.stem for path in work.glob("*.pt")} | read_probes(work).keys()
    missing = tuple(run for run in whole.runs if run.name not in there)
    piece = replace(whole, runs=missing)
    seconds = speed.seconds(piece) if missing else 0.0
    print(f"{len(missing)} runs to train; expected on one H200, with probes: {seconds / 60:.0f} minutes", flush=True)
    if options.dry:
        return
    if missing:
        check_startable(piece, replace(speed, limit_minutes=options.minutes))
    data = Data.load(options.data, work, 500 if options.tiny else None)
    if missing:
        reserve = (FINAL_SECONDS + piece.probe_s) * len(missing)
        deadline = float("inf") if options.tiny else begun + 60 * options.minutes - reserve
        small = {"num_samples": 0, "test_images": 100, "eval_batch": 100} if options.tiny else {}
        run_piece(piece, work, data.file, options.inception, deadline, **small)
    measure(whole, work, data, options)


def joined(names: Sequence[str]) -> Piece:
    """Pieces of the queue as one; they must train the same network in the same way."""
    pieces = [read_queue().find(name) for name in names]
    for piece, field in ((piece, field.name) for piece in pieces for field in fields(Recipe)):
        if getattr(piece, field) != getattr(pieces[0], field):
            raise StudyError(f"queue.{piece.name}.{field}: is not that of {pieces[0].name}; run them one by one")
    return replace(pieces[-1], runs=tuple(run for piece in pieces for run in piece.runs))


def read_probes(work: Path) -> dict[str, dict[str, Any]]:
    stored = work / "probes.json"
    return json.loads(stored.read_text()) if stored.is_file() else {}


def kind(run: Run) -> str:
    return " and ".join(KINDS[key] for key in run.changes) or "plain"


def measure(piece: Piece, work: Path, data: Data, options: argparse.Namespace) -> None:
    """Probe every run that has been trained, and write what is known after each."""
    stored, probes = work / "probes.json", read_probes(work)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    for run, spec in zip(piece.runs, specs(piece, work, data.file, float("inf")), strict=True):
        weights = work / f"{run.name}.pt"
        if run.name in probes or not weights.is_file():
            continue
        model = build_model(spec).to(device).eval()
        model.load_state_dict(torch.load(weights, map_location=device))
        floors: dict[str, Any] = {}
        if run.label == "none":  # the same for all runs of a seed
            floors = {"random_network": build_model(spec).to(device).eval(), "pixels": True}
        levels = 2 if options.tiny else 9
        probe = linear_probe(model, data.train, data.test, process="vp", levels=levels, images=options.images, **floors)
        probes[run.name] = probe.record()
        write_text(stored, json.dumps(probes, indent=1) + "\n")
        write_results(piece, work, probes, options.out)
    print_table(write_results(piece, work, probes, options.out))


def write_results(piece: Piece, work: Path, probes: dict[str, dict[str, Any]], out: Path) -> list[dict[str, Any]]:
    """The table, after writing runs.csv, summary.json and the heat maps of the runs that have been probed."""
    out.mkdir(parents=True, exist_ok=True)
    last = {(row["method"], row["seed"]): row for row in collect(piece, work)}
    ends, rows = outcomes(piece, work), []
    for run in (run for run in piece.runs if run.name in probes):
        row, probe = last[run.label, run.seed], probes[run.name]
        quality = {"fid": row["fid"], "probe": probe["accuracy"], "test_loss": float(row["test_loss"])}
        where = {"block": probe["block"], "noise": probe["level"]}
        floors = {"untrained": probe["random_network"] or "", "pixels": probe["pixels"] or ""}
        speed = {"steps": row["step"], "ms_per_step": ends[run.name].get("ms_per_step", "")}
        rows.append({"method": run.method, "kind": kind(run), "seed": run.seed, **quality, **where, **floors, **speed})
    if not rows:
        sys.exit(f"{work}: no run has ended; see its *.log")
    write_csv(rows, out / "runs.csv")
    variants = list(dict.fromkeys((row["method"], row["kind"]) for row in rows))
    table = [averaged(rows, *variant) for variant in variants]
    setting = (
        f"CIFAR-10, U-ViT {piece.dim} x {piece.depth}, patch {piece.patch}, {piece.steps} steps, batch {piece.batch}"
    )
    write_summary(out, [], setting, table=table, published=PUBLISHED)
    maps: dict[str, list[LinearProbe]] = {}
    for run in (run for run in piece.runs if run.name in probes):
        kept = {entry.name: probes[run.name][entry.name] for entry in fields(LinearProbe)}
        maps.setdefault(f"{run.method}, {kind(run)}", []).append(LinearProbe(**kept))
    draw(maps, setting, out / "heat_maps.png")
    return table


def averaged(rows: Sequence[dict[str, Any]], method: str, kind: str) -> dict[str, Any]:
    """Mean ± sd over seeds; one seed has no spread."""
    mine = [row for row in rows if (row["method"], row["kind"]) == (method, kind)]
    cells = {}
    for key in ("fid", "probe", "test_loss", "ms_per_step"):
        values = [float(row[key]) for row in mine if row[key] != ""]
        cells[key] = mean_and_sd(values) if values else "-"
    return {"method": method, "kind": kind, "seeds": len(mine), **cells, "block": mine[0]["block"]}


def arguments(given: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n", maxsplit=1)[0])
    parser.add_argument("pieces", nargs="*", default=["h-features-seed0"], help="of study/queue.yaml, with probes")
    parser.add_argument("--data", type=Path, help="folder with the CIFAR-10 files; default: the library's cache")
    parser.add_argument("--inception", type=Path, help="TorchScript file of the FID network; without it no FID")
    parser.add_argument("--work", type=Path, default=Path("runs/features"))
    parser.add_argument("--out", type=Path, default=Path("experiments/results/features-gpu"))
    parser.add_argument(
        "--minutes", type=float, default=28, help="for everything; training ends in time for the probes"
    )
    parser.add_argument("--images", type=int, default=10_000, help="for the choice of block and noise level")
    parser.add_argument("--dry", action="store_true", help="only print the expected time")
    parser.add_argument("--tiny", action="store_true", help="a small network, 40 steps, 500 images")
    options = parser.parse_args(given)
    options.images = min(options.images, 500 if options.tiny else 50_000)
    return options


if __name__ == "__main__":
    main()
