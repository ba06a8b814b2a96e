"""Generate the tables and the plot of docs/speed.md from benchmarks/results; what was not measured is left out.

python scripts/speed_page.py            # writes them
python scripts/speed_page.py --check    # fails if they are out of date
"""

from __future__ import annotations

import json
import sys
from typing import Any

from figures_table import DOCS, ROOT, fill

sys.path.insert(0, str(ROOT / "benchmarks"))

RESULTS, PAGE, PLOT = ROOT / "benchmarks" / "results", DOCS / "speed.md", DOCS / "assets" / "speed.svg"
GROWTH = ("growth.json", "growth_cpu.json")  # on a GPU, on a CPU

IMAGENET_IMAGES = 300_000 * 1024  # of the paper's recipe for ImageNet-64: steps times batch
NVLINK, NETWORK = 450e9, 50e9  # bytes a second and direction: in a machine of 8 H200, of one 400 Gb/s port per GPU
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


SAMPLED = {
    "generate.json": ", plain network",
    "generate-drawing.json": ", fused kernels",
    "generate-profile.json": ", fused kernels, current version",
}


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
    lines, factors = [], list(dict.fromkeys(row["factor"] for row in rows))
    points = dict.fromkeys((row["factor"], row["value"]) for row in rows)
    ordered = sorted(points, key=lambda p: (factors.index(p[0]), p[1] if not isinstance(p[1], str) else 0))
    for factor, value in ordered:
        here = {row["method"]: row for row in rows if (row["factor"], row["value"]) == (factor, value)}
        if not here.keys() >= {"none", "cs", "ls"}:  # cut off
            continue
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
                label = f"{method}, {'GPU' if name == GROWTH[0] else 'CPU'}" if factor == "depth" else None
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


def parts() -> dict[str, str]:
    """The generated part of each section of the page."""
    step, generated, cpu = read("step.json"), read("generate-profile.json"), read("step_cpu.json")
    kernels = {f"{case}, batch {batch}": find(step, case, batch) for batch in (64, 128) for case in ("loop", "trainer")}
    found = {
        "step on a GPU": [headline(step), source(step, "step.json"), step_table(step, on_gpu=True)],
        "kernels": [profile_table(kernels)],
        "sampling": [
            sampling_table(),
            source(generated, "generate-profile.json"),
            profile_table({"one evaluation of 1,000 images": generated["rows"][0]}),
        ],
        "step on a CPU": [source(cpu, "step_cpu.json"), step_table(cpu, on_gpu=False), startup(cpu)],
        "growth": [],
    }
    for name, result in measured_growth().items():
        base = result["base"]
        network = f"dim {base['dim']}, depth {base['depth']}, {base['tokens']} tokens, batch {base['batch']}"
        found["growth"] += [
            f"Around {network}. {source(result, name)}",
            growth_table(result["rows"], name == GROWTH[0]),
        ]
    measured = [row for row in read(GROWTH[0]).get("rows", []) if row["factor"] == "preset"]
    rows, rate = measured or estimated_rows(step), find(step, "trainer", 64)["tflops"]
    found["scale"] = [MEASURED if measured else ESTIMATED.format(rate), scale_table(rows)]
    return {name: "\n\n".join(texts) for name, texts in found.items()}


def measured_growth() -> dict[str, dict[str, Any]]:
    """Results of benchmarks/growth.py by file, without those that were not measured."""
    return {name: result for name in GROWTH if (result := read(name))}


def startup(cpu: dict[str, Any]) -> str:
    imports = max(0.0, cpu["import_processor_seconds_over_torch"])
    return (
        f"`import scalelong` takes {imports:.2f} s beyond `import torch`; from the start of Python to the end of the "
        f"demo's first step pass {cpu['first_step_processor_seconds']:.1f} s of processor time, "
        f"{cpu['first_step_seconds']:.1f} s by the clock (the best of three, on a machine that others use)."
    )


MEASURED = "The step of one GPU with its share of the batch is measured; communication is computed."
ESTIMATED = """The step is estimated, not measured at this size: the FLOPs of one GPU's share of the batch at the rate that
U-ViT-S/2 reaches at batch 64 on an H200 ({:.0f} TFLOP/s, above), and AdamW and EMA in proportion to the parameters."""


def main() -> None:
    for name, text in parts().items():
        fill(PAGE, name, text)
    if "--check" not in sys.argv and (grown := measured_growth()):
        plot(grown)


if __name__ == "__main__":
    main()
