"""Short fp32 CPU runs whose losses are pinned: U-ViT and UNet; none, cs, ls; class and text conditions.

`python -m tests.golden.runs` records `losses.json` anew. Do that only when a change is meant to alter training.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from scalelong.training import train
from tests.data.encoders import make_bert
from tests.training.tiny import tiny

STEPS = 20
LOSSES = Path(__file__).with_name("losses.json")
BACKBONES: dict[str, dict[str, Any]] = {
    "uvit": {"model_backbone": "uvit", "model_dim": 32, "model_heads": 2},
    "unet": {"model_backbone": "unet", "model_channels": (32, 64), "model_layers_per_block": 1},
}
CASES = [f"{b}-{m}-{c}" for b in BACKBONES for m in ("none", "cs", "ls") for c in ("class", "text")]


def curves(case: str, folder: Path) -> dict[str, list[float]]:
    """Train one case; losses and gradient norms of every step."""
    backbone, method, condition = case.split("-")
    data: dict[str, Any] = {"data_name": "digits", "data_root": str(folder)}
    if condition == "text":
        encoder = str(make_bert(folder / "bert"))
        data = {"data_name": "emoji32", "data_image_size": 16, "data_root": str(folder)}
        data |= {"condition_encoder": encoder, "condition_max_tokens": 6}
    config = tiny(
        **data, **BACKBONES[backbone], scaling_method=method, condition_kind=condition, training_steps=STEPS,
        training_checkpoint_every=STEPS,
    )  # fmt: skip
    train(config, folder / "run")
    records = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    steps = [record for record in records if record["kind"] == "train"]
    return {key: [record[key] for record in steps] for key in ("loss", "gradient_norm")}


def main() -> None:
    """Record every case."""
    found = {}
    for case in CASES:
        with tempfile.TemporaryDirectory() as folder:
            found[case] = curves(case, Path(folder))
    lines = ",\n".join(f" {json.dumps(case)}: {json.dumps(found[case])}" for case in CASES)
    LOSSES.write_text(f"{{\n{lines}\n}}\n")


if __name__ == "__main__":
    main()
