"""muP on a model: roles, initial sizes, learning rates and decay."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import scalelong
from scalelong import mup
from scalelong.parametrization.attach import INPUT, plan_of
from scalelong.parametrization.mup import plan_for
from tests.parametrization.networks import INPUTS, meta, mlp, parametrized, uvit

SCALINGS = ["none", "universal", "rsqrt2", "cs", "cs_reversed", "ls", "mp_cat", "layernorm", "rezero", "stable_tau"]


def test_every_multiplier_of_the_u_vit() -> None:
    model = parametrized(64, mlp_time_embed=True, num_classes=3)
    found = {name: (role.role, role.initial, role.multiplier, role.lr) for name, role in mup.roles(model).items()}
    assert found["patch_embed.proj.weight"] == found["pos_embed"] == found["label_emb.weight"] == ("input", 1, 1, 1)
    for hidden in ("time_embed.0", "out_blocks.0.skip_linear", "mid_block.attn.qkv", "in_blocks.1.mlp.fc2"):
        assert found[f"{hidden}.weight"] == ("hidden", 0.5, 1, 0.25)
    assert found["mid_block.norm1.weight"] == found["mid_block.mlp.fc1.bias"] == ("vector", 1, 1, 1)
    assert found["decoder_pred.weight"] == ("output", 1, 0.25, 1)
    assert found["decoder_pred.bias"] == found["final_layer.weight"] == ("finite", 1, 1, 1)
    assert model.mid_block.attn.scale == pytest.approx(8**0.5 / 32)  # sqrt(d0) / d, with heads of 8 and 32
    assert getattr(model.decoder_pred, INPUT) == 0.25


@pytest.mark.parametrize("scaling", SCALINGS)
def test_with_every_skip_scaling(scaling: str) -> None:
    model = parametrized(64, scaling)
    gates = {name: role.role for name, role in mup.roles(model).items() if name.startswith("scalelong.")}
    if scaling == "ls":
        assert set(gates.values()) == {"finite"}  # the gate averages over channels: its sizes are those of the tokens
    plain = parametrized(64)
    assert {k: v for k, v in mup.roles(model).items() if k not in gates} == mup.roles(plain)
    assert torch.isfinite(model(**INPUTS)).all()


@pytest.mark.parametrize("scaling", SCALINGS)
def test_a_scaled_base_gives_the_gates_their_own_roles(scaling: str) -> None:
    model, base = uvit(64), meta(uvit, 16)
    scalelong.apply(model, scaling)
    scalelong.apply(base, scaling)
    mup.parametrize(model, base)
    gates = {role.role for name, role in mup.roles(model).items() if name.startswith("scalelong.")}
    assert gates <= ({"vector"} if scaling == "layernorm" else {"finite"})


def test_at_base_width_it_is_the_standard_parametrization_bit_for_bit() -> None:
    def trained(parametrize: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = uvit(16)
        if parametrize:
            mup.parametrize(model, meta(uvit, 16), same_width=True)
        optimizer = torch.optim.AdamW(mup.param_groups(model, 1e-3, 0.1))
        for _ in range(3):
            optimizer.zero_grad()
            model(**INPUTS).square().mean().backward()
            optimizer.step()
        return list(model.parameters())

    for one, other in zip(trained(True), trained(False), strict=True):
        assert torch.equal(one, other)


def test_torchs_attention_with_another_head_size_is_refused() -> None:
    def make(width: int, heads: int) -> nn.Module:
        return nn.TransformerEncoderLayer(width, heads, 2 * width)

    with pytest.raises(ValueError, match=r"self_attn has heads of 32, of 8 at base width.* grow the number of heads"):
        mup.parametrize(make(64, 2), meta(make, 16, 2))
    assert mup.roles(mup.parametrize(make(64, 8), meta(make, 16, 2)))["self_attn.in_proj_weight"].role == "hidden"


def test_schedulers_that_multiply_keep_the_ratios_and_those_that_set_rates_need_a_list() -> None:
    def ratios(make) -> list[float]:
        optimizer = torch.optim.AdamW(mup.param_groups(mup.parametrize(mlp(64), mlp(16)), 1e-2))
        scheduler = make(optimizer)
        for _ in range(5):
            optimizer.step()
            scheduler.step()
        return [group["lr"] / optimizer.param_groups[0]["lr"] for group in optimizer.param_groups]

    schedules = torch.optim.lr_scheduler
    for make in (
        lambda o: schedules.LambdaLR(o, lambda step: 1 / (1 + step)),
        lambda o: schedules.CosineAnnealingLR(o, 10),
        lambda o: schedules.LinearLR(o),
        lambda o: schedules.OneCycleLR(o, [1e-2 * g["lr_multiplier"] for g in o.param_groups], total_steps=10),
    ):
        assert ratios(make) == pytest.approx([1, 0.25])
    assert ratios(lambda o: schedules.OneCycleLR(o, 1e-2, total_steps=10)) == [1, 1]  # sets the rate of every group


def test_every_tensor_decays_alike() -> None:
    """A coordinate check does not see weight decay, so it has a test of its own."""

    def shrinkage(compensated: bool) -> set[float]:
        model = mup.parametrize(mlp(64), mlp(16))
        groups = mup.param_groups(model, 1e-2, 0.1)
        if not compensated:
            groups = [group | {"weight_decay": 0.1} for group in groups]
        before = [parameter.detach().clone() for parameter in model.parameters()]
        optimizer = torch.optim.AdamW(groups)
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        pairs = zip(model.parameters(), before, strict=True)
        return {round(float(p.detach().norm() / b.norm()), 5) for p, b in pairs}

    assert shrinkage(compensated=True) == {0.999}
    assert shrinkage(compensated=False) == {0.999, 0.99975}


def test_convolutions_and_their_readouts() -> None:
    def make(width: int) -> nn.Sequential:
        return nn.Sequential(
            nn.Conv2d(3, width, 3), nn.Conv2d(width, width, 3, groups=width), nn.Conv2d(width, 2 * width, 1),
            nn.ConvTranspose2d(2 * width, 1, 2),
        )  # fmt: skip

    model = mup.parametrize(make(32), meta(make, 8))
    found = mup.roles(model)
    assert [found[f"{i}.weight"].role for i in range(4)] == [
        "input",
        "input",
        "hidden",
        "output",
    ]  # depthwise: fan-in 1
    x = torch.randn(1, 2 * 32, 4, 4)
    plain = nn.functional.conv_transpose2d(x / 4, model[3].weight, model[3].bias)
    torch.testing.assert_close(model[3](x), plain)


def test_tied_weights_are_an_embedding_with_a_readout_multiplier() -> None:
    class Tied(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.embedding, self.head = nn.Embedding(5, width), nn.Linear(width, 5, bias=False)
            self.head.weight = self.embedding.weight

        def forward(self, tokens):
            return self.head(self.embedding(tokens))

    for order in ("first", "last"):
        model = Tied(32)
        if order == "last":  # the readout comes first in named_parameters
            model._modules = {"head": model.head, "embedding": model.embedding}
        base = Tied(8)
        base._modules = {name: base._modules[name] for name in model._modules}
        mup.parametrize(model, base)
        (found,) = mup.roles(model).values()
        assert (found.role, found.lr) == ("input", 1)
        weight = model.embedding.weight
        torch.testing.assert_close(model(torch.tensor([2])), weight[[2]] @ weight.T / 4)
        with pytest.raises(ValueError, match="fold: head has no weight of its own"):
            mup.fold(model)


@pytest.mark.parametrize("law", ["torch", "constant", "xavier", "zeros"])
def test_initial_sizes_are_those_of_the_base_width_by_role(law: str) -> None:
    def make(width: int) -> nn.Sequential:
        model = mlp(width)
        for layer in (model[0], model[2], model[4]):
            if law == "constant":
                nn.init.normal_(layer.weight, std=0.3)
            elif law == "xavier":
                nn.init.xavier_normal_(layer.weight)
            elif law == "zeros":
                nn.init.zeros_(layer.weight)
        return model

    torch.manual_seed(0)
    wide, narrow, model = make(512), make(64), make(512)
    mup.parametrize(model, narrow)
    if law == "zeros":
        assert not model[2].weight.any()
        return
    targets = {0: narrow[0].weight.std(), 2: narrow[2].weight.std() / 8**0.5, 4: narrow[4].weight.std()}
    for at, target in targets.items():
        assert float((model[at].weight.std() / target).detach()) == pytest.approx(1, abs=0.15), at
    assert float((wide[2].weight.std() / targets[2]).detach()) == pytest.approx(
        {"constant": 8**0.5}.get(law, 1), abs=0.2
    )


@pytest.mark.parametrize("make", [lambda: parametrized(64), lambda: parametrized(64, qkv_bias=True)])
def test_fold_gives_the_same_function_as_a_plain_network(make) -> None:
    model = make()
    expected = model(**INPUTS)
    plain = uvit(64, qkv_bias=model.config.qkv_bias)
    mup.fold(model)
    plain.load_state_dict(model.state_dict())
    torch.testing.assert_close(plain(**INPUTS), expected)
    torch.testing.assert_close(model(**INPUTS), expected)
    assert plan_of(model).roles == {}


def test_torchs_default_is_recognized_from_few_values() -> None:
    torch.manual_seed(0)
    for _ in range(200):
        plan = plan_for(
            nn.Sequential(nn.Linear(3, 32), nn.Linear(32, 1)), nn.Sequential(nn.Linear(3, 8), nn.Linear(8, 1))
        )
        assert [plan.roles[name].initial for name in ("0.weight", "0.bias", "1.weight", "1.bias")] == [1, 1, 2, 2]


def test_torchs_default_is_recognized_where_its_size_is_near_that_of_transformers() -> None:
    """0.02: within 1 / sqrt(768), the root mean square is 0.0208."""

    def make(width: int) -> nn.Module:
        return nn.Linear(width, 64 * width // 192)

    torch.manual_seed(0)
    base, readout = meta(make, 192), meta(nn.Linear, 192, 3)
    assert {plan_for(make(768), base).roles["bias"].initial for _ in range(40)} == {2}
    assert {plan_for(nn.Linear(768, 3), readout).roles["weight"].initial for _ in range(60)} == {2}
