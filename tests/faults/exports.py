"""Exports: every file is verified by its hash before any of it is used."""

from __future__ import annotations

import pickle
import shutil
from pathlib import Path

import scalelong
from scalelong.errors import CheckpointError, DamagedFileError
from tests.faults.checkpoints import flipped
from tests.faults.harness import case
from tests.faults.hostile import Payload
from tests.training.tiny import tiny


def refused(act, *names: str) -> bool:
    try:
        act()
    except (CheckpointError, DamagedFileError) as error:
        assert any(name in str(error) for name in names), f"{names}: not named in {error}"
        return True
    return False


@case(
    17,
    "export and import: flipped bit, truncation, deletion of each file; a pickle or code added; tampered code",
    passes_when="refused by hash, file named; nothing executes",
    protections=["files.manifest"],
)
def exports(folder: Path, protect: bool) -> str:
    from scalelong.pipelines import export_pipeline, export_weights
    from scalelong.training import load_run, train
    from scalelong.training.build import build_model

    config, marker, count = tiny(training_steps=1), folder / "executed", 0
    run = train(config, folder / "run")
    weights = export_weights(load_run(run), folder / "weights")
    pipeline = export_pipeline(load_run(run), folder / "pipeline").folder
    model = build_model(config, (1, 8, 8))

    def load(copy: Path):
        return (lambda: scalelong.load(model, copy)) if (copy / "scalelong.json").exists() else lambda: load_run(copy)

    changes = {
        "bit": flipped,
        "half": lambda data: data[: len(data) // 2],
        "code": lambda data: data + b"\nimport os\n",
    }
    for source in (weights, pipeline):
        load(source)()
        for file in sorted(path for path in source.rglob("*") if path.is_file() and path.name != "manifest.json"):
            if source == weights and file.name not in ("scalelong.json", "model.safetensors"):
                continue  # for people
            for damage, change in changes.items():
                shutil.copytree(source, folder / "copy")
                damaged = folder / "copy" / file.relative_to(source)
                damaged.write_bytes(change(damaged.read_bytes()))
                assert refused(load(folder / "copy"), damaged.name), f"{file.name}, {damage}: accepted"
                shutil.rmtree(folder / "copy")
                count += 1
    for name in ("unet/diffusion_pytorch_model.bin", "unet/extra.py", "vae/model.safetensors"):
        shutil.copytree(pipeline, folder / "copy")
        added = folder / "copy" / name
        added.parent.mkdir(exist_ok=True)
        added.write_bytes(pickle.dumps(Payload(marker)))
        assert refused(load(folder / "copy"), added.name), f"{name}: accepted"
        shutil.rmtree(folder / "copy")
        count += 1
    assert not marker.exists(), "code was executed"
    return f"{count} of {count} refused, file named"
