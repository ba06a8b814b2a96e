"""Text to emoji with none, cs and ls: captions never trained on, each word of which was; how often a judge finds them.

python experiments/text_to_emoji.py                           # a toy, to see it work on one core
python experiments/text_to_emoji.py --scale gpu --jobs 3      # about 5 minutes on an H200

The captions' features must be in the cache (scalelong data encode-text emoji32 --max-tokens 16 --split seen, and unseen), or
MiniLM within reach.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import torch
import tyro
from common import Options, compared, setting
from output import Claim, beats, print_claims, print_table, save, write_csv, write_summary
from text_image_probe import Probe, ranks, train_probe
from torch import Tensor

from scalelong.data import MemorySource, load_source
from scalelong.data.text import TextFeatures, encode_text
from scalelong.training import RunConfig, TrainedRun, get_preset
from scalelong.training.condition import Condition, make_condition

NAME = "text-to-emoji"
SHOWN = 16  # captions in the picture


@dataclass(frozen=True)
class TextToEmoji(Options):
    """All options."""

    seeds: tuple[int, ...] = (0,)
    methods: tuple[str, ...] = ("none", "cs:0.7", "ls")
    guidance: tuple[float, ...] = (1.0, 3.0)  # evaluated with each of these; the grid uses the last
    per_caption: int = 0  # images of each held-out caption, two or more; 0: 2 (cpu) or 8 (gpu)
    probe_steps: int = 0  # 0: 300 (cpu) or 3000 (gpu)


@dataclass(frozen=True)
class HeldOut:
    """Real pictures and texts that no run was trained on."""

    source: MemorySource
    texts: TextFeatures

    @property
    def captions(self) -> list[str]:
        return self.source.captions or []


def main() -> None:
    options = tyro.cli(TextToEmoji, description=__doc__)
    if options.per_caption == 1:
        raise SystemExit("per_caption: must be at least 2, since two of each are shown")
    out = options.folder(NAME)
    base = text_config(options)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    found = compared(base, options.methods, options, device)
    seen, unseen = pairs(base, "seen", device), pairs(base, "unseen", device)
    judges = train_judges(seen, unseen, options.probe_steps or (3000 if options.scale == "gpu" else 300), device)
    count = options.per_caption or (8 if options.scale == "gpu" else 2)
    sampled = {
        (name, scale): draw_held_out(run, unseen, scale, count, device)
        for name, (_, run) in found.items()
        for scale in options.guidance
    }
    rows = [row("real pictures", None, unseen.source.images, unseen, judges)]
    rows += [row(name, scale, images, unseen, judges) for (name, scale), images in sampled.items()]
    write_csv(rows, out / "retrieval.csv")
    last = {name: images for (name, scale), images in sampled.items() if scale == options.guidance[-1]}
    picture(unseen, last, out / "grid.png")
    claims = [claim(rows, len(unseen.captions))]
    setup = (
        f"{setting(base)}; {len(seen.captions)} captions seen, {len(unseen.captions)} held out; {count} images of each"
    )
    write_summary(out, claims, setup, chance=1 / len(unseen.captions), table=rows)
    print_claims(claims)
    print(
        f"\nchance    {1 / len(unseen.captions):.4f} for the first, {5 / len(unseen.captions):.4f} for the first five\n"
    )
    print_table(rows)


def text_config(options: TextToEmoji) -> RunConfig:
    """The preset on the captions that are seen; a toy of it for a CPU."""
    preset = get_preset("emoji32-text")
    gpu = options.scale == "gpu"
    steps = options.steps or (6000 if gpu else 300)
    training = dataclasses.replace(
        preset.training,
        steps=steps,
        batch_size=128 if gpu else 32,
        compile="reduce-overhead" if gpu else "off",
        checkpoint_every=steps,
        sample_every=0,
    )
    model = preset.model if gpu else dataclasses.replace(preset.model, patch_size=8, dim=64, depth=4)
    return dataclasses.replace(
        preset,
        data=dataclasses.replace(preset.data, split="seen"),
        model=model,
        optimizer=dataclasses.replace(preset.optimizer, lr=5e-4 if gpu else 1e-3, warmup_steps=steps // 12),
        training=training,
    )


def pairs(base: RunConfig, split: str, device: torch.device) -> HeldOut:
    """The pictures and captions of one split, and the captions' features."""
    source = load_source("emoji32", split=split, root=base.data.root)
    if not isinstance(source, MemorySource) or source.captions is None:
        raise TypeError("emoji32: expected pictures with captions in memory")
    settings = base.condition
    texts = encode_text(source.captions, settings.encoder, settings.max_tokens, root=base.data.root, device=device)
    return HeldOut(source, texts)


def train_judges(seen: HeldOut, unseen: HeldOut, steps: int, device: torch.device) -> dict[str, Probe]:
    """One that knows the real held-out pairs, too, and one that knows only what the networks have seen."""
    images = torch.cat([seen.source.images, unseen.source.images])
    texts = torch.cat([seen.texts.rows, unseen.texts.rows])
    return {
        "all": train_probe(images, texts, steps, device),
        "seen": train_probe(seen.source.images, seen.texts.rows, steps, device),
    }


def draw_held_out(run: TrainedRun, unseen: HeldOut, scale: float, count: int, device: torch.device) -> Tensor:
    """Image i is of caption i % K; the same noise for every run."""
    own = make_condition(run.config, load_source("emoji32", split="seen", root=run.config.data.root), device)
    condition: Condition = dataclasses.replace(own, choices=unseen.texts.rows.float().to(device))
    sampling = dataclasses.replace(
        run.config.sampling,
        count=count * len(unseen.captions),
        batch_size=1024,
        precision="bf16" if device.type == "cuda" else "fp32",
        guidance=scale,
    )
    return run.sample(sampling, condition)


def row(name: str, scale: float | None, images: Tensor, unseen: HeldOut, judges: dict[str, Probe]) -> dict[str, Any]:
    """How often the right caption is the first, and among the first five, by each judge; ± a standard error."""
    captions = len(unseen.captions)
    own = torch.arange(len(images)) % captions
    cells: dict[str, Any] = {"images": name, "guidance": "" if scale is None else scale, "n": len(images)}
    for judge, probe in judges.items():
        place = ranks(probe, images, unseen.texts.rows, own)
        first = (place == 0).double().view(-1, captions).mean(dim=0)  # by caption: images of one are not independent
        cells[f"first ({judge})"] = float(first.mean())
        cells[f"± ({judge})"] = float(first.std() / captions**0.5)
        cells[f"five ({judge})"] = float((place < 5).double().mean())
    return cells


def claim(rows: Sequence[dict[str, Any]], captions: int) -> Claim:
    """Whether both of the paper's methods beat the unscaled network here, at the last guidance."""
    last = rows[-1]["guidance"]
    values = {each["images"]: each["first (all)"] for each in rows if each["guidance"] == last}
    listed = "; ".join(f"{name} {value:.3f}" for name, value in values.items())
    return Claim(
        "text-to-image generation with CS and with LS is better than without scaling (Table 1, FID on MS-COCO)",
        f"share of held-out captions that rank first among {captions} (chance {1 / captions:.3f}): {listed}",
        beats(values, lower=False),
    )


def picture(unseen: HeldOut, sampled: dict[str, Tensor], path: Path) -> None:
    """A row for each of some held-out captions: the real picture, then two of each run."""
    captions = unseen.captions
    chosen = [position * len(captions) // SHOWN for position in range(SHOWN)]
    columns = [("real", unseen.source.images)]
    for name, images in sampled.items():
        columns += [(name, images[: len(captions)]), ("", images[len(captions) :])]
    width = 0.75 * len(columns) + 3.2
    figure, axes = plt.subplots(SHOWN, len(columns), figsize=(width, 0.75 * SHOWN + 0.4))
    for line, caption in enumerate(chosen):
        for panel, (title, images) in zip(axes[line], columns, strict=True):
            panel.imshow(images[caption].permute(1, 2, 0).numpy(), interpolation="nearest")
            panel.set_axis_off()
            panel.set_title(title if line == 0 else "", fontsize=8, loc="left")
        where = {"ha": "right", "va": "center", "transform": axes[line, 0].transAxes}
        axes[line, 0].text(-0.15, 0.5, captions[caption], fontsize=8, **where)
    figure.subplots_adjust(left=3.0 / width, right=0.99, top=0.96, bottom=0.01, wspace=0.05, hspace=0.05)
    save(figure, path)


if __name__ == "__main__":
    main()
