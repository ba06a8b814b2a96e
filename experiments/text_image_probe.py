"""A small judge of pictures and captions: a contrastive pair of encoders, trained on real pairs with augmentation.

Shapes: n pairs, B batch, K captions to choose from, images uint8 (n, 3, H, W), texts (n, T, D) token features, E embedding.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm import tqdm

EMBEDDING = 128


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
