"""The oscillation probe: what it measures, and that measuring changes nothing."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import scalelong
from scalelong.backbones import UViT, UViTConfig
from scalelong.lab.matrix_unet import MatrixUNet
from scalelong.stability import OscillationProbe, stages
from tests.families import FAMILIES, build


def uvit() -> UViT:
    torch.manual_seed(0)
    return UViT(UViTConfig(image_size=8, patch_size=4, dim=16, depth=4, heads=2))


BATCH = (torch.randn(3, 3, 8, 8, generator=torch.Generator().manual_seed(1)), torch.tensor([3.0, 50.0, 500.0]))


def test_stages_are_the_u_in_order() -> None:
    assert stages(uvit()) == ["in_blocks.0", "in_blocks.1", "mid_block", "out_blocks.0", "out_blocks.1"]
    assert stages(build(FAMILIES[0])) == ["down_blocks.0", "down_blocks.1", "mid_block", "up_blocks.0", "up_blocks.1"]
    assert stages(MatrixUNet(width=4, layers=1, num_skips=1)) == ["a.0", "middle", "b.0"]
    with pytest.raises(ValueError, match=r"stages of Linear are not known; pass blocks="):
        stages(torch.nn.Linear(1, 1))


def test_norms_are_those_of_the_blocks_outputs() -> None:
    model = MatrixUNet(width=4, layers=1, num_skips=1)
    x = torch.randn(5, 4)
    probe = OscillationProbe(model, x)
    expected = model.middle(model.a[0](x)).norm(dim=1).mean()
    assert probe.norms()["middle"] == pytest.approx(expected.item(), rel=1e-5)


def test_a_block_may_return_a_dict() -> None:
    class Named(torch.nn.Linear):
        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"hidden": super().forward(x)}

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = Named(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.block(x)["hidden"]

    model, x = Net(), torch.randn(5, 4)
    assert OscillationProbe(model, x, blocks=["block"]).norms() == {
        "block": pytest.approx(model(x).norm(dim=1).mean().item())
    }


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
    assert records[0].keys() == {"step", "seconds"} | {
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


def test_blocks_by_name_and_the_nearest_name_for_a_wrong_one() -> None:
    assert list(OscillationProbe(uvit(), BATCH, blocks=["norm"]).norms()) == ["norm"]
    with pytest.raises(ValueError, match=r"blocks: no module 'midblock'; did you mean 'mid_block'\?"):
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


def test_a_batch_of_the_wrong_shape_is_rejected_before_training() -> None:
    wrong = (torch.zeros(3, 3, 16, 16), BATCH[1])
    with pytest.raises(
        ValueError, match=r"inputs: the forward of UViT fails on a probe batch of shapes \[\(3, 3, 16, 16\), \(3,\)\]"
    ):
        OscillationProbe(uvit(), wrong)
    with pytest.raises(ValueError, match=r"blocks: \['final'\] returned no tensor"):
        OscillationProbe(Idle(), torch.zeros(1, 2), blocks=["first", "final"])


class Idle(torch.nn.Module):
    """Has a block that never runs."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.final = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.first(x)


def test_an_unknown_model_gives_the_entries_of_its_lists() -> None:
    model = torch.nn.Module()
    model.downs = torch.nn.ModuleList([torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)])
    model.ups = torch.nn.ModuleDict({"8x8": torch.nn.Linear(1, 1)})
    assert stages(model) == ["downs.0", "downs.1", "ups.8x8"]


def test_a_measurement_keeps_the_coefficients_of_the_last_training_step() -> None:
    model = uvit()
    scalelong.apply(
        model, "ls", reduction=2, activation="elu"
    )  # never flat, so that another batch gives another number
    zeros = (torch.zeros_like(BATCH[0]), BATCH[1])
    model(*zeros)
    there = scalelong.coefficients(model)
    model(*BATCH)
    before = scalelong.coefficients(model)
    assert before != there
    probe = OscillationProbe(model, zeros, every=1)
    probe.step()
    assert scalelong.coefficients(model) == before


def loop(model: torch.nn.Module, path, steps: int = 4) -> list[dict[str, float]]:
    """A training loop with the probe's two lines in it."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    probe = OscillationProbe(model, BATCH, every=2, path=path)
    for _ in range(steps):
        model(*BATCH).square().mean().backward()
        optimizer.step()
        probe.step()
        optimizer.zero_grad()
    return [json.loads(line) for line in path.read_text().splitlines()]


def assert_near(found: list[dict[str, float]], expected: list[dict[str, float]]) -> None:
    assert len(found) == len(expected) > 0
    for one, other in zip(found, expected, strict=True):
        assert one == pytest.approx({**other, "seconds": one["seconds"]}, rel=1e-4)


def test_checkpointing_gives_the_same_records(tmp_path) -> None:
    plain = loop(uvit(), tmp_path / "plain.jsonl")
    torch.manual_seed(0)
    recomputing = UViT(UViTConfig(image_size=8, patch_size=4, dim=16, depth=4, heads=2, checkpointing=True))
    assert_near(loop(recomputing, tmp_path / "recomputing.jsonl"), plain)


@pytest.mark.slow
@pytest.mark.parametrize("form", ["torch.compile", "in place"])
def test_compiled_training_gives_the_same_records_and_compiles_once(form: str, tmp_path) -> None:
    plain = loop(uvit(), tmp_path / "plain.jsonl")
    torch.compiler.reset()
    model, compiled = uvit(), 0

    def counted(graph: torch.fx.GraphModule, _inputs: object) -> object:
        nonlocal compiled
        compiled += 1
        return graph.forward

    if form == "in place":
        model.compile(backend=counted)
        wrapped: torch.nn.Module = model
    else:
        wrapped = torch.compile(model, backend=counted)
    records = loop(wrapped, tmp_path / "compiled.jsonl", steps=4)
    assert_near(records, plain)
    assert compiled == 1


RANKS = """
import json, sys, torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from tests.ranks import leave
from tests.stability.test_probes import BATCH, OscillationProbe, uvit
dist.init_process_group("gloo")
model, rank = DistributedDataParallel(uvit()), dist.get_rank()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
probe = OscillationProbe(model, BATCH, every=2, path=sys.argv[1])
for _ in range(4):
    model(*BATCH).square().mean().backward()
    optimizer.step()
    probe.step()
    optimizer.zero_grad()
leave()
"""


@pytest.mark.slow
def test_two_ranks_write_the_records_of_one_process_once(tmp_path) -> None:
    (tmp_path / "script.py").write_text(RANKS)
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*launch, tmp_path / "script.py", tmp_path / "ranks.jsonl"], capture_output=True, text=True, timeout=180,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2])},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    records = [json.loads(line) for line in (tmp_path / "ranks.jsonl").read_text().splitlines()]
    assert_near(records, loop(uvit(), tmp_path / "one.jsonl"))


def test_the_folder_of_the_records_is_made_before_the_training(tmp_path) -> None:
    OscillationProbe(uvit(), BATCH, every=1, path=tmp_path / "new" / "probe.jsonl").step()
    assert (tmp_path / "new" / "probe.jsonl").is_file()


class Bottle(torch.nn.Module):
    """A U of plain attributes: no lists, no usual names."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.lower, self.bottle = (torch.nn.Conv2d(n, 4, 1) for n in (1, 4, 4))
        self.rise, self.leave = torch.nn.Conv2d(8, 4, 1), torch.nn.Conv2d(8, 1, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a = self.enter(x)
        b = self.lower(a.relu())
        c = self.rise(torch.cat([self.bottle(b.relu()), b], dim=1))
        return self.leave(torch.cat([c, a], dim=1))


def test_the_stages_and_the_middle_of_any_u_are_found() -> None:
    x = torch.randn(2, 1, 4, 4)
    probe = OscillationProbe(Bottle(), x)
    assert probe.blocks == ["enter", "lower", "bottle", "rise", "leave"]
    assert probe.middle == "bottle"
    assert repr(probe) == "OscillationProbe(Bottle, 5 blocks, middle bottle, every 50 steps, 0 records)"
    with pytest.raises(ValueError, match=r"plot: no records yet; the first comes at step 50"):
        probe.plot()
    with pytest.raises(ValueError, match=r"no module 'botle'; did you mean 'bottle'\?"):
        OscillationProbe(Bottle(), x, blocks=["botle"])


def probed_loop(folder: Path, steps: int = 6) -> OscillationProbe:
    torch.manual_seed(0)
    model, x = Bottle(), torch.randn(2, 1, 4, 4)
    scalelong.apply(model, "cs", kappa=0.6, example=x)
    probe = OscillationProbe(model, x, every=2, path=folder / "probe.jsonl")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        loss = (model(x) - x).square().mean()
        loss.backward()
        optimizer.step()
        probe.step(loss)
        optimizer.zero_grad()
    return probe


def test_its_history_plot_report_and_diagnosis(tmp_path) -> None:
    from scalelong.report import read_runs, write_report
    from scalelong.stability.diagnosis import diagnose

    probe = probed_loop(tmp_path)
    records = [json.loads(line) for line in (tmp_path / "probe.jsonl").read_text().splitlines()]
    assert records == probe.history
    assert [record["step"] for record in records] == [2, 4, 6]
    norms = [record["norm/bottle"] for record in records]
    assert probe.oscillation() == scalelong.stability.relative_oscillation(norms)
    assert "3 records, the middle moves by" in repr(probe)
    probe.plot(tmp_path / "probe.png")
    assert (tmp_path / "probe.png").stat().st_size > 5000
    found = diagnose(tmp_path / "probe.jsonl")
    assert {sentence.about for sentence in found} == {"course", "features", "gradients", "try"}
    assert found[0].text.startswith("The loss fell from ")
    runs, refused = read_runs([tmp_path / "probe.jsonl"])
    assert not refused
    assert runs[0].config.scaling.kappa == 0.6
    page = write_report(runs, tmp_path / "report.html", refused).read_text()
    assert "bottle" in page
    (tmp_path / "empty.jsonl").write_text('{"step": 1}\n')
    with pytest.raises(ValueError, match=r"has no records of an OscillationProbe"):
        diagnose(tmp_path / "empty.jsonl")
