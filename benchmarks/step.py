"""How long a training step takes: the public recipe, a well-tuned plain loop, diffusers' example, and our trainer.

    python benchmarks/step.py --out benchmarks/results/step.json           # U-ViT-S/2 on a GPU
    python benchmarks/step.py --cpu --out benchmarks/results/step_cpu.json  # the demo's network on one thread

recipe   eager fp16 autocast with a loss scaler, concatenation and linear layer, attention on converted float32, AdamW, an
         average per parameter: what U-ViT's public code does
loop     bf16, torch.compile with CUDA graphs, fused AdamW, foreach average: the same network, nothing else in the step
unet     diffusers' UNet2DModel as its example for unconditional images trains it, in fp16
trainer  `scalelong.training.Trainer` as `scalelong train` runs it: data, times, noise, guard, average, records

All in one run, because only ratios within a run mean something. On a GPU every case is a process; those of one batch size
compile at the same time and are timed one after another. On a CPU everything is eager float32, and windows of the trainer and
of its peers take turns. Rows are written as they come, so a run that is cut off keeps what it measured.
"""

from __future__ import annotations

import dataclasses
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
import tyro
from measure import (
    Step,
    about,
    clock,
    in_turn,
    kernel_table,
    matmul_ceiling,
    spread,
    startup,
    training_flops,
    wait_for_turn,
    windows,
    write,
)
from plain_uvit import PlainUViT, noisy
from torch import Tensor, nn

from scalelong.training import RunConfig, Trainer, get_preset

EMOJI = "emoji32"  # images of 32 x 32 that come with the package


@dataclass(frozen=True)
class Benchmark:
    batch_sizes: tuple[int, ...] = (64, 128, 512)
    methods: tuple[str, ...] = ("none", "cs", "ls")
    peer_methods: tuple[str, ...] = ("none",)  # of the recipe and the loop
    cases: tuple[str, ...] = ("recipe", "loop", "unet", "trainer")
    compile: tuple[str, ...] = ("step",)  # of the trainer: off, default, reduce-overhead, step
    windows: int = 9
    steps: int = 20  # in a window; on a GPU at batch 64, and fewer at larger ones
    profile: int = 0  # steps to profile after timing: the kernels of each case, longest first
    cpu: bool = False
    startup: bool = True  # also measure how long importing and the first step take
    out: str = ""
    worker: str = ""  # one case, "trainer/none/64/step": this process measures it and prints its row


def config_of(method: str, batch: int, mode: str, on_gpu: bool, model: str = "uvit") -> RunConfig:
    """What the trainer trains: U-ViT-S/2 or the DDPM UNet on images of 32 x 32, or the demo's network."""
    name = {"unet": "cifar10-unet", "uvit": "cifar10-uvit-s2" if on_gpu else "digits-demo"}[model]
    preset = get_preset(name)
    training = dataclasses.replace(
        preset.training, batch_size=batch, compile=mode, sample_every=0, checkpoint_every=10**9, log_every=50
    )
    data = dataclasses.replace(preset.data, name=EMOJI) if on_gpu or model == "unet" else preset.data
    scaling = dataclasses.replace(preset.scaling, method=method, kappa=0.7)
    return dataclasses.replace(preset, training=training, data=data, scaling=scaling)


def plain_model(
    config: RunConfig, shape: tuple[int, int, int], method: str, float_attention: bool = False
) -> PlainUViT:
    torch.manual_seed(0)
    model = config.model
    return PlainUViT(shape, model.patch_size, model.dim, model.depth, model.heads, method, float_attention)


def recipe(model: nn.Module, images: Tensor) -> Step:
    """Eager, fp16 with a scaler on a GPU, three kernels per parameter for the average."""
    on_gpu = images.is_cuda
    average = [p.detach().clone() for p in model.parameters()]
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-4, betas=(0.99, 0.999), weight_decay=0.03)
    scaler = torch.amp.GradScaler("cuda", enabled=on_gpu)

    def step(_number: int) -> None:
        optimizer.zero_grad()
        x_t, time_input, noise = noisy(images)
        with torch.autocast(images.device.type, torch.float16, enabled=on_gpu):
            prediction = model(x_t, time_input)
        loss = (noise - prediction.float()).square().flatten(1).mean(dim=-1).mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        with torch.no_grad():
            for mean, parameter in zip(average, model.parameters(), strict=True):
                mean.mul_(0.9999).add_(1e-4 * parameter)

    return step


def loop(model: nn.Module, images: Tensor) -> Step:
    """bf16, compiled with CUDA graphs, fused AdamW, foreach average; on a CPU eager float32."""
    on_gpu = images.is_cuda
    average, parameters = [p.detach().clone() for p in model.parameters()], list(model.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=2e-4, betas=(0.99, 0.999), weight_decay=0.03, fused=True)
    net: Any = torch.compile(model, mode="reduce-overhead") if on_gpu else model

    def step(_number: int) -> None:
        x_t, time_input, noise = noisy(images)
        if on_gpu:
            torch.compiler.cudagraph_mark_step_begin()
        with torch.autocast(images.device.type, torch.bfloat16, enabled=on_gpu):
            loss = (net(x_t, time_input).float() - noise).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        with torch.no_grad():
            torch._foreach_lerp_(average, parameters, 1e-4)

    return step


def diffusers_example(images: Tensor) -> Step:
    """UNet2DModel in the loop of diffusers' example: fp16, clipping, AdamW, its EMAModel and noise scheduler."""
    from diffusers import DDPMScheduler
    from diffusers.training_utils import EMAModel

    from scalelong.backbones import ddpm_cifar10

    on_gpu = images.is_cuda
    model = ddpm_cifar10().to(images.device)
    average = EMAModel(model.parameters(), decay=0.9999, use_ema_warmup=True, inv_gamma=1.0, power=0.75)
    average.to(images.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.95, 0.999), weight_decay=1e-6)
    scheduler, scaler = DDPMScheduler(1000), torch.amp.GradScaler("cuda", enabled=on_gpu)

    def step(_number: int) -> None:
        noise = torch.randn_like(images)
        timesteps = torch.randint(0, 1000, (len(images),), device=images.device)
        noisy_images = scheduler.add_noise(images, noise, timesteps)
        with torch.autocast(images.device.type, torch.float16, enabled=on_gpu):
            loss = F.mse_loss(model(noisy_images, timesteps).sample.float(), noise)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        average.step(model.parameters())
        loss.item()  # logged by the example at every step

    return step


def trainer_windows(
    config: RunConfig, count: int, size: int, warm_up: int, between: Sequence[Step] = (),
    ready: Callable[[], None] = int, profile: Profile | None = None,
) -> list[list[float]]:  # fmt: skip
    """Milliseconds per step of the trainer's windows; after each one, a window of every step in `between`."""
    last = warm_up + count * size
    steps = last + (profile.steps if profile else 0)
    config = dataclasses.replace(config, training=dataclasses.replace(config.training, steps=steps))
    found, started = [list[float]() for _ in range(1 + len(between))], 0.0

    def observe(step: int, _model: nn.Module) -> None:
        nonlocal started
        if step >= last and profile:
            profile.at(step - last)
        if step < warm_up or step > last or (step - warm_up) % size:
            return
        now = clock(trainer.device)
        if step > warm_up:
            found[0].append((now - started) / size * 1e3)
        else:
            ready()
        for which, (times,) in enumerate(windows([each], trainer.device, 1, size, 2) for each in between):
            found[which + 1] += times if step > warm_up else []
        started = clock(trainer.device)

    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(config, f"{folder}/run", [observe])
        trainer.run()
    return found


class Profile:
    """The kernels of some steps on a GPU; `at(n)` is called after n of them."""

    def __init__(self, steps: int) -> None:
        self.steps, self.rows = steps, list[dict[str, Any]]()
        self.profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])

    def at(self, number: int) -> None:
        if number == 0:
            torch.cuda.synchronize()
            self.profiler.start()
        elif number == self.steps:
            torch.cuda.synchronize()
            self.profiler.stop()
            self.rows = kernel_table(self.profiler, self.steps)

    def run(self, step: Step) -> None:
        for number in range(self.steps):
            self.at(number)
            step(number)
        self.at(self.steps)


class Results:
    """The rows so far, printed and written as they come."""

    def __init__(self, command: Benchmark, device: torch.device) -> None:
        self.out, self.device, self.ceiling = command.out, device, matmul_ceiling(device)
        self.content: dict[str, Any] = {**about(device), "matmul_tflops": self.ceiling / 1e12, "rows": []}
        print(f"{self.content['device']}, torch {torch.__version__}, matmul {self.ceiling / 1e12:.3g} TFLOP/s")

    def add(
        self, times: list[float], flops: float, batch: int, more: dict[str, Any] | None = None, **what: Any
    ) -> None:
        row = {**what, "batch": batch, **spread(times), "windows": len(times)}
        tflops = flops * batch / row["ms"] / 1e9
        row |= {"images_per_second": batch / row["ms"] * 1e3, "tflops": tflops}
        row |= {"share_of_matmul": tflops * 1e12 / self.ceiling, **(more or {})}
        self.content["rows"].append(row)
        name = " ".join(f"{value:.3f}" if isinstance(value, float) else str(value) for value in what.values())
        print(f"{batch:5} {name:32} {row['ms']:8.2f} ms ({row['ms_low']:.2f} to {row['ms_high']:.2f}) "
              f"{row['images_per_second']:8.0f} img/s {row['share_of_matmul']:6.1%}", flush=True)  # fmt: skip
        write(self.out, self.content)


SHAPE, WARM_UP, UNET_PEER = (3, 32, 32), 12, "unet: diffusers' example"


def gpu_cases(command: Benchmark) -> list[list[str]]:
    """The cases as --worker takes them, case/method/batch/mode, in groups that compile at the same time."""
    groups = []
    for batch in command.batch_sizes:
        peers = [case for case in ("recipe", "loop") if case in command.cases]
        cases = [f"{case}/{method}/{batch}/" for case in peers for method in command.peer_methods]
        if "trainer" in command.cases:
            cases += [f"trainer/{method}/{batch}/{mode}" for mode in command.compile for method in command.methods]
        size = max(1, 1536 // batch)  # each holds its memory: at batch 512 up to 45 GiB
        groups += [cases[first : first + size] for first in range(0, len(cases), size)]
    if "unet" in command.cases:
        groups.append([UNET_PEER + "/none/128/", *(f"unet: trainer/none/128/{mode}" for mode in command.compile)])
    return groups


def measure_on_a_gpu(command: Benchmark) -> dict[str, Any]:
    """What a worker prints: the windows of its case, peak memory, kernels."""
    case, method, size, mode = command.worker.split("/")
    batch, device = int(size), torch.device("cuda")
    timing = (command.windows, max(3, command.steps * 64 // batch), WARM_UP)
    profile = Profile(command.profile) if command.profile else None
    if case.endswith("trainer"):
        config = config_of(method, batch, mode, True, "unet" if case.startswith("unet") else "uvit")
        times = trainer_windows(config, *timing, ready=wait_for_turn, profile=profile)[0]
    else:
        images = torch.randn(batch, *SHAPE, device=device)
        if case.startswith("unet"):
            step = diffusers_example(images)
        else:
            model = plain_model(config_of("none", batch, "off", True), SHAPE, method, case == "recipe").to(device)
            step = {"recipe": recipe, "loop": loop}[case](model, images)
        times = windows([step], device, *timing, wait_for_turn)[0]
        if profile:
            profile.run(step)
    kernels = {"kernels": profile.rows} if profile else {}
    return {"times": times, "more": {"peak_gib": torch.cuda.max_memory_allocated() / 2**30, **kernels}}


def on_a_gpu(command: Benchmark, results: Results) -> None:
    with torch.device("meta"):
        model = plain_model(config_of("none", 64, "off", True), SHAPE, "none")
        flops = training_flops(model, torch.zeros(1, *SHAPE), torch.zeros(1))
    results.content["gflop_per_image"] = flops / 1e9
    arguments = [f"--{key}={getattr(command, key)}" for key in ("windows", "steps", "profile")]
    for group in gpu_cases(command):
        workers = in_turn([[sys.executable, __file__, *arguments, "--worker", case] for case in group])
        for name, found in zip(group, workers, strict=True):
            case, method, batch, mode = name.split("/")
            if found is None:
                print(f"{name}: failed", flush=True)
                continue
            compiled = {"compile": mode} if mode else {}
            counted = 0 if case.startswith("unet") else flops
            results.add(found["times"], counted, int(batch), found["more"], case=case, method=method, **compiled)


def on_a_cpu(command: Benchmark, results: Results) -> None:
    """Windows of the trainer and of both peers take turns, method by method."""
    device, shape = torch.device("cpu"), (1, 8, 8)
    batch = get_preset("digits-demo").training.batch_size
    for method in command.methods:
        images = torch.randn(batch, *shape)
        for mode in ("off", *(mode for mode in command.compile if mode == "step")):
            config = config_of(method, batch, mode, False)
            flops = training_flops(plain_model(config, shape, "none"), torch.zeros(1, *shape), torch.zeros(1))
            peers = [make(plain_model(config, shape, method).to(device), images) for make in (recipe, loop)]
            ours, *theirs = trainer_windows(config, command.windows, command.steps, 5, peers)
            for name, times in zip(("recipe", "loop"), theirs, strict=True):
                results.add(times, flops, batch, case=name, method=method, beside=f"trainer {mode}")
            over = {
                f"ms_over_{name}": statistics.median(
                    a / b for a, b in zip(ours, times, strict=True)
                )  # window by window
                for name, times in zip(("recipe", "loop"), theirs, strict=True)
            }
            results.add(ours, flops, batch, case="trainer", method=method, compile=mode, **over)


def main() -> None:
    command = tyro.cli(Benchmark, description=__doc__)
    if command.cpu or not torch.cuda.is_available():
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        torch.set_num_threads(1)
    if command.worker:
        print("\n" + json.dumps(measure_on_a_gpu(command)))
        return
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    results = Results(command, device)
    if device.type == "cuda":
        on_a_gpu(command, results)
    else:
        on_a_cpu(command, results)
    if command.startup:
        found = startup()
        results.content |= found
        print({key: round(value, 2) for key, value in found.items()})
    write(command.out, results.content)


if __name__ == "__main__":
    main()
