"""Sharded training on two real ranks: bit-identical after resuming, equal to replicas, and one kind of checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from scalelong.training import load_run, read_events, train
from scalelong.training.build import check_config
from tests.training.test_processes import finish, start
from tests.training.tiny import assert_same_run, losses, newest, tiny


def evaluations(folder: Path) -> list[float]:
    return [record["value"] for record in read_events(folder)[0] if record["kind"] == "evaluation"]


@pytest.mark.slow
@pytest.mark.parametrize(("method", "accumulate"), [("cs", 1), ("ls", 2)])
def test_two_sharded_ranks_resume_bit_identically_and_agree_with_replicas(method, accumulate, tmp_path) -> None:
    changes = {"scaling_method": method, "training_accumulate": accumulate, "training_sample_every": 6}
    whole, parts, replicas = (tmp_path / name for name in ("whole", "parts", "replicas"))
    options = ["--evaluate-every", "3", "--evaluate-samples", "64", "--evaluate-extractor", "random-conv"]
    running = [
        start(whole, 2, options=options, training_shard="full", **changes),
        start(replicas, 2, options=options, **changes),
    ]
    finish(start(parts, 2, options=options, training_shard="full", training_steps=6, **changes))
    for process in running:
        finish(process)
    finish(start(parts, 2, options=options, training_shard="full", **changes))
    assert_same_run(whole, parts)
    assert [loss for _, loss in losses(whole)] == pytest.approx([loss for _, loss in losses(replicas)], rel=1e-4)
    assert len(evaluations(whole)) == 4
    assert evaluations(whole) == pytest.approx(evaluations(replicas), rel=1e-3)  # of the average at that step
    for name in ("model", "ema", "optimizer"):
        first, second = (load_file(newest(folder) / f"{name}.safetensors") for folder in (whole, replicas))
        assert first.keys() == second.keys()
        for key, value in first.items():
            torch.testing.assert_close(value, second[key], rtol=1e-3, atol=1e-4)
    assert load_run(whole).step == 12
    train(tiny(training_steps=13, **changes), whole)  # in one process, not sharded
    assert losses(whole)[-1][0] == 13


@pytest.mark.parametrize(
    ("changes", "ranks", "reason"),
    [
        ({}, 1, "needs several ranks"),
        ({"optimizer_name": "muon"}, 2, "does not support optimizer.name = muon"),
        ({"training_compile": "reduce-overhead"}, 2, "reduce-overhead"),
        ({"training_precision": "fp16"}, 2, "fp16"),
    ],
)
def test_what_it_does_not_support_is_refused(changes, ranks, reason) -> None:
    with pytest.raises(ValueError, match=rf"training\.shard: full .*{reason}"):
        check_config(tiny(training_shard="full", **changes), world_size=ranks, on_gpu=True)
