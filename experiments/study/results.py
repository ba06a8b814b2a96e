"""The study's results: one table of all pieces, what each was run with, and what may be joined to them."""

from __future__ import annotations

import csv
import io
import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from entries import Piece, Run, StudyError

from scalelong.files import write_text

RESULTS = Path(__file__).parents[1] / "results" / "study"
COLUMNS = ("experiment", "method", "seed", "step", "test_loss", "fid", "seconds", "train_loss", "raw_test_loss")
COLUMNS += ("short_test_loss", "fid_short")


def check_joinable(
    results: Path, name: str, commit: str, data: str, data_name: str = "cifar10", accept_commit: Sequence[str] = ()
) -> None:
    """Raise StudyError where results of other pixels of this data set, of other code or of the same piece are there."""
    meta = read_meta(results)
    for other, about in meta["pieces"].items():
        if about["data"] != data and about["settings"].get("data", "cifar10") == data_name:
            raise StudyError(
                f"results.data: {other} was trained on data {about['data']}, this is {data}; use another --results folder"
            )
        if about["commit"] not in (commit, *accept_commit):
            raise StudyError(
                f"results.commit: {other} was trained by commit {about['commit']}, this is {commit}; check it out, or pass "
                f"--accept-commit {about['commit']} if nothing that is trained or measured has changed since"
            )
    if name in meta["pieces"]:
        raise StudyError(f"results.{name}: already there; remove its rows and its entry in meta.json to repeat it")


def read_meta(results: Path) -> dict[str, Any]:
    path = results / "meta.json"
    return json.loads(path.read_text()) if path.exists() else {"pieces": {}}


def read_rows(path: Path) -> list[dict[str, Any]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def write_rows(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Replace the table whole."""
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, COLUMNS)
    writer.writeheader()
    writer.writerows(rows)
    write_text(path, text.getvalue())


def merge(work: Path, results: Path, accept_commit: Sequence[str] = ()) -> None:
    """Add the rows, meta data, events and sample grids of a finished piece to the results."""
    about = json.loads((work / "piece.json").read_text())
    name = about["name"]
    data_name = about["settings"].get("data", "cifar10")
    check_joinable(results, name, about["commit"], about["data"], data_name, accept_commit)
    check_paired_with_results(work, about, results)
    results.mkdir(parents=True, exist_ok=True)
    table = results / "curves.csv"
    write_rows(table, [*(read_rows(table) if table.exists() else []), *read_rows(work / "curves.csv")])
    (results / name).mkdir(exist_ok=True)
    for path in (*work.glob("*.jsonl"), *work.glob("*.png")):
        shutil.copyfile(path, results / name / path.name)
    meta = read_meta(results)
    meta["pieces"][name] = about
    write_text(results / "meta.json", json.dumps(meta, indent=1) + "\n")


def collect(piece: Piece, work: Path) -> list[dict[str, Any]]:
    """The rows that the workers and the FID process have written so far."""
    fids = {(row["run"], row["step"]): row["fid"] for row in _json_lines(work / "fid.jsonl")}
    return [
        {
            "experiment": piece.name,
            "method": run.label,
            "seed": run.seed,
            "step": row["step"],
            "test_loss": f"{row['test_loss']:.6g}",
            "fid": fids.get((run.name, row["step"]), ""),
            "seconds": row["seconds"],
            "train_loss": f"{row['train_loss']:.6g}",
            "raw_test_loss": f"{np.mean(row['raw_bins']):.6g}",  # of the weights themselves
            "short_test_loss": f"{np.mean(row['short_bins']):.6g}",  # of a shorter average
            "fid_short": fids.get((f"{run.name}~short", row["step"]), ""),
        }
        for run in piece.runs
        for row in _json_lines(work / f"{run.name}.jsonl")
        if "test_loss" in row
    ]


def check_paired(piece: Piece, work: Path) -> None:
    """Raise StudyError unless runs of one seed saw the same batch at every step that both recorded."""
    seen: dict[tuple[int, int], str] = {}
    for run in piece.runs:
        _check_batches(work / f"{run.name}.jsonl", run.seed, seen)


def check_paired_with_results(work: Path, about: Mapping[str, Any], results: Path) -> None:
    """The same for the runs of earlier pieces with these data and this batch size: methods are compared across pieces."""
    pieces, seen = {**read_meta(results)["pieces"], about["name"]: about}, {}
    for name, other in pieces.items():
        folder = work if name == about["name"] else results / name
        if [other["data"], other["settings"]["batch"]] == [about["data"], about["settings"]["batch"]]:
            for run in other["settings"]["runs"]:
                label = {**run["options"], **run.get("changes", {})}
                _check_batches(folder / f"{Run(run['method'], run['seed'], label).name}.jsonl", run["seed"], seen)


def _check_batches(path: Path, seed: int, seen: dict[tuple[int, int], str]) -> None:
    for row in _json_lines(path):
        if "batch" in row and seen.setdefault((seed, row["step"]), row["batch"]) != row["batch"]:
            raise StudyError(f"{path.stem}: batch {row['batch']} at step {row['step']}, others of its seed saw another")


def outcomes(piece: Piece, work: Path, unfinished: str = "failed") -> dict[str, dict[str, Any]]:
    """How each run ended, and its milliseconds per step after the first evaluation."""
    found = {}
    for run in piece.runs:
        lines = _json_lines(work / f"{run.name}.jsonl")
        rows = [line for line in lines if "test_loss" in line]
        end = next((line["reason"] for line in lines if line.get("event") == "end"), unfinished)
        about: dict[str, Any] = {"end": end, "step": rows[-1]["step"] if rows else 0}
        if len(rows) > 1:
            elapsed, steps = rows[-1]["seconds"] - rows[0]["seconds"], rows[-1]["step"] - rows[0]["step"]
            about["ms_per_step"] = round(1000 * elapsed / steps, 3)
        found[run.name] = about
    return found


def _json_lines(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]
