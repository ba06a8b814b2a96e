"""Two real processes, joined by torch.distributed."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from scalelong.evaluation import FeatureStatistics, RandomConvFeatures, evaluate_images
from scalelong.evaluation.evaluate import Result
from scalelong.evaluation.statistics import all_parts
from scalelong.training import train
from tests.ranks import leave
from tests.training.tiny import tiny

from .test_extractors import images

WORLD = 2


def evaluated(part: torch.Tensor) -> Result:
    extractor = RandomConvFeatures(channels=2)
    real = extractor(images(50, seed=9))
    reference = FeatureStatistics.from_features(real, extractor=extractor.name, extractor_hash=extractor.hash)
    return evaluate_images(part.split(10), reference, extractor, kid_reference=real, kid_subset_size=20, kid_subsets=3)


def work(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=WORLD)
    parts = all_parts(torch.full((rank * 3, 2), float(rank)))
    assert [len(part) for part in parts] == [0, 3]
    result = evaluated(images(45)[rank * 30 :][:30])
    (Path(folder) / f"{rank}.json").write_text(json.dumps(dataclasses.asdict(result)))
    leave()


def test_alone_there_is_one_part() -> None:
    own = torch.rand(3, 2)
    assert all_parts(own) == [own]


@pytest.mark.slow
def test_ranks_get_the_result_of_the_whole(tmp_path: Path) -> None:
    mp.spawn(work, (str(tmp_path),), nprocs=WORLD)
    whole = dataclasses.asdict(evaluated(images(45)))
    for rank in range(WORLD):
        found = json.loads((tmp_path / f"{rank}.json").read_text())
        assert found["value"] == pytest.approx(whole["value"], rel=1e-9)
        assert found["kid"][0] == pytest.approx(whole["kid"][0], rel=1e-5)
        assert found["n"] == whole["n"] == 45


@pytest.mark.slow
def test_the_command_shares_the_work_and_records_once(tmp_path: Path) -> None:
    run = train(tiny(training_steps=2), tmp_path / "run")
    command = ["-m", "scalelong.cli.main", "evaluate", str(run), "--extractor", "random-conv", "--num-samples", "65"]
    environment = os.environ | {"SCALELONG_DATA": str(tmp_path / "cache"), "OMP_NUM_THREADS": "1"}
    for launcher in (["-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"], []):
        made = subprocess.run(
            [sys.executable, *launcher, *command, "--kid"], env=environment, capture_output=True, text=True, timeout=300
        )
        assert made.returncode == 0, made.stderr
        assert made.stdout.count("KID = ") == 1
        shutil.rmtree(tmp_path / "cache")
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    shared, alone = [record for record in records if record["kind"] == "evaluation"]
    assert shared["n"] == alone["n"] == 65
    assert shared["value"] == pytest.approx(alone["value"], rel=1e-4)
    assert shared["kid"] == pytest.approx(alone["kid"], rel=1e-4)
