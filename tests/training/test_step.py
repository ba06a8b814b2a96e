"""The parts of a step: average, learning rate, indices, precision."""

from __future__ import annotations

import pytest
import torch

from scalelong.data import load_source, make_loader
from scalelong.training.build import build_model, build_objective
from scalelong.training.optimizers import EMA, make_optimizers
from scalelong.training.step import Stepper, learning_rate, resolve_precision, sample_indices
from tests.training.tiny import tiny


def test_the_average_is_the_recursion_with_a_warmed_up_decay() -> None:
    model = torch.nn.Linear(2, 1, bias=False)
    ema = EMA(model, decay=0.5)
    expected = model.weight.detach().clone()
    for step in range(1, 13):  # the warm-up reaches 0.5 at step 8
        with torch.no_grad():
            model.weight.fill_(step)
        ema.update(step)
        decay = min(0.5, (1 + step) / (10 + step))
        expected = decay * expected + (1 - decay) * step
        torch.testing.assert_close(ema.model.weight, expected.expand_as(model.weight))
    assert not ema.model.weight.requires_grad


def test_the_rate_warms_up_linearly() -> None:
    config = tiny(optimizer_warmup_steps=10, optimizer_lr=2.0)
    assert [learning_rate(config, step) for step in (1, 5, 10, 99)] == [0.2, 1.0, 2.0, 2.0]
    assert learning_rate(tiny(optimizer_warmup_steps=0, optimizer_lr=2.0), 1) == 2.0


@pytest.mark.parametrize(("world_size", "accumulate"), [(1, 1), (2, 1), (1, 4), (2, 2)])
def test_ranks_and_micro_batches_cover_each_sample_once(world_size: int, accumulate: int) -> None:
    config = tiny(training_accumulate=accumulate)
    parts = [
        sample_indices(config, step, part, rank, world_size)
        for step in (1, 2, 3)
        for part in range(accumulate)
        for rank in range(world_size)
    ]
    assert torch.cat(parts).sort().values.tolist() == list(range(24))


def test_precision_follows_the_device() -> None:
    assert resolve_precision(tiny(), torch.device("cpu")) == torch.float32
    assert resolve_precision(tiny(), torch.device("cuda")) == torch.bfloat16
    assert resolve_precision(tiny(training_precision="bf16"), torch.device("cpu")) == torch.bfloat16


def test_the_average_of_a_network_that_normalizes_its_weights_in_training_is_not_changed_by_running_it() -> None:
    """As EDM2's layers do: a copy in training mode would overwrite the averaged weights."""

    class Forced(torch.nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.training:
                with torch.no_grad():
                    self.weight.copy_(torch.nn.functional.normalize(self.weight))
            return super().forward(x)

    model = Forced(3, 2)
    ema = EMA(model, decay=0.5)
    ema.update(step=1)
    before = ema.model.weight.clone()
    ema.model(torch.randn(1, 3))
    assert torch.equal(ema.model.weight, before)


def test_a_cpu_does_not_compile() -> None:
    config = tiny(training_compile="default")
    model = build_model(config, (1, 8, 8))
    assert Stepper(config, model, build_objective(config), torch.device("cpu")).net is model


def test_muon_takes_the_matrices_and_adamw_the_rest() -> None:
    model = build_model(tiny(scaling_method="ls"), (1, 8, 8))
    settings = tiny(optimizer_name="muon").optimizer
    adamw, muon = make_optimizers(settings, model)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    matrices = {names[id(p)] for group in muon.param_groups for p in group["params"]}
    others = {names[id(p)] for group in adamw.param_groups for p in group["params"]}
    assert matrices | others == set(names.values()) and not matrices & others
    assert {"in_blocks.0.attn.qkv.weight", "out_blocks.0.skip_linear.weight"} < matrices
    assert {"decoder_pred.weight", "pos_embed", "patch_embed.proj.weight", "norm.weight"} < others


def test_an_overflow_in_one_optimizer_stops_the_other() -> None:
    config = tiny(optimizer_name="muon", training_precision="fp16")
    model = build_model(config, (1, 8, 8))
    stepper = Stepper(config, model, build_objective(config), torch.device("cpu"))
    model.decoder_pred.bias.register_hook(lambda gradient: gradient * torch.inf)  # type: ignore[union-attr]
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    scale = stepper.scaler.get_scale()
    pending = stepper.compute(1, make_loader(load_source("digits"), 0).batches([torch.arange(8)]))
    stepper.update(pending)
    assert pending.read().overflow and stepper.scaler.get_scale() == scale / 2
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_a_gradient_that_is_not_finite_names_its_sample() -> None:
    config, device = tiny(), torch.device("cpu")
    model = build_model(config, (1, 8, 8))
    seen: list[torch.Tensor] = []

    def poison(_module: object, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> torch.Tensor:
        """The gradient of the third sample is infinite, wherever it is in a batch."""
        seen.append(inputs[0][2].clone()) if not seen else None
        rows = torch.tensor([torch.equal(x, seen[0]) for x in inputs[0]])
        output = output.clone()
        output.register_hook(lambda gradient: gradient.masked_fill(rows[:, None, None, None], torch.inf))
        return output

    model.register_forward_hook(poison)
    stepper = Stepper(config, model, build_objective(config), device)
    pending = stepper.compute(1, make_loader(load_source("digits"), 0).batches([torch.arange(8, 16)]))
    stepper.update(pending)
    assert not pending.read().finite
    ((index, t),) = pending.suspects()
    assert index == 10
    assert 0 < t < 1
