"""Text to emoji: captions never trained on, each word of which was; how often a judge finds them.

The judge is a contrastive pair of encoders, trained on real pairs with augmentation.
Shapes: n pairs, B batch, K captions to choose from, images uint8 (n, 3, H, W), texts (n, T, D) token features, E embedding.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
from output import Claim, Outcome, save, write_csv
from settings import Experiment
from torch import Tensor, nn
from tqdm import tqdm

from scalelong.data import MemorySource, load_source
from scalelong.data.text import TextFeatures, encode_text
from scalelong.runs.reader import Run
from scalelong.training import RunConfig, TrainedRun, load_run
from scalelong.training.condition import Condition, make_condition

SHOWN = 16  # captions in the picture
EMBEDDING = 128


@dataclass(frozen=True)
class HeldOut:
    """Real pictures and texts that no run was trained on."""

    source: MemorySource
    texts: TextFeatures

    @property
    def captions(self) -> list[str]:
        return self.source.captions or []


def measure(experiment: Experiment, runs: Mapping[str, Sequence[Run]], out: Path) -> Outcome:
    options, base = experiment.options, next(iter(experiment.runs.values()))
    count, device = options["per_caption"], torch.device("cuda" if torch.cuda.is_available() else "cpu")
    seen, unseen = pairs(base, "seen", device), pairs(base, "unseen", device)
    judges = train_judges(seen, unseen, options["judge_steps"], device)
    trained = {
        f"{name}, seed {run.seed}": load_run(run.folder, device=device) for name, own in runs.items() for run in own
    }
    sampled = {
        (name, scale): sample_held_out(run, unseen, scale, count, device)
        for name, run in trained.items()
        for scale in options["guidance"]
    }
    rows = [row("real pictures", None, unseen.source.images, unseen, judges)]
    rows += [row(name, scale, images, unseen, judges) for (name, scale), images in sampled.items()]
    write_csv(rows, out / "retrieval.csv")
    last = {name: images for (name, scale), images in sampled.items() if scale == options["guidance"][-1]}
    picture(unseen, last, out / "grid.png")
    held = f"{len(seen.captions)} captions seen, {len(unseen.captions)} held out; {count} images of each"
    tables = {"chance": 1 / len(unseen.captions), "table": rows}
    return Outcome([claim(rows, len(unseen.captions))], f"{experiment.setting}; {held}", tables)


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


def sample_held_out(run: TrainedRun, unseen: HeldOut, scale: float, count: int, device: torch.device) -> Tensor:
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
    """Whether both of the paper's methods beat the unscaled network, at the last guidance; one seed decides nothing."""
    values = {each["images"]: each["first (all)"] for each in rows if each["guidance"] == rows[-1]["guidance"]}
    unscaled = [value for name, value in values.items() if name.startswith("none")]
    scaled = [value for name, value in values.items() if not name.startswith("none")]
    listed = "; ".join(f"{name} {value:.3f}" for name, value in values.items())
    return Claim(
        "text-to-image generation with CS and with LS is better than without scaling (Table 1, FID on MS-COCO)",
        f"share of held-out captions that rank first among {captions} (chance {1 / captions:.3f}): {listed}",
        min(scaled) > max(unscaled) if len(unscaled) > 1 else None,
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


class Probe(nn.Module):
    """Unit vectors for images and for texts; a text is the mean of its tokens, which the padding's zeros leave alone."""

    def __init__(self, text_dim: int, width: int = 48) -> None:
        super().__init__()
        stages: list[nn.Module] = []
        for inside, outside in ((3, width), (width, 2 * width), (2 * width, 4 * width), (4 * width, 4 * width)):
            stages += [nn.Conv2d(inside, outside, 3, 2, 1), nn.GroupNorm(8, outside), nn.GELU()]
            stages += [nn.Conv2d(outside, outside, 3, 1, 1), nn.GroupNorm(8, outside), nn.GELU()]
        self.image = nn.Sequential(*stages, nn.Flatten(), nn.LazyLinear(EMBEDDING))
        self.text = nn.Sequential(nn.Linear(text_dim, 256), nn.GELU(), nn.Linear(256, EMBEDDING))
        self.log_scale = nn.Parameter(torch.tensor(math.log(10.0)))

    def embed_images(self, images: Tensor) -> Tensor:
        """(B, E) of float images in [0, 1]."""
        return F.normalize(self.image(images * 2 - 1), dim=1)

    def embed_texts(self, texts: Tensor) -> Tensor:
        """(B, E) of token features."""
        present = (texts.abs().sum(dim=2, keepdim=True) > 0).float()
        return F.normalize(self.text((texts.float() * present).sum(1) / present.sum(1)), dim=1)


def train_probe(images: Tensor, texts: Tensor, steps: int, device: torch.device, seed: int = 0) -> Probe:
    """Each picture to its own caption and each caption to its own picture, among those of a batch."""
    torch.manual_seed(seed)
    random = torch.Generator().manual_seed(seed)
    probe = Probe(texts.shape[2]).to(device)
    images, texts = images.to(device), texts.to(device)
    probe.embed_images(images[:1].float() / 255)  # the lazy layer learns its size
    optimizer = torch.optim.AdamW(probe.parameters(), lr=1e-3, weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-3, total_steps=steps)
    for _ in tqdm(range(steps), desc="probe", disable=None):
        chosen = torch.randint(len(images), (min(256, len(images)),), generator=random).unique().to(device)
        seen = augmented(images[chosen].float() / 255, random)
        logits = probe.log_scale.exp() * probe.embed_images(seen) @ probe.embed_texts(texts[chosen]).T
        own = torch.arange(len(chosen), device=device)
        loss = F.cross_entropy(logits, own) + F.cross_entropy(logits.T, own)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    return probe.eval()


def augmented(images: Tensor, random: torch.Generator, shift: int = 3) -> Tensor:
    """Moved by up to `shift` pixels on white, blurred or not, brighter or darker, noisy: what a denoiser gets wrong."""
    count, _, height, width = images.shape
    padded = F.pad(images, [shift] * 4, value=1.0)
    down, right = torch.randint(0, 2 * shift + 1, (2, count), generator=random).to(images.device)
    rows = down[:, None, None, None] + torch.arange(height, device=images.device)[None, None, :, None]
    columns = right[:, None, None, None] + torch.arange(width, device=images.device)[None, None, None, :]
    sample = torch.arange(count, device=images.device)[:, None, None, None]
    channel = torch.arange(3, device=images.device)[None, :, None, None]
    moved = padded[sample, channel, rows, columns]
    numbers = torch.rand(4, count, 1, 1, 1, generator=random).to(images.device)
    blurred = F.avg_pool2d(F.pad(moved, [1] * 4, mode="replicate"), 3, 1)
    moved = torch.where(numbers[0] < 0.3, blurred, moved)
    moved = (moved - 1) * (0.8 + 0.4 * numbers[1]) + 1
    noise = torch.randn(moved.shape, generator=random).to(images.device)
    return (moved + 0.1 * numbers[2] * noise).clamp(0, 1)


@torch.no_grad()
def ranks(probe: Probe, images: Tensor, texts: Tensor, own: Tensor) -> Tensor:
    """(n,) how many of the K texts (K, T, D) fit each image better than its own, number `own` (n,): 0 is the best."""
    device = probe.log_scale.device
    captions = probe.embed_texts(texts.to(device))
    parts = [probe.embed_images(part.to(device).float() / 255) @ captions.T for part in images.split(512)]
    fits = torch.cat(parts).cpu()
    return (fits > fits.gather(1, own[:, None])).sum(dim=1)
