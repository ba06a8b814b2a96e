"""docs/speed.md and its plot from the results of the benchmarks; rows that were not measured are left out.

python scripts/speed_page.py            # writes them
python scripts/speed_page.py --check    # fails if the page is not that of the results
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS, PAGE, PLOT = (
    ROOT / "benchmarks" / "results",
    ROOT / "docs" / "speed.md",
    ROOT / "docs" / "assets" / "speed.svg",
)

sys.path.insert(0, str(ROOT / "benchmarks"))

IMAGENET_IMAGES = 300_000 * 1024  # of the paper's recipe for ImageNet-64: steps times batch
NVLINK, NETWORK = (
    450e9,
    50e9,
)  # bytes a second and direction: inside a machine of 8 H200, and of one 400 Gb/s port per GPU
UNET_PEER = "unet: diffusers' example"
SMALLEST = 16  # images per GPU; below, more GPUs would mean a larger batch

Rows = list[dict[str, Any]]


def read(name: str) -> dict[str, Any]:
    """A result, or {} if it was not measured."""
    path = RESULTS / name
    found: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {}
    return found


def table(head: tuple[str, ...], lines: list[tuple[str, ...]]) -> str:
    return "\n".join("| " + " | ".join(line) + " |" for line in [head, ("---",) * len(head), *lines])


def source(result: dict[str, Any], name: str) -> str:
    about = f"{result['device']}, torch {result['torch']}, {result.get('clock', 'seconds')}"
    return f"{about}; `{result['command']}` at commit {result['commit']}, `benchmarks/results/{name}`."


def ms(row: dict[str, Any]) -> str:
    return f"{row['ms']:.1f} ({row['ms_low']:.1f} to {row['ms_high']:.1f})"


def step_table(result: dict[str, Any], on_gpu: bool) -> str:
    """The rows of benchmarks/step.py; ratios are those to the peers of the same batch without scaling, on a CPU to those
    of the same method, window by window."""
    names = {"recipe": "public recipe", "loop": "plain loop", "trainer": "**trainer**"}
    lines = []
    for row in (row for row in result["rows"] if row["case"] in names):
        here = [each for each in result["rows"] if each["batch"] == row["batch"]]
        peers = {each["case"]: each for each in here if each["method"] == "none"}
        ratios = ["", ""]
        if on_gpu:
            ratios = [f"{row['ms'] / peers[name]['ms']:.2f}" if name in peers else "" for name in ("recipe", "loop")]
        elif row["case"] == "trainer":
            ratios = [f"{row['ms_over_recipe']:.2f}", f"{row['ms_over_loop']:.2f}"]
        what = names[row["case"]] + (f", compile {row['compile']}" if "compile" in row else "")
        beside = row["beside"].removeprefix("trainer ") if "beside" in row else ""
        what += f" (beside {beside})" if beside else ""
        shown = (str(row["batch"]), what, row["method"], ms(row), *ratios, f"{row['images_per_second']:,.0f}")
        share = f"{row['share_of_matmul']:.0%}" if row["tflops"] else ""
        lines.append(shown + ((share, f"{row['peak_gib']:.1f}") if on_gpu else (share,)))
    head = (
        "batch",
        "what",
        "skips",
        "ms per step (quartiles)",
        "/ recipe",
        "/ loop",
        "images/s",
        "of the matmul ceiling",
    )
    return table((*head, "peak GiB") if on_gpu else head, lines)


def find(result: dict[str, Any], case: str, batch: int, method: str = "none") -> dict[str, Any]:
    return next(r for r in result["rows"] if (r["case"], r["batch"], r["method"]) == (case, batch, method))


def headline(result: dict[str, Any]) -> str:
    """The trainer's step on a GPU against both peers, and what the methods cost."""
    cases = {batch: [find(result, case, batch) for case in ("trainer", "loop", "recipe")] for batch in (64, 128, 512)}
    times = ", ".join(f"{ours['ms']:.1f} ms at batch {batch}" for batch, (ours, _, _) in cases.items())

    def faster(peer: int, key: str = "ms") -> str:
        ratios = [each[peer][key] / each[0][key] for each in cases.values()]
        return f"{min(ratios):.2f} to {max(ratios):.2f}"

    costs = {
        method: [find(result, "trainer", batch, method)["ms"] / ours["ms"] - 1 for batch, (ours, _, _) in cases.items()]
        for method in ("cs", "ls")
    }
    cs, ls = (f"{min(costs[method]):+.1%} to {max(costs[method]):+.1%}" for method in ("cs", "ls"))
    spreads = [(ours["ms_high"] - ours["ms_low"]) / ours["ms"] for ours, _, _ in cases.values()]
    less = all(ours["peak_gib"] < peer["peak_gib"] for ours, *peers in cases.values() for peer in peers)
    example, unet = find(result, UNET_PEER, 128), find(result, "unet: trainer", 128)
    memory = ", with less memory than either" if less else ""
    apart = f"{min(spreads):.1%} to {max(spreads):.1%}"
    return (
        f"Our trainer takes {times} for U-ViT-S/2: {faster(1)} times as fast as the plain loop "
        f"({faster(1, 'ms_high')} by the upper quartiles) and {faster(2)} times as fast as the public recipe{memory}. "
        f"CS adds {cs} and LS {ls}. The trainer's quartiles are {apart} apart, more than those of the plain loop: some "
        "windows are slower, for a reason we have not found. For DDPM's UNet at batch 128 it is "
        f"{example['ms'] / unet['ms']:.1f} times as fast as diffusers' example "
        f"({unet['ms']:.1f} against {example['ms']:.1f} ms)."
    )


GROUPS = {
    "attention": ("_forward", "_query_gradients", "_key_gradients", "sdpa", "flash", "cudnn::fusion"),
    "MLP with GELU": ("_linear_gelu", "_gelu_backward"),
    "matrix products": ("nvjet", "gemm", "cutlass", "splitK"),
    "AdamW and average": ("_update", "multi_tensor"),
    "generated by torch.compile": ("triton_",),
}


def group_of(kernel: str) -> str:
    """What a kernel does, by its name; generated ones are recognized first, since their names list all they fused."""
    if kernel.startswith("triton_"):
        return "generated by torch.compile"
    return next((group for group, parts in GROUPS.items() if any(part in kernel for part in parts)), "other")


def profile_table(rows: dict[str, dict[str, Any]]) -> str:
    """Milliseconds of the longest kernels by group, one column per row."""
    columns = {}
    for name, row in rows.items():
        sums = dict.fromkeys([*GROUPS, "other"], 0.0)
        for kernel in row["kernels"]:
            sums[group_of(kernel["kernel"])] += kernel["us"] / 1e3
        columns[name] = sums
    lines = [
        (group, *(f"{sums[group]:.2f}" if sums[group] else "" for sums in columns.values()))
        for group in [*GROUPS, "other"]
        if any(sums[group] for sums in columns.values())
    ]
    return table(("ms of kernels", *columns), lines)


def sampling_table() -> str:
    files = ("generate.json", "generate-drawing.json", "generate-profile.json")
    found = [(name, row) for name in files for row in read(name)["rows"]]
    lines = [
        (f"{row['what']}{SAMPLED[name]}", f"{row['seconds']:.1f}", f"`{name}`")
        for name, row in found
        if "2000" not in row["what"]
        and row.get("run", 1) == 1
        and (name != "generate.json" or "Inc" not in row["what"])
    ]
    return table(("what", "seconds", "file in `benchmarks/results/`"), lines)


def growth_table(rows: Rows, on_gpu: bool) -> str:
    lines = []
    for factor, value in dict.fromkeys((row["factor"], row["value"]) for row in rows):
        here = {row["method"]: row for row in rows if (row["factor"], row["value"]) == (factor, value)}
        plain = here["none"]
        memory = f"{plain['peak_gib']:.1f} GiB" if "peak_gib" in plain else ""
        memory = memory or (f"{plain['activation_mib']:.1f} MiB" if "activation_mib" in plain else "")
        value = {False: "off", True: "on"}[value] if factor == "checkpointing" else value
        ratios = [here[method].get("over_none", here[method]["ms"] / plain["ms"]) for method in ("cs", "ls")]
        over = [f"{ratio - 1:+.1%}" for ratio in ratios]
        lines.append((f"{factor} {value}", ms(plain), *over, memory))
    return table(("", "ms per step, none", "cs", "ls", "peak memory" if on_gpu else "activations"), lines)


def cost_at_scale(rows: Rows, gpus: int) -> dict[str, float]:
    """ImageNet-64 with U-ViT-L/4 on this many GPUs: the measured step of one GPU, and a ring all-reduce of the gradients.

    Every GPU sends and receives 2 (n - 1) / n times the float32 gradient; from 9 GPUs on over the network. `hours_low` hides
    all of it behind the backward pass, `hours` none.
    """
    images = max(SMALLEST, 1024 // gpus)
    row = next(r for r in rows if r["factor"] == "preset" and r["batch"] == images and r["method"] == "none")
    traffic = 2 * (gpus - 1) / gpus * 4 * row["parameters"]
    compute, communication = row["ms"] / 1e3, traffic / (NVLINK if gpus <= 8 else NETWORK)
    steps = IMAGENET_IMAGES / (gpus * images)
    low, high = (steps * seconds / 3600 for seconds in (max(compute, communication), compute + communication))
    found = {
        "images": images,
        "batch": gpus * images,
        "compute_ms": compute * 1e3,
        "communication_ms": communication * 1e3,
    }
    return {**found, "hours_low": low, "hours": high, "gpu_hours": high * gpus}


def estimated_rows(step: dict[str, Any]) -> Rows:
    """U-ViT-L/4's step while it is not measured: its FLOPs at the measured rate of U-ViT-S/2, and AdamW by parameters."""
    import torch
    from measure import training_flops

    from scalelong import UViT, UViTConfig

    with torch.device("meta"):
        small, large = (
            UViT(UViTConfig(image_size=size, patch_size=patch, dim=dim, depth=depth, heads=dim // 64))
            for size, patch, dim, depth in ((32, 2, 512, 12), (64, 4, 1024, 20))
        )
        flops = training_flops(large, torch.zeros(1, 3, 64, 64), torch.zeros(1))
    counts = [sum(p.numel() for p in model.parameters()) for model in (small, large)]
    measured = find(step, "trainer", 64)  # the lowest of the measured rates
    adamw = sum(k["us"] for k in measured["kernels"] if group_of(k["kernel"]) == "AdamW and average") / 1e3
    return [
        {"factor": "preset", "method": "none", "batch": images, "parameters": counts[1],
         "ms": images * flops / measured["tflops"] / 1e9 + adamw * counts[1] / counts[0]}
        for images in (SMALLEST, 128)
    ]  # fmt: skip


def scale_table(rows: Rows) -> str:
    lines = []
    for gpus in (8, 64, 512):
        c = cost_at_scale(rows, gpus)
        hours = f"{c['hours_low']:.1f} to {c['hours']:.1f}"
        lines.append((str(gpus), f"{c['batch']:,}", f"{c['compute_ms']:.1f}", f"{c['communication_ms']:.1f}", hours,
                      f"{c['gpu_hours']:,.0f}"))  # fmt: skip
    head = ("GPUs", "batch", "ms per step, computing", "ms, communicating", "hours", "GPU hours")
    return table(head, lines)


def plot(results: dict[str, dict[str, Any]]) -> None:
    """Time against depth, tokens and batch."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams |= {"svg.hashsalt": "speed", "svg.fonttype": "none"}
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 3, figsize=(10, 3), layout="constrained")
    for (name, result), line in zip(results.items(), ("-", "--"), strict=False):
        for axis, factor in zip(axes, ("depth", "tokens", "batch"), strict=True):
            for method, colour in (("none", "C0"), ("cs", "C1"), ("ls", "C2")):
                rows = [r for r in result["rows"] if r["factor"] == factor and r["method"] == method]
                label = f"{method}, {name}" if factor == "depth" else None
                axis.plot(
                    [r["value"] for r in rows],
                    [r["ms"] for r in rows],
                    f"{colour}{line}",
                    marker="o",
                    ms=3,
                    label=label,
                )
            axis.set(xlabel=factor, ylabel="ms per step", yscale="log", xscale="linear" if factor == "depth" else "log")
    axes[0].legend(fontsize=7)
    PLOT.parent.mkdir(exist_ok=True)
    figure.savefig(PLOT, metadata={"Date": None})


def page() -> str:
    parts, step = [HEAD], read("step.json")
    parts += ["## A training step on a GPU", headline(step), source(step, "step.json"), step_table(step, on_gpu=True)]
    rows = {f"{case}, batch {batch}": find(step, case, batch) for batch in (64, 128) for case in ("loop", "trainer")}
    parts += ["### Where the time goes", PROFILE, profile_table(rows), FAST]
    generated = read("generate-profile.json")
    sampled = {"one evaluation of 1,000 images": generated["rows"][0]}
    parts += [
        "## Sampling",
        SAMPLING,
        sampling_table(),
        source(generated, "generate-profile.json"),
        profile_table(sampled),
    ]
    cpu = read("step_cpu.json")
    imports = max(0.0, cpu["import_processor_seconds_over_torch"])
    parts += ["## A training step on a CPU", source(cpu, "step_cpu.json"), step_table(cpu, on_gpu=False)]
    parts.append(START.format(imports, cpu["first_step_processor_seconds"], cpu["first_step_seconds"]))
    grown = {label: read(name) for label, name in (("GPU", "growth.json"), ("CPU", "growth_cpu.json")) if read(name)}
    parts += ["## How cost grows", GROWTH]
    for label, result in grown.items():
        base = result["base"]
        network = f"dim {base['dim']}, depth {base['depth']}, {base['tokens']} tokens, batch {base['batch']}"
        name = "growth.json" if label == "GPU" else "growth_cpu.json"
        parts += [f"Around {network}. {source(result, name)}", growth_table(result["rows"], label == "GPU")]
    parts.append("![Time per step against depth, tokens and batch](assets/speed.svg)")
    preset = [row for row in grown.get("GPU", {}).get("rows", []) if row["factor"] == "preset"]
    computed = COMPUTED if preset else ESTIMATED.format(find(step, "trainer", 64)["tflops"])
    scale = scale_table(preset or estimated_rows(step))
    parts += ["## ImageNet-64 with U-ViT-L/4 on many GPUs", f"{computed} {SCALE}", scale]
    return "\n\n".join(parts) + "\n"


HEAD = """# How fast

Generated by `scripts/speed_page.py` from `benchmarks/results/`. Times are medians with quartiles; compare numbers within one
table only, since each table is one run on one machine.

| name | what is timed |
|---|---|
| public recipe | a plain U-ViT with concatenated skips: eager, fp16 with a loss scaler, AdamW, one EMA update per parameter |
| plain loop | the same network: bf16, `torch.compile` with CUDA graphs, fused AdamW, foreach EMA, nothing else |
| trainer | what `scalelong train` runs: data loading, random times and noise, non-finite guard, AdamW, EMA, records |

On a CPU all three are eager and in float32. The trainer's fast step (`--training.compile step`, or `auto`, the default of GPU
presets) supports one rank, AdamW, and bf16 or fp32; checkpoints are those of the plain step."""

PROFILE = (
    """The longest kernels of one step, without scaling, from the same run; other kernels and gaps make up the rest."""
)

FAST = """What the fast step does differently from the plain loop:

- **Flat tensors.** Weights, gradients, AdamW moments and EMA are views of flat float32 tensors; one kernel updates all of
  them and writes the bf16 copy that the network uses, so no weights are cast in the step.
- **One CUDA graph** for forward and backward pass, random numbers included.
- **Attention for 257 tokens.** Libraries use tiles of 128 tokens, which wastes a third of the work; ours use 64.
- **GELU inside the matrix products** of the MLP, in both directions.
- **Joins without concatenation**, accumulated in place; patches as a matrix product instead of a convolution.
- The residual stream is in bf16 from the first block on; autocast keeps it in float32 up to the first join.

In a loop of your own, `scalelong.backbones.fused.for_training(model)` swaps these parts into a U-ViT; call it before
`torch.compile`, and train under bf16 autocast. Each kernel is compared with torch's operations, forward and backward
(`tests/backbones/test_fused_ops.py`); the assembled step, with the kernels replaced by torch's operations, with the plain
one over 200 steps and after resuming (`tests/training/test_fast.py`).

Tried once on an H200, found no faster, and not in the code: persistent MLP kernels, queries of the last token as a vector
instead of a masked tile, recomputing GELU in the backward pass, other tile sizes (`benchmarks/fused_kernels.py --tune`), and
torch.compile without its mixed-order reductions. What is left: the MLP kernels run at about half the rate of the plain
matrix products, probably because a program computes GELU after its products and not beside them (not verified)."""

SAMPLED = {
    "generate.json": ", plain network",
    "generate-drawing.json": ", fused kernels",
    "generate-profile.json": ", fused kernels, current version",
}

SAMPLING = """10,000 images, 50 evaluations each of U-ViT-S/2 in bf16, and their Inception features, on an H200. About two
thirds of the time is matrix products at the rate of the library."""

START = """`import scalelong` takes {:.2f} s beyond `import torch`; from the start of Python to the end of the
demo's first step pass {:.1f} s of processor time, {:.1f} s by the clock (the best of three, on a machine that others use)."""

GROWTH = """One factor changes at a time. `cs` and `ls` are relative to `none` in the same run; differences within
the quartiles are noise. Activations are what a forward pass keeps for the backward pass, counted exactly."""

COMPUTED = "Computed, not run: the measured step of one GPU with its share of the batch, plus communication."

ESTIMATED = """Estimated, neither run nor measured at this size: the FLOPs of one GPU's share of the batch at the rate
that U-ViT-S/2 reaches at batch 64 on an H200 ({:.0f} TFLOP/s, above), the time of AdamW and EMA in proportion to
the parameters, and communication."""

SCALE = f"""Communication is a ring all-reduce of the float32 gradients at {NVLINK / 1e9:.0f} GB/s inside a machine of
8 GPUs and {NETWORK / 1e9:.0f} GB/s per GPU between machines (data sheets, not measured). 300,000 steps at batch 1,024;
from 64 GPUs on at least {SMALLEST} images per GPU, so the batch grows and the number of images stays. The first number
of hours hides all communication behind the backward pass, the second none of it."""


def main() -> None:
    new = page()
    if "--check" in sys.argv:
        if not PAGE.is_file() or PAGE.read_text() != new:
            raise SystemExit("docs/speed.md is not that of benchmarks/results; run python scripts/speed_page.py")
        return
    grown = {label: read(name) for label, name in (("GPU", "growth.json"), ("CPU", "growth_cpu.json")) if read(name)}
    if grown:
        plot(grown)
    PAGE.write_text(new)


if __name__ == "__main__":
    main()
