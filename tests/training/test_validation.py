"""Validation loss in ten bins of noise: what is computed, recorded and reported."""

from __future__ import annotations

import pytest
import torch
from PIL import Image

from scalelong.backbones import as_network
from scalelong.data import DataError, to_float
from scalelong.report import compare_runs, write_report
from scalelong.report.sentences import noise_bins
from scalelong.runs.reader import read_run
from scalelong.training import Trainer, read_events
from scalelong.training.validation import ValidationObserver
from tests.training.tiny import tiny


def validated(folder, **changes) -> list[dict]:
    trainer = Trainer(tiny(**changes), folder)
    trainer.observers.append(ValidationObserver(trainer, "train", every=4, images=205))
    trainer.run()
    return [record for record in read_events(folder)[0] if record["kind"] == "validation"]


def test_bins_cover_the_noise_levels_and_average_to_the_loss(tmp_path) -> None:
    trainer = Trainer(tiny(), tmp_path / "run")
    observer = ValidationObserver(trainer, "train", every=4, images=205)
    record = observer(4, trainer.model)
    assert record is not None and record["images"] == 200 and len(record["bins"]) == 10
    assert sum(record["bins"]) / 10 == pytest.approx(record["loss"])
    assert observer(5, trainer.model) is None
    images = to_float(torch.stack([trainer.source.read_many([i])[0] for i in range(200)]))
    generator, errors = torch.Generator().manual_seed(1), []
    for part in range(10):  # the same expectation, with other times and noises
        t = (part + torch.rand(200, generator=generator)) / 10
        noise = torch.randn(images.shape, generator=generator)
        with torch.no_grad():
            loss = trainer.objective.loss(as_network(trainer.ema.model), images, noise, t)
        errors.append(float(loss.mean()))
    assert record["bins"] == pytest.approx(errors, rel=0.15)


def test_the_record_is_the_same_after_a_resume_and_reaches_the_report(tmp_path) -> None:
    whole = validated(tmp_path / "none", scaling_method="none")
    assert [record["step"] for record in whole] == [4, 8, 12]
    validated(tmp_path / "half", scaling_method="none", training_steps=4)
    resumed = validated(tmp_path / "half", scaling_method="none")
    assert [(r["step"], r["bins"]) for r in resumed] == [(r["step"], r["bins"]) for r in whole]
    validated(tmp_path / "cs", scaling_method="cs")
    runs = [read_run(tmp_path / name) for name in ("none", "cs")]
    comparison = compare_runs(runs)
    gaps = comparison.noise_gaps(comparison.groups[1])
    assert gaps == pytest.approx([a / b - 1 for a, b in zip(runs[1].noise_bins(), whole[-1]["bins"], strict=True)])
    assert noise_bins(comparison)[0].startswith("cs 0.7: ")
    page = write_report(runs, tmp_path / "report.html").read_text()
    assert "Validation loss by noise" in page and noise_bins(comparison)[0].split(" ")[0] in page


def test_bins_are_compared_at_the_last_common_step(tmp_path) -> None:
    validated(tmp_path / "none", scaling_method="none")
    validated(tmp_path / "cs", scaling_method="cs", training_steps=8)
    runs = [read_run(tmp_path / name) for name in ("none", "cs")]
    comparison = compare_runs(runs)
    both = zip(runs[1].noise_bins(8), runs[0].noise_bins(8), strict=True)
    assert comparison.noise_gaps(comparison.groups[1]) == pytest.approx([a / b - 1 for a, b in both])
    records = tmp_path / "cs" / "metrics.jsonl"
    lines = [
        line for line in records.read_text().splitlines(True) if '"validation"' not in line or '"step": 8' not in line
    ]
    records.write_text("".join(lines))
    runs[1] = read_run(tmp_path / "cs")
    both = zip(runs[1].noise_bins(4), runs[0].noise_bins(4), strict=True)
    comparison = compare_runs(runs)
    assert comparison.noise_gaps(comparison.groups[1]) == pytest.approx([a / b - 1 for a, b in both])


def test_a_split_with_other_classes_is_refused(tmp_path) -> None:
    def folder(split: str, classes: list[str]) -> None:
        for name in classes:
            (tmp_path / "data" / split / name).mkdir(parents=True)
            Image.new("RGB", (8, 8)).save(tmp_path / "data" / split / name / "0.png")

    folder("train", ["ant", "bee", "cat"])
    folder("test", ["ant", "cat"])
    changes = {"data_name": f"folder:{tmp_path / 'data'}", "condition_kind": "class", "training_batch_size": 1}
    trainer = Trainer(tiny(**changes), tmp_path / "run")
    with pytest.raises(DataError, match=r"^validate-split: .* has no 'val'; it has test, train"):
        ValidationObserver(trainer, "val", images=10)
    with pytest.raises(DataError, match="validate-split: 'test': class 1 is 'cat', in the training data 'bee'"):
        ValidationObserver(trainer, "test", images=10)


def test_bad_requests_are_refused(tmp_path) -> None:
    trainer = Trainer(tiny(), tmp_path / "run")
    with pytest.raises(ValueError, match="validate-split: digits has no 'test'; it has train"):
        ValidationObserver(trainer)
    with pytest.raises(ValueError, match=r"validate-images: must be at least 10"):
        ValidationObserver(trainer, "train", images=5)
