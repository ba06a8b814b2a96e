"""Check and time the Triton kernels on a GPU, without the data set.

    python experiments/study/tune.py check                    # loss and gradients against the plain network
    python experiments/study/tune.py tilings --jobs 14        # one block, forward and backward, other tiles one at a time
    python experiments/study/tune.py step ls --profile FILE   # ms per training step, kernels by time
    python experiments/study/tune.py samples ls               # seconds per 10,000 samples

`step --at T --seconds S` counts the steps between T and T + S, so that several processes are timed together.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import fcntl
import functools
import math
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import evaluator
import fast_block
import fast_uvit
import tilings
import torch
import triton
from network import Spec, build_model, predict
from tilings import TILINGS, Tiling
from train import Trainer
from weights import Weights

from scalelong.diffusion import VPSDE, Objective

OPTIONS = {"cs": {"kappa": 0.7}, "universal": {"kappa": 0.5}}
BATCH, WIDTH, HEADS = 128, 256, 4
DEVICE = "cuda"


def spec_of(method: str, kernels: bool = True) -> Spec:
    return Spec("tune", method, 0, "", options=OPTIONS.get(method, {}), kernels=kernels)


def check(method: str) -> None:
    """Relative error of loss and gradients against float32: of the plain network in bfloat16, and of the kernels."""
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.manual_seed(1)
    x, t, noise = torch.randn(BATCH, 3, 32, 32), torch.rand(BATCH), torch.randn(BATCH, 3, 32, 32)
    x, t, noise = (each.to(DEVICE) for each in (x, t, noise))
    found = []
    for dtype, fast in ((torch.float32, False), (torch.bfloat16, False), (torch.bfloat16, True)):
        model = build_model(spec_of(method)).to(DEVICE)
        with torch.no_grad():
            for parameter in model.parameters():  # nothing may be zero
                parameter += 0.02 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(2)).to(DEVICE)
        weights = Weights(model, dtype)
        if fast:
            fast_block.speed_up(model, weights)
        low = dtype == torch.bfloat16
        loss = Objective(VPSDE()).loss(functools.partial(predict, model, low_precision=low), x, noise, t).mean()
        gradients = torch.autograd.grad(loss, weights.leaves)
        low_part, rest = weights.flatten(gradients)
        found.append((loss.detach(), low_part.float(), rest.float(), weights))
    (exact, low, rest, _), *others = found
    for name, (loss, low2, rest2, _) in zip(("plain", "kernels"), others, strict=True):
        errors = [float((b - a).norm() / a.norm()) for a, b in ((exact, loss), (low, low2), (rest, rest2))]
        print(f"{method} {name}: loss {errors[0]:.2e}, gradients {errors[1]:.2e} and {errors[2]:.2e}", flush=True)
    sizes = [-(-p.numel() // 64) * 64 for p in found[0][3].parameters]
    expected, *whole = (torch.cat([a, b]).split(sizes) for _, a, b, _ in found)
    worst = [max(float((b - a).norm() / a.norm()) for a, b in zip(expected, each, strict=True)) for each in whole]
    print(f"{method} worst parameter: plain {worst[0]:.2e}, kernels {worst[1]:.2e}", flush=True)


# --------------------------------------------------------------------------------------------------------------- tilings

VARIANTS: dict[str, list[Tiling]] = {
    "qkv": [Tiling(64, 128, 64, 4, 3), Tiling(128, 128, 64, 4, 3), Tiling(128, 256, 64, 8, 3)],
    "fc1": [Tiling(64, 128, 64, 4, 3), Tiling(128, 64, 64, 4, 3)],
    "fc2_backward": [Tiling(64, 128, 64, 4, 3), Tiling(128, 128, 64, 8, 2)],
    "proj": [Tiling(64, 256, 64, 8, 3), Tiling(128, 128, 64, 8, 3)],
    "fc2": [Tiling(128, 128, 64, 8, 4), Tiling(128, 64, 64, 4, 4), Tiling(64, 128, 64, 4, 3)],
    "norm_backward": [Tiling(64, inner=8, warps=4), Tiling(32, inner=16, warps=4), Tiling(64, inner=16, warps=8)],
    "fc1_backward": [Tiling(128, 128, 64, 8, 4), Tiling(128, 64, 64, 4, 4)],
    "qkv_backward": [Tiling(128, 128, 64, 8, 4), Tiling(128, 64, 64, 4, 4)],
    "weights": [Tiling(128, stages=3), Tiling(64, warps=4, stages=4)],
}  # fmt: skip
ATTENTION = {"BACKWARD": [{"num_warps": 4}]}
Change = Tiling | tuple[int, int] | dict[str, int] | None


def variants() -> list[tuple[str, Change]]:
    """The present settings first, then one change at a time; "parts" is the number of parts in gradients of weights."""
    found: list[tuple[str, Change]] = [("now", None), ("now again", None), ("parts", (3, 3))]
    found += [(key, options) for key, each in ATTENTION.items() for options in each]
    return found + [(key, tiling) for key, tilings in VARIANTS.items() for tiling in tilings]


def chain(joins: bool) -> Callable[[], None]:
    """One forward and backward pass of a block with buffers of its own."""
    d, size = WIDTH, (14 if joins else 12) * WIDTH**2 + (7 if joins else 6) * WIDTH
    rows = BATCH * 65
    kind = {"device": DEVICE, "dtype": torch.bfloat16 if joins else torch.float32}
    x, dy = torch.randn(rows, d, **kind), torch.randn(rows, d, **kind)
    flat = (0.05 * torch.randn(size, device=DEVICE)).bfloat16()
    norms = 1 + 0.1 * torch.randn(4 * d, device=DEVICE)
    skip = torch.randn(rows, d, device=DEVICE) if joins else None
    gates = torch.rand(rows, device=DEVICE) if joins else None

    def run() -> None:
        _, *kept = fast_block.forward(x, flat, norms, HEADS, skip, gates, 1.0)
        fast_block.backward(dy, x, flat, norms, HEADS, skip, gates, 1.0, *kept)

    return run


@contextlib.contextmanager
def alone(lock: Path | None) -> Iterator[None]:
    """One process at a time, among those that were given the same file."""
    with contextlib.ExitStack() as stack:
        if lock is not None:
            fcntl.flock(stack.enter_context(lock.open("w")), fcntl.LOCK_EX)
        yield


def microseconds(chains: list[Callable[[], None]], lock: Path | None, repeat: int = 40) -> float:
    """Time per chain of chains that run at the same time, each in a stream of its own, replayed as one graph."""
    for run in chains:
        run()
    main, streams = torch.cuda.Stream(), [torch.cuda.Stream() for _ in chains]
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=main):
        for stream, run in zip(streams, chains, strict=True):
            stream.wait_stream(main)
            with torch.cuda.stream(stream):
                run()
        for stream in streams:
            main.wait_stream(stream)
    with alone(lock):
        return _timed(graph.replay, repeat) / len(chains)


def _timed(run: Callable[[], None], repeat: int) -> float:
    """Median microseconds of one call, over five rounds."""
    rounds = []
    for _ in range(6):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(repeat // 5):
            run()
        end.record()
        torch.cuda.synchronize()
        rounds.append(begin.elapsed_time(end) * 1000 / (repeat // 5))
    return sorted(rounds[1:])[2]


def time_variants(number: int, jobs: int, lock: Path | None) -> None:
    for key, change in variants()[number::jobs]:
        kept, parts, attention = dict(TILINGS), tilings.PARTS, (fast_uvit.FORWARD, fast_uvit.BACKWARD)
        if isinstance(change, Tiling):
            TILINGS[key] = change
        elif key in ATTENTION:
            setattr(fast_uvit, key, change)
        elif change is not None:
            tilings.PARTS = change
        row = []
        try:
            for joins in (False, True):
                row += [microseconds([chain(joins) for _ in range(n)], lock) for n in (1, 3)]
        except (RuntimeError, triton.errors.TritonError) as error:  # out of shared memory, for one
            row.append(math.nan)
            print(f"{key} {change}: {type(error).__name__} {str(error)[:200]}", file=sys.stderr)
        text = dataclasses.astuple(change) if isinstance(change, Tiling) else change
        print(f"{key:14s} {text!s:36s} " + " ".join(f"{value:8.1f}" for value in row), flush=True)
        TILINGS.update(kept)
        tilings.PARTS = parts
        fast_uvit.FORWARD, fast_uvit.BACKWARD = attention


def run_jobs(jobs: int, lock: Path | None) -> None:
    """Several processes, since most of the time goes into compiling."""
    print(
        "kernel         tiling                               in-block in3/3   out-block out3/3 (us, forward and backward)",
        flush=True,
    )
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable,
            __file__,
            "tilings",
            "--lock",
            str(lock or f"{folder}/lock"),
            "--jobs",
            str(jobs),
            "--number",
        ]
        workers = [subprocess.Popen([*command, str(number)]) for number in range(jobs)]
        for worker in workers:
            worker.wait()


# ----------------------------------------------------------------------------------------------------------------- step


def time_step(method: str, kernels: bool, profile: Path | None, at: float, seconds: float, lock: Path | None) -> None:
    begun = time.time()
    images = torch.randint(0, 256, (50_000, 3, 32, 32), dtype=torch.uint8, device=DEVICE)
    trainer = Trainer(spec_of(method, kernels), images)
    steps = trainer.spec.steps_per_graph
    trainer.advance()
    torch.cuda.synchronize()
    ready = time.time() - begun
    while time.time() < at:
        trainer.advance()
        torch.cuda.synchronize()
    with alone(lock):
        first, count = time.time(), 0
        while time.time() < first + seconds:
            for _ in range(10):
                trainer.advance()
            torch.cuda.synchronize()
            count += 10 * steps
        ms = 1000 * (time.time() - first) / count
    kind = "kernels" if kernels else "plain"
    print(
        f"{method} {kind}: {ms:.3f} ms per step, loss {float(trainer.loss_sum):.4g}, ready after {ready:.0f} s",
        flush=True,
    )
    if profile is not None:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
            for _ in range(4):
                trainer.advance()
            torch.cuda.synchronize()
        rows = sorted(profiler.key_averages(), key=lambda row: -row.device_time_total)
        runs = 4 * steps
        lines = [f"{r.device_time_total / runs:8.1f} us {r.count / runs:6.1f} calls  {r.key[:110]}" for r in rows]
        total = sum(r.device_time_total for r in rows) / runs
        profile.write_text(
            f"{method} {kind}: {ms:.3f} ms per step, {total:.0f} us in kernels\n" + "\n".join(lines) + "\n"
        )


def time_samples(method: str, kernels: bool, lock: Path | None, sizes: Sequence[int] = (1000, 500)) -> None:
    """Seconds per 10,000 samples of one average, and how far the kernels are from the plain network."""
    test = torch.randint(0, 256, (4000, 3, 32, 32), dtype=torch.uint8, device=DEVICE)
    losses = []
    for size in sizes if kernels else sizes[:1]:
        evaluator.CHUNK = size
        made = evaluator.Evaluator(dataclasses.replace(spec_of(method, kernels), num_samples=1000), test)
        made.samples()
        torch.cuda.synchronize()
        with alone(lock):
            begun = time.time()
            made.samples()
            torch.cuda.synchronize()
            seconds, begun = time.time() - begun, time.time()
            losses.append(float(made.losses()[0].mean()))
        kind = "kernels" if kernels else "plain"
        print(f"{method} {kind}, {size} at once: {10 * seconds:.2f} s per 10,000 samples, "
              f"{time.time() - begun:.3f} s per test loss, {losses[-1]:.7f}", flush=True)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("check", "tilings", "step", "samples"))
    parser.add_argument("method", nargs="*", default=["none"])
    parser.add_argument("--plain", action="store_true", help="without the Triton kernels")
    parser.add_argument("--profile", type=Path, help="write kernels by time to this file")
    parser.add_argument("--at", type=float, default=0.0, help="Unix time at which to start counting")
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--jobs", type=int, default=8)
    parser.add_argument("--number", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--lock", type=Path, help="a file: processes that are given the same one are timed in turn")
    options = parser.parse_args()
    torch.set_float32_matmul_precision("high")
    torch.backends.cudnn.benchmark = True
    with contextlib.suppress(KeyboardInterrupt):
        if options.what == "check":
            for method in options.method:
                check(method)
        elif options.what == "tilings" and options.number is not None:
            time_variants(options.number, options.jobs, options.lock)
        elif options.what == "tilings":
            run_jobs(options.jobs, options.lock)
        elif options.what == "samples":
            time_samples(options.method[0], not options.plain, options.lock)
        else:
            time_step(options.method[0], not options.plain, options.profile, options.at, options.seconds, options.lock)


if __name__ == "__main__":
    main()
