"""What survives copies, wrappers and files, and what is refused."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
import torch.distributed as dist
from diffusers import AutoencoderKL, DDIMScheduler, DiTPipeline, DiTTransformer2DModel, UNet2DModel
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import scalelong
from scalelong import EMA, mup
from scalelong.backbones import fused
from scalelong.parametrization.attach import INPUT, OUTPUT, STAMP
from tests.parametrization.networks import INPUTS, dit, meta, mlp, parametrized, uvit
from tests.ranks import leave

PAIR = {"x": torch.linspace(-1, 1, 384).view(2, 3, 8, 8), "time": torch.tensor([10.0, 500.0])}  # the same on all ranks


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


class ByKeyword(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, width), nn.Linear(width, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(input=self.first(input=x))


def test_a_readout_that_is_called_by_keyword() -> None:
    model, x = mup.parametrize(ByKeyword(64), ByKeyword(16)), torch.randn(2, 3)
    expected = nn.functional.linear(model.first(x) / 4, model.last.weight, model.last.bias)
    torch.testing.assert_close(model(x), expected)
    torch.testing.assert_close(mup.fold(model)(x), expected)
    assert not model.last._forward_pre_hooks_with_kwargs


def test_compiled_and_wrapped_models(tmp_path) -> None:
    model = parametrized()
    expected, groups = model(**INPUTS), mup.param_groups(model, 1e-3)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(**INPUTS), expected)
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        parallel = DistributedDataParallel(copy.deepcopy(model))
        torch.testing.assert_close(parallel(**INPUTS), expected)
        sharded = copy.deepcopy(model)
        for block in sharded.out_blocks:
            fully_shard(block, mesh=dist.init_device_mesh("cpu", (1,)))
        fully_shard(sharded, mesh=dist.init_device_mesh("cpu", (1,)))
        torch.testing.assert_close(sharded(**INPUTS), expected)
        for wrapped in (compiled, parallel, sharded):
            theirs = mup.param_groups(wrapped, 1e-3)
            assert [(g["lr"], len(g["params"])) for g in theirs] == [(g["lr"], len(g["params"])) for g in groups]
        with pytest.raises(ValueError, match="is not folded; pass the model inside DDP"):
            mup.fold(parallel)
        optimizer = torch.optim.AdamW(mup.param_groups(sharded, 1e-3))
        sharded(**INPUTS).square().mean().backward()
        optimizer.step()
    finally:
        dist.destroy_process_group()
    with pytest.raises(TypeError, match=r"before torch\.compile"):
        mup.parametrize(torch.compile(uvit(64), backend="eager"), meta(uvit, 16))


def _rank(rank: int, folder: str) -> None:
    """One of two ranks, each with half of the batch: DDP and FSDP2 train like one process with all of it."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    for wrapper in ("ddp", "fsdp"):
        alone, model = parametrized(), parametrized()
        if wrapper == "ddp":
            wrapped = DistributedDataParallel(model)
        else:
            mesh = dist.init_device_mesh("cpu", (2,))
            for block in model.out_blocks:
                fully_shard(block, mesh=mesh)
            wrapped = fully_shard(model, mesh=mesh)
        for net, part in ((alone, slice(0, 2)), (wrapped, slice(rank, rank + 1))):
            optimizer = torch.optim.AdamW(mup.param_groups(net, 1e-2, 0.1))
            for _ in range(3):
                optimizer.zero_grad()
                (net(**{name: value[part] for name, value in PAIR.items()}) - 1).square().mean().backward()
                optimizer.step()
        if wrapper == "fsdp":
            assert mup.roles(wrapped) == mup.roles(alone)
        torch.testing.assert_close(wrapped(**PAIR), alone(**PAIR), rtol=1e-3, atol=1e-4)
    leave()


@pytest.mark.slow
def test_two_ranks_train_as_one(tmp_path) -> None:
    torch.multiprocessing.spawn(_rank, (str(tmp_path),), nprocs=2)


@pytest.mark.parametrize("kind", ["plain", "ls", "ls after", "conditioned"])
def test_folders_keep_the_parametrization(kind: str, tmp_path) -> None:
    """Without a scaling, with gates in the plan, with gates and conditioning that came after it."""
    model = parametrized(64, "ls" if kind == "ls" else "")
    if kind == "ls after":
        scalelong.apply(model, "ls")
    if kind == "conditioned":
        scalelong.condition_on_features(model)
    loaded = scalelong.load(uvit(64), scalelong.save(model, tmp_path / "uvit"))
    torch.testing.assert_close(loaded(**INPUTS), model(**INPUTS))
    assert {k: (v.role, v.lr) for k, v in mup.roles(loaded).items()} == {
        k: (v.role, v.lr) for k, v in mup.roles(model).items()
    }


def test_folders_of_other_networks_are_refused(tmp_path) -> None:
    folder = scalelong.save(parametrized(), tmp_path / "saved")
    other, wider = mup.parametrize(uvit(64), meta(uvit, 32)), uvit(32)
    for model, message in (
        (other, "16 at the base width of the weights, 1 5 32 at the model's"),
        (wider, "do not fit"),
    ):
        before, attributes = copy.deepcopy(model.state_dict()), set(vars(model))
        with pytest.raises(ValueError, match=message):
            scalelong.load(model, folder)
        assert set(vars(model)) == attributes
        assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    model = uvit(64, depth=6)
    mup.scale_skip_weights(model, "cs")
    with pytest.raises(ValueError, match=r"in two parts, of mup.scale_skip_weights; call mup.fold\(model\) before"):
        scalelong.save(model, tmp_path / "parts")
    assert not (tmp_path / "parts").exists()


@pytest.mark.parametrize("load", ["ours", "diffusers", "all at once", "pipeline"])
def test_diffusers_keeps_the_parametrization(load: str, tmp_path) -> None:
    torch.manual_seed(0)
    network = mup.parametrize(dit(4, head=16), meta(dit, 2))
    network.save_pretrained(tmp_path / "dit")
    if load == "ours":
        again = scalelong.from_pretrained(DiTTransformer2DModel, tmp_path / "dit")
    elif load == "pipeline":
        DiTPipeline(network, AutoencoderKL(), DDIMScheduler()).save_pretrained(tmp_path / "pipeline")
        again = DiTPipeline.from_pretrained(tmp_path / "pipeline").transformer
    else:
        again = DiTTransformer2DModel.from_pretrained(tmp_path / "dit", low_cpu_mem_usage=load == "diffusers")
    call = {"hidden_states": torch.randn(1, 3, 8, 8), "timestep": torch.tensor([3]), "class_labels": torch.tensor([1])}
    torch.testing.assert_close(again.eval()(**call).sample, network.eval()(**call).sample)
    assert getattr(again.transformer_blocks[0].attn1.to_q, OUTPUT) == pytest.approx(2**-0.5)
    assert mup.roles(again).keys() == mup.roles(network).keys()
    fresh = DiTTransformer2DModel.from_config(network.config)  # new weights, to train: of muP's initial sizes
    name = "transformer_blocks.0.attn1.to_k.weight"
    sizes = [float(each.get_parameter(name).detach().std()) for each in (fresh, network)]
    assert sizes[0] == pytest.approx(sizes[1], rel=0.1)


def test_diffusers_keeps_several_head_sizes(tmp_path) -> None:
    """The file has the names of attention layers in alphabetical order, the model has not."""

    def unet(width: int) -> UNet2DModel:
        blocks = {
            "down_block_types": ("AttnDownBlock2D", "DownBlock2D"),
            "up_block_types": ("UpBlock2D", "AttnUpBlock2D"),
        }
        return UNet2DModel(sample_size=8, block_out_channels=(width, 2 * width), norm_num_groups=4, attention_head_dim=None,
                           layers_per_block=1, **blocks)  # fmt: skip

    network = mup.parametrize(unet(16), meta(unet, 8))
    network.save_pretrained(tmp_path)
    again = UNet2DModel.from_pretrained(tmp_path, low_cpu_mem_usage=False).eval()
    call = {"sample": torch.randn(1, 3, 8, 8), "timestep": 3}
    torch.testing.assert_close(again(**call).sample, network.eval()(**call).sample)


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
    with pytest.raises(ValueError, match="was saved in the standard parametrization, the model is in muP"):
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
    whole = nn.Sequential(mup.parametrize(mlp(64), mlp(16)), nn.Linear(2, 64))
    with pytest.raises(
        ValueError, match="model: a part of it, this Sequential is parametrized already; build a new one"
    ):
        mup.parametrize(whole, nn.Sequential(mlp(16), nn.Linear(2, 16)))
    assert len(whole[0][4]._forward_pre_hooks) == 1


@pytest.mark.parametrize("function", [mup.roles, mup.role_table, mup.fold, lambda it: mup.param_groups(it, 1e-3)])
def test_what_is_not_a_module_is_refused(function) -> None:
    with pytest.raises(TypeError, match=r"model: must be a torch\.nn\.Module, got list"):
        function([mlp(16)])


def test_a_model_without_values_is_refused() -> None:
    model = meta(mlp, 64)
    with pytest.raises(ValueError, match=r"model: 0\.weight is on the meta device .* or pass initialize=False"):
        mup.parametrize(model, meta(mlp, 16))
    assert not model[4]._forward_pre_hooks
    with torch.device("meta"):
        roles = mup.roles(mup.parametrize(mlp(64), mlp(16)))  # to inspect them
    assert mup.roles(mup.parametrize(model, meta(mlp, 16), initialize=False)).keys() == roles.keys()


def test_several_parametrized_parts_of_a_module() -> None:
    """As a generator and a discriminator in one wrapper; the plan of each counts."""
    parts = nn.ModuleList(mup.parametrize(mlp(width), mlp(16)) for width in (64, 32))
    assert [(g["lr"], len(g["params"])) for g in mup.param_groups(parts, 1.0)] == [(1, 10), (0.25, 1), (0.5, 1)]
    x = torch.randn(2, 3)
    expected = [part(x) for part in parts]
    mup.fold(parts)
    assert not any(mup.roles(part) for part in parts)
    torch.testing.assert_close([part(x) for part in parts], expected)


def test_layers_that_an_adapter_replaced_are_named() -> None:
    peft = pytest.importorskip("peft")
    model, x = mup.parametrize(mlp(64), mlp(16)), torch.randn(2, 3)
    expected = model(x)
    peft.inject_adapter_in_model(peft.LoraConfig(r=2, target_modules=["2", "4"]), model)
    torch.testing.assert_close(model(x), expected)  # the multiplier stays on the layer inside
    with pytest.raises(ValueError, match=r"2\.bias is not among the parameters .* with adapters \(LoRA\) give"):
        mup.param_groups(model, 1e-3)
    with pytest.raises(ValueError, match="fold: 4 has no weight of its own"):
        mup.fold(model)
    torch.testing.assert_close(model(x), expected)


def test_an_optimizer_made_before_is_refused() -> None:
    model = mlp(64)
    optimizer = torch.optim.AdamW(model[2].parameters())
    weight = model[2].weight.clone()
    with pytest.raises(ValueError, match=r"optimizer: an optimizer of 2.weight was made before parametrize"):
        mup.parametrize(model, mlp(16))
    assert torch.equal(model[2].weight, weight)
    del optimizer
    mup.parametrize(model, mlp(16))


def test_the_fused_kernels_keep_the_scale_of_attention() -> None:
    model = parametrized(64).eval()
    with torch.no_grad():
        expected = model(**INPUTS)
        with fused.inference(model):
            torch.testing.assert_close(model(**INPUTS), expected, atol=2e-3, rtol=2e-3)
    assert not fused._can_fuse(model.mid_block.attn, attention_kernel=True)  # it has 1 / sqrt(d) only
    assert fused._can_fuse(uvit(64).mid_block.attn, attention_kernel=True)
