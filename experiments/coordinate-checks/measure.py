"""Coordinate checks of every supported class, and of U-ViT with every skip scaling, at five widths."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from output import Outcome, write_csv
from settings import Experiment
from torch import Tensor, nn

import scalelong
from scalelong import UViT, UViTConfig
from scalelong.parametrization.coordinates import CoordinateCheck, coordinate_check, plot
from scalelong.scaling.registry import METHODS

WIDTHS = (64, 128, 256, 384, 512)
HEAD = 16  # head size where the number of heads grows


def _randn(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def uvit(width: int) -> nn.Module:
    """With a fixed number of heads, so that the logits are scaled by 1 / d."""
    return UViT(UViTConfig(image_size=8, patch_size=4, dim=width, depth=2, heads=2, num_classes=10))


def scaled_uvit(method: str, width: int) -> nn.Module:
    """Of depth 4, so that it has a skip whose coefficient is not 1."""
    model = UViT(UViTConfig(image_size=8, patch_size=4, dim=width, depth=4, heads=2))
    return scalelong.apply(model, method).model


def dit(width: int) -> nn.Module:
    from diffusers import DiTTransformer2DModel

    return DiTTransformer2DModel(
        num_attention_heads=width // HEAD, attention_head_dim=HEAD, in_channels=4, num_layers=2, sample_size=8,
        num_embeds_ada_norm=10, norm_num_groups=4,
    )  # fmt: skip


def pixart(width: int) -> nn.Module:
    from diffusers import PixArtTransformer2DModel

    return PixArtTransformer2DModel(
        num_attention_heads=width // HEAD, attention_head_dim=HEAD, in_channels=4, out_channels=4, num_layers=2,
        sample_size=8, cross_attention_dim=width, caption_channels=24, norm_num_groups=4,
    )  # fmt: skip


def mmdit(width: int) -> nn.Module:
    from diffusers import SD3Transformer2DModel

    return SD3Transformer2DModel(
        sample_size=8, in_channels=4, out_channels=4, num_layers=2, attention_head_dim=HEAD,
        num_attention_heads=width // HEAD, joint_attention_dim=24, caption_projection_dim=width,
        pooled_projection_dim=24, pos_embed_max_size=8,
    )  # fmt: skip


def utransformer(width: int) -> nn.Module:
    from diffusers.pipelines.deprecated.unidiffuser.modeling_uvit import UTransformer2DModel

    return UTransformer2DModel(
        num_attention_heads=width // HEAD, attention_head_dim=HEAD, in_channels=4, num_layers=3, sample_size=8,
        use_patch_pos_embed=True, block_type="unidiffuser",
    )  # fmt: skip


BATCH = 2  # few directions: the corrections at small widths are small
TIME, LABEL = torch.tensor([300, 900]), torch.tensor([3, 1])
LATENT = {"hidden_states": _randn(BATCH, 4, 8, 8)}
TEXT = {"encoder_hidden_states": _randn(BATCH, 4, 24), "timestep": TIME}
CLASSES: dict[str, tuple[Callable[[int], nn.Module], dict[str, Any]]] = {
    "UViT": (uvit, {"x": _randn(BATCH, 3, 8, 8), "time": TIME.float(), "class_labels": LABEL}),
    "DiTTransformer2DModel": (dit, LATENT | {"timestep": TIME, "class_labels": LABEL}),
    "PixArtTransformer2DModel": (pixart, LATENT | TEXT),
    "SD3Transformer2DModel": (mmdit, LATENT | TEXT | {"pooled_projections": _randn(BATCH, 24)}),
    "UTransformer2DModel": (utransformer, LATENT | {"unpatchify": False, "return_dict": False}),
}


SCALINGS = [
    name for name, method in METHODS.items() if not method.sampling_only and name not in ("cs_annealed", "subset")
]
SCALED_LR = 0.002  # deeper than the others: with 0.005 the corrections of the narrowest network reach 0.1
SEEDS = {"rezero": (3, 12, 48)}  # the first updates of its factors have random signs: an average needs many
SCALED = {"x": _randn(BATCH, 3, 8, 8), "time": TIME.float()}


def measure(experiment: Experiment, _: object, out: Path) -> Outcome:
    options, rows = experiment.options, []
    for name in options["classes"]:
        make_model, example = CLASSES[name]
        checks = [coordinate_check(make_model, WIDTHS, parametrization=p, example=example) for p in ("mup", "standard")]
        rows += [line(name, check) for check in checks]
        plot(checks, name, Path(options["pictures"]) / f"{name}.png")
    for method in SCALINGS if options["scalings"] == "all" else options["scalings"]:
        for seeds in SEEDS.get(method, (3,)):
            check = coordinate_check(partial(scaled_uvit, method), WIDTHS, example=SCALED, lr=SCALED_LR, seeds=seeds)
            rows.append(line(f"UViT with {method}", check))
    write_csv(rows, out / "slopes.csv")
    return Outcome([], f"widths {', '.join(map(str, WIDTHS))}", {"table": rows})


def line(network: str, check: CoordinateCheck) -> dict[str, Any]:
    """The steepest slope of a network."""
    module, step, slope = check.worst
    where = {"module": module or "(model)", "after step": step}
    found = {"seeds": check.seeds, "flat": check.flat, "steepest": slope, "standard error": check.error(module, step)}
    return {"network": network, "parametrization": check.name, **found, **where}
