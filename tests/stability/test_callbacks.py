"""Observers inside Hugging Face's Trainer and Lightning's, against the same steps in a plain loop."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from scalelong.stability import OscillationProbe, trainer_callback
from tests.packages import FOLDER

transformers = pytest.importorskip("transformers")
ROOT = Path(__file__).parents[2]


class Net(nn.Module):
    """A small U that returns its loss, as Trainer expects it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.down, self.mid_block, self.up = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(8, 4)

    def predict(self, x: Tensor) -> Tensor:
        a = self.down(x)
        return self.up(torch.cat([self.mid_block(a.relu()), a], dim=1))

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:
        y = self.predict(x)
        return {"loss": (y - x).square().mean(), "logits": y} if labels is not None else y


BLOCKS = ["down", "mid_block", "up"]
X = torch.randn(8, 4, generator=torch.Generator().manual_seed(1))


def plain_loop(steps: int) -> list[dict[str, Any]]:
    model = Net()
    probe = OscillationProbe(model, X, blocks=BLOCKS, every=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        (model.predict(X) - X).square().mean().backward()
        optimizer.step()
        probe.step()
        optimizer.zero_grad()
    return probe.history


def check(found: list[dict[str, Any]], steps: int) -> None:
    expected = plain_loop(steps)
    assert [record["step"] for record in found] == list(range(1, steps + 1))
    for mine, theirs in zip(found, expected, strict=True):
        for key in (f"{what}/{block}" for what in ("norm", "gradient") for block in BLOCKS):
            assert mine[key] == pytest.approx(theirs[key], rel=1e-4), key


def test_in_a_trainer_of_transformers(tmp_path) -> None:
    model, steps = Net(), []
    probe = OscillationProbe(model, X, blocks=BLOCKS, every=1)
    args = transformers.TrainingArguments(
        str(tmp_path), per_device_train_batch_size=8, max_steps=3, learning_rate=0.1, lr_scheduler_type="constant",
        optim="sgd", max_grad_norm=0.0, report_to=[], use_cpu=True, save_strategy="no", disable_tqdm=True,
        remove_unused_columns=False, dataloader_pin_memory=False,
    )  # fmt: skip
    data = [{"x": row, "labels": row} for row in X]
    callback = trainer_callback(probe, lambda step, _model: steps.append(step))
    transformers.Trainer(model, args, train_dataset=data, callbacks=[callback]).train()
    check(probe.history, 3)
    assert steps == [1, 2, 3]


LIGHTNING = """
import json, sys, torch
from tests.packages import declare_torchvision
declare_torchvision()
import lightning.pytorch as pl
from scalelong.stability import OscillationProbe, lightning_callback
from tests.stability.test_callbacks import BLOCKS, Net, X

class Module(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = Net()
    def training_step(self, batch, _):
        return (self.net.predict(batch) - batch).square().mean()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

module = Module()
probe = OscillationProbe(module.net, X, blocks=BLOCKS, every=1)
quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
trainer = pl.Trainer(max_steps=4, accelerator="cpu", callbacks=[lightning_callback(probe)], **quiet)
trainer.fit(module, torch.utils.data.DataLoader(X, batch_size=8))
json.dump(probe.history, open(sys.argv[1], "w"))
"""


@pytest.mark.slow
def test_in_a_trainer_of_lightning(tmp_path) -> None:
    if not (FOLDER / "lightning").exists():
        pytest.skip("make test-slow installs tests/packages.txt")
    paths = os.pathsep.join([*sys.path, str(ROOT), str(FOLDER)])
    done = subprocess.run(
        [sys.executable, "-c", LIGHTNING, tmp_path / "found.json"], env={**os.environ, "PYTHONPATH": paths},
        cwd=tmp_path, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads((tmp_path / "found.json").read_text())
    check(found, len(found))
    assert len(found) >= 3  # Lightning clears gradients before the next step: the last step's are not seen
