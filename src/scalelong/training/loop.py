"""The training loop, with bit-exact resume."""

from __future__ import annotations

import dataclasses
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor, nn

from scalelong.backbones.unet import model_inputs
from scalelong.data import Batch, make_loader
from scalelong.data.images import save_grid
from scalelong.data.loader import caption_rows
from scalelong.diffusion import draw_time_and_noise
from scalelong.errors import NonFiniteError, WriteError
from scalelong.failpoints import failpoint
from scalelong.files import check_space, disk_error, inside, write_text
from scalelong.progress import Progress
from scalelong.runs import CHECKPOINTS, CONFIG, SAMPLES, step_name
from scalelong.runs.config import to_yaml
from scalelong.runs.events import CHECKPOINT_KIND, Events, check_fingerprint, fingerprint
from scalelong.runs.folder import check_folder, claim_folder
from scalelong.runs.settings import Conditioning, RunConfig
from scalelong.skips import coefficients
from scalelong.training.build import build_model, build_objective, build_source, check_config
from scalelong.training.checkpoint import (
    CheckpointError,
    Tensors,
    check_never_saved,
    load_newest,
    save_checkpoint,
)
from scalelong.training.condition import make_condition
from scalelong.training.distillation import Distillation
from scalelong.training.fast import speed_up
from scalelong.training.guard import Guard
from scalelong.training.host import environment, stop_signals
from scalelong.training.optimizers import EMA
from scalelong.training.ranks import Ranks
from scalelong.training.run import TrainedRun, load_pixels
from scalelong.training.shard import ShardedStepper, shard
from scalelong.training.step import Pending, Stepper, Window, learning_rate, sample_indices

logger = logging.getLogger(__name__)

_PATIENCE = 3.0  # seconds to wait for a hanging worker when stopping

# (step, model with gradients) -> values to record, under the observer's `kind` (default "probe")
Observer = Callable[[int, nn.Module], Mapping[str, Any] | None]


class Trainer:
    """A training run on one rank; see also `train`.

    >>> from scalelong.runs.presets import get_preset
    >>> trainer = Trainer(get_preset("digits-demo"), "my-run", [lambda step, model: {"step_twice": 2 * step}])
    >>> trainer.step, trainer.source.shape  # trainer.run() trains
    (0, (1, 8, 8))
    """

    def __init__(self, config: RunConfig, folder: str | Path, observers: Sequence[Observer] = ()) -> None:
        self.ranks = Ranks(config.training.rank_timeout)
        self.device = self.ranks.device
        if "ACCELERATE_USE_CPU" in os.environ and "WORLD_SIZE" not in os.environ and self.device.type == "cpu":
            logger.warning("accelerate launch starts one process on a CPU; for N ranks use torchrun --nproc-per-node N")
        self.folder, self.observers = Path(folder), list(observers)
        data, training, ranks = config.data, config.training, self.ranks.num_processes
        self.config = check_config(config, ranks, self.device.type == "cuda")
        if self.ranks.is_main_process:
            check_folder(self.folder, config)
        failpoint("build.source")
        with self.ranks.main_first():  # downloads, unpacks or encodes for the others
            self.source = build_source(config)
            self.condition = make_condition(config, self.source, self.device)
        self.model = build_model(config, self.source.shape, self.condition.conditioning).to(self.device)
        count, size = training.keep + 1, 4 * sum(p.nbytes for p in self.model.parameters())  # with average, moments
        if self.ranks.is_main_process:
            check_space(self.folder, count * size, f"{count} checkpoints need")
        self.objective = build_objective(config)
        reading = (data.flip, data.workers, data.resident_mb * 2**20, data.worker_timeout)
        self.loader = make_loader(self.source, training.seed, self.device, *reading)
        self.ema = EMA(self.model, training.ema_decay)
        if training.shard == "full":
            self.ema = shard(self.model, self.ema)
        distillation = None
        if config.distillation.weight:
            teacher, process = self.ema.model, self.objective.process
            distillation = Distillation(config.distillation, self.model, teacher, process, training.seed)
        kind = ShardedStepper if training.shard == "full" else Stepper
        self.stepper = kind(config, self.model, self.objective, self.device, ranks, self.condition, distillation)
        if self.stepper.compile == "step":
            self.stepper, self.ema = speed_up(self.stepper, self.ema)
        self.guard = Guard(training)
        self.step, self.seconds, self.window = 0, 0.0, Window()
        self.to_pixels = load_pixels(self.trained(), self.device)
        self.pending: Pending | None = None  # results of the last step, not read yet
        self.stop_requested = False  # on this rank
        self.stopping = False  # on some rank, known to all
        self._lock: IO[str] | None = None  # on the main rank, as the next one
        self._events: Events | None = None

    def run(self) -> Path:
        """Train to the end, or until stopped, and return the run folder."""
        training, is_main = self.config.training, self.ranks.is_main_process
        try:
            if is_main:
                self._lock = claim_folder(self.folder, self.config)
            self.ranks.barrier()
            resumed = self._resume()
            if is_main and self.step <= training.steps:  # a complete run keeps its config
                write_text(self.folder / CONFIG, to_yaml(self.config))
            if self.step >= training.steps:
                logger.info("%s is complete at step %d", self.folder, self.step)
                return self.folder
            if is_main:
                self._events = Events(self.folder, self.step, training.wandb_project)
            if not resumed and "rewind" in (training.on_nonfinite, training.on_spike):
                self._save()  # something to rewind to
            self._record("start", environment(self.device, self.ranks.num_processes, self.source.fingerprint))
            bar = {"total": training.steps, "initial": self.step, "unit": "step", "desc": self.folder.name}
            self._bar = Progress(**bar, disable=not is_main)
            with self._bar, stop_signals(self._request_stop), self.ranks.explained():
                self._train()
        except FileNotFoundError as error:
            gone = f"{error.filename} was removed while the run wrote to it"
            raise CheckpointError(f"step {self.step}: {gone}; run the same command again") from error
        except OSError as error:  # metrics, samples
            if not isinstance(error, WriteError) and not disk_error(error):
                raise
            what = f"step {self.step}: {self.folder} cannot be written to ({error.strerror or error})"
            raise CheckpointError(f"{what}; the checkpoints are intact, free some space and run it again") from error
        finally:
            self._batches: Iterator[Batch] = iter(())  # ends the workers
            self.ranks.close()
            if self._events is not None:
                self._events.close()
            if self._lock is not None:
                self._lock.close()
        return self.folder

    def _train(self) -> None:
        """The loop. The results of a step are read after the next one is launched, so the device never waits."""
        training = self.config.training
        self._start_batches()
        while self.step < training.steps and not self.stopping:
            started = time.perf_counter()
            step = self.step + 1
            batches = islice(self._batches, training.accumulate)
            limit = self.guard.update_limit(self.pending is not None)
            pending = self.stepper.compute(step, batches, self.stop_requested, limit)
            if not self._read_pending():  # of the step before
                continue
            if self.stopping:
                self.stepper.discard()
                self._write_due(last=True)
                break
            if step in self.guard.avoid:
                self.guard.skipped.append(step)
                self.stepper.discard()
            else:
                self.stepper.update(pending)
            self.ema.update(step)
            self.step = self.ranks.step = step
            self.pending = pending
            self.seconds += time.perf_counter() - started
            for observer in self.observers:
                self._record(getattr(observer, "kind", "probe"), observer(step, self.model))
            self.stepper.clear()
            self._bar.update(1)
            if self._is_due():
                started = time.perf_counter()
                if not self._read_pending():
                    continue
                self.seconds += time.perf_counter() - started  # the device was still at work
                self._write_due(last=step == training.steps or self.stopping)

    def _start_batches(self) -> None:
        """This rank's micro-batches from the next step on."""
        config, rank, ranks = self.config, self.ranks.process_index, self.ranks.num_processes
        steps, parts = range(self.step + 1, config.training.steps + 1), range(config.training.accumulate)
        indices = (sample_indices(config, step, part, rank, ranks) for step in steps for part in parts)
        self._batches = self.loader.batches(indices)

    def _read_pending(self) -> bool:
        """Read the last step's results; False if the run was rewound."""
        if self.pending is None:
            return True
        pending, self.pending = self.pending, None
        result = pending.read()
        self.window.add(result)
        self.stopping = result.stop
        try:
            bad = self.guard.review(self.step, result, pending.suspects)
        except NonFiniteError:
            self._record("diverged", {"loss": result.loss, "gradient_norm": result.gradient_norm})
            raise
        if bad is not None:
            if bad["policy"] == "rewind":
                self._rewind()
            self._record(bad.pop("kind"), bad)
        return bad is None or bad["policy"] != "rewind"

    def _rewind(self) -> None:
        """Return to the newest checkpoint; the bad step will be skipped."""
        self.stepper.discard()
        self._resume()
        self._start_batches()
        self._bar.n = self.step
        if self._events is not None:
            self._events.rewind(self.step)

    def _is_due(self) -> bool:
        """True if something is written after this step, so its results are needed now."""
        training = self.config.training
        every = (training.log_every, training.checkpoint_every, training.sample_every or training.steps)
        return self.step == training.steps or any(self.step % interval == 0 for interval in every)

    def _write_due(self, last: bool) -> None:
        """Write the record, checkpoint and sample grid that are due after this step."""
        training, step = self.config.training, self.step
        if step % training.log_every == 0 or last:
            window, self.window = self.window, Window(since=self.seconds)
            values = {
                **window.record(self.seconds, training.batch_size),
                "lr": learning_rate(self.config, step),
                "skipped": len(self.guard.skipped),
                "kappa": [round(k, 6) for k in coefficients(self.model)],
            }
            self._bar.set_postfix(loss=f"{values['loss']:.4f}", img_s=f"{values['images_per_second']:.0f}")
            self._record("train", values)
        if step % training.checkpoint_every == 0 or last:
            self._save()
        if training.sample_every and (step % training.sample_every == 0 or last) and not self.stopping:
            trained = self.trained()
            if self.ranks.is_main_process:
                options = {"seed": training.seed, "to_pixels": self.to_pixels, "progress": False}
                images = trained.sample(self.config.sampling, self.condition, **options)
                save_grid(images, inside(self.folder, SAMPLES, f"{step_name(step)}.png"))
            self.ranks.barrier()

    def _record(self, kind: str, values: Mapping[str, Any] | None) -> None:
        if values and self._events is not None:
            self._events.write(self.step, kind, values)

    def trained(self) -> TrainedRun:
        """The EMA weights at this step; a collective operation."""
        self.ema.gather()
        model, source, conditioning = self.ema.model, self.source, self.condition.conditioning
        return TrainedRun(
            self.folder, self.config, model, self.objective, source.shape, self.step, conditioning, source.fingerprint
        )

    def probe_inputs(self) -> dict[str, Tensor]:
        """A fixed batch of the first 32 images as keyword arguments of the model."""
        source, process = self.source, self.objective.process
        index = torch.arange(min(32, len(source)))
        on_device = index.to(self.device)
        images = source.prepare(source.read_many(index.tolist()).to(self.device), 0, on_device, None)
        t, noise = draw_time_and_noise(process, self.config.training.seed + 1, on_device, source.shape)
        x_t, _, _ = process.diffuse(images, noise, t)
        x, time_input = process.network_input(x_t, t)
        condition = self.condition.at_rows(caption_rows(0, index, index, source.caption_counts))
        return model_inputs(self.model, x, time_input, **condition)

    def _save(self) -> None:
        tensors = self.stepper.tensors(self.ema)
        if self._events is not None:  # the main rank
            state = {
                "step": self.step,
                "seconds": self.seconds,
                "shape": list(self.source.shape),
                "data": self.source.fingerprint,
                "condition": dataclasses.asdict(self.condition.conditioning),
                "window": vars(self.window),
                "guard": self.guard.state(),
                "scaler": self.stepper.scaler.state_dict(),
                "records": fingerprint(self.folder),
            }
            keep, config = self.config.training.keep, to_yaml(self.config)
            save_checkpoint(self.folder / CHECKPOINTS, self.step, tensors, state, keep, config)
            self._events.write(self.step, CHECKPOINT_KIND, {})
        self.ranks.barrier()

    def _resume(self) -> bool:
        """Load the newest intact checkpoint; return False if none was ever written."""
        newest = load_newest(self.folder / CHECKPOINTS)
        if newest is None:
            check_never_saved(self.folder)
            return False
        path, tensors, state = newest
        try:
            self._restore(path, tensors, state)
        except CheckpointError:
            raise
        except (LookupError, TypeError, ValueError, RuntimeError) as error:
            fits = f"{path}: does not fit this run ({type(error).__name__}: {str(error).partition(chr(10))[0]})"
            raise CheckpointError(f"{fits}; remove that folder to fall back to the one before") from error
        if self.ranks.is_main_process and "records" in state:  # older checkpoints lack them
            check_fingerprint(self.folder, state["records"])
        logger.info("resumed from %s", path)
        return True

    def _restore(self, path: Path, tensors: Tensors, state: Mapping[str, Any]) -> None:
        if state["data"] != self.source.fingerprint:
            raise CheckpointError(f"{path}: was trained on other data than {self.source.name} is now; use a new folder")
        if Conditioning.from_state(state.get("condition")) != self.condition.conditioning:
            raise CheckpointError(f"{path}: was trained with other classes or another text encoder; use a new folder")
        self.stepper.restore(tensors, self.ema)
        if self.stepper.scaler.is_enabled():
            self.stepper.scaler.load_state_dict(state["scaler"])
        self.guard.restore(state["guard"])
        self.window = Window(**state["window"])
        self.step, self.seconds = state["step"], state["seconds"]
        self.ranks.step = self.step

    def _request_stop(self) -> None:
        self.stop_requested = True
        self.loader.worker_timeout = min(self.loader.worker_timeout, _PATIENCE)

    def is_stopping(self) -> bool:
        """True once any rank was asked to stop; aborts running evaluations."""
        return self.ranks.announced("stop", self.stop_requested)


def train(config: RunConfig, folder: str | Path, observers: Sequence[Observer] = ()) -> Path:
    """Train `config` into `folder`; calling it again resumes.

    >>> from scalelong.runs.settings import ModelSettings, TrainingSettings
    >>> model = ModelSettings(patch_size=4, dim=16, depth=4, heads=2)
    >>> config = RunConfig(model=model, training=TrainingSettings(steps=2, batch_size=8, sample_every=0))
    >>> train(config, "tiny-run")
    PosixPath('tiny-run')
    """
    return Trainer(config, folder, observers).run()
