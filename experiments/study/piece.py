"""Run one piece of the queue: all its runs at once on one GPU, under CUDA MPS where that is installed.

    python experiments/study/piece.py a-seed0 --work runs/study/a-seed0
    python experiments/study/piece.py a-seed0 --work runs/study/a-seed0 --merge-only    # a folder from another machine

The queue entry, the data and earlier results are checked first. Rows appear in WORK/curves.csv after every evaluation; when
all runs have ended they are merged into experiments/results/study.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import hashlib
import json
import os
import platform
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from entries import DATA, QUEUE, Piece, Run, StudyError, check_startable, read_queue
from torch import Tensor
from train import PROTOCOL, Spec, write_spec

HERE = Path(__file__).parent
RESULTS = HERE.parent / "results" / "study"
COLUMNS = ("experiment", "method", "seed", "step", "test_loss", "fid", "seconds", "train_loss", "raw_test_loss")
COLUMNS += ("short_test_loss", "fid_short")
FINAL_SECONDS = 30  # per run: the last evaluation, samples and FID after the deadline


# ---------------------------------------------------------------------------------------------------------------- data


def prepare_data(name: str, root: Path | None, target: Path) -> str:
    """Write a data set as one .npz of 32 x 32 RGB images and return the fingerprint of its pixels."""
    from scalelong.data import load_source

    arrays = {split: to_rgb32(load_source(name, split=split, root=root).images).numpy() for split in ("train", "test")}
    found, expected = len(arrays["train"]), DATA[name][1]
    if found != expected:
        raise StudyError(f"data: {name} has {found} training images, expected {expected}; fetch it again")
    if not target.exists():
        np.savez(target, **arrays)
    return hashlib.sha256(arrays["train"].tobytes()).hexdigest()[:16]


def to_rgb32(images: Tensor) -> Tensor:
    """Grey to RGB, and a black margin up to 32 x 32."""
    margin = (32 - images.shape[-1]) // 2
    return torch.nn.functional.pad(images, [margin] * 4).expand(-1, 3, -1, -1).contiguous()


def code_commit() -> str:
    """The commit of the code: $SCALELONG_COMMIT where there is no repository."""
    if given := os.environ.get("SCALELONG_COMMIT"):
        return given
    found = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=HERE, capture_output=True, text=True)
    return found.stdout.strip() or "unknown"


# ---------------------------------------------------------------------------------------------------------- results


def check_joinable(
    results: Path, name: str, commit: str, data: str, data_name: str = "cifar10", accept_commit: Sequence[str] = ()
) -> None:
    """Raise StudyError where results of other pixels of this data set, of other code or of the same piece are there."""
    meta = read_meta(results)
    for other, about in meta["pieces"].items():
        if about["data"] != data and about["settings"].get("data", "cifar10") == data_name:
            raise StudyError(
                f"results.data: {other} was trained on data {about['data']}, this is {data}; use another --results folder"
            )
        if about["commit"] not in (commit, *accept_commit):
            raise StudyError(
                f"results.commit: {other} was trained by commit {about['commit']}, this is {commit}; check it out, or pass "
                f"--accept-commit {about['commit']} if nothing that is trained or measured has changed since"
            )
    if name in meta["pieces"]:
        raise StudyError(f"results.{name}: already there; remove its rows and its entry in meta.json to repeat it")


def read_meta(results: Path) -> dict[str, Any]:
    path = results / "meta.json"
    return json.loads(path.read_text()) if path.exists() else {"pieces": {}}


def read_rows(path: Path) -> list[dict[str, Any]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def write_rows(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Replace the table whole."""
    partial = path.with_suffix(".partial")
    with partial.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        writer.writerows(rows)
    partial.replace(path)


def merge(work: Path, results: Path, accept_commit: Sequence[str] = ()) -> None:
    """Add the rows, meta data, events and sample grids of a finished piece to the results."""
    about = json.loads((work / "piece.json").read_text())
    name = about["name"]
    data_name = about["settings"].get("data", "cifar10")
    check_joinable(results, name, about["commit"], about["data"], data_name, accept_commit)
    check_paired_with_results(work, about, results)
    results.mkdir(parents=True, exist_ok=True)
    table = results / "curves.csv"
    write_rows(table, [*(read_rows(table) if table.exists() else []), *read_rows(work / "curves.csv")])
    (results / name).mkdir(exist_ok=True)
    for path in (*work.glob("*.jsonl"), *work.glob("*.png")):
        shutil.copyfile(path, results / name / path.name)
    meta = read_meta(results)
    meta["pieces"][name] = about
    (results / "meta.json").write_text(json.dumps(meta, indent=1) + "\n")


# -------------------------------------------------------------------------------------------------------------- running


@contextmanager
def mps(folder: Path) -> Iterator[dict[str, str]]:
    """Start CUDA MPS, so that kernels of several processes overlap; yields the environment of its clients."""
    control = shutil.which("nvidia-cuda-mps-control")
    if control is None:
        yield {}
        return
    folder.mkdir(parents=True, exist_ok=True)
    env = {"CUDA_MPS_PIPE_DIRECTORY": str(folder), "CUDA_MPS_LOG_DIRECTORY": str(folder)}
    started = subprocess.run([control, "-d"], env=os.environ | env)
    try:
        yield env if started.returncode == 0 else {}
    finally:
        subprocess.run([control], input="quit\n", text=True, env=os.environ | env, timeout=60)


def specs(piece: Piece, work: Path, data: str, deadline: float, kernels: bool = True) -> list[Spec]:
    """One worker per run."""
    same = ("steps", "batch", "lr", "warmup", "dim", "depth", "heads", "patch", "loss_every", "fid_at")
    shared = {key: getattr(piece, key) for key in same} | {"folder": str(work), "data": data, "deadline": deadline}
    shared["kernels"] = kernels
    if not data:
        shared["num_samples"] = 0
    return [
        Spec(
            run.name,
            run.method,
            run.seed,
            options=dict(run.options),
            changes=dict(run.changes),
            **(shared | {"steps": run.steps or piece.steps}),
        )
        for run in piece.runs
    ]


def collect(piece: Piece, work: Path) -> list[dict[str, Any]]:
    """The rows that the workers and the FID process have written so far."""
    fids = {(row["run"], row["step"]): row["fid"] for row in _json_lines(work / "fid.jsonl")}
    return [
        {
            "experiment": piece.name,
            "method": run.label,
            "seed": run.seed,
            "step": row["step"],
            "test_loss": f"{row['test_loss']:.6g}",
            "fid": fids.get((run.name, row["step"]), ""),
            "seconds": row["seconds"],
            "train_loss": f"{row['train_loss']:.6g}",
            "raw_test_loss": f"{np.mean(row['raw_bins']):.6g}",  # of the weights themselves
            "short_test_loss": f"{np.mean(row['short_bins']):.6g}",  # of a shorter average
            "fid_short": fids.get((f"{run.name}~short", row["step"]), ""),
        }
        for run in piece.runs
        for row in _json_lines(work / f"{run.name}.jsonl")
        if "test_loss" in row
    ]


def check_paired(piece: Piece, work: Path) -> None:
    """Raise StudyError unless runs of one seed saw the same batch at every step that both recorded."""
    seen: dict[tuple[int, int], str] = {}
    for run in piece.runs:
        _check_batches(work / f"{run.name}.jsonl", run.seed, seen)


def check_paired_with_results(work: Path, about: Mapping[str, Any], results: Path) -> None:
    """The same for the runs of earlier pieces with these data and this batch size: methods are compared across pieces."""
    pieces, seen = {**read_meta(results)["pieces"], about["name"]: about}, {}
    for name, other in pieces.items():
        folder = work if name == about["name"] else results / name
        if [other["data"], other["settings"]["batch"]] == [about["data"], about["settings"]["batch"]]:
            for run in other["settings"]["runs"]:
                label = {**run["options"], **run.get("changes", {})}
                _check_batches(folder / f"{Run(run['method'], run['seed'], label).name}.jsonl", run["seed"], seen)


def _check_batches(path: Path, seed: int, seen: dict[tuple[int, int], str]) -> None:
    for row in _json_lines(path):
        if "batch" in row and seen.setdefault((seed, row["step"]), row["batch"]) != row["batch"]:
            raise StudyError(f"{path.stem}: batch {row['batch']} at step {row['step']}, others of its seed saw another")


def run_piece(
    piece: Piece, work: Path, data: str, inception: Path | None, deadline: float, kernels: bool = True
) -> None:
    """Start all processes, gather rows until the last one has ended. `touch WORK/RUN.stop` ends one run early."""
    here = {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "3"}
    cache = {"TORCHINDUCTOR_CACHE_DIR": os.environ.get("TORCHINDUCTOR_CACHE_DIR", str(work / "inductor"))}
    with mps(work / "mps") as clients:
        env = os.environ | here | cache | clients
        workers = []
        for spec in specs(piece, work, data, deadline, kernels):
            path = work / f"{spec.name}.json"
            write_spec(spec, path)
            workers.append(_start(work / f"{spec.name}.log", env, HERE / "train.py", path))
        scoring = None
        if inception is not None:
            scoring = _start(
                work / "fid.log", env | {"OMP_NUM_THREADS": "4"}, HERE / "fid.py", work, work / "data.npz", inception
            )
        while any(process.poll() is None for process in workers):
            time.sleep(2)
            write_rows(work / "curves.csv", collect(piece, work))
        (work / "finished").touch()
        while scoring is not None and scoring.poll() is None:
            time.sleep(1)
            write_rows(work / "curves.csv", collect(piece, work))
    write_rows(work / "curves.csv", collect(piece, work))
    check_paired(piece, work)


def _start(log: Path, env: dict[str, str], *command: Path) -> subprocess.Popen[bytes]:
    with log.open("wb") as file:
        return subprocess.Popen([sys.executable, *map(str, command)], env=env, stdout=file, stderr=subprocess.STDOUT)


def _json_lines(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]


def outcomes(piece: Piece, work: Path) -> dict[str, dict[str, Any]]:
    """How each run ended, and its milliseconds per step after the first evaluation."""
    found = {}
    for run in piece.runs:
        lines = _json_lines(work / f"{run.name}.jsonl")
        rows = [line for line in lines if "test_loss" in line]
        end = next((line["reason"] for line in lines if line.get("event") == "end"), "failed")
        about: dict[str, Any] = {"end": end, "step": rows[-1]["step"] if rows else 0}
        if len(rows) > 1:
            elapsed, steps = rows[-1]["seconds"] - rows[0]["seconds"], rows[-1]["step"] - rows[0]["step"]
            about["ms_per_step"] = round(1000 * elapsed / steps, 3)
        found[run.name] = about
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("piece", help="a name in the queue")
    parser.add_argument("--work", type=Path, required=True, help="working folder of this piece")
    parser.add_argument("--queue", type=Path, default=QUEUE)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--data", type=Path, help="cache folder of the data sets; default: the library's")
    parser.add_argument("--inception", type=Path, help="TorchScript file of the FID network; without it no FID")
    parser.add_argument("--minutes", type=float, help="time for this piece, default: the queue's limit")
    parser.add_argument("--ms-per-step", type=float, help="measured speed, default: the queue's")
    parser.add_argument("--speed-test", type=int, metavar="STEPS", help="train on random images and print ms per step")
    parser.add_argument("--plain", action="store_true", help="without the Triton kernels")
    parser.add_argument("--merge-only", action="store_true", help="merge a finished working folder into the results")
    parser.add_argument("--accept-commit", nargs="+", default=(), help="earlier commits whose results may be joined")
    options = parser.parse_args()
    try:
        _main(options)
    except StudyError as error:
        sys.exit(f"error: {error}")


def _main(options: argparse.Namespace) -> None:
    begun, work = time.time(), options.work.resolve()
    if options.merge_only:
        merge(work, options.results, options.accept_commit)
        return
    queue = read_queue(options.queue)
    piece, speed = queue.find(options.piece), queue.speed
    work.mkdir(parents=True, exist_ok=True)
    if options.speed_test:
        runs = tuple(dataclasses.replace(run, steps=0) for run in piece.runs)
        settings = {"steps": options.speed_test, "loss_every": options.speed_test // 4, "fid_at": ()}
        piece = dataclasses.replace(piece, runs=runs, **settings)
        run_piece(piece, work, "", None, float("inf"), not options.plain)
        print(json.dumps(outcomes(piece, work), indent=1))
        return
    if options.minutes:
        speed = dataclasses.replace(speed, limit_minutes=options.minutes)
    if options.ms_per_step:
        speed = dataclasses.replace(speed, ms_per_step=options.ms_per_step)
    check_startable(piece, speed)
    commit, data = code_commit(), prepare_data(piece.data, options.data, work / "data.npz")
    check_joinable(options.results, piece.name, commit, data, piece.data, options.accept_commit)
    deadline = begun + 60 * speed.limit_minutes - FINAL_SECONDS * len(piece.runs)
    run_piece(piece, work, str(work / "data.npz"), options.inception, deadline, not options.plain)
    about = {
        "name": piece.name,
        "command": shlex.join(["python", "experiments/study/piece.py", piece.name]),
        "commit": commit,
        "data": data,
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else f"CPU ({platform.machine()})",
        "torch": torch.__version__,
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "minutes": round((time.time() - begun) / 60, 1),
        "settings": dataclasses.asdict(piece),
        "protocol": {key: text.format(*DATA[piece.data]) for key, text in PROTOCOL.items()},
        "runs": outcomes(piece, work),
    }
    (work / "piece.json").write_text(json.dumps(about, indent=1) + "\n")
    merge(work, options.results, options.accept_commit)
    print(json.dumps(about["runs"], indent=1))


if __name__ == "__main__":
    main()
