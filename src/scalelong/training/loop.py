"""The training loop: run the same command again and it goes on where it stood, to the bit."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import IO, Any

import torch
from accelerate import PartialState
from torch import nn
from tqdm import tqdm

from scalelong.data import load_source, make_loader
from scalelong.data.grid import save_grid
from scalelong.runs.events import CHECKPOINT_KIND, Events
from scalelong.runs.settings import Conditioning, RunConfig
from scalelong.skips import coefficients
from scalelong.training.build import build_model, build_objective, build_pixels
from scalelong.training.checkpoint import (
    Checkpoint,
    CheckpointError,
    load_newest,
    optimizer_tensors,
    restore_optimizer,
    save_checkpoint,
)
from scalelong.training.checks import check_config
from scalelong.training.condition import make_condition
from scalelong.training.draw import draw_grid
from scalelong.training.ema import Ema
from scalelong.training.nonfinite import Guard, describe
from scalelong.training.record import Window, environment
from scalelong.training.run import CHECKPOINTS, SAMPLES, check_never_saved, claim_folder
from scalelong.training.signals import StopSignals
from scalelong.training.step import Pending, Stepper, StepResult, index_batches, learning_rate

logger = logging.getLogger(__name__)

# (step, model with gradients) -> values to record, as records of the observer's `kind`, by default "probe"
Observer = Callable[[int, nn.Module], Mapping[str, Any] | None]


class Trainer:
    """Everything a run holds, on one rank."""

    def __init__(self, config: RunConfig, folder: str | Path, observers: Sequence[Observer] = ()) -> None:
        # without the flag, ranks on CPUs do not find each other
        self.ranks = PartialState(cpu=not torch.cuda.is_available())
        self.device = self.ranks.device
        self.config = check_config(config, self.ranks.num_processes, self.device.type == "cuda")
        self.folder = Path(folder)
        self.observers = list(observers)
        with self.ranks.main_process_first():  # the others find what it fetched, unpacked or encoded
            self.source = load_source(
                config.data.name, image_size=config.data.image_size, split=config.data.split, root=config.data.root
            )
            self.condition = make_condition(config, self.source, self.device)
        self.model = build_model(config, self.source.shape, self.condition.sizes).to(self.device)
        self._lock: IO[str] | None = None
        if self.ranks.is_main_process:
            self._lock = claim_folder(self.folder, config, checkpoint_bytes(self.model))
        self.ranks.wait_for_everyone()
        self.objective = build_objective(config)
        self.to_pixels = build_pixels(config, self.device)
        self.loader = make_loader(
            self.source,
            config.training.seed,
            self.device,
            flip=config.data.flip,
            workers=config.data.workers,
            resident_limit_bytes=config.data.resident_mb * 2**20,
        )
        self.ema = Ema(self.model, config.training.ema_decay)
        self.stepper = Stepper(
            config, self.model, self.objective, self.device, self.ranks.num_processes, self.condition
        )
        self.guard = Guard(config.training.on_nonfinite, config.training.max_nonfinite)
        self.step = 0
        self.seconds = 0.0
        self.window = Window()
        self.unsettled: Pending | None = None  # the last step's numbers, not read yet
        self.asked_to_stop = False  # this rank got a signal
        self.stopping = False  # some rank did, and all know

    def run(self) -> Path:
        """Train to the end (or until asked to stop) and return the run's folder."""
        try:
            self._resume()
            if self.step < self.config.training.steps:
                self._go_on()
            else:
                logger.info("%s is complete at step %d", self.folder, self.step)
        finally:
            if self._lock is not None:
                self._lock.close()
        return self.folder

    def _go_on(self) -> None:
        events = (
            Events(self.folder, self.step, self.config.training.wandb_project) if self.ranks.is_main_process else None
        )
        try:
            if self.step == 0 and self.config.training.on_nonfinite == "rewind":
                self._save(events)  # something to rewind to
            with StopSignals(self._ask_to_stop):
                self._train(events)
        finally:
            if events is not None:
                events.close()

    def _train(self, events: Events | None) -> None:
        if events is not None:
            events.write(
                self.step, "start", environment(self.device, self.ranks.num_processes, self.source.fingerprint)
            )
        bar = tqdm(
            total=self.config.training.steps,
            initial=self.step,
            unit="step",
            desc=str(self.folder.name),
            disable=None if self.ranks.is_main_process else True,
        )
        with bar:
            while self.step < self.config.training.steps and not self.stopping:
                self._stretch(events, bar)

    def _stretch(self, events: Events | None, bar: Any) -> None:
        """Steps in a row, until the end, a request to stop, or a rewind.

        What a step found is read after the next one was started, so that the device never waits; the update itself is
        left out on the device if the step is not sound.
        """
        settings = self.config.training
        rank, ranks = self.ranks.process_index, self.ranks.num_processes
        batches = self.loader.batches(index_batches(self.config, self.step + 1, rank, ranks))
        while self.step < settings.steps:
            started = time.perf_counter()
            step = self.step + 1
            pending = self.stepper.compute(step, islice(batches, settings.accumulate), self.asked_to_stop)
            settled = self._settle(events, bar)
            if not settled or self.stopping:
                self.stepper.leave_out()
                self.stepper.clear()
                if settled:
                    self._write_due(events, bar, last=True)
                return
            if step in self.guard.avoid:
                self.guard.skipped.append(step)
                self.stepper.leave_out()
            else:
                self.stepper.update(pending)
            self.step, self.unsettled = step, pending
            self.ema.update(self.model, step)
            self.seconds += time.perf_counter() - started
            self._observe(events)
            self.stepper.clear()
            bar.update(1)
            if self._is_due():
                started = time.perf_counter()
                if not self._settle(events, bar):
                    return
                self.seconds += time.perf_counter() - started  # the device was still at work
                self._write_due(events, bar, last=step == settings.steps or self.stopping)
                if self.stopping:
                    return

    def _is_due(self) -> bool:
        """Whether something is written after this step, so that its numbers are needed now."""
        settings = self.config.training
        every = (settings.log_every, settings.checkpoint_every, settings.sample_every or settings.steps)
        return self.step == settings.steps or any(self.step % interval == 0 for interval in every)

    def _settle(self, events: Events | None, bar: Any) -> bool:
        """Read what the last step found; False if the run was rewound."""
        if self.unsettled is None:
            return True
        result, self.unsettled = self.unsettled.read(self.ranks.num_processes), None
        self.window.add(result)
        self.stopping = result.stop
        if self.step in self.guard.avoid or result.finite or self._judge(self.step, result) == "skip":
            return True
        self._rewind(events, bar)
        return False

    def _observe(self, events: Events | None) -> None:
        for observer in self.observers:
            values = observer(self.step, self.model)
            if values and events is not None:
                events.write(self.step, getattr(observer, "kind", "probe"), values)

    def _rewind(self, events: Events | None, bar: Any) -> None:
        """Back to the newest checkpoint; the step that went wrong is left out when it comes again."""
        self._resume()
        bar.n = self.step
        if events is not None:
            events.rewind(self.step)

    def _judge(self, step: int, result: StepResult) -> str:
        sentence = describe(step, result.loss, result.gradient_norm, result.suspects)
        verdict = self.guard.judge(step, sentence)
        logger.warning("%s; policy: %s", sentence, verdict)
        return verdict

    def _write_due(self, events: Events | None, bar: Any, last: bool) -> None:
        """What is due after this step, or at the end: a record, a grid of samples, a checkpoint."""
        settings, step = self.config.training, self.step
        if step % settings.log_every == 0 or last:
            record = self._record()
            bar.set_postfix(loss=f"{record['loss']:.4f}", img_s=f"{record['images_per_second']:.0f}")
            if events is not None:
                events.write(step, "train", record)
        if settings.sample_every and (step % settings.sample_every == 0 or last) and self.ranks.is_main_process:
            self._draw_samples()
        if step % settings.checkpoint_every == 0 or last:
            self._save(events)

    def _record(self) -> dict[str, Any]:
        window, self.window = self.window, Window(since=self.seconds)
        return {
            **window.record(self.seconds, self.config.training.batch_size),
            "lr": learning_rate(self.config, self.step),
            "skipped": len(self.guard.skipped),
            "kappa": [round(k, 6) for k in coefficients(self.model)],
        }

    def _draw_samples(self) -> None:
        images = draw_grid(self.config, self.objective, self.ema.model, self.source.shape, self.condition)
        save_grid(self.to_pixels(images), self.folder / SAMPLES / f"step-{self.step:08d}.png")

    # ------------------------------------------------------------------------------------------------ saving, resuming

    def _parameter_names(self) -> list[str]:
        return [name for name, _ in self.model.named_parameters()]

    def _save(self, events: Events | None) -> None:
        if events is not None:  # the main process
            tensors = {
                "model": self.model.state_dict(),
                "ema": self.ema.model.state_dict(),
                "optimizer": optimizer_tensors(self.stepper.optimizer, self._parameter_names()),
            }
            try:
                save_checkpoint(
                    self.folder / CHECKPOINTS, self.step, Checkpoint(tensors, self._state()), self.config.training.keep
                )
            except OSError as error:
                raise CheckpointError(
                    f"step {self.step}: the checkpoint could not be written ({error}); the one before it is intact, "
                    "run the same command again once there is space"
                ) from error
            events.write(self.step, CHECKPOINT_KIND, {})
        self.ranks.wait_for_everyone()

    def _state(self) -> dict[str, Any]:
        return {
            "step": self.step,
            "seconds": self.seconds,
            "shape": list(self.source.shape),
            "data": self.source.fingerprint,
            "condition": dataclasses.asdict(self.condition.sizes),
            "window": vars(self.window),
            "guard": self.guard.state(),
            "scaler": self.stepper.scaler.state_dict(),
        }

    def _resume(self) -> None:
        """Go on from the newest whole checkpoint, or stay at step 0 if there never was one."""
        newest = load_newest(self.folder / CHECKPOINTS)
        if newest is None:
            check_never_saved(self.folder)
            return
        path, checkpoint = newest
        if checkpoint.state["data"] != self.source.fingerprint:
            raise CheckpointError(
                f"{path}: was trained on other data than {self.source.name} holds now; use a new folder"
            )
        if Conditioning.from_state(checkpoint.state.get("condition")) != self.condition.sizes:
            raise CheckpointError(
                f"{path}: was trained with other classes or another text encoder ({self.config.condition.encoder!r} now "
                "has other weights); put them back, or use a new folder"
            )
        self.model.load_state_dict(checkpoint.tensors["model"])
        self.ema.model.load_state_dict(checkpoint.tensors["ema"])
        restore_optimizer(self.stepper.optimizer, self._parameter_names(), checkpoint.tensors["optimizer"])
        if self.stepper.scaler.is_enabled():
            self.stepper.scaler.load_state_dict(checkpoint.state["scaler"])
        self.guard.restore(checkpoint.state["guard"])
        self.window = Window(**checkpoint.state["window"])
        self.step, self.seconds = checkpoint.state["step"], checkpoint.state["seconds"]
        logger.info("resumed from %s", path)

    def _ask_to_stop(self) -> None:
        self.asked_to_stop = True


def checkpoint_bytes(model: nn.Module) -> int:
    """Weights, average, and AdamW's two moments."""
    return 4 * sum(p.numel() * p.element_size() for p in model.parameters())


def train(config: RunConfig, folder: str | Path, observers: Sequence[Observer] = ()) -> Path:
    """Train what `config` describes into `folder`; the same call again resumes."""
    return Trainer(config, folder, observers).run()
