"""Changes other than a scaling method: of joins, objective, optimizer, extra losses. Keys of a run in the queue:

    ramp: N              the constant coefficients go from 1 to kappa_i, linearly over N steps
    same_function: true  W_s is divided by kappa_i at the start: the network then computes what the unscaled one does
    size: x              W_s of skip i is multiplied by x ** (i - 1) at the start
    rate: x              Adam's step of W_s of skip i is multiplied by x ** (i - 1), its weight decay is not
    joins: xavier        Xavier initialisation of the layers that join skips
    features: true       later blocks are conditioned on the features of the middle one
    distill: w           contrastive self-distillation with this weight, an extra loss
    mup: WIDTH           muP relative to this width, with heads of the same size
    min_snr: gamma       min-SNR weighting of the training loss; the test loss is not weighted
    flow: true           flow matching; train and test loss are then those of the velocity
    muon: true           Muon for the weights of linear layers, as in the library's trainer
    placement: after_norm  constant coefficients act behind the GroupNorm that would cancel them (unet)
    again: true          nothing: a second run of the same seed, to see how far two such runs differ

W_s is the part of such a layer that acts on the skip. Under Adam, CS is `size` and `rate` together, and CS with
`same_function` is `rate` alone, but for Adam's eps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from scalelong import condition_on_features, mup
from scalelong.diffusion import VPSDE, Flow, Objective
from scalelong.runs.settings import DistillationSettings
from scalelong.scaling.constant import ConstantScaling, constant_coefficients
from scalelong.scaling.registry import METHODS
from scalelong.skips.hooks import replace_scaling, scaling_of

UVIT_KEYS = ("same_function", "size", "rate", "joins", "distill", "mup")  # those that only a U-ViT has
UNET_KEYS = ("placement",)
KEYS = (*UVIT_KEYS, *UNET_KEYS, "ramp", "features", "min_snr", "flow", "muon", "again")


def check(method: str, changes: Mapping[str, Any]) -> None:
    """Raise ValueError for values that cannot be used."""
    for key in ("ramp", "same_function", "placement"):
        if changes.get(key) and not METHODS[method].constant:
            raise ValueError(f"{key}: needs constant coefficients, got method {method!r}; use cs or universal")
    ramp = changes.get("ramp", 1)
    if type(ramp) is not int or ramp < 1:
        raise ValueError(f"ramp: must be a number of steps of at least 1, got {ramp!r}")
    for key in ("size", "rate", "min_snr", "distill"):
        if not changes.get(key, 1.0) > 0:
            raise ValueError(f"{key}: must be positive, got {changes[key]!r}")
    if changes.get("joins", "xavier") != "xavier":
        raise ValueError(
            f"joins: must be xavier, got {changes['joins']!r}; omit it for the network's own initialisation"
        )
    if changes.get("placement", "after_norm") != "after_norm":
        raise ValueError(
            f"placement: must be after_norm, got {changes['placement']!r}; omit it to scale the skip itself"
        )
    if "mup" in changes and (type(changes["mup"]) is not int or changes["mup"] < 1):
        raise ValueError(f"mup: must be a base width, got {changes['mup']!r}")
    if changes.get("muon") and not changes.keys().isdisjoint(("rate", "mup")):
        raise ValueError("muon: has no rates of its own for single weights; drop rate and mup")
    if changes.get("flow") and "min_snr" in changes:
        raise ValueError(f"min_snr: {changes['min_snr']} weights the loss of the noise; drop it or flow")


def objective(changes: Mapping[str, Any]) -> Objective:
    """Process, prediction and weights of the loss."""
    return Objective(Flow() if changes.get("flow") else VPSDE(), min_snr_gamma=changes.get("min_snr", 0.0))


def distillation(changes: Mapping[str, Any]) -> DistillationSettings:
    return DistillationSettings(weight=changes.get("distill", 0.0))


class Ramp(ConstantScaling):
    """Coefficients 1 + progress (kappa_i - 1)."""

    progress: Tensor

    def __init__(self, coefficients: Sequence[float]) -> None:
        super().__init__(coefficients)
        self.register_buffer("progress", torch.zeros(()), persistent=False)

    def coefficient(self, index: int, skip: Tensor) -> Tensor:  # noqa: ARG002
        return 1 + self.progress * (self.values[index - 1] - 1)

    def current(self) -> list[float]:
        return [1 + float(self.progress) * (value - 1) for value in self.values]


@torch.no_grad()
def change(model: nn.Module, changes: Mapping[str, Any]) -> None:
    """Apply all changes but the rates, which are the optimizer's."""
    scaling = scaling_of(model)
    attach(model, changes)
    if "mup" in changes:
        with torch.device("meta"):
            config, base = model.config, changes["mup"]
            narrow = type(model)(replace(config, dim=base, heads=config.heads * base // config.dim))
            attach(narrow, changes)
        mup.parametrize(model, narrow, same_width=True)
    if changes.get("joins"):
        for block in model.out_blocks:
            nn.init.xavier_uniform_(block.skip_linear.weight)
    if changes.get("same_function"):
        scale_skip_weights(model, [1 / kappa for kappa in scaling.values])
    if "size" in changes:
        scale_skip_weights(model, constant_coefficients(scaling.num_skips, changes["size"]))
    if "ramp" in changes:
        ramp = Ramp(scaling.values)
        ramp.config = scaling.config
        replace_scaling(model, ramp)


def attach(model: nn.Module, changes: Mapping[str, Any]) -> None:
    """Add the layers of conditioning and distillation."""
    if changes.get("features"):
        condition_on_features(model)
    if "distill" in changes:
        from scalelong.training.distillation import attach_head  # imports tyro, which other runs do without

        attach_head(model, distillation(changes), model.config.dim)


@torch.no_grad()
def scale_skip_weights(model: nn.Module, factors: Sequence[float]) -> None:
    """Multiply W_s of every skip by its factor, outermost skip first: the network of skips multiplied by it."""
    for block, factor in zip(reversed(model.out_blocks), factors, strict=True):
        block.skip_linear.weight[:, block.skip_linear.out_features :] *= factor


@torch.no_grad()
def set_progress(model: nn.Module, changes: Mapping[str, Any], step: Tensor) -> None:
    """Set the coefficients of a ramp to those of this step; step may be on the GPU."""
    if "ramp" in changes:
        scaling_of(model).progress.copy_((step / changes["ramp"]).clamp(max=1.0))


def step_sizes(model: nn.Module, parameters: Sequence[Tensor], changes: Mapping[str, Any]) -> list[Tensor]:
    """What Adam's step of every parameter is multiplied by; muP divides that of hidden weights."""
    sizes = {id(parameter): torch.ones_like(parameter, dtype=torch.float32) for parameter in parameters}
    for name, role in mup.roles(model).items():
        sizes[id(model.get_parameter(name))] *= role.lr
    if "rate" in changes:
        factors = constant_coefficients(len(model.out_blocks), changes["rate"])
        for block, factor in zip(reversed(model.out_blocks), factors, strict=True):
            sizes[id(block.skip_linear.weight)][:, block.skip_linear.out_features :] *= factor
    return [sizes[id(parameter)] for parameter in parameters]
