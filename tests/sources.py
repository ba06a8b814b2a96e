"""Networks of repositories that no package index has, with their long skips counted by hand.

python -m tests.sources                   # clone them into $SCALELONG_SOURCES or .venv/packages/sources
python -m tests.sources edm found.json    # try those of one repository, in a process of its own: their modules share names
"""

from __future__ import annotations

import copy
import importlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import scalelong
from tests.packages import FOLDER, Packaged, randn, tried

SOURCES = {
    "edm": ("https://github.com/NVlabs/edm", "008a4e5316c8e3bfe61a62f874bddba254295afb"),
    "edm2": ("https://github.com/NVlabs/edm2", "4bf8162f601bcc09472ce8a32dd0cbe8889dc8fc"),
    "ScaleLong": ("https://github.com/sail-sg/ScaleLong", "4ca368c467b715d83b8f555625e523ea8264a298"),
    "U-DiT": ("https://github.com/YuchuanTian/U-DiT", "7fcce5eb2b7fb3888cea13dea619c4ef2efeb569"),
    "a-unet": ("https://github.com/archinetai/a-unet", "e0933e73a60cf9e7d42fcb68c173b23d903f258d"),
    "pytorch-ddpm": ("https://github.com/w86763777/pytorch-ddpm", "f804ccbd58a758b07f79a3b9ecdfb1beb67258f6"),
    "diffusion_policy": (
        "https://github.com/real-stanford/diffusion_policy",
        "5ba07ac6661db573af695b419a7947ecb704690f",
    ),
}
SCRIPT = "examples/unconditional_image_generation/train_unconditional.py"
DIFFUSERS = ("https://github.com/huggingface/diffusers", "58eb52c0803ea9af3abec60841c2a093bdf1f951")
SIZE: dict[str, Any] = {"img_resolution": 16, "label_dim": 4, "model_channels": 32, "channel_mult": [1, 2], "num_blocks": 1,
                        "attn_resolutions": [8]}  # fmt: skip
NCSNPP = {
    "embedding_type": "fourier",
    "encoder_type": "residual",
    "channel_mult_noise": 2,
    "resample_filter": [1, 3, 3, 1],
}


def path(name: str) -> Path:
    return Path(os.environ.get("SCALELONG_SOURCES", FOLDER / "sources")) / name


def _inputs() -> tuple[Tensor, ...]:
    return randn(2, 3, 16, 16), torch.tensor([0.3, 2.0]), torch.eye(4)[:2]


def networks(name: str) -> list[Packaged]:
    """The networks of a repository, whose folder is on the path."""
    image, times = randn(2, 3, 16, 16), torch.tensor([3, 500])
    if name in ("edm", "edm2"):
        return _edm(name)
    if name == "ScaleLong":
        uvit = importlib.import_module("libs.uvit").UViT
        build = partial(uvit, img_size=8, patch_size=2, embed_dim=32, depth=5, num_heads=2, scalelong=0)
        return [Packaged("UViT (scalelong=0)", name, build, lambda: (randn(2, 3, 8, 8), times.float()), 2)]
    if name == "U-DiT":  # eval() merges weights in place
        options = {"attn_type": "v2", "posemb_type": "rope2d", "downsampler": "dwconv5", "down_shortcut": 1}
        network = importlib.import_module("udit_models").U_DiT
        build = partial(network, 16, hidden_size=32, num_heads=4, depth=[1] * 5, num_classes=4, **options)
        return [Packaged("U_DiT", name, build, lambda: (randn(2, 4, 16, 16), times, torch.tensor([1, 2])), 2)]
    if name == "a-unet":  # every level joins its input, the outermost that of the network
        apex = importlib.import_module("a_unet.apex")
        blocks = [apex.XBlock(channels=width, factor=2, items=[apex.ResnetItem]) for width in (16, 32, 32)]
        return [
            Packaged(
                f"XUNet ({skip})", name,
                partial(apex.XUNet, dim=2, in_channels=3, blocks=blocks, skip_t=getattr(apex, skip), resnet_groups=4),
                lambda: (image,), 3,
            )
            for skip in ("SkipCat", "SkipAdd")
        ]  # fmt: skip
    if name == "pytorch-ddpm":  # three outputs of each of two resolutions
        network = importlib.import_module("model").UNet
        build = partial(network, T=1000, ch=32, ch_mult=[1, 2], attn=[1], num_res_blocks=2, dropout=0.1)
        return [Packaged("UNet", name, build, lambda: (image, times), 6)]
    network = importlib.import_module("diffusion_policy.model.diffusion.conditional_unet1d").ConditionalUnet1D
    build = partial(network, input_dim=4, global_cond_dim=6, down_dims=[16, 32, 64])
    inputs = lambda: (randn(2, 16, 4), times, None, randn(2, 6))  # noqa: E731
    return [Packaged("ConditionalUnet1D", name, build, inputs, 2)]  # the outermost of its three outputs is not used


def _edm(name: str) -> list[Packaged]:
    """A convolution and one block per resolution, and one downsampling: four outputs of the encoder, all joined."""
    found: dict[str, Callable[[], nn.Module]] = {}
    if name == "edm2":
        nets = importlib.import_module("training.networks_edm2")
        found = {cls: partial(getattr(nets, cls), img_channels=3, **SIZE) for cls in ("UNet", "Precond")}
    else:
        nets = importlib.import_module("training.networks")
        kinds: dict[str, tuple[str, dict[str, Any]]] = {
            "SongUNet (DDPM++)": ("SongUNet", {}),
            "SongUNet (NCSN++)": ("SongUNet", NCSNPP),
            "DhariwalUNet": ("DhariwalUNet", {}),
        }
        for kind, (cls, options) in kinds.items():
            found[kind] = partial(getattr(nets, cls), in_channels=3, out_channels=3, **SIZE, **options)
            found[f"EDMPrecond of {kind}"] = partial(nets.EDMPrecond, img_channels=3, model_type=cls, **SIZE, **options)
        found["VPPrecond of SongUNet (DDPM++)"] = partial(nets.VPPrecond, img_channels=3, **SIZE)
        found["VEPrecond of SongUNet (NCSN++)"] = partial(nets.VEPrecond, img_channels=3, **SIZE, **NCSNPP)
        found["iDDPMPrecond of DhariwalUNet"] = partial(nets.iDDPMPrecond, img_channels=3, **SIZE)
    return [Packaged(kind, name, build, _inputs, 4) for kind, build in found.items()]


def check_use(packaged: Packaged, method: str) -> None:
    """Copies of copies, their independence, state dicts, files and removal."""
    torch.manual_seed(0)
    model, inputs = packaged.build().eval(), packaged.inputs()
    with torch.no_grad():
        for parameter in (p for p in model.parameters() if not p.any()):
            parameter += 0.1 * randn(1, *parameter.shape)[0]  # behind zeros nothing shows
        plain = model(*inputs)
        fresh = copy.deepcopy(model)
        handle = scalelong.apply(model, method, example=inputs)
        expected, close = model(*inputs), partial(torch.testing.assert_close, rtol=1e-5, atol=1e-5)
        assert not torch.allclose(expected, plain)
        copied = copy.deepcopy(copy.deepcopy(model))
        close(copied(*inputs), expected)
        for parameter in copied.parameters():
            parameter += 1
        close(model(*inputs), expected)
        copied.load_state_dict(model.state_dict())
        close(copied(*inputs), expected)
        with tempfile.TemporaryDirectory() as folder:
            close(scalelong.load(fresh, scalelong.save(model, folder), example=inputs)(*inputs), expected)
        handle.remove()
        close(model(*inputs), plain)


def main() -> None:
    torch.set_num_threads(1)
    if len(sys.argv) == 1:
        for name, (url, commit) in SOURCES.items():
            if not path(name).exists():
                subprocess.run(["git", "clone", "--quiet", url, path(name)], check=True)
            subprocess.run(["git", "-C", path(name), "checkout", "--quiet", commit], check=True)
        url, commit = DIFFUSERS
        home = path("diffusers")
        if not home.exists():  # of its history and files, the one script is fetched
            subprocess.run(["git", "clone", "--quiet", "--filter=blob:none", "--no-checkout", url, home], check=True)
        subprocess.run(["git", "-C", home, "checkout", "--quiet", commit, "--", SCRIPT], check=True)
        return
    name, found = sys.argv[1:]
    sys.path.insert(0, str(path(name)))
    every = networks(name)
    for packaged in every:
        check_use(packaged, "cs")
        check_use(packaged, "ls")
    Path(found).write_text(json.dumps([tried(packaged) for packaged in every]))


if __name__ == "__main__":
    main()
