"""An experiment as its settings.yaml describes it, checked before anything is trained."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import Any

from scalelong.errors import SettingError, require, short, unknown_name
from scalelong.runs.config import read_yaml, with_settings
from scalelong.runs.presets import get_preset
from scalelong.runs.settings import RunConfig, ScalingSettings, dotted
from scalelong.training.build import check_config

EXPERIMENTS = Path(__file__).parent
SECTIONS = tuple(vars(RunConfig()))  # data, model, scaling, ...: as in a run's config.yaml
SCALE_KEYS = ("preset", "command", "options", "prepare", "evaluate", "minutes", *SECTIONS)
KEYS = ("question", "page", "seeds", "scales", "runs", "train", "measures", "claims", *SCALE_KEYS)
CLAIM_KEYS = {"paper", "lower", "than", "measures", "by"}
OPTIONAL: dict[str, type] = {
    **dict.fromkeys(("page", "command"), str),
    **dict.fromkeys(("options", "prepare", "evaluate", "runs"), dict),
    **dict.fromkeys(("measures", "claims", "seeds"), list),
    "train": bool,
}
MEASURES = (
    "oscillation_all_blocks",  # relative oscillation of features after the warm-up: mean over the blocks
    "oscillation_middle",  # of the middle block
    "gradient_oscillation",
    "gradient_norm_spread",
    "final_loss",  # of training, over the last fifth
    "loss_on_fixed_noise",  # of the averaged weights: 2,048 training images, times and noises, the same for every run
    "test_loss",  # the same on test images
)
FIXED_SEED = 1_000_003  # of the times and noises on which runs are compared; no run's own
_NOT_IN_KEY = ("training.keep", "data.workers", "data.root", "training.wandb_project")


@dataclass(frozen=True)
class Experiment:
    """One experiment at one scale. Runs have the first seed; `configs` has them with every seed."""

    name: str
    scale: str
    question: str
    page: str = ""  # of the docs, that discusses it
    command: str = ""  # starts it, if `run.py` does not
    seeds: tuple[int, ...] = (0, 1, 2)
    runs: Mapping[str, RunConfig] = field(default_factory=dict)
    train: bool = True  # False: measure.py trains the runs
    measures: tuple[str, ...] = ()
    claims: tuple[Mapping[str, Any], ...] = ()
    evaluate: Mapping[str, str] = field(default_factory=dict)  # column -> flags of `scalelong evaluate`
    options: Mapping[str, Any] = field(default_factory=dict)  # of measure.py
    prepare: Mapping[str, str] = field(default_factory=dict)  # folder -> command that makes it
    minutes: float | None = None  # where they cannot be estimated from the runs

    @property
    def folder(self) -> Path:
        return EXPERIMENTS / self.name

    @property
    def configs(self) -> dict[tuple[str, int], RunConfig]:
        """Every run with every seed."""
        return {
            (name, seed): replace(config, training=replace(config.training, seed=seed))
            for name, config in self.runs.items()
            for seed in self.seeds
        }

    @property
    def setting(self) -> str:
        """What is trained, in words."""
        config = next(iter(self.runs.values()))
        model, training = config.model, config.training
        network = f"U-ViT of depth {model.depth}" if model.backbone == "uvit" else f"UNet {list(model.channels)}"
        size = f" at {config.data.image_size}x{config.data.image_size}" if config.data.image_size else ""
        return (
            f"{network} on {config.data.name}{size}, {training.steps} steps (warm-up {config.optimizer.warmup_steps}), "
            f"batch {training.batch_size}, lr {config.optimizer.lr:g}"
        )

    @property
    def measure(self) -> ModuleType | None:
        """The experiment's own measure.py, if there is one."""
        path = self.folder / "measure.py"
        if not path.is_file():
            return None
        sys.path[:0] = [str(folder) for folder in (self.folder, EXPERIMENTS) if str(folder) not in sys.path]
        name = f"measure_{self.name.replace('-', '_')}"
        if name not in sys.modules:
            spec = importlib.util.spec_from_file_location(name, path)
            assert spec is not None and spec.loader is not None
            sys.modules[name] = module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
        return sys.modules[name]


def names() -> list[str]:
    """All experiments: the folders with a settings.yaml."""
    return sorted(path.parent.name for path in EXPERIMENTS.glob("*/settings.yaml"))


def scales(name: str) -> list[str]:
    """The scales of an experiment; none if it has a command of its own."""
    if name not in names():
        raise unknown_name("experiment", name, names())
    return list(_mapping(read_yaml(EXPERIMENTS / name / "settings.yaml"), name).get("scales") or {})


def load(
    name: str,
    scale: str = "",  # default: the first
    *,
    steps: int = 0,  # of every run, the warm-up in proportion; 0: as in the file
    seeds: Sequence[int] = (),
    changes: Mapping[str, Any] | None = None,  # sections or options, over the file's
) -> Experiment:
    """Read and check the settings of an experiment."""
    known, where = scales(name), f"{name}/settings.yaml"
    if scale and scale not in known:
        raise unknown_name(f"{where}: scales", scale, known)
    scale = scale or next(iter(known), "")
    content = _keys(read_yaml(EXPERIMENTS / name / "settings.yaml"), KEYS, where)
    at_scale = _keys((content.get("scales") or {}).get(scale) or {}, SCALE_KEYS, f"{where}: scales.{scale}")
    changes = _keys(changes or {}, ("options", *SECTIONS), "set")
    require(isinstance(content.get("question"), str), f"{where}: question", "a sentence", content.get("question"))
    for key, kind in OPTIONAL.items():
        for part in (content, at_scale):
            require(isinstance(part.get(key, kind()), kind), f"{where}: {key}", f"a {kind.__name__}", part.get(key))
    base = _base(content, at_scale, scale, where)
    base = with_settings(base, {key: changes[key] for key in changes if key in SECTIONS}, "set")
    if steps:
        warmup = base.optimizer.warmup_steps * steps // base.training.steps
        base = with_settings(base, {"training": {"steps": steps}, "optimizer": {"warmup_steps": warmup}}, "steps")
    evaluate = {**content.get("evaluate", {}), **at_scale.get("evaluate", {})}
    runs = {
        run: _recorded(with_settings(base, settings, f"{where}: runs.{run}"), bool(evaluate), f"{where}: runs.{run}")
        for run, settings in content.get("runs", {}).items()
    }
    seeds = tuple(seeds or content.get("seeds", Experiment.seeds))
    require(len(set(seeds)) == len(seeds) > 0, f"{where}: seeds", "one or more different numbers", list(seeds))
    options = {**content.get("options", {}), **at_scale.get("options", {})}
    _keys(changes.get("options", {}), tuple(options), "set: options")
    experiment = Experiment(
        name, scale, " ".join(content["question"].split()), content.get("page", ""),
        at_scale.get("command", content.get("command", "")), seeds,
        runs, content.get("train", True), tuple(content.get("measures", ())), tuple(content.get("claims", ())), evaluate,
        {**options, **changes.get("options", {})},
        {**content.get("prepare", {}), **at_scale.get("prepare", {})}, at_scale.get("minutes"),
    )  # fmt: skip
    _check(experiment, where)
    return experiment


def _base(content: dict[str, Any], at_scale: dict[str, Any], scale: str, where: str) -> RunConfig:
    """The unscaled run: a preset of the experiment's, or defaults.yaml, with the settings of the file and the scale."""
    defaults = read_yaml(EXPERIMENTS / "defaults.yaml").get(scale, {})
    own = {**content, **at_scale}
    first = own if "preset" in own else defaults
    try:
        config = get_preset(first["preset"]) if "preset" in first else RunConfig()
    except SettingError as error:
        raise SettingError(f"{where}: {error}") from None
    config = replace(config, scaling=ScalingSettings("none"))
    for layer in ({} if "preset" in own else defaults, content, at_scale):
        config = with_settings(config, {key: layer[key] for key in layer if key in SECTIONS}, where)
    return config


def _recorded(config: RunConfig, with_samples: bool, where: str) -> RunConfig:
    """With what the measures need: a record every ten steps, one checkpoint, and samples at the end if any."""
    steps = config.training.steps
    training = replace(config.training, log_every=10, checkpoint_every=steps, sample_every=steps if with_samples else 0)
    try:
        return check_config(replace(config, training=training), on_gpu=True)
    except ValueError as error:
        raise SettingError(f"{where}: {error}") from None


def _check(experiment: Experiment, where: str) -> None:
    """What the parts of an experiment say of each other."""
    keys: dict[str, str] = {}
    for run, config in experiment.runs.items():
        if other := keys.get(run_key(config)):
            raise SettingError(f"{where}: runs: {other!r} and {run!r} have the same settings; remove one")
        keys[run_key(config)] = run
    known = (*MEASURES, *experiment.evaluate)
    for measure in experiment.measures:
        if measure not in known:
            raise unknown_name(f"{where}: measures", measure, known)
    for claim in experiment.claims:
        missing = CLAIM_KEYS - {"by"} - _keys(claim, tuple(CLAIM_KEYS), f"{where}: claims").keys()
        require(not missing, f"{where}: claims", f"given with {', '.join(sorted(missing))}", claim)
        require(claim.get("by", "seed") in ("seed", "mean"), f"{where}: claims: by", "seed or mean", claim.get("by"))
        lists = all(isinstance(claim[key], list) and claim[key] for key in ("lower", "than", "measures"))
        require(lists, f"{where}: claims", "lists of lower, than and measures", claim)
        for run in (*claim["lower"], *claim["than"]):
            if run not in experiment.runs:
                raise unknown_name(f"{where}: claims", run, experiment.runs)
        for measure in claim["measures"]:
            if measure not in experiment.measures:
                raise unknown_name(f"{where}: claims", measure, experiment.measures)
    own = (experiment.folder / "measure.py").is_file()
    holds = bool(experiment.command or own or (experiment.runs and experiment.measures))
    require(holds, where, "given runs and measures, a measure.py or a command", experiment.name)


def run_key(config: RunConfig) -> str:
    """A readable name and a hash of every setting that is not the default: equal runs are trained once."""
    usual = dotted(RunConfig())
    settings = {k: v for k, v in dotted(config).items() if k not in _NOT_IN_KEY and v != usual[k]}
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True, default=str).encode()).hexdigest()[:8]
    training, data = config.training, config.data.name.replace("/", "_").replace(":", "_")
    return (
        f"{data}-batch{training.batch_size}-{config.scaling.label.replace(' ', '')}-steps{training.steps}"
        f"-seed{training.seed}-{digest}"
    )


def _mapping(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise SettingError(f"{where}: must hold keys and values, got {short(value)}")
    return dict(value)


def _keys(value: Any, known: Sequence[str], where: str) -> dict[str, Any]:
    """The mapping, if it has no other keys than these."""
    found = _mapping(value, where)
    for key in found:
        if key not in known:
            raise unknown_name(f"{where}: key", key, known)
    return found
