"""What the experiments share: options, the two scales, and runs that are trained once and used by several figures.

A run lives in RUNS/<key>, where the key is a function of its configuration: fig01, fig07 and fig12 need the same runs and
train them once. A complete run is not repeated, a broken-off one goes on.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any, Literal

import torch
from tqdm import tqdm

from scalelong.runs.reader import Run, read_run
from scalelong.runs.settings import (
    DataSettings,
    ModelSettings,
    OptimizerSettings,
    ScalingSettings,
    TrainingSettings,
    dotted,
)
from scalelong.stability import relative_oscillation
from scalelong.training import RunConfig, TrainedRun, get_preset, load_run, to_yaml
from scalelong.training.build import check_config

Scale = Literal["cpu", "gpu"]
METHODS = ("none", "rsqrt2", "cs:0.5", "ls")  # cs as the paper has it on CIFAR-10
_NOT_IN_KEY = ("training.keep", "data.workers", "data.root", "training.wandb_project")


@dataclass(frozen=True)
class Options:
    """What is on every experiment's command line."""

    scale: Scale = "cpu"  # cpu: 8x8 digits, minutes on one core; gpu: U-ViT-S/2 on CIFAR-10
    steps: int = 0  # of each run; 0: 400 (cpu) or 1500 (gpu)
    seeds: tuple[int, ...] = (0, 1, 2)
    jobs: int = 1  # runs at once
    out: str = ""  # default: experiments/results/NAME-SCALE
    runs: str = "runs/experiments"  # where trained runs are kept and looked for

    def folder(self, name: str) -> Path:
        """Where the results go; made if missing."""
        path = Path(self.out or f"experiments/results/{name}-{self.scale}")
        path.mkdir(parents=True, exist_ok=True)
        return path


def base_config(scale: Scale, steps: int = 0) -> RunConfig:
    """The unscaled network, predicting the noise as the paper does.

    The paper warms up over 2,500 steps of 500,000; these runs are shorter than that, so the warm-up is too.
    """
    if scale == "gpu":
        preset, steps = get_preset("cifar10-uvit-s2"), steps or 1500
        training = dataclasses.replace(preset.training, batch_size=64, compile="reduce-overhead")
        config = dataclasses.replace(
            preset, optimizer=dataclasses.replace(preset.optimizer, warmup_steps=steps // 3), training=training
        )
    else:
        steps = steps or 400
        config = RunConfig(
            data=DataSettings("digits", flip=False),
            model=ModelSettings("uvit", patch_size=2, dim=64, depth=12, heads=4),
            optimizer=OptimizerSettings(lr=1e-3, betas=(0.9, 0.99), warmup_steps=steps // 8),
            training=TrainingSettings(batch_size=32, ema_decay=0.99),
        )
    training = dataclasses.replace(
        config.training, steps=steps, log_every=10, checkpoint_every=steps, sample_every=0, precision="auto"
    )
    return dataclasses.replace(config, scaling=ScalingSettings("none"), training=training)


def varied(
    config: RunConfig, method: str = "none", seed: int = 0, depth: int | None = None, batch_size: int | None = None
) -> RunConfig:
    """The same run with another method ("cs:0.5" sets kappa; above 1 is asked for here), seed, depth or batch size."""
    name, _, kappa = method.partition(":")
    value = float(kappa) if kappa else config.scaling.kappa
    scaling = dataclasses.replace(config.scaling, method=name, kappa=value, allow_amplify=value > 1)
    model = dataclasses.replace(config.model, depth=depth or config.model.depth)
    training = dataclasses.replace(config.training, seed=seed, batch_size=batch_size or config.training.batch_size)
    return check_config(dataclasses.replace(config, scaling=scaling, model=model, training=training), on_gpu=True)


def grid(options: Options, methods: Sequence[str] = METHODS, **changes: int) -> list[RunConfig]:
    """Every method with every seed at the chosen scale."""
    base = base_config(options.scale, options.steps)
    return [varied(base, method, seed, **changes) for method in methods for seed in options.seeds]


def run_key(config: RunConfig) -> str:
    """A readable name and a hash of every setting that is not the default."""
    usual = dotted(RunConfig())
    settings = {k: v for k, v in dotted(config).items() if k not in _NOT_IN_KEY and v != usual[k]}
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True, default=str).encode()).hexdigest()[:8]
    kappa = f"{config.scaling.kappa:g}" if "kappa" in config.scaling.options() else ""
    training, data = config.training, config.data.name.replace("/", "_")
    return (
        f"{data}-depth{config.model.depth}-batch{training.batch_size}-{config.scaling.method}{kappa}"
        f"-steps{training.steps}-seed{training.seed}-{digest}"
    )


def trained(configs: Sequence[RunConfig], options: Options, probe_every: int = 10) -> list[Run]:
    """The runs of these configurations, in order; what is not complete is trained by `scalelong train`, `jobs` at once."""
    folders = [Path(options.runs) / run_key(config) for config in configs]
    missing = {f: c for f, c in zip(folders, configs, strict=True) if not is_complete(f, c)}
    if missing:
        with ThreadPoolExecutor(min(options.jobs, len(missing))) as pool:
            futures = [pool.submit(_train_one, config, folder, probe_every) for folder, config in missing.items()]
            for future in tqdm(as_completed(futures), total=len(futures), desc="runs", disable=None):
                future.result()
    return [read_run(folder) for folder in folders]


def is_complete(folder: Path, config: RunConfig) -> bool:
    """Whether a run reached its last step and saved it."""
    return (folder / "checkpoints" / f"step-{config.training.steps:08d}").is_dir()


def _train_one(config: RunConfig, folder: Path, probe_every: int) -> None:
    settings = folder.with_name(f"{folder.name}.yaml")
    settings.parent.mkdir(parents=True, exist_ok=True)
    settings.write_text(to_yaml(config))
    command = [sys.executable, "-m", "scalelong.cli.main", "train", "--config", str(settings), "--out", str(folder)]
    subprocess.run([*command, "--probe-every", str(probe_every)], check=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    if not is_complete(folder, config):
        raise RuntimeError(f"{folder}: stopped before its last step; the same command again goes on from there")


def compared(
    base: RunConfig, methods: Sequence[str], options: Options, device: torch.device
) -> dict[str, tuple[Run, TrainedRun]]:
    """Every method with every seed, trained and loaded to be looked at, by a name for tables and pictures."""
    configs = [varied(base, method, seed) for method in methods for seed in options.seeds]
    return {
        f"{label(series)}, seed {series.seed}": (series, load_run(series.folder, device=device))
        for series in trained(configs, options, probe_every=100)
    }


def setting(config: RunConfig) -> str:
    """What was trained, in words."""
    return (
        f"U-ViT of depth {config.model.depth} on {config.data.name}, {config.training.steps} steps (warm-up "
        f"{config.optimizer.warmup_steps}), batch {config.training.batch_size}, lr {config.optimizer.lr:g}"
    )


def label(run: Run) -> str:
    """The method's name in tables and pictures."""
    return run.label


def block_oscillations(run: Run, what: str = "norm") -> dict[str, float]:
    """Relative oscillation of each probed block over the records after the warm-up."""
    first = run.config.optimizer.warmup_steps
    found = {}
    for block in run.blocks:
        steps, norms = run.column("probe", f"{what}/{block}")
        found[block] = relative_oscillation([n for s, n in zip(steps, norms, strict=True) if s > first])
    return found


def measures(run: Run) -> dict[str, Any]:
    """One row of a table: the method, the seed, and what was measured."""
    features = block_oscillations(run)
    return {
        "method": run.label,
        "seed": run.seed,
        "depth": run.config.model.depth,
        "batch": run.config.training.batch_size,
        "oscillation_all_blocks": mean(features.values()),
        "oscillation_middle": features[run.middle_block],
        "gradient_oscillation": mean(block_oscillations(run, "gradient").values()),
        "gradient_norm_spread": run.gradient_spread(),
        "final_loss": run.final_loss(),
        "seconds": run.column("train", "seconds")[1][-1],
    }


def by_method(rows: Iterable[dict[str, Any]], key: str) -> dict[str, list[float]]:
    """The values of one column by method, in the order of the rows."""
    found: dict[str, list[float]] = {}
    for row in rows:
        found.setdefault(row["method"], []).append(row[key])
    return found
