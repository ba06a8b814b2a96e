"""The transfer sweep, small and on a CPU: which runs it trains, that it resumes, and that its muP is the library's."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import sweep
import torch
from network import build_model
from train import Trainer, training_loss
from weights import BETAS, WEIGHT_DECAY, Weights

import scalelong
from scalelong import mup
from tests.experiments.tiny_study import tiny_spec


def job(tmp_path, what: str, width: int, **changes) -> sweep.Job:
    options = sweep.arguments([what, "--tiny", "--work", str(tmp_path), "--rate", "1e-3"])
    found = next(each for each in sweep.jobs(options, tmp_path, "", float("inf")) if each.spec.dim == width)
    return replace(found, **changes)


def test_it_goes_downhill_and_trains_what_is_around_the_best(tmp_path) -> None:
    values = tuple(2.0**power for power in range(-14, -5))
    wide = job(tmp_path, "rates", 64, values=values, every=False, guess=2.0**-8)
    losses: dict[float, float] = {}
    while (value := sweep.next_value(wide, losses, first=True)) is not None:
        losses[value] = abs(value - 2.0**-11)
    assert sorted(losses) == [2.0**power for power in range(-13, -7)]  # from the guess down, and around the best
    again: dict[float, float] = {}
    best = replace(wide, guess=2.0**-11)
    while (value := sweep.next_value(best, again, first=False)) is not None:
        again[value] = value  # another seed trains the same values, whatever it finds
    assert sorted(again) == [2.0**power for power in range(-13, -8)]


@pytest.mark.parametrize("kappa", [1.0, 0.5])
def test_its_step_is_that_of_torch_in_the_librarys_mup(tmp_path, kappa: float) -> None:
    wide = job(tmp_path, "kappas", 64)
    trainer = Trainer(wide.spec, sweep.read_images(wide.spec)[0], torch.zeros(()))
    sweep.restart(trainer, wide, wide.point(kappa, seed=3))
    model = build_model(replace(wide.spec, seed=3, changes={"mup": 32}))
    expected, start = scalelong.remove(model, "scaling"), Weights(build_model(trainer.spec), torch.float32).master
    assert expected is None and torch.equal(trainer.weights.master, start)
    if kappa != 1:
        mup.scale_skip_weights(model, "cs", kappa=kappa)
    groups = mup.param_groups(model, 1.0, WEIGHT_DECAY)
    optimizer = torch.optim.AdamW(groups, betas=BETAS, eps=1e-8)
    for step in range(1, 4):
        trainer._one_step()
        loss = training_loss(model, trainer.images, trainer.index, trainer.uniforms, trainer.noise)
        optimizer.zero_grad()
        loss.backward()
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 * min(1.0, step / trainer.spec.warmup) * group["lr_multiplier"]
        optimizer.step()
    x, t = torch.randn(2, 3, 32, 32), torch.tensor([10.0, 500.0])
    torch.testing.assert_close(trainer.model(x, t), model(x, t), rtol=1e-3, atol=1e-5)


def test_the_best_rate_is_that_of_the_narrowest_network(tmp_path) -> None:
    for width, best in ((1024, 2.0**-12), (128, 2.0**-10)):  # w1024 comes before w128 among the files
        runs = [{"parametrization": "mup", "width": width, "lr": lr, "kappa": 1.0, "seed": 0, "loss": abs(lr - best)}
                for lr in (2.0**-10, 2.0**-12)]  # fmt: skip
        (tmp_path / f"mup-w{width}.jsonl").write_text("".join(json.dumps(run) + "\n" for run in runs))
    assert sweep.best_rate(tmp_path) == 2.0**-10


def test_a_command_is_recorded_such_that_it_can_be_repeated() -> None:
    given = ["kappas", "--steps", "40", "--base", "128", "--widths", "256", "--rate", "0.001", "--seeds", "0", "1"]
    command = sweep.about(sweep.arguments(given), 60.0)["command"].split()
    assert vars(sweep.arguments(command[2:])) == vars(sweep.arguments(given))


@pytest.mark.slow
def test_it_trains_resumes_summarizes_and_plots(tmp_path, monkeypatch, capsys) -> None:
    for what in ("rates", "kappas", "plot", "rates"):
        given = [what, "--tiny", "--seeds", "0", "--work", str(tmp_path), "--out", str(tmp_path)]
        monkeypatch.setattr("sys.argv", ["sweep.py", *given])
        if what == "plot":
            sweep.main()
        else:
            with pytest.raises(SystemExit, match="0"):
                sweep.main()
        assert "moves by a factor of" in capsys.readouterr().out
    points = json.loads((tmp_path / "rates" / "transfer.json").read_text())
    assert len(points) == 2 * 2 * 3  # the second time nothing was trained
    assert {point["kappa"] for point in json.loads((tmp_path / "kappas" / "transfer.json").read_text())} == {
        *sweep.KAPPAS
    }
    assert (tmp_path / "transfer-rates.png").is_file() and (tmp_path / "transfer-kappas.png").is_file()


def test_features_are_a_variant_of_the_study(tmp_path) -> None:
    """Plain at first; every network trains the conditioning."""
    plain, conditioned = (tiny_spec(tmp_path, changes=changes) for changes in ({}, {"features": True}))
    images = torch.randint(0, 256, (8, 3, 32, 32), dtype=torch.uint8)
    x, t = torch.randn(2, 3, 32, 32), torch.tensor([10.0, 500.0])
    torch.testing.assert_close(build_model(conditioned)(x, t), build_model(plain)(x, t))
    trainer = Trainer(conditioned, images)
    trainer.advance()
    assert float(trainer.model.feature_conditioning.gate.detach().abs()) > 0
