"""The oscillation probe: what it measures, and that measuring changes nothing."""

from __future__ import annotations

import copy
import json

import pytest
import torch

import scalelong
from scalelong.backbones import MatrixUNet, UViT, UViTConfig
from scalelong.stability import OscillationProbe, relative_oscillation, relative_spread, stages
from tests.families import FAMILIES, build


def uvit() -> UViT:
    torch.manual_seed(0)
    return UViT(UViTConfig(image_size=8, patch_size=4, dim=16, depth=4, heads=2))


BATCH = (torch.randn(3, 3, 8, 8, generator=torch.Generator().manual_seed(1)), torch.tensor([3.0, 50.0, 500.0]))


def test_oscillation_and_spread_by_hand() -> None:
    assert relative_oscillation([1.0, 3.0, 2.0]) == pytest.approx((2 + 1) / 2 / 2)
    assert relative_oscillation([5.0, 5.0, 5.0]) == 0
    assert relative_spread([1.0, 3.0]) == pytest.approx(2**0.5 / 2)
    for function in (relative_oscillation, relative_spread):
        with pytest.raises(ValueError, match="at least 2 records, got 1"):
            function([1.0])


def test_stages_are_the_u_in_order() -> None:
    assert stages(uvit()) == ["in_blocks.0", "in_blocks.1", "mid_block", "out_blocks.0", "out_blocks.1"]
    assert stages(build(FAMILIES[0])) == ["down_blocks.0", "down_blocks.1", "mid_block", "up_blocks.0", "up_blocks.1"]
    assert stages(MatrixUNet(width=4, layers=1, num_skips=1)) == ["a.0", "middle", "b.0"]
    with pytest.raises(ValueError, match=r"stages of Linear are not known; pass blocks="):
        stages(torch.nn.Linear(1, 1))


def test_norms_are_those_of_the_blocks_outputs() -> None:
    model = MatrixUNet(width=4, layers=1, num_skips=1)
    x = torch.randn(5, 4)
    probe = OscillationProbe(model, (x,))
    expected = model.middle(model.a[0](x)).norm(dim=1).mean()
    assert probe.norms()["middle"] == pytest.approx(expected.item(), rel=1e-5)


def test_gradient_norms_are_those_of_the_blocks_parameters() -> None:
    model = uvit()
    probe = OscillationProbe(model, BATCH)
    assert probe.gradient_norms() == {}
    model(*BATCH).square().mean().backward()
    expected = torch.cat([p.grad.flatten() for p in model.mid_block.parameters()]).norm()
    assert probe.gradient_norms()["mid_block"] == pytest.approx(expected.item(), rel=1e-5)


def test_two_lines_in_a_loop_write_a_record_every_k_steps(tmp_path) -> None:
    model = uvit()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    probe = OscillationProbe(model, BATCH, every=2, path=tmp_path / "probe.jsonl")
    for _ in range(5):
        model(*BATCH).square().mean().backward()
        optimizer.step()
        probe.step()
        optimizer.zero_grad()
    records = [json.loads(line) for line in (tmp_path / "probe.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records] == [2, 4]
    assert records[0].keys() == {"step"} | {
        f"{kind}/{block}" for kind in ("norm", "gradient") for block in stages(model)
    }
    assert records[0]["norm/mid_block"] != records[1]["norm/mid_block"]


def test_measuring_changes_nothing() -> None:
    model = uvit().train()
    scalelong.apply(model, "cs")
    before = copy.deepcopy(model.state_dict())
    OscillationProbe(model, BATCH)(10, model)
    assert model.training
    assert not any(module._forward_hooks for module in model.modules())
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


def test_blocks_by_name_and_near_names_for_a_wrong_one() -> None:
    assert list(OscillationProbe(uvit(), BATCH, blocks=["norm"]).norms()) == ["norm"]
    with pytest.raises(ValueError, match=r"no 'midblock' in UViT; near are \['mid_block'"):
        OscillationProbe(uvit(), BATCH, blocks=["midblock"])
    with pytest.raises(ValueError, match="every: must be at least 1"):
        OscillationProbe(uvit(), BATCH, every=0)


def test_a_compiled_model_is_measured_by_its_own_blocks() -> None:
    model = uvit()
    expected = OscillationProbe(model, BATCH).norms()
    assert OscillationProbe(torch.compile(model, backend="eager"), BATCH).norms() == expected


def test_inputs_may_be_keywords() -> None:
    model = uvit()
    by_name = OscillationProbe(model, {"x": BATCH[0], "time": BATCH[1]}).norms()
    assert by_name == OscillationProbe(model, BATCH).norms()
