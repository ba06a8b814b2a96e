"""Every piece of the queue trains, small and on a CPU; what its runs change acts, and is what the library computes."""

from __future__ import annotations

import dataclasses
import math
from functools import cache

import pytest
import torch
import train
import variants
from entries import Piece, Run, StudyError, read_queue
from evaluator import Evaluator
from network import Spec, build_model
from piece import specs
from train import Trainer, training_images, training_loss
from weights import BETAS, WEIGHT_DECAY

from scalelong.data import Batch
from scalelong.diffusion import VPSDE
from scalelong.runs.settings import OptimizerSettings
from scalelong.training.distillation import Distillation
from scalelong.training.optimizers import EMA, make_optimizers
from tests.experiments.test_study import written
from tests.experiments.tiny_study import SMALL, tiny_spec

IMAGES = torch.randint(0, 256, (50, 3, 32, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
STEPS = 3


def tiny_runs(piece: Piece) -> dict[str, Spec]:
    """The first seed's runs, with fewer and narrower blocks, unless the piece removes more skips than are left."""
    deep = any("count" in run.options for run in piece.runs)
    runs = [
        dataclasses.replace(run, steps=0, changes={**run.changes, **dict.fromkeys(run.changes.keys() & {"ramp"}, 2)})
        for run in piece.runs
        if run.seed == piece.runs[0].seed
    ]
    sizes = {"dim": 32 if piece.network == "unet" else 16, "depth": 12 if deep else 4, "heads": 2, "patch": 8}
    small = dataclasses.replace(piece, runs=tuple(runs), **sizes, batch=8, lr=1e-2, warmup=1, steps=STEPS)
    found = specs(small, piece.name, "", math.inf, **SMALL)
    return {run.label: spec for run, spec in zip(runs, found, strict=True)}


def trained(spec: Spec) -> tuple[dict[str, torch.Tensor], float]:
    """Weights after a few steps, and the mean training loss."""
    trainer = Trainer(spec, IMAGES)
    for _ in range(STEPS):
        trainer._one_step()
    weights = {name: value.detach().clone() for name, value in trainer.model.named_parameters()}
    return weights, float(trainer.loss_sum) / STEPS


@cache
def unscaled(network: str, dim: int, depth: int, seed: int) -> dict[str, torch.Tensor]:
    """The weights of the plain run of the same size and batches."""
    piece = Piece("plain", (Run("none", seed),), network=network)
    (spec,) = tiny_runs(piece).values()
    return trained(dataclasses.replace(spec, dim=dim, depth=depth))[0]


@pytest.mark.parametrize(
    "piece",
    [
        pytest.param(each, id=each.name, marks=[pytest.mark.slow] * (each.network == "unet"))
        for each in read_queue().pieces
    ],
)
def test_every_piece_trains_and_what_it_changes_acts(piece: Piece) -> None:
    for label, spec in tiny_runs(piece).items():
        weights, loss = trained(spec)
        assert 0 < loss < 10, label
        plain = unscaled(spec.network, spec.dim, spec.depth, spec.seed)
        changes = [float((weights[name] - value).abs().max()) for name, value in plain.items()]
        if label in ("none", "none again=True"):
            assert max(changes) < 1e-6, label
        else:
            assert max(changes) > 1e-5, label
        losses, _ = Evaluator(spec, IMAGES[:10]).losses()
        assert losses.isfinite().all(), label


def test_what_a_network_does_not_have_is_refused(tmp_path) -> None:
    unet = {"name": "p", "network": "unet", "runs": [{"method": "none"}]}
    for entry, message in (
        (unet, r"queue\.p\.network: must be uvit, or unet with ms_per_step, got 'unet'"),
        ({**unet, "ms_per_step": 9, "runs": [{"method": "none", "rate": 0.5}]}, "rate is not for network unet"),
        ({"name": "p", "runs": [{"method": "cs", "placement": "after_norm"}]}, "placement is not for network uvit"),
        ({**unet, "runs": [{"method": "ls", "placement": "after_norm"}]}, "placement: needs constant coefficients"),
        ({"name": "p", "runs": [{"method": "none", "distill": 0}]}, "distill: must be positive, got 0"),
        (
            {"name": "p", "runs": [{"method": "none", "flow": True, "min_snr": 5}]},
            "min_snr: 5 weights the loss of the noise",
        ),
        ({"name": "p", "runs": [{"method": "none", "muon": True, "mup": 64}]}, "muon: has no rates of its own"),
    ):
        with pytest.raises(StudyError, match=message):
            read_queue(written(tmp_path, entry))


def changed(folder, **changes: object) -> Spec:
    return tiny_spec(folder, changes=changes, lr=1e-2)


def test_muon_is_that_of_the_library_s_trainer(tmp_path) -> None:
    """Step by step from the same weights: it rounds to bfloat16, and small differences grow."""
    trainer = Trainer(changed(tmp_path, muon=True), IMAGES)
    model = build_model(trainer.spec)
    settings = OptimizerSettings("muon", lr=1e-2, betas=BETAS, weight_decay=WEIGHT_DECAY)
    for _ in range(2):  # the second time after a reset
        optimizers = make_optimizers(settings, model)
        for step in range(1, 1 + STEPS):
            model.load_state_dict(trainer.model.state_dict())
            trainer._one_step()
            training_loss(model, IMAGES, trainer.index, trainer.uniforms, trainer.noise).backward()
            for optimizer in optimizers:
                optimizer.param_groups[0]["lr"] = 1e-2 * min(1.0, step / trainer.spec.warmup)
                optimizer.step()
                optimizer.zero_grad()
            for ours, theirs in zip(trainer.model.parameters(), model.parameters(), strict=True):
                torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-5)
        trainer.reset()


def test_distillation_is_that_of_the_library_s_trainer(tmp_path) -> None:
    trainer = Trainer(changed(tmp_path, distill=0.5), IMAGES)
    spec, model = trainer.spec, build_model(trainer.spec)
    ema = EMA(model)
    extra = Distillation(variants.distillation(spec.changes), model, ema.model, VPSDE(), spec.seed)
    optimizer = torch.optim.AdamW(model.parameters(), betas=BETAS, weight_decay=WEIGHT_DECAY)
    for step in range(1, 1 + STEPS):
        trainer._one_step()
        loss = training_loss(model, IMAGES, trainer.index, trainer.uniforms, trainer.noise)
        number = torch.arange((step - 1) * spec.batch, step * spec.batch)
        images = training_images(IMAGES, trainer.index, trainer.uniforms)
        (loss + extra(Batch(images, None, number, number, number), {})).backward()
        optimizer.param_groups[0]["lr"] = 1e-2 * min(1.0, step / spec.warmup)
        optimizer.step()
        optimizer.zero_grad()
        ema.update(step)
    for ours, theirs in zip(trainer.model.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("network", "method", "changes"),
    [
        ("uvit", "none", {"flow": True, "muon": True}),
        ("uvit", "ls", {"min_snr": 5.0, "distill": 0.1, "features": True, "mup": 8}),
        ("unet", "cs", {"placement": "after_norm"}),
    ],
)
def test_a_step_compiles_without_a_break(tmp_path, monkeypatch, network, method, changes) -> None:
    """As on a GPU, where it must, but for the backend."""
    options = {"fullgraph": True, "dynamic": False, "backend": "aot_eager"}
    monkeypatch.setattr(train, "compiled", lambda function, _on_gpu: torch.compile(function, **options))
    dim = 32 if network == "unet" else 16
    trainer = Trainer(tiny_spec(tmp_path, network=network, dim=dim, method=method, changes=changes), IMAGES)
    plain = trained(trainer.spec)[1] if network == "unet" else None
    for _ in range(STEPS):
        trainer._one_step()
    assert math.isfinite(float(trainer.loss_sum))
    if plain is not None:
        assert float(trainer.loss_sum) / STEPS == pytest.approx(plain, rel=1e-3)
