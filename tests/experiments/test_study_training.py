"""One run of the study agrees with the library and with torch, and its variants with one another."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import torch
import variants
from entries import Run
from evaluator import sample
from fid import Gaussian, Reference
from network import Spec, build_model, write_spec
from results import collect, read_rows
from skip_tuning import evaluate
from train import Trainer, train, training_loss
from weights import BETAS, WEIGHT_DECAY, Weights, adamw

import scalelong
from scalelong.diffusion import VPSDE, Flow, Objective
from scalelong.diffusion import sample as library_sample
from scalelong.evaluation.frechet import frechet_distance
from scalelong.runs.settings import SamplingSettings
from tests.experiments.tiny_study import PIECE, RUNS, tiny_spec
from tests.interpreter import run_interpreted


def test_initial_weights_of_one_seed_differ_in_the_gates_alone(tmp_path) -> None:
    plain, gated = (dict(build_model(tiny_spec(tmp_path, run)).named_parameters()) for run in RUNS[:2])
    assert all(torch.equal(value, gated[name]) for name, value in plain.items())
    assert set(gated) - set(plain) == {name for name in gated if name.startswith("scalelong.")} != set()


def test_a_non_finite_loss_ends_the_run_as_diverged(tmp_path) -> None:
    assert train(tiny_spec(tmp_path, lr=1e30, warmup=1), torch.device("cpu")) == "diverged"


def test_a_run_stops_at_its_deadline_with_a_last_row(tmp_path) -> None:
    assert train(tiny_spec(tmp_path, deadline=0.0), torch.device("cpu")) == "deadline"
    assert [row["step"] for row in collect(dataclasses.replace(PIECE, runs=RUNS[:1]), tmp_path)] == [2]
    assert (tmp_path / "samples" / "none-seed0@2.npy").exists()


def test_the_loss_is_the_library_s(tmp_path) -> None:
    model = build_model(tiny_spec(tmp_path))
    images = torch.randint(0, 256, (5, 3, 32, 32), dtype=torch.uint8)
    index, uniforms, noise = torch.tensor([4, 1, 1]), torch.rand(2, 3), torch.randn(3, 3, 32, 32)
    x = images[index] / 127.5 - 1
    flipped = torch.stack([x[i].flip(-1) if uniforms[1, i] < 0.5 else x[i] for i in range(3)])
    for objective in (Objective(VPSDE()), Objective(VPSDE(), min_snr_gamma=5.0), Objective(Flow())):
        expected = objective.loss(model, flipped, noise, uniforms[0]).mean()
        torch.testing.assert_close(training_loss(model, images, index, uniforms, noise, objective), expected)


@pytest.mark.parametrize("process", [VPSDE(), Flow()])
def test_the_sampler_is_the_library_s(process) -> None:
    def network(x: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x) + 1e-3 * time.view(-1, 1, 1, 1)

    start, objective = torch.randn(4, 3, 8, 8), Objective(process)
    theirs = library_sample(objective, network, start, SamplingSettings("dpm++2m", steps=20, clip=True))
    torch.testing.assert_close(sample(objective, network, start, steps=20), theirs, atol=1e-4, rtol=1e-4)


def test_the_optimizer_is_torch_s_adamw_and_the_average_follows_it() -> None:
    master, steps = torch.randn(100), 5
    expected = torch.nn.Parameter(master.clone())
    optimizer = torch.optim.AdamW([expected], lr=0.1, betas=BETAS, weight_decay=WEIGHT_DECAY)
    average, low = master.clone(), torch.zeros(60, dtype=torch.bfloat16)
    m, v, ema, short = torch.zeros(100), torch.zeros(100), master.clone(), master.clone()
    for step in range(1, steps + 1):
        gradient = torch.randn(100)
        optimizer.param_groups[0]["lr"] = 0.1 * min(1.0, step / 3)
        expected.grad = gradient.clone()
        optimizer.step()
        decay = (1 + step) / (10 + step)
        average = decay * average + (1 - decay) * expected.detach()
        adamw(master, low, gradient, m, v, ema, short, torch.tensor(float(step)), 0.1, 3)
    torch.testing.assert_close(master, expected.detach())
    torch.testing.assert_close(ema, average)
    assert torch.equal(low, master[:60].bfloat16())


def test_flat_weights_leave_the_network_as_it_was(tmp_path) -> None:
    model = build_model(tiny_spec(tmp_path, RUNS[1]))
    x, time = torch.randn(2, 3, 32, 32), torch.rand(2)
    before = model(x, time)
    weights = Weights(model, torch.float32)
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


def changed(folder: Path, method: str, options: dict | None = None, **changes: object) -> Spec:
    return tiny_spec(folder, method=method, options=options or {}, changes=changes)


def outputs(*models: torch.nn.Module) -> list[torch.Tensor]:
    x, time = torch.randn(2, 3, 32, 32), torch.rand(2)
    return [model(x, time).detach() for model in models]


def test_the_ramp_goes_from_the_unscaled_network_to_cs(tmp_path) -> None:
    kappa = {"kappa": 0.5}
    ramp = changed(tmp_path, "cs", kappa, ramp=10)
    none, cs, model = map(build_model, (changed(tmp_path, "none"), changed(tmp_path, "cs", kappa), ramp))
    for step, like, coefficient in ((0, none, 1.0), (5, None, 0.75), (10, cs, 0.5), (99, cs, 0.5)):
        variants.set_progress(model, ramp.changes, torch.tensor(float(step)))
        assert scalelong.coefficients(model) == pytest.approx([1.0, coefficient])
        if like is not None:
            torch.testing.assert_close(*outputs(model, like))
    assert train(ramp, torch.device("cpu")) == "complete"
    rows = [json.loads(line) for line in (tmp_path / "none-seed0.jsonl").read_text().splitlines()[1:-1]]
    assert [row["coefficients"][1] for row in rows] == pytest.approx([1 - 0.5 * 4 / 10, 1 - 0.5 * 8 / 10])


def test_networks_that_must_compute_the_same_at_the_start(tmp_path) -> None:
    kappa = {"kappa": 0.5}
    none, cs, undone, small, slow = (
        build_model(spec)
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
        trainer = Trainer(dataclasses.replace(changed(tmp_path, method, options, **changes), lr=1e-2), images)
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
        dict(build_model(changed(tmp_path, "none", **changes)).named_parameters())
        for changes in ({}, {"joins": "xavier"})
    )
    assert [name for name, value in plain.items() if not torch.equal(value, xavier[name])] == [
        f"out_blocks.{i}.skip_linear.weight" for i in range(2)
    ]
    assert float(xavier["out_blocks.0.skip_linear.weight"].detach().std()) == pytest.approx(
        (2 / (3 * 16)) ** 0.5, rel=0.1
    )


def test_skip_tuning_shrinks_the_skips_of_a_trained_network(tmp_path) -> None:
    images = np.random.default_rng(0).integers(0, 256, (20, 3, 32, 32), dtype=np.uint8)
    np.savez(tmp_path / "data.npz", train=images, test=images)
    spec = tiny_spec(tmp_path, steps=2, fid_at=(), data=str(tmp_path / "data.npz"))
    write_spec(spec, tmp_path / "none-seed0.json")
    train(spec, torch.device("cpu"))
    shrunk, state = build_model(spec), torch.load(tmp_path / "none-seed0.pt", weights_only=True)
    shrunk.load_state_dict(state)
    variants.scale_skip_weights(shrunk, [1.0, 0.7])
    cs = build_model(spec)
    cs.load_state_dict(state)
    scalelong.remove(cs)
    scalelong.apply(cs, "cs", kappa=0.7)
    torch.testing.assert_close(*outputs(shrunk, cs))
    evaluate(tmp_path, "none-seed0", None, float("inf"))
    rows = read_rows(tmp_path / "none-seed0.skip_tuning.csv")
    measured = json.loads((tmp_path / "none-seed0.jsonl").read_text().splitlines()[1])["test_loss"]
    assert [(row["method"], row["kappa"]) for row in rows[:2]] == [("cs", "1.0"), ("cs", "0.95")]
    assert float(rows[0]["test_loss"]) == pytest.approx(measured, rel=1e-5)


def test_gradients_are_flattened_in_the_order_of_the_weights(tmp_path) -> None:
    weights = Weights(build_model(tiny_spec(tmp_path, RUNS[1])), torch.float32)
    low, rest = weights.flatten([parameter.detach() for parameter in weights.parameters])
    assert torch.equal(torch.cat([low, rest]), weights.master)


_IN_THE_INTERPRETER = """
import copy, torch
import fast_block, scalelong
from scalelong.backbones import UViT, UViTConfig
from weights import Weights

def network(method, **options):
    torch.manual_seed(0)
    model = UViT(UViTConfig(image_size=32, patch_size=4, dim=128, heads=2, depth=2))
    scalelong.apply(model, method, **options)
    for parameter in model.parameters():  # none of them zero or one
        parameter.data += 0.05 * torch.randn_like(parameter)
    return model

def close(ours, theirs):
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, atol=1e-4 * float(b.abs().max()), rtol=1e-4)

for method, options in (("cs", {}), ("ls", {}), ("ls", {"module": "time"}), ("rezero", {}), ("stable_tau", {})):
    x, time, found = torch.randn(2, 3, 32, 32), torch.rand(2), []
    for fast in (False, True):
        model = network(method, **options)
        weights = Weights(model, torch.float32)
        if fast:
            fast_block.speed_up(model, weights)
            blocks = (*model.in_blocks, model.mid_block, *model.out_blocks)
            assert all(type(block) is fast_block.FastBlock for block in blocks)
        y = model(x, time)
        found.append([y, *weights.flatten(torch.autograd.grad(y.square().sum(), weights.leaves))])
    close(*reversed(found))

plain = network("none").requires_grad_(False)  # forward only, as in evaluation
fast = copy.deepcopy(plain)
fast_block.speed_up(fast, Weights(fast, torch.float32))
close([fast(x, time)], [plain(x, time)])

flat = 0.05 * torch.randn(14 * 128 ** 2 + 7 * 128)  # low precision beside float32: an out-block and its gradients
x, skip, dy = torch.randn(3, 65, 128)
norms, rows = torch.rand(512) + 0.5, torch.rand(65)
exact, low = (
    [out, *fast_block.backward(dy.to(kind), x.to(kind), flat.to(kind), norms, 2, skip, rows, 1.0, *kept)]
    for kind in (torch.float32, torch.float16)
    for out, *kept in [fast_block.forward(x.to(kind), flat.to(kind), norms, 2, skip, rows, 1.0)]
)
for a, b in zip(exact, low, strict=True):
    assert float((a - b).norm() / a.norm()) < 2e-3, (a, b)
"""


@pytest.mark.slow
def test_the_kernels_are_the_plain_network() -> None:
    """Output and gradients; Triton's interpreter runs the kernels on the CPU."""
    run_interpreted(_IN_THE_INTERPRETER, Path(__file__).parents[2] / "experiments" / "study")


def test_one_leaf_takes_the_gradient_of_neighbouring_parameters(tmp_path) -> None:
    narrow = build_model(tiny_spec(tmp_path))  # 16 numbers, then padding up to 64
    with pytest.raises(ValueError, match="padding"):
        Weights(narrow, torch.float32).leaf([*narrow.mid_block.norm2.parameters()])
    model = build_model(tiny_spec(tmp_path, dim=64))
    weights = Weights(model, torch.float32)
    before, (gain, shift) = weights.master.clone(), model.mid_block.norm2.parameters()
    flat = weights.leaf([gain, shift])
    assert torch.equal(flat, torch.cat([gain, shift]))
    with torch.no_grad():
        flat.fill_(3.0)
    assert gain.eq(3).all()
    assert shift.eq(3).all()
    assert len(weights.leaves) == len(weights.parameters) - 1
    flattened = torch.cat(weights.flatten([leaf.detach() for leaf in weights.leaves]))
    assert flattened.shape == before.shape
    assert int((flattened != before).sum()) == 2 * 64
    with pytest.raises(ValueError, match="neighbours"):
        weights.leaf([model.in_blocks[0].norm1.weight, model.mid_block.norm1.weight])


def test_a_run_done_again_is_named_apart_and_changes_nothing(tmp_path) -> None:
    plain, again = (build_model(changed(tmp_path, "none", **changes)) for changes in ({}, {"again": True}))
    torch.testing.assert_close(*outputs(plain, again))
    assert Run("none", 1, {}, 0, {"again": True}).name != Run("none", 1).name
