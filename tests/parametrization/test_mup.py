"""muP on a model: what survives copies, wrappers and files, and what is refused."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
import torch.distributed as dist
from diffusers import DiTTransformer2DModel
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import scalelong
from scalelong import EMA, UViT, UViTConfig, mup
from scalelong.backbones import fused
from scalelong.parametrization.mup import INPUT, OUTPUT, STAMP, plan_for, plan_of

SCALINGS = ["none", "universal", "rsqrt2", "cs", "cs_reversed", "ls", "mp_cat", "layernorm", "rezero", "stable_tau"]
INPUTS = {"x": torch.randn(2, 3, 8, 8), "time": torch.tensor([10.0, 500.0])}


def uvit(dim: int, depth: int = 4, heads: int = 2, **sizes) -> UViT:
    return UViT(UViTConfig(image_size=8, patch_size=4, dim=dim, depth=depth, heads=heads, **sizes))


def meta(make, *args, **kwargs) -> nn.Module:
    with torch.device("meta"):
        return make(*args, **kwargs)


def parametrized(dim: int = 64, scaling: str = "", **sizes) -> UViT:
    torch.manual_seed(0)
    model = uvit(dim, **sizes)
    if scaling:
        scalelong.apply(model, scaling)
    return mup.parametrize(model, meta(uvit, 16, **sizes))


def dit(heads: int, head: int = 8) -> DiTTransformer2DModel:
    return DiTTransformer2DModel(
        num_attention_heads=heads, attention_head_dim=head, in_channels=3, num_layers=1, sample_size=8,
        num_embeds_ada_norm=4, norm_num_groups=4,
    )  # fmt: skip


def mlp(width: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 2))


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


def test_copies_and_averages_keep_the_multipliers() -> None:
    model = parametrized()
    expected = model(**INPUTS)
    for twin in (copy.deepcopy(model), EMA(model).model, pickle.loads(pickle.dumps(model))):
        torch.testing.assert_close(twin(**INPUTS), expected)
        assert mup.roles(twin) == mup.roles(model)
        setattr(twin.decoder_pred, INPUT, 1.0)  # independent of the original
    torch.testing.assert_close(model(**INPUTS), expected)
    buffer = io.BytesIO()
    torch.save(model.state_dict(), buffer)
    fresh = parametrized()
    fresh.load_state_dict(torch.load(io.BytesIO(buffer.getvalue())))
    torch.testing.assert_close(fresh(**INPUTS), expected)


def test_compiled_and_wrapped_models(tmp_path) -> None:
    model = parametrized()
    expected, groups = model(**INPUTS), mup.param_groups(model, 1e-3)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(**INPUTS), expected)
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        parallel = DistributedDataParallel(copy.deepcopy(model))
        torch.testing.assert_close(parallel(**INPUTS), expected)
        from torch.distributed.fsdp import fully_shard

        sharded = copy.deepcopy(model)
        for block in sharded.out_blocks:
            fully_shard(block, mesh=dist.init_device_mesh("cpu", (1,)))
        fully_shard(sharded, mesh=dist.init_device_mesh("cpu", (1,)))
        torch.testing.assert_close(sharded(**INPUTS), expected)
        for wrapped in (compiled, parallel, sharded):
            theirs = mup.param_groups(wrapped, 1e-3)
            assert [(g["lr"], len(g["params"])) for g in theirs] == [(g["lr"], len(g["params"])) for g in groups]
        optimizer = torch.optim.AdamW(mup.param_groups(sharded, 1e-3))
        sharded(**INPUTS).square().mean().backward()
        optimizer.step()
    finally:
        dist.destroy_process_group()
    with pytest.raises(TypeError, match=r"before torch\.compile"):
        mup.parametrize(torch.compile(uvit(64), backend="eager"), meta(uvit, 16))


def test_files_keep_the_parametrization(tmp_path) -> None:
    model = parametrized(64, "ls")
    loaded = scalelong.load(uvit(64), scalelong.save(model, tmp_path / "uvit"))
    torch.testing.assert_close(loaded(**INPUTS), model(**INPUTS))
    assert {k: (v.role, v.lr) for k, v in mup.roles(loaded).items()} == {
        k: (v.role, v.lr) for k, v in mup.roles(model).items()
    }
    torch.manual_seed(0)
    network = mup.parametrize(dit(4, head=16), meta(dit, 2))
    network.save_pretrained(tmp_path / "dit")
    again = scalelong.from_pretrained(DiTTransformer2DModel, tmp_path / "dit")
    call = {"hidden_states": torch.randn(1, 3, 8, 8), "timestep": torch.tensor([3]), "class_labels": torch.tensor([1])}
    torch.testing.assert_close(again.eval()(**call).sample, network.eval()(**call).sample)
    assert getattr(again.transformer_blocks[0].attn1.to_q, OUTPUT) == pytest.approx(2**-0.5)
    assert mup.roles(again).keys() == mup.roles(network).keys()


def test_weights_of_another_parametrization_are_refused_and_nothing_is_loaded(tmp_path) -> None:
    model, standard = parametrized(), uvit(64)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match=r"mup_base_shapes: missing: pos_embed .* standard parametrization"):
        model.load_state_dict(standard.state_dict())
    with pytest.raises(RuntimeError, match="mup_base_shapes"):
        standard.load_state_dict(model.state_dict())
    other = mup.parametrize(uvit(64), meta(uvit, 32))
    with pytest.raises(ValueError, match=r"mup_base_shapes: pos_embed: 32 at the base width of the weights, 16 at the"):
        model.load_state_dict(other.state_dict())
    scalelong.apply(standard, "none")
    with pytest.raises(ValueError, match="mup_base_shapes is missing"):
        scalelong.load(model, scalelong.save(standard, tmp_path / "standard"))
    for key, value in model.state_dict().items():
        assert torch.equal(value, before[key])
    model.load_state_dict({"pos_embed": torch.zeros(1, 5, 64), STAMP: before[STAMP]}, strict=False)


@pytest.mark.parametrize(
    "base, message",
    [
        (lambda: meta(dit, 2), "base: is a DiTTransformer2DModel, the model a UViT"),
        (lambda: meta(uvit, 16, depth=2), r"base: the base has no in_blocks.1.norm1.weight; .* not in depth"),
        (lambda: meta(uvit, 16, depth=6), "base: the model has no in_blocks.2"),
        (lambda: meta(uvit, 64), "base: no dimension of any tensor differs .* same_width=True"),
        (lambda: meta(uvit, 16, num_classes=3), "base: the model has no label_emb.weight"),
        (lambda: 16, "base: is a int"),
    ],
)
def test_a_wrong_base_is_refused_and_the_model_as_it_was(base, message: str) -> None:
    model = uvit(64)
    before, attributes = copy.deepcopy(model.state_dict()), set(vars(model))
    with pytest.raises(ValueError, match=message):
        mup.parametrize(model, base())
    assert set(vars(model)) == attributes
    assert model.state_dict().keys() == before.keys()
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


def test_twice_is_refused() -> None:
    with pytest.raises(ValueError, match="model: this UViT is parametrized already; build a new one"):
        mup.parametrize(parametrized(), meta(uvit, 16))


def test_an_optimizer_made_before_is_refused() -> None:
    model = mlp(64)
    optimizer = torch.optim.AdamW(model[2].parameters())
    weight = model[2].weight.clone()
    with pytest.raises(ValueError, match=r"optimizer: an optimizer of 2.weight was made before parametrize"):
        mup.parametrize(model, mlp(16))
    assert torch.equal(model[2].weight, weight)
    del optimizer
    mup.parametrize(model, mlp(16))


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


def test_the_fused_kernels_keep_the_scale_of_attention() -> None:
    model = parametrized(64).eval()
    with torch.no_grad():
        expected = model(**INPUTS)
        with fused.inference(model):
            torch.testing.assert_close(model(**INPUTS), expected, atol=2e-3, rtol=2e-3)
    assert not fused._can_fuse(model.mid_block.attn, attention_kernel=True)  # it has 1 / sqrt(d) only
    assert fused._can_fuse(uvit(64).mid_block.attn, attention_kernel=True)


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
