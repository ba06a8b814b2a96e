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
        plain = here["none"]
        memory = f"{plain['peak_gib']:.1f} GiB" if "peak_gib" in plain else ""
        memory = memory or (f"{plain['activation_mib']:.1f} MiB" if "activation_mib" in plain else "")
        value = {False: "off", True: "on"}[value] if factor == "checkpointing" else value
        over = ["", ""]  # of a method that was not measured
        for i, row in enumerate(here.get(method) for method in ("cs", "ls")):
            if row:
                over[i] = f"{row.get('over_none', row['ms'] / plain['ms']) - 1:+.1%}"
        lines.append((f"{factor} {value}", ms(plain), *over, memory))
    return table(("", "ms per step, none", "cs", "ls", "peak memory" if on_gpu else "activations"), lines)


def cost_at_scale(rows: Rows, gpus: int) -> dict[str, float]:
    """ImageNet-64 with U-ViT-L/4 on this many GPUs: the measured step of one GPU, and a ring all-reduce of the gradients.

    A batch per GPU that was not measured takes as long per image as the largest smaller one. Every GPU sends and receives
    2 (n - 1) / n times the float32 gradient; from 9 GPUs on over the network. `hours_low` hides all of it behind the backward
    pass, `hours` none.
    """
    images = max(SMALLEST, 1024 // gpus)
    measured = [r for r in rows if (r["factor"], r["method"]) == ("preset", "none") and r["batch"] <= images]
    row = max(measured, key=lambda r: r["batch"])
    traffic = 2 * (gpus - 1) / gpus * 4 * row["parameters"]
    compute, communication = row["ms"] * images / row["batch"] / 1e3, traffic / (NVLINK if gpus <= 8 else NETWORK)
    steps = IMAGENET_IMAGES / (gpus * images)
    low, high = (steps * seconds / 3600 for seconds in (max(compute, communication), compute + communication))
    found = {
        "images": images,
        "measured": row["batch"] == images,
        "batch": gpus * images,
        "compute_ms": compute * 1e3,
        "communication_ms": communication * 1e3,
    }
    return {**found, "hours_low": low, "hours": high, "gpu_hours": high * gpus}


def scale_table(rows: Rows) -> str:
    lines = []
    for gpus in (8, 64, 512):
        c = cost_at_scale(rows, gpus)
        hours = f"{c['hours_low']:.1f} to {c['hours']:.1f}"
        compute = f"{c['compute_ms']:.1f}{'' if c['measured'] else ' (not measured)'}"
        lines.append((str(gpus), f"{c['batch']:,}", compute, f"{c['communication_ms']:.1f}", hours,
                      f"{c['gpu_hours']:,.0f}"))  # fmt: skip
    head = ("GPUs", "batch", "ms per step, computing", "ms, communicating", "hours", "GPU hours")
    return table(head, lines)


def plot(results: dict[str, dict[str, Any]]) -> None:
    """Time per step against depth, tokens and batch, on GPU and CPU; below, what CS and LS add on the GPU, else the CPU."""
    import matplotlib
    from matplotlib import pyplot

    from scalelong.report.colours import GREY, TEAL, colour

    matplotlib.use("Agg")
    matplotlib.rcParams |= {"svg.hashsalt": "speed", "svg.fonttype": "none", "font.size": 9}
    figure, axes = pyplot.subplots(2, 3, figsize=(10, 5), layout="constrained", sharex="col", sharey="row")
    for (name, result), line in zip(results.items(), (GREY, TEAL), strict=False):
        base = result["base"]
        device = result["device"].partition(",")[0]
        label = f"{device}: width {base['dim']}, {base['tokens']} tokens, batch {base['batch']}"
        for axis, factor in zip(axes[0], ("depth", "tokens", "batch"), strict=True):
            rows = sorted((r for r in result["rows"] if r["factor"] == factor), key=lambda r: r["value"])
            plain = {r["value"]: r for r in rows if r["method"] == "none"}
            axis.plot(list(plain), [r["ms"] for r in plain.values()], "o-", color=line, ms=4, label=label)
            axis.set(title=factor, yscale="log", xscale="linear" if factor == "depth" else "log")
            if name == next(iter(results)):
                _plot_costs(axes[1, list(axes[0]).index(axis)], rows, plain, colour)
    for axis in axes[1]:
        axis.axhline(0, color=GREY, lw=1)
    for axis in axes.flat:
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
    for axis, factor in zip(axes[1], ("depth", "tokens", "batch"), strict=True):
        ticks = sorted({r["value"] for result in results.values() for r in result["rows"] if r["factor"] == factor})
        axis.set_xticks(ticks, labels=[str(tick) for tick in ticks], rotation=60 if len(ticks) > 6 else 0)
        axis.minorticks_off()
    axes[0, 0].set_ylabel("ms per step, unscaled")
    axes[1, 0].set_ylabel(f"% over unscaled, {next(iter(results.values()))['device'].partition(',')[0]}")
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside upper center", ncols=2, frameon=False)
    axes[1, 0].legend(frameon=False, loc="upper left", ncols=2)
    PLOT.parent.mkdir(exist_ok=True)
    figure.savefig(PLOT, metadata={"Date": None})


def _plot_costs(axis: Any, rows: Rows, plain: dict[Any, dict[str, Any]], colour: Any) -> None:
    """Medians of cs and ls over that of none, with the quartiles of the method."""
    for method, marker in (("cs", "s"), ("ls", "o")):
        here = [r for r in rows if r["method"] == method]
        over = [[100 * (r[key] / plain[r["value"]]["ms"] - 1) for r in here] for key in ("ms", "ms_low", "ms_high")]
        bars = [
            [m - low for m, low in zip(over[0], over[1], strict=True)],
            [h - m for m, _, h in zip(*over, strict=True)],
        ]
        axis.errorbar([r["value"] for r in here], over[0], bars, fmt=f"{marker}-", color=colour(method), ms=4, capsize=2,
                      lw=1, label=method)  # fmt: skip


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
    found["scale"] = [scale_table(read(GROWTH[0])["rows"])]
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


def main() -> None:
    for name, text in parts().items():
        fill(PAGE, name, text)
    if "--check" not in sys.argv and (grown := measured_growth()):
        plot(grown)


if __name__ == "__main__":
    main()
