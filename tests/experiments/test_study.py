"""The training study: its queue refuses what cannot run, and its worker agrees with the library."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import json
import os
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

sys.path.insert(0, str(Path(__file__).parents[2] / "experiments" / "study"))

import train as worker
import variants
from entries import Piece, Run, Speed, StudyError, check_startable, read_queue
from fid import Gaussian, Reference
from piece import check_joinable, check_paired, collect, merge, outcomes, read_rows, specs, to_rgb32, write_rows
from plot import intervals_ahead, relative, smoothed, speed_up
from skip_tuning import evaluate

import scalelong
from scalelong.diffusion import VPSDE, Objective
from scalelong.diffusion import sample as library_sample
from scalelong.evaluation.frechet import frechet_distance
from scalelong.runs.settings import SamplingSettings

TINY = {"batch": 4, "dim": 16, "depth": 4, "heads": 2, "patch": 8, "steps": 8, "loss_every": 4, "warmup": 3}
SMALL = {"train_images": 50, "test_images": 20, "num_samples": 8, "eval_batch": 10, "steps_per_graph": 2}
RUNS = (Run("none", 0), Run("ls", 0, {"start": 0.95}), Run("cs", 1, {"kappa": 0.7}))
PIECE = Piece("tiny", RUNS, **{**TINY, "fid_at": (4,)})


def tiny_spec(folder: Path, run: Run = RUNS[0], **changes: object) -> worker.Spec:
    found = next(spec for spec in specs(PIECE, folder, "", float("inf")) if spec.name == run.name)
    return dataclasses.replace(found, **SMALL, **changes)


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    """A working folder in which all runs of the tiny piece were trained."""
    folder = tmp_path_factory.mktemp("piece")
    for run in RUNS:
        assert worker.train(tiny_spec(folder, run), torch.device("cpu")) == "complete"
    return folder


# ---------------------------------------------------------------------------------------------------------------- queue


def test_the_queue_is_valid_and_its_first_open_piece_can_start() -> None:
    queue = read_queue()
    first = next(piece for piece in queue.pieces if piece.status != "done")
    check_startable(first, queue.speed)
    for piece in queue.pieces:
        if piece.runs and piece.status == "open":
            assert piece.minutes == pytest.approx(queue.speed.seconds(piece) / 60, abs=0.2), piece.name


def written(tmp_path: Path, *pieces: dict) -> Path:
    path = tmp_path / "queue.yaml"
    path.write_text(
        yaml.safe_dump({"speed": {"ms_per_step": 2.0}, "defaults": {"steps": 1000}, "pieces": list(pieces)})
    )
    return path


@pytest.mark.parametrize(
    ("piece", "message"),
    [
        ({"name": "p", "runs": [{"method": "none"}] * 2}, r"queue\.p\.runs: 2 runs are called 'none-seed0'"),
        ({"name": "p", "runs": [{"method": "cs", "kappa": 2}]}, r"queue\.p\.runs: scaling\.kappa: .*got 2"),
        ({"name": "p", "runs": [{"method": "sc"}]}, r"scaling\.method: unknown 'sc'"),
        ({"name": "p", "runs": []}, r"queue\.p\.runs: the piece has no runs"),
        ({"name": "p", "runs": [{"method": "ls"}], "step": 5}, r"queue\.p\.step: unknown key"),
        ({"name": "p", "runs": [{"method": "ls"}], "batch": 0}, r"queue\.p\.batch: must be at least 1, got 0"),
        ({"name": "p", "runs": [{"method": "ls"}], "data": "cifar"}, r"queue\.p\.data: unknown 'cifar'; .* cifar10"),
        ({"name": "p", "runs": [{"method": "ls", "ramp": 9}]}, r"queue\.p\.runs: ramp: needs constant coef.*'ls'"),
        ({"name": "p", "runs": [{"method": "cs", "ramp": 0}]}, r"ramp: must be a number of steps of at least 1, got 0"),
        ({"name": "p", "runs": [{"method": "none", "rate": -1}]}, r"rate: must be positive, got -1"),
        ({"name": "p", "runs": [{"method": "none", "joins": "he"}]}, r"joins: must be xavier, got 'he'"),
    ],
)
def test_bad_entries_are_refused(tmp_path, piece, message) -> None:
    with pytest.raises(StudyError, match=message):
        read_queue(written(tmp_path, piece))


def test_two_pieces_of_one_name_and_unknown_names_are_refused(tmp_path) -> None:
    piece = {"name": "p", "runs": [{"method": "ls"}]}
    with pytest.raises(StudyError, match="2 pieces are called 'p'"):
        read_queue(written(tmp_path, piece, piece))
    with pytest.raises(StudyError, match="no piece 'q'; choose one of p"):
        read_queue(written(tmp_path, piece)).find("q")


def test_a_piece_that_cannot_end_in_time_is_refused() -> None:
    five = Piece("p", tuple(Run("none", seed) for seed in range(5)))
    speed = Speed(ms_per_step=2.0)
    assert speed.seconds(five) == pytest.approx(60 + 5 * 100_000 * 0.002 + 5 * 4 * 8)
    check_startable(five, speed)
    with pytest.raises(StudyError, match=r"queue\.p\.steps: 5 runs of 100000 steps take .* minutes.*split the runs"):
        check_startable(five, Speed(ms_per_step=4.0))
    with pytest.raises(StudyError, match="take"):
        check_startable(dataclasses.replace(five, depth=24), speed)


def test_missing_code_and_finished_pieces_are_refused() -> None:
    piece = Piece("p", RUNS)
    with pytest.raises(StudyError, match=r"queue\.p\.needs: 'a schedule' is not written yet"):
        check_startable(dataclasses.replace(piece, needs="a schedule"), Speed(1.0))
    with pytest.raises(StudyError, match=r"queue\.p\.status: the piece is done"):
        check_startable(dataclasses.replace(piece, status="done"), Speed(1.0))


# --------------------------------------------------------------------------------------------------------------- worker


def test_rows_samples_and_events_are_written(finished) -> None:
    rows = collect(PIECE, finished)
    assert [(row["method"], row["seed"], row["step"]) for row in rows] == [
        (label, seed, step)
        for label, seed in (("none", 0), ("ls start=0.95", 0), ("cs kappa=0.7", 1))
        for step in (4, 8)
    ]
    assert all(0 < float(row["test_loss"]) < 10 for row in rows)
    for run in RUNS:
        assert (finished / f"{run.name}.png").exists()
        for average, step in itertools.product(("", "~short"), (4, 8)):
            pixels = np.load(finished / "samples" / f"{run.name}{average}@{step}.npy")
            assert pixels.shape == (8, 3, 32, 32)
            assert pixels.dtype == np.uint8
    lines = [json.loads(line) for line in (finished / f"{RUNS[1].name}.jsonl").read_text().splitlines()]
    assert lines[-1] == {"event": "end", "reason": "complete", "step": 8}
    assert lines[1]["coefficients"] == pytest.approx([0.95, 0.95], abs=0.02)
    assert len(lines[1]["bins"]) == len(lines[1]["raw_bins"]) == len(lines[1]["short_bins"]) == worker.NOISE_BINS
    assert sum(lines[1]["bins"]) / worker.NOISE_BINS == pytest.approx(lines[1]["test_loss"], rel=1e-4)
    assert outcomes(PIECE, finished)["none-seed0"]["end"] == "complete"


def test_runs_of_one_seed_see_the_same_batches_and_others_do_not(finished) -> None:
    check_paired(PIECE, finished)
    batches = [
        [json.loads(line).get("batch") for line in (finished / f"{run.name}.jsonl").read_text().splitlines()]
        for run in RUNS
    ]
    assert batches[0] == batches[1]
    assert batches[0] != batches[2]
    one_seed = dataclasses.replace(PIECE, runs=tuple(dataclasses.replace(run, seed=0) for run in RUNS))
    (finished / "cs-kappa=0.7-seed0.jsonl").write_text((finished / "cs-kappa=0.7-seed1.jsonl").read_text())
    with pytest.raises(StudyError, match="others of its seed saw another"):
        check_paired(one_seed, finished)


def test_initial_weights_of_one_seed_differ_in_the_gates_alone(tmp_path) -> None:
    plain, gated = (dict(worker.build_model(tiny_spec(tmp_path, run)).named_parameters()) for run in RUNS[:2])
    assert all(torch.equal(value, gated[name]) for name, value in plain.items())
    assert set(gated) - set(plain) == {name for name in gated if name.startswith("scalelong.")} != set()


def test_a_non_finite_loss_ends_the_run_as_diverged(tmp_path) -> None:
    assert worker.train(tiny_spec(tmp_path, lr=1e30, warmup=1), torch.device("cpu")) == "diverged"


def test_a_run_stops_at_its_deadline_with_a_last_row(tmp_path) -> None:
    assert worker.train(tiny_spec(tmp_path, deadline=0.0), torch.device("cpu")) == "deadline"
    assert [row["step"] for row in collect(dataclasses.replace(PIECE, runs=RUNS[:1]), tmp_path)] == [2]
    assert (tmp_path / "samples" / "none-seed0@2.npy").exists()


def test_the_loss_is_the_library_s(tmp_path) -> None:
    model = worker.build_model(tiny_spec(tmp_path))
    images = torch.randint(0, 256, (5, 3, 32, 32), dtype=torch.uint8)
    index, uniforms, noise = torch.tensor([4, 1, 1]), torch.rand(2, 3), torch.randn(3, 3, 32, 32)
    x = images[index] / 127.5 - 1
    flipped = torch.stack([x[i].flip(-1) if uniforms[1, i] < 0.5 else x[i] for i in range(3)])
    expected = Objective(VPSDE()).loss(model, flipped, noise, uniforms[0]).mean()
    torch.testing.assert_close(worker.training_loss(model, images, index, uniforms, noise), expected)


def test_the_sampler_is_the_library_s() -> None:
    def network(x: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x) + 1e-3 * time.view(-1, 1, 1, 1)

    start = torch.randn(4, 3, 8, 8)
    ours = worker.sample(lambda x, t: network(x, 999 * t), start, steps=20)
    theirs = library_sample(Objective(VPSDE()), network, start, SamplingSettings("dpm++2m", steps=20, clip=True))
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


def test_the_optimizer_is_torch_s_adamw_and_the_average_follows_it() -> None:
    master, steps = torch.randn(100), 5
    expected = torch.nn.Parameter(master.clone())
    optimizer = torch.optim.AdamW([expected], lr=0.1, betas=worker.BETAS, weight_decay=worker.WEIGHT_DECAY)
    average, low = master.clone(), torch.zeros(60, dtype=torch.bfloat16)
    m, v, ema, short = torch.zeros(100), torch.zeros(100), master.clone(), master.clone()
    for step in range(1, steps + 1):
        gradient = torch.randn(100)
        optimizer.param_groups[0]["lr"] = 0.1 * min(1.0, step / 3)
        expected.grad = gradient.clone()
        optimizer.step()
        decay = (1 + step) / (10 + step)
        average = decay * average + (1 - decay) * expected.detach()
        worker.adamw(master, low, gradient, m, v, ema, short, torch.tensor(float(step)), 0.1, 3)
    torch.testing.assert_close(master, expected.detach())
    torch.testing.assert_close(ema, average)
    assert torch.equal(low, master[:60].bfloat16())


def test_flat_weights_leave_the_network_as_it_was(tmp_path) -> None:
    model = worker.build_model(tiny_spec(tmp_path, RUNS[1]))
    x, time = torch.randn(2, 3, 32, 32), torch.rand(2)
    before = model(x, time)
    weights = worker.Weights(model, torch.float32)
    torch.testing.assert_close(model(x, time), before)
    weights.load(torch.zeros_like(weights.master))
    assert all(not parameter.any() for parameter in model.parameters())
    assert scalelong.coefficients(model)


def test_the_frechet_distance_is_the_library_s() -> None:
    torch.manual_seed(0)
    first, second = torch.randn(500, 12), 1.3 * torch.randn(400, 12) + 0.2
    ours = Reference(Gaussian.fit(first)).distance(Gaussian.fit(second))
    a, b = Gaussian.fit(first), Gaussian.fit(second)
    assert ours == pytest.approx(frechet_distance(a.mean, a.cov, b.mean, b.cov), rel=1e-6)


def changed(folder: Path, method: str, options: dict | None = None, **changes: object) -> worker.Spec:
    return tiny_spec(folder, method=method, options=options or {}, changes=changes)


def outputs(*models: torch.nn.Module) -> list[torch.Tensor]:
    x, time = torch.randn(2, 3, 32, 32), torch.rand(2)
    return [model(x, time).detach() for model in models]


def test_the_ramp_goes_from_the_unscaled_network_to_cs(tmp_path) -> None:
    kappa = {"kappa": 0.5}
    ramp = changed(tmp_path, "cs", kappa, ramp=10)
    none, cs, model = map(worker.build_model, (changed(tmp_path, "none"), changed(tmp_path, "cs", kappa), ramp))
    for step, like, coefficient in ((0, none, 1.0), (5, None, 0.75), (10, cs, 0.5), (99, cs, 0.5)):
        variants.set_progress(model, ramp.changes, torch.tensor(float(step)))
        assert scalelong.coefficients(model) == pytest.approx([1.0, coefficient])
        if like is not None:
            torch.testing.assert_close(*outputs(model, like))
    assert worker.train(ramp, torch.device("cpu")) == "complete"
    rows = [json.loads(line) for line in (tmp_path / "none-seed0.jsonl").read_text().splitlines()[1:-1]]
    assert [row["coefficients"][1] for row in rows] == pytest.approx([1 - 0.5 * 4 / 10, 1 - 0.5 * 8 / 10])


def test_networks_that_must_compute_the_same_at_the_start(tmp_path) -> None:
    kappa = {"kappa": 0.5}
    none, cs, undone, small, slow = (
        worker.build_model(spec)
        for spec in (
            changed(tmp_path, "none"),
            changed(tmp_path, "cs", kappa),
            changed(tmp_path, "cs", kappa, same_function=True),
            changed(tmp_path, "none", size=0.5),
            changed(tmp_path, "none", rate=0.5),
        )
    )
    for pair in ((none, undone), (cs, small), (none, slow)):
        torch.testing.assert_close(*outputs(*pair))
    assert not torch.allclose(*outputs(none, cs))


def test_cs_is_initial_size_and_rate(tmp_path) -> None:
    """And CS with its size undone is the rate alone. Adam's eps is all that differs."""
    kappa, images = {"kappa": 0.5}, torch.randint(0, 256, (50, 3, 32, 32), dtype=torch.uint8)

    def trained(method: str, options: dict | None = None, **changes: object) -> list[torch.Tensor]:
        """kappa_i W_s of every skip after 8 steps, outermost first."""
        trainer = worker.Trainer(dataclasses.replace(changed(tmp_path, method, options, **changes), lr=1e-2), images)
        for _ in range(4):
            trainer.advance()
        weights = [block.skip_linear.weight.detach()[:, 16:] for block in reversed(trainer.model.out_blocks)]
        return [k * weight for k, weight in zip(scalelong.coefficients(trainer.model), weights, strict=True)]

    both, cs = trained("none", size=0.5, rate=0.5), trained("cs", kappa)
    rate, undone = trained("none", rate=0.5), trained("cs", kappa, same_function=True)
    for ours, theirs in ((both, cs), (rate, undone)):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-3)
    for ours, theirs in ((trained("none", size=0.5), cs), (trained("none"), undone)):
        assert (ours[1] - theirs[1]).abs().max() > 0.01


def test_xavier_joins_change_nothing_else(tmp_path) -> None:
    plain, xavier = (
        dict(worker.build_model(changed(tmp_path, "none", **changes)).named_parameters())
        for changes in ({}, {"joins": "xavier"})
    )
    assert [name for name, value in plain.items() if not torch.equal(value, xavier[name])] == [
        f"out_blocks.{i}.skip_linear.weight" for i in range(2)
    ]
    assert float(xavier["out_blocks.0.skip_linear.weight"].detach().std()) == pytest.approx(
        (2 / (3 * 16)) ** 0.5, rel=0.1
    )


def test_grey_images_become_rgb_with_a_margin() -> None:
    images = torch.randint(1, 256, (2, 1, 28, 28), dtype=torch.uint8)
    found = to_rgb32(images)
    assert found.shape == (2, 3, 32, 32)
    assert torch.equal(found[:, 1:2, 2:30, 2:30], images)
    assert not found[:, :, :2].any()
    colour = torch.randint(0, 256, (2, 3, 32, 32), dtype=torch.uint8)
    assert torch.equal(to_rgb32(colour), colour)


def test_skip_tuning_shrinks_the_skips_of_a_trained_network(tmp_path) -> None:
    images = np.random.default_rng(0).integers(0, 256, (20, 3, 32, 32), dtype=np.uint8)
    np.savez(tmp_path / "data.npz", train=images, test=images)
    spec = tiny_spec(tmp_path, steps=2, fid_at=(), data=str(tmp_path / "data.npz"))
    worker.write_spec(spec, tmp_path / "none-seed0.json")
    worker.train(spec, torch.device("cpu"))
    shrunk, state = worker.build_model(spec), torch.load(tmp_path / "none-seed0.pt")
    shrunk.load_state_dict(state)
    variants.scale_skip_weights(shrunk, [1.0, 0.7])
    cs = worker.build_model(spec)
    cs.load_state_dict(state)
    scalelong.remove(cs)
    scalelong.apply(cs, "cs", kappa=0.7)
    torch.testing.assert_close(*outputs(shrunk, cs))
    evaluate(tmp_path, "none-seed0", None, float("inf"))
    rows = read_rows(tmp_path / "none-seed0.skip_tuning.csv")
    measured = json.loads((tmp_path / "none-seed0.jsonl").read_text().splitlines()[1])["test_loss"]
    assert [(row["method"], row["kappa"]) for row in rows[:2]] == [("cs", "1.0"), ("cs", "0.95")]
    assert float(rows[0]["test_loss"]) == pytest.approx(measured, rel=1e-5)


# -------------------------------------------------------------------------------------------------------------- results


def test_results_of_another_commit_or_data_set_are_not_joined(finished, tmp_path) -> None:
    about = {"name": "tiny", "commit": "abc", "data": "d0", "settings": dataclasses.asdict(PIECE)}
    (finished / "piece.json").write_text(json.dumps(about))
    write_rows(finished / "curves.csv", collect(PIECE, finished))
    merge(finished, tmp_path)
    assert len(read_rows(tmp_path / "curves.csv")) == 6
    with pytest.raises(StudyError, match=r"results\.tiny: already there"):
        merge(finished, tmp_path)
    with pytest.raises(StudyError, match=r"results\.data: tiny was trained on data d0, this is d1"):
        check_joinable(tmp_path, "other", "abc", "d1")
    with pytest.raises(StudyError, match=r"results\.commit: tiny was trained by commit abc.*--accept-commit abc"):
        check_joinable(tmp_path, "other", "def", "d0")
    check_joinable(tmp_path, "other", "def", "d0", accept_commit=["old", "abc"])
    check_joinable(tmp_path, "other", "abc", "d1", data_name="fashion_mnist")


def test_a_piece_whose_batches_are_not_those_of_earlier_pieces_is_not_joined(finished, tmp_path) -> None:
    about = {"name": "tiny", "commit": "abc", "data": "d0", "settings": dataclasses.asdict(PIECE)}
    (finished / "piece.json").write_text(json.dumps(about))
    write_rows(finished / "curves.csv", collect(PIECE, finished))
    merge(finished, tmp_path / "results")
    work = tmp_path / "work"
    shutil.copytree(finished, work)
    (work / "piece.json").write_text(json.dumps(about | {"name": "again"}))
    merge(work, tmp_path / "results")
    rows = (work / "none-seed0.jsonl").read_text()
    (work / "none-seed0.jsonl").write_text(rows.replace('"batch": "', '"batch": "0'))
    (work / "piece.json").write_text(json.dumps(about | {"name": "third"}))
    with pytest.raises(StudyError, match=r"none-seed0: batch 0.* at step 4, others of its seed saw another"):
        merge(work, tmp_path / "results")


def test_curves_are_compared_with_the_unscaled_run() -> None:
    baseline, curve = {1: 4.0, 2: 2.0, 3: 1.0, 4: 0.8}, {1: 5.0, 2: 1.8, 3: 1.1, 4: 0.6}
    difference = relative(curve, baseline)
    assert difference == pytest.approx({1: 25, 2: -10, 3: 10, 4: -25})
    assert intervals_ahead(difference) == [(2, 2), (4, 4)]
    assert speed_up(curve, baseline) == pytest.approx(4 / 3.6)
    assert speed_up(baseline, curve) is None
    assert smoothed(baseline, width=2) == pytest.approx({2: 3.0, 3: 1.5, 4: 0.9})


# -------------------------------------------------------------------------------------------------------------- kernels


def test_gradients_are_flattened_in_the_order_of_the_weights(tmp_path) -> None:
    weights = worker.Weights(worker.build_model(tiny_spec(tmp_path, RUNS[1])), torch.float32)
    low, rest = weights.flatten([parameter.detach() for parameter in weights.parameters])
    assert torch.equal(torch.cat([low, rest]), weights.master)


@pytest.mark.skipif(not os.environ.get("TRITON_INTERPRET"), reason="set TRITON_INTERPRET=1 to run the kernels on a CPU")
def test_the_kernels_are_the_plain_network(tmp_path) -> None:
    kernels = pytest.importorskip("fast_uvit")
    model = worker.build_model(tiny_spec(tmp_path, dim=128, heads=2, depth=2, patch=4))
    fast = copy.deepcopy(model)
    kernels.speed_up(fast)
    assert type(fast.mid_block.attn) is kernels.FastAttention
    x, time = torch.randn(2, 3, 32, 32), torch.rand(2)
    outputs = [net(x, time) for net in (model, fast)]
    torch.testing.assert_close(outputs[1], outputs[0])
    ours, theirs = (
        torch.autograd.grad(output.square().sum(), list(net.parameters()))
        for net, output in zip((model, fast), outputs, strict=True)
    )
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)
