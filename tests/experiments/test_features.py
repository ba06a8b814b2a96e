"""The experiment on features, small and on a CPU: trained by the study's worker, probed, resumed."""

from __future__ import annotations

import csv
import json
import re

import features
import pytest
import torch

from scalelong.data import load_source


@pytest.mark.slow
def test_it_trains_probes_and_resumes(tmp_path, monkeypatch) -> None:
    source = load_source("digits")

    def load(cls, root, work, count):  # digits as 32 x 32 RGB: CIFAR-10 is not on every machine
        images = source.images[:200].repeat_interleave(4, 2).repeat_interleave(4, 3).expand(-1, 3, -1, -1)
        part = images.float() / 127.5 - 1, source.labels[:200]
        features.np.savez(work / "data.npz", train=images.numpy(), test=images.numpy())
        return cls(part, part, str(work / "data.npz"))

    monkeypatch.setattr(features.Data, "load", classmethod(load))
    given = ["features.py", "--tiny", "--methods", "cs", "--work", str(tmp_path / "work"), "--out", str(tmp_path)]
    monkeypatch.setattr("sys.argv", given)
    features.main()
    with (tmp_path / "runs.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["method"], row["kind"]) for row in rows] == [("cs", "plain"), ("cs", "conditioned")]
    weights = torch.load(tmp_path / "work" / "cs-kappa=0.7-features=True-seed0.pt")
    assert float(weights["feature_conditioning.gate"].abs()) > 0
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "work").glob("*.pt")}
    features.main()
    assert {path: path.stat().st_mtime_ns for path in before} == before
    assert len(json.loads((tmp_path / "work" / "probes.json").read_text())) == 2


def test_it_says_how_long_it_takes(monkeypatch, tmp_path, capsys) -> None:
    monkeypatch.setattr("sys.argv", ["features.py", "--dry", "--work", str(tmp_path / "work")])
    features.main()
    found = re.fullmatch(
        r"6 runs to train; expected on one H200, with probes: (\d+) minutes\n", capsys.readouterr().out
    )
    assert found is not None and int(found[1]) < 28
