"""What the benchmarks share: the clock, medians with their spread, FLOPs, the matmul ceiling, and the JSON of a result."""

from __future__ import annotations

import json
import os
import platform
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

ROOT = Path(__file__).parents[1]
SECONDS = "print(time.time() - float(sys.argv[1]), time.process_time())"  # wall clock, processor
Step = Callable[[int], object]  # called with the number of the step, from 1


def about(device: torch.device) -> dict[str, Any]:
    """The commit (of a copy without history: $SCALELONG_COMMIT), command, device and versions of a result."""
    git = ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]
    commit = os.environ.get("SCALELONG_COMMIT", "")
    if not commit and (ROOT / ".git").exists():
        commit = subprocess.run(git, capture_output=True, text=True).stdout.strip()
    on_gpu = device.type == "cuda"
    cores = f"CPU ({platform.machine()}), {torch.get_num_threads()} threads"
    arguments = " ".join(sys.argv[1:]).partition("--out")[0].split()  # without the file, which is named last
    return {
        "commit": commit,
        "date": time.strftime("%Y-%m-%d"),
        "command": shlex.join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *arguments]),
        "device": torch.cuda.get_device_name(device) if on_gpu else cores,
        "clock": "seconds" if on_gpu or torch.get_num_threads() > 1 else "seconds of processor time",
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def write(out: str, result: dict[str, Any]) -> None:
    """Write the result as JSON, if a file is asked for."""
    if out:
        Path(out).parent.mkdir(parents=True, exist_ok=True)
        Path(out).write_text(json.dumps(result, indent=1) + "\n")


def clock(device: torch.device) -> float:
    """Seconds; waits for a GPU. On one CPU thread, processor time: other programs on the machine do not count."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    elif torch.get_num_threads() == 1:
        return time.process_time()
    return time.perf_counter()


def windows(
    steps: Sequence[Step], device: torch.device, count: int, size: int, warm_up: int, ready: Callable[[], None] = int
) -> list[list[float]]:
    """Milliseconds per step of each window, for each of several steps whose windows take turns; `ready` follows warm-up."""
    done, found = [0] * len(steps), [list[float]() for _ in steps]

    def run(which: int, times: int) -> None:
        for _ in range(times):
            done[which] += 1
            steps[which](done[which])

    for which in range(len(steps)):
        run(which, warm_up)
    ready()
    for _ in range(count):
        for which in range(len(steps)):
            started = clock(device)
            run(which, size)
            found[which].append((clock(device) - started) / size * 1e3)
    return found


READY = "warm"  # what a worker prints before it waits for its turn


def wait_for_turn() -> None:
    """In a worker of `in_turn`: return when all others are warm or done."""
    print(READY, flush=True)
    input()


def in_turn(commands: Sequence[Sequence[str]]) -> Iterator[dict[str, Any] | None]:
    """Start all workers at once, so that they compile in parallel; let them measure one by one.

    Yields the JSON that each prints last; None if it failed, with the end of its output on stderr.
    """
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    workers = [subprocess.Popen(command, **pipes) for command in commands]  # type: ignore[call-overload]
    outputs: list[list[str]] = [[] for _ in workers]
    for worker, lines in zip(workers, outputs, strict=True):
        for line in worker.stdout:
            lines.append(line)
            if line.strip() == READY:
                break
    for worker, lines in zip(workers, outputs, strict=True):
        lines += worker.communicate("\n")[0].splitlines(keepends=True)
        if worker.returncode:
            print("".join(lines[-20:]), file=sys.stderr, flush=True)
        yield None if worker.returncode else json.loads([line for line in lines if line.startswith("{")][-1])


def kernel_table(profile: torch.profiler.profile, steps: int, most: int = 40) -> list[dict[str, Any]]:
    """The GPU's kernels, longest first: calls and microseconds per step."""
    events = [e for e in profile.key_averages() if e.device_type == torch.autograd.DeviceType.CUDA]
    events.sort(key=lambda event: -event.self_device_time_total)
    return [
        {"kernel": event.key[:90], "calls": event.count / steps, "us": event.self_device_time_total / steps}
        for event in events[:most]
    ]


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median with the quartiles beside it."""
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else [values[0]] * 3
    return {"ms": middle, "ms_low": low, "ms_high": high}


def training_flops(net: Callable[..., Tensor], *inputs: Tensor) -> int:
    """Multiplications and additions of a forward and a backward pass; on the meta device nothing is computed."""
    with FlopCounterMode(display=False) as counter:
        net(*inputs).float().square().mean().backward()
    return int(counter.get_total_flops())


def saved_bytes(loss: Callable[[], Tensor], parameters: Sequence[nn.Parameter]) -> int:
    """Bytes of the activations that a forward pass keeps for the backward pass, without the parameters."""
    known, sizes = {p.untyped_storage().data_ptr() for p in parameters}, {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            sizes[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        kept = loss()
    total = sum(sizes.values())
    del kept
    return total


def matmul_ceiling(device: torch.device, size: int = 0) -> float:
    """FLOP/s of a large square matrix product: bf16 on a GPU, float32 on a CPU."""
    size = size or (8192 if device.type == "cuda" else 1024)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    (times,) = windows([lambda _: a @ b], device, count=10, size=5, warm_up=5)
    return 2 * size**3 / (min(times) / 1e3)


def startup() -> dict[str, float]:
    """Seconds that `import scalelong` adds to `import torch`, and from start to the first step of the demo's preset.

    By the wall clock, and as processor time, which other programs on the machine do not lengthen.
    """
    first_step = (
        "import sys, time; from scalelong.training import Trainer, get_preset\n"
        f"def stop(*_): {SECONDS}; sys.stdout.flush(); import os; os._exit(0)\n"
        "import tempfile; Trainer(get_preset('digits-demo'), tempfile.mkdtemp() + '/run', [stop]).run()"
    )
    programs = {
        "torch": f"import sys, time, torch; {SECONDS}",
        "scalelong": f"import sys, time, torch, scalelong; {SECONDS}",
        "first_step": first_step,
    }
    seconds: dict[str, list[tuple[float, ...]]] = {name: [] for name in programs}
    for _ in range(3):
        for name, program in programs.items():
            command = [sys.executable, "-c", program, str(time.time())]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            seconds[name].append(tuple(map(float, done.stdout.split()[-2:])))
    wall, processor = ({name: min(each[i] for each in values) for name, values in seconds.items()} for i in (0, 1))
    return {
        "import_seconds_over_torch": wall["scalelong"] - wall["torch"],
        "import_processor_seconds_over_torch": processor["scalelong"] - processor["torch"],
        "first_step_seconds": wall["first_step"],
        "first_step_processor_seconds": processor["first_step"],
    }
