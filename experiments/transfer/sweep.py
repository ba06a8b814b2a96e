"""Does the best learning rate move with width? U-ViT on CIFAR-10, muP and the standard parametrization, on one GPU.

    python experiments/transfer/sweep.py rates --data FOLDER     # widths 128 to 1024, nine rates; three seeds up to 256
    python experiments/transfer/sweep.py kappas --data FOLDER    # then, at muP's best rate: does the best kappa transfer?
    python experiments/transfer/sweep.py plot                    # docs/assets/transfer-*.png and the best values
    python experiments/transfer/sweep.py rates --tiny            # minutes on a CPU, on random images

Every parametrization and width is one process, all at once under CUDA MPS. It captures its training step once (the study's,
`study/train.py`) and trains one run after another with other rates and seeds: first where the loss falls, then around the
best. Results are written after every run; the same command again trains what is missing. kappa is the size and the rate of
the weights behind skips, which under Adam is CS. `plot` reads experiments/results/transfer, or the folder given with --work.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "study"))

import variants
from network import Spec, build_model, read_images
from piece import code_commit, mps, prepare_data
from train import Trainer
from weights import Weights

from scalelong.files import write_text
from scalelong.stability.transfer import RESULTS, Point, optima, plot, summary

RATES = tuple(2.0**power for power in range(-14, -5))
KAPPAS = (0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
GUESS = 2.0**-9  # where the search starts, at base width
EVERY = 256  # up to this width every rate is trained with the first seed
STORED = Path(__file__).parents[1] / "results" / "transfer"
# Of the study's training step on an H200 with several runs at once, in teraflops; 512 and 1024 together, 128 supposed.
SPEED = {128: 90, 256: 141, 512: 277, 1024: 277}
STARTUP = 90  # seconds until all processes have compiled and captured


@dataclass(frozen=True)
class Job:
    """The runs of one process: one parametrization at one width."""

    parametrization: str
    over: str  # "lr" or "kappa"
    values: tuple[float, ...]
    seeds: tuple[int, ...]
    every: bool  # train every value with the first seed
    around: int  # values on either side of the best that are trained where not all are
    other: float  # the rate of a sweep over kappa, kappa of one over rates
    guess: float
    spec: Spec

    @property
    def name(self) -> str:
        return f"{self.parametrization}-w{self.spec.dim}"

    def point(self, value: float, seed: int) -> Point:
        lr, kappa = (value, self.other) if self.over == "lr" else (self.other, value)
        return Point(self.parametrization, self.spec.dim, lr, kappa, seed)

    @property
    def seconds(self) -> float:
        """GPU time that the runs are expected to take."""
        per_seed = min(2 * self.around + 1, len(self.values))
        runs = (len(self.values) if self.every else per_seed) + per_seed * (len(self.seeds) - 1)
        spec = self.spec
        flops = 6 * 14 * spec.depth * spec.dim**2 * spec.batch * ((32 // spec.patch) ** 2 + 1)
        return runs * spec.steps * flops / (1e12 * SPEED.get(spec.dim, 90))


# ----------------------------------------------------------------------------------------------------------- one process


def work(job: Job, device: torch.device) -> None:
    """Train the runs of a job that are missing in its .jsonl, until the deadline."""
    path = Path(job.spec.folder) / f"{job.name}.jsonl"
    known = {(p.lr, p.kappa, p.seed): p for p in read_points(path)}
    images = read_images(job.spec)[0].to(device)
    trainer = Trainer(job.spec, images, torch.zeros((), device=device))
    with path.open("a") as log:
        for seed in job.seeds:
            losses: dict[float, float] = {}
            while (value := next_value(job, losses, first=seed == job.seeds[0])) is not None:
                point = job.point(value, seed)
                found = known.get((point.lr, point.kappa, seed))
                if found is None:
                    if time.time() > job.spec.deadline:
                        return
                    restart(trainer, job, point)
                    begun = time.time()
                    found = replace(point, loss=final_loss(trainer))
                    row = asdict(found) | {"seconds": round(time.time() - begun, 2)}
                    log.write(json.dumps(row) + "\n")
                    log.flush()
                losses[value] = math.inf if found.loss is None else found.loss
            if seed == job.seeds[0] and losses:
                job = replace(job, guess=min(losses, key=lambda each: losses[each]), every=False)


def next_value(job: Job, losses: dict[float, float], first: bool) -> float | None:
    """The next value to train: downhill with the first seed; then, or with another seed, those around the best."""
    values = sorted(job.values)
    if not losses:
        return min(values, key=lambda value: abs(math.log(value / job.guess)))
    best = values.index(min(losses, key=lambda each: losses[each]) if first else job.guess)
    order = sorted(range(len(values)), key=lambda at: abs(at - best))
    near = [values[at] for at in order if abs(at - best) <= job.around or job.every]
    return next((value for value in near if value not in losses), None)


def restart(trainer: Trainer, job: Job, point: Point) -> None:
    """Start again with the weights of another seed and kappa, and another rate."""
    changes = (
        {**job.spec.changes, "size": point.kappa, "rate": point.kappa} if job.over == "kappa" else job.spec.changes
    )
    spec = replace(job.spec, seed=point.seed, changes=changes)
    if spec != trainer.spec:
        model = build_model(spec)
        fresh = Weights(model, torch.float32)
        trainer.start.copy_(fresh.master)
        if isinstance(trainer.sizes[0], torch.Tensor):
            sizes = fresh.flatten(variants.step_sizes(model, fresh.parameters, changes))
            for old, new in zip(trainer.sizes, sizes, strict=True):
                old.copy_(new)
        trainer.spec = spec
    trainer.lr.fill_(point.lr)
    trainer.reset()


def final_loss(trainer: Trainer) -> float | None:
    """Train a run; the mean training loss over its last tenth, None if it diverged."""
    each, steps = trainer.spec.steps_per_graph, trainer.spec.steps
    tail = max(steps // 10 // each, 1) * each
    for step in range(each, steps + 1, each):
        trainer.advance()
        look = step == steps - tail or step % (20 * each) == 0  # this also keeps the queue of replays short
        if look and not math.isfinite(float(trainer.loss_sum)):
            return None
        if step == steps - tail:
            trainer.loss_sum.zero_()
    loss = float(trainer.loss_sum) / tail
    return loss if math.isfinite(loss) else None


def read_points(path: Path) -> list[Point]:
    """The runs that a process has finished."""
    lines = path.read_text().splitlines() if path.is_file() else []
    rows = [json.loads(line) for line in lines if line.endswith("}")]
    return [Point(**{key: value for key, value in row.items() if key != "seconds"}) for row in rows]


# ----------------------------------------------------------------------------------------------------------- all of them


def jobs(options: argparse.Namespace, folder: Path, data: str, deadline: float) -> list[Job]:
    """Widest first: they take longest."""
    found = []
    rate = options.rate or best_rate(options.work / "rates") if options.what == "kappas" else 0.0
    for width in sorted(options.widths, reverse=True):
        for kind in ("mup", "standard") if options.what == "rates" else ("mup",):
            changes: dict[str, Any] = {"mup": options.base} if kind == "mup" else {}
            if options.what == "kappas":
                changes["rate"] = 1.0
            spec = Spec(
                f"{kind}-w{width}", "none", 0, str(folder), changes=changes, data=data, deadline=deadline, dim=width,
                heads=width // options.head, depth=options.depth, patch=options.patch, batch=options.batch_size,
                steps=options.steps, warmup=max(1, options.steps // 10), train_images=64, test_images=1,
            )  # fmt: skip
            seeds = tuple(options.seeds[: None if width <= options.seeded else 1])
            if options.what == "rates":
                guess = GUESS * (1 if kind == "mup" else options.base / width)
                values, every = tuple(options.rates), width <= EVERY
                found.append(Job(kind, "lr", values, seeds, every, options.around, 1.0, guess, spec))
            else:
                found.append(Job(kind, "kappa", KAPPAS, seeds, True, options.around, rate, 0.7, spec))
    return found


def best_rate(folder: Path) -> float:
    """muP's best rate at the base width, from the sweep over rates."""
    points = read_results(folder)
    if not points:
        raise SystemExit(f"{folder}: no results; run the sweep over rates first, or pass --rate")
    return next(each.best for each in optima(points) if each.parametrization == "mup")


def read_results(folder: Path) -> list[Point]:
    """All runs that are stored, narrow networks first."""
    found = [point for path in folder.glob("*.jsonl") for point in read_points(path)]
    return sorted(found, key=lambda point: (point.parametrization, point.width, point.lr, point.kappa, point.seed))


def run(options: argparse.Namespace) -> int:
    """Start all processes and gather their results; the number of those that failed."""
    begun, folder = time.time(), (options.work / options.what).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    data = "" if options.tiny and options.data is None else str(folder / "data.npz")
    if data:
        prepare_data("cifar10", options.data, Path(data))
    planned = jobs(options, folder, data, begun + 60 * options.minutes)
    expected = STARTUP + sum(job.seconds for job in planned)
    print(f"{len(planned)} processes, {options.steps} steps per run; expected on one H200: {expected / 60:.0f} minutes")
    if options.dry:
        return 0
    environment = {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "3"}
    environment["TORCHINDUCTOR_CACHE_DIR"] = os.environ.get("TORCHINDUCTOR_CACHE_DIR", str(folder / "inductor"))
    running: list[tuple[Job, subprocess.Popen[bytes]]] = []
    with mps(folder / "mps") as clients:
        for job in planned:
            path = folder / f"{job.name}.job"
            path.write_text(json.dumps(asdict(job)))
            with (folder / f"{job.name}.log").open("wb") as log:
                command = [sys.executable, __file__, "work", str(path)]
                env = os.environ | environment | clients
                running.append((job, subprocess.Popen(command, env=env, stdout=log, stderr=subprocess.STDOUT)))
            if options.tiny:
                running[-1][1].wait()  # one after another on a CPU
        while any(process.poll() is None for _, process in running):
            time.sleep(1)
            store(folder)
    points = store(folder)
    meta = folder / "meta.json"
    earlier = json.loads(meta.read_text()) if meta.is_file() else []
    write_text(meta, json.dumps([*earlier, about(options, time.time() - begun)], indent=1) + "\n")
    failed = [job.name for job, process in running if process.returncode]
    for name in failed:
        print(f"{name} failed:\n" + "\n".join((folder / f"{name}.log").read_text().splitlines()[-5:]), file=sys.stderr)
    print(f"{len(points)} runs in {(time.time() - begun) / 60:.1f} minutes")
    if points:
        print(summary(points, "lr" if options.what == "rates" else "kappa"))
    return len(failed)


def store(folder: Path) -> list[Point]:
    points = read_results(folder)
    write_text(folder / RESULTS, json.dumps([asdict(point) for point in points], indent=1) + "\n")
    return points


def about(options: argparse.Namespace, seconds: float) -> dict[str, Any]:
    """What one command was run with; meta.json holds that of all which added results."""
    kept = [
        "steps",
        "batch_size",
        "base",
        "widths",
        *(["rates"] if options.what == "rates" else []),
        "around",
        "seeds",
        "seeded",
    ]
    kept += ["rate"] if options.what == "kappas" else []
    given = [f"--{key.replace('_', '-')} {_words(getattr(options, key))}" for key in kept if getattr(options, key)]
    return {
        "command": f"python experiments/transfer/sweep.py {options.what} {' '.join(given)}",
        "commit": code_commit(),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU",
        "torch": torch.__version__,
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "minutes": round(seconds / 60, 1),
        "network": f"U-ViT, depth {options.depth}, patch {options.patch}, heads of {options.head} channels",
    }


def _words(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)


def arguments(given: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("what", choices=("rates", "kappas", "plot", "work"))
    parser.add_argument("job", nargs="?", type=Path, help="of `work`, which the others start")
    parser.add_argument("--data", type=Path, help="folder with the CIFAR-10 files; default: the library's cache")
    parser.add_argument("--work", type=Path, help="default: runs/transfer, of plot experiments/results/transfer")
    parser.add_argument("--out", type=Path, default=Path("docs/assets"))
    parser.add_argument("--minutes", type=float, default=20, help="no run starts after this time")
    parser.add_argument("--steps", type=int, default=2500)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--widths", type=int, nargs="+", help="default: 128 256 512 1024, of kappas up to 512")
    parser.add_argument("--base", type=int, help="base width of muP; default: the first width")
    parser.add_argument("--around", type=int, default=2, help="values trained on either side of the best")
    parser.add_argument("--rates", type=float, nargs="+", default=list(RATES))
    parser.add_argument("--rate", type=float, default=0.0, help="of kappas; default: muP's best")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--seeded", type=int, default=256, help="wider networks are trained with the first seed only")
    parser.add_argument("--dry", action="store_true", help="only print the expected time")
    parser.add_argument("--tiny", action="store_true", help="a small network for 20 steps, one process at a time")
    options = parser.parse_args(given)
    options.depth, options.patch, options.head = 12, 4, 64
    options.widths = options.widths or [128, 256, 512, *([1024] if options.what == "rates" else [])]
    if options.tiny:
        options.widths, options.depth, options.patch, options.head = [32, 64], 2, 8, 16
        options.steps, options.batch_size, options.seeds = 20, 4, options.seeds[:2]
        options.rates = [2.0**power for power in (-10, -8, -6)]
    options.base = options.base or options.widths[0]
    options.work = options.work or (STORED if options.what == "plot" else Path("runs/transfer"))
    return options


def main() -> None:
    options = arguments(sys.argv[1:])
    if options.what == "work":
        torch.set_float32_matmul_precision("high")
        stored = json.loads(options.job.read_text())
        spec = Spec(**{**stored["spec"], "fid_at": ()})
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        work(
            Job(**{**stored, "values": tuple(stored["values"]), "seeds": tuple(stored["seeds"]), "spec": spec}), device
        )
    elif options.what == "plot":
        for name, over in (("rates", "lr"), ("kappas", "kappa")):
            if points := read_results(options.work / name):
                print(summary(points, over))
                print(plot(points, options.out / f"transfer-{name}.png", over))
    else:
        sys.exit(run(options))


if __name__ == "__main__":
    main()
