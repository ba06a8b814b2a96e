"""Run one piece of the queue: all its runs at once on one GPU, under CUDA MPS where that is installed.

    python experiments/study/piece.py a-seed0 --work runs/study/a-seed0
    python experiments/study/piece.py a-seed0 --work runs/study/a-seed0 --merge-only    # a folder from another machine

The queue entry, the data and earlier results are checked first. Rows appear in WORK/curves.csv after every evaluation; when
all runs have ended they are merged into experiments/results/study.
"""

from __future__ import annotations

import argparse
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
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from entries import DATA, QUEUE, Piece, Recipe, StudyError, check_startable, read_queue
from network import Spec, write_spec
from results import RESULTS, check_joinable, check_paired, collect, merge, outcomes, write_rows
from torch import Tensor
from train import PROTOCOL

HERE = Path(__file__).parent
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


# -------------------------------------------------------------------------------------------------------------- running


@contextmanager
def mps(folder: Path) -> Iterator[dict[str, str]]:
    """Start CUDA MPS, so that kernels of several processes overlap; yields the environment of its clients.

    Where CUDA_MPS_PIPE_DIRECTORY is set, the daemon that runs there is used.
    """
    control = shutil.which("nvidia-cuda-mps-control")
    if control is None or "CUDA_MPS_PIPE_DIRECTORY" in os.environ:
        yield {}
        return
    folder.mkdir(parents=True, exist_ok=True)
    env = {"CUDA_MPS_PIPE_DIRECTORY": str(folder), "CUDA_MPS_LOG_DIRECTORY": str(folder)}
    started = subprocess.run([control, "-d"], env=os.environ | env)
    try:
        yield env if started.returncode == 0 else {}
    finally:
        subprocess.run([control], input="quit\n", text=True, env=os.environ | env, timeout=60)


def specs(piece: Piece, work: Path, data: str, deadline: float, kernels: bool = True, **changes: Any) -> list[Spec]:
    """One worker per run; changes: other settings of `Spec`."""
    shared = {entry.name: getattr(piece, entry.name) for entry in dataclasses.fields(Recipe)}
    shared |= {"folder": str(work), "data": data, "deadline": deadline, "kernels": kernels}
    if not data:
        shared["num_samples"] = 0
    shared |= changes
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


def run_piece(
    piece: Piece, work: Path, data: str, inception: Path | None, deadline: float, kernels: bool = True, **changes: Any
) -> None:
    """Start all processes, gather rows until the last one has ended. `touch WORK/RUN.stop` ends one run early."""
    (work / "finished").unlink(missing_ok=True)
    here = {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "3"}
    cache = {"TORCHINDUCTOR_CACHE_DIR": os.environ.get("TORCHINDUCTOR_CACHE_DIR", str(work / "inductor"))}
    with mps(work / "mps") as clients:
        env = os.environ | here | cache | clients
        workers = []
        for spec in specs(piece, work, data, deadline, kernels, **changes):
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("piece", help="a name in the queue")
    parser.add_argument("--work", type=Path, required=True, help="working folder of this piece")
    parser.add_argument("--queue", type=Path, default=QUEUE)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--data", type=Path, help="cache folder of the data sets; default: the library's")
    parser.add_argument("--inception", type=Path, help="TorchScript file of the FID network; without it no FID")
    parser.add_argument("--minutes", type=float, help="time for this piece, default: the queue's limit")
    parser.add_argument("--ms-per-step", type=float, help="of this piece, per model; default: the queue's")
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
    queue = read_queue(options.queue)
    piece, speed = queue.find(options.piece), queue.speed
    if options.merge_only:
        finish(work, piece)
        merge(work, options.results, options.accept_commit)
        return
    work.mkdir(parents=True, exist_ok=True)
    if options.speed_test:
        runs = tuple(dataclasses.replace(run, steps=0) for run in piece.runs)
        settings = {"steps": options.speed_test, "loss_every": options.speed_test // 4, "fid_at": ()}
        piece = dataclasses.replace(piece, runs=runs, **settings)
        run_piece(piece, work, "", None, float("inf"), not options.plain)
        print(json.dumps(outcomes(piece, work), indent=1))
        return
    if piece.probe_s:
        raise StudyError(
            f"queue.{piece.name}: has linear probes; run python experiments/features/features.py {piece.name}"
        )
    if options.minutes:
        speed = dataclasses.replace(speed, limit_minutes=options.minutes)
    if options.ms_per_step:
        piece = dataclasses.replace(piece, ms_per_step=options.ms_per_step)
    check_startable(piece, speed)
    commit, data = code_commit(), prepare_data(piece.data, options.data, work / "data.npz")
    check_joinable(options.results, piece.name, commit, data, piece.data, options.accept_commit)
    deadline = begun + 60 * speed.limit_minutes - FINAL_SECONDS * len(piece.runs)
    about = {
        "name": piece.name,
        "command": shlex.join(["python", "experiments/study/piece.py", piece.name]),
        "commit": commit,
        "data": data,
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else f"CPU ({platform.machine()})",
        "torch": torch.__version__,
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "settings": dataclasses.asdict(piece),
        "protocol": {key: text.format(*DATA[piece.data]) for key, text in PROTOCOL.items()},
    }
    write_about(work, about)
    run_piece(piece, work, str(work / "data.npz"), options.inception, deadline, not options.plain)
    about |= {"minutes": round((time.time() - begun) / 60, 1), "runs": outcomes(piece, work)}
    write_about(work, about)
    merge(work, options.results, options.accept_commit)
    print(json.dumps(about["runs"], indent=1))


def write_about(work: Path, about: Mapping[str, Any]) -> None:
    (work / "piece.json").write_text(json.dumps(about, indent=1) + "\n")


def finish(work: Path, piece: Piece) -> None:
    """Note how far the runs came whose machine was lost before they ended."""
    about = json.loads((work / "piece.json").read_text())
    if "runs" not in about:
        write_rows(work / "curves.csv", rows := collect(piece, work))
        minutes = max((row["seconds"] for row in rows), default=0.0) / 60
        write_about(work, about | {"minutes": round(minutes, 1), "runs": outcomes(piece, work, unfinished="cut off")})


if __name__ == "__main__":
    main()
