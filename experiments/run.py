"""Run an experiment: train the runs of its settings.yaml that are missing, measure them, and write its results.

    python experiments/run.py                                          # lists all
    python experiments/run.py fig12-seeds --dry-run                    # the runs, and how long they take here
    python experiments/run.py fig12-seeds --scale gpu --jobs 3         # three runs at once
    python experiments/run.py fig12-seeds --steps 20 --seeds 0 --set model.dim=16 --out runs/try

Runs are trained by `scalelong train` in RUNS/<key>, where the key is a function of the settings: experiments share them, a
complete run is not repeated, and an interrupted one continues.
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from statistics import fmean
from typing import Any

from measures import DEVICE, averages, judged, value_of
from output import Outcome, draw, print_outcome, print_table, write_csv, write_summary
from settings import EXPERIMENTS, Experiment, load, names, run_key, scales
from tqdm import tqdm

from scalelong.cli.estimate import estimated_seconds
from scalelong.errors import SettingError, one_line
from scalelong.files import atomic_folder, write_text
from scalelong.runs.config import parse_yaml
from scalelong.runs.reader import Run, read_run
from scalelong.runs.settings import RunConfig
from scalelong.training import to_yaml


def main(given: Sequence[str] | None = None) -> int:
    options = arguments(given)
    try:
        if not options.name:
            print_table([row(name) for name in names()])
            return 0
        changes = parsed_changes(options.set)
        experiment = load(options.name, options.scale, steps=options.steps, seeds=options.seeds, changes=changes)
        if experiment.command:
            raise SettingError(f"{experiment.name}: is started by `{experiment.command}`")
        if options.dry_run:
            print(plan(experiment, options.runs, options.jobs))
            return 0
        out, begun = results_folder(experiment, options), time.monotonic()
        runs = trained(experiment, options.runs, options.jobs)
        with atomic_folder(out) as folder:
            own = experiment.measure
            outcome = own.measure(experiment, runs, folder) if own else measured(experiment, runs, folder)
            command = ["run.py", *(sys.argv[1:] if given is None else given)]
            seconds = round(time.monotonic() - begun, 1)
            write_summary(folder, outcome.claims, outcome.setting, command, seconds=seconds, **outcome.tables)
    except (ValueError, RuntimeError) as error:
        print(f"error: {one_line(error)}", file=sys.stderr)
        return 1
    print_outcome(outcome)
    print(f"\n{out}")
    return 0


def results_folder(experiment: Experiment, options: argparse.Namespace) -> Path:
    """Where the results go; those of other settings than the file's are not put in the place of its own."""
    if options.out is None and (options.steps or options.seeds or options.set):
        raise SettingError(
            "out: results of other steps, seeds or settings need a folder of their own; pass --out FOLDER"
        )
    out: Path = options.out or EXPERIMENTS / "results" / f"{experiment.name}-{experiment.scale}"
    if out.exists() and not (out / "summary.json").is_file():
        raise SettingError(f"out: {out} is there and holds no results of an experiment; choose another folder")
    return out


def arguments(given: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", nargs="?", help="a folder of experiments/; without it, all are listed")
    parser.add_argument("--scale", default="", help="of the settings; default: their first")
    parser.add_argument("--steps", type=int, default=0, help="of every run, its warm-up in proportion")
    parser.add_argument("--seeds", type=int, nargs="+", default=())
    parser.add_argument(
        "--set", nargs="+", default=(), metavar="KEY=VALUE", help="model.dim=16, options.images=100, ..."
    )
    parser.add_argument("--jobs", type=int, default=1, help="runs at once")
    parser.add_argument("--out", type=Path, help="default: experiments/results/NAME-SCALE")
    parser.add_argument("--runs", type=Path, default=Path("runs/experiments"), help="where trained runs are kept")
    parser.add_argument(
        "--dry-run", action="store_true", help="print the runs and the expected time, and train nothing"
    )
    return parser.parse_args(given)


def parsed_changes(pairs: Sequence[str]) -> dict[str, dict[str, Any]]:
    """ "model.dim=16" as {"model": {"dim": 16}}."""
    found: dict[str, dict[str, Any]] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        part, _, name = key.partition(".")
        if not (equals and name):
            raise SettingError(f"set: must be SECTION.KEY=VALUE, got {pair!r}; for example model.dim=16")
        found.setdefault(part, {})[name] = parse_yaml(value)
    return found


def row(name: str) -> dict[str, Any]:
    """A line of the list."""
    experiment = load(name)
    return {
        "experiment": name,
        "scales": " ".join(scales(name)),
        "runs": len(experiment.runs) * len(experiment.seeds) or "",
        "question": experiment.question,
    }


def plan(experiment: Experiment, folder: Path, jobs: int) -> str:
    """The runs that are complete or missing, and minutes on this machine."""
    configs = experiment.configs if experiment.train else {}
    missing = {each: config for each, config in configs.items() if not is_complete(config, folder)}
    lines = [f"{experiment.name} ({experiment.scale}): {experiment.question}"]
    lines += [f"  {run}, seed {seed}: {'missing' if (run, seed) in missing else 'complete'}" for run, seed in configs]
    lines += [f"  before: {command} --out {made}" for made, command in experiment.prepare.items()]
    if experiment.minutes is not None:
        lines.append(
            f"about {experiment.minutes:g} minutes on {'one H200' if experiment.scale == 'gpu' else 'one core'}"
        )
    elif any(not Path(made).exists() for made in experiment.prepare):
        lines.append(f"then {len(missing)} runs, whose time is known once the data are there")
    elif missing:
        one = {config.scaling: config for config in missing.values()}.values()
        seconds = fmean(estimated_seconds(config) for config in one) * len(missing) / min(jobs, len(missing))
        lines.append(f"about {seconds / 60:.1f} minutes to train {len(missing)} runs on this {DEVICE}, {jobs} at once")
    return "\n".join(lines)


def trained(experiment: Experiment, folder: Path, jobs: int) -> dict[str, list[Run]]:
    """The runs by name, after preparing and training what is missing, `jobs` at once."""
    for made, command in experiment.prepare.items():
        if not Path(made).exists():
            scalelong([*shlex.split(command)[1:], "--out", made])
    configs = experiment.configs if experiment.train else {}
    missing = [config for config in configs.values() if not is_complete(config, folder)]
    with ThreadPoolExecutor(max(1, min(jobs, len(missing)))) as pool:
        futures = [pool.submit(train, config, folder) for config in missing]
        try:
            for future in tqdm(as_completed(futures), total=len(futures), desc="runs", disable=None):
                future.result()
        except RuntimeError:
            pool.shutdown(cancel_futures=True)
            raise
    runs: dict[str, list[Run]] = {}
    for (name, _), config in configs.items():
        runs.setdefault(name, []).append(read_run(folder / run_key(config)))
    return runs


def scalelong(command: Sequence[str]) -> None:
    """A command of its own process; it prints its error itself."""
    done = subprocess.run(
        [sys.executable, "-m", "scalelong.cli.main", *command], env=os.environ | {"OMP_NUM_THREADS": "1"}
    )
    if done.returncode:
        raise RuntimeError(
            f"scalelong {shlex.join(command)}: stopped; after mending it, the same command again goes on"
        )


def is_complete(config: RunConfig, folder: Path) -> bool:
    """Whether a run reached its last step and saved it."""
    return (folder / run_key(config) / "checkpoints" / f"step-{config.training.steps:08d}").is_dir()


def train(config: RunConfig, folder: Path) -> None:
    """By the command, so that `scalelong sample`, `evaluate` and `report` take the folder."""
    out = folder / run_key(config)
    file = out.with_name(f"{out.name}.yaml")
    file.parent.mkdir(parents=True, exist_ok=True)
    write_text(file, to_yaml(config))
    scalelong(["train", "--config", str(file), "--out", str(out), "--probe-every", "10"])


def measured(experiment: Experiment, runs: Mapping[str, Sequence[Run]], out: Path) -> Outcome:
    """A row for each run, their means over seeds, the claims, and one picture."""
    rows = [
        {"run": name, "seed": each.seed, **{m: value_of(each, m, experiment.evaluate) for m in experiment.measures}}
        | {"seconds": each.column("train", "seconds")[1][-1]}
        for name, own in runs.items()
        for each in own
    ]
    write_csv(rows, out / "runs.csv")
    draw(runs, rows, experiment.measures, out / f"{experiment.name}.png")
    claims = [judged(rows, claim, measure) for claim in experiment.claims for measure in claim["measures"]]
    return Outcome(claims, experiment.setting, {"table": averages(rows, experiment.measures)})


if __name__ == "__main__":
    sys.exit(main())
