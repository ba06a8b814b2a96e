"""Callbacks that run observers such as `OscillationProbe` in Hugging Face's Trainer and Lightning.

An observer is called as observer(step, model) after each optimizer step, before gradients are cleared; it returns values or
None.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from scalelong.training.loop import Observer


def trainer_callback(*observers: Observer) -> Any:
    """A `TrainerCallback` of transformers that calls observers; `transformers.Trainer(..., callbacks=[callback])`.

    >>> steps = []
    >>> callback = trainer_callback(lambda step, model: steps.append(step))
    >>> from transformers import TrainerCallback
    >>> isinstance(callback, TrainerCallback)
    True
    """
    from transformers import TrainerCallback

    class ObserverCallback(TrainerCallback):  # type: ignore[misc]
        def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
            for observer in observers:
                observer(state.global_step + 1, kwargs["model"])  # the step is counted after this event

    return ObserverCallback()


def lightning_callback(*observers: Observer) -> Any:
    """A `Callback` of Lightning that calls observers and logs what they return; `Trainer(callbacks=[callback])`.

    The model they get is the LightningModule; `OscillationProbe` measures the one it was built with.

    >>> lightning_callback()  # without Lightning
    Traceback (most recent call last):
    ModuleNotFoundError: lightning_callback: Lightning is not installed; pip install lightning
    """
    names = [
        name for name in ("lightning.pytorch", "pytorch_lightning") if importlib.util.find_spec(name.split(".")[0])
    ]
    if not names:
        raise ModuleNotFoundError("lightning_callback: Lightning is not installed; pip install lightning")
    base: Any = importlib.import_module(names[0]).Callback

    class ObserverCallback(base):  # type: ignore[misc]
        seen = 0

        def on_before_zero_grad(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:  # noqa: ARG002
            """Called before gradients are cleared; the first call precedes any step."""
            if not trainer.global_step or trainer.global_step == self.seen:
                return
            self.seen = trainer.global_step
            for observer in observers:
                values = observer(trainer.global_step, pl_module)
                if values and trainer.logger is not None:
                    trainer.logger.log_metrics(dict(values), step=trainer.global_step)

    return ObserverCallback()
