"""How the kernels of products.py cut their work into tiles; tune.py times others."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor


@dataclass(frozen=True)
class Tiling:
    """Rows, columns (of those that do not span the width) and inner size of a tile; warps and stages of its loop."""

    rows: int = 128
    columns: int = 128
    inner: int = 64
    warps: int = 8
    stages: int = 3

    @property
    def options(self) -> dict[str, int]:
        return {"num_warps": self.warps, "num_stages": self.stages, "launch_pdl": True}


TILINGS = {
    "qkv": Tiling(),
    "proj": Tiling(rows=64, warps=4),
    "fc1": Tiling(),
    "fc2": Tiling(rows=64, warps=4, stages=4),
    "join": Tiling(rows=64, warps=4),
    "join_backward": Tiling(rows=64),
    "fc2_backward": Tiling(columns=64, warps=4),
    "fc1_backward": Tiling(rows=64, warps=4, stages=4),
    "qkv_backward": Tiling(rows=64, warps=4),
    "norm_backward": Tiling(rows=32, inner=8, warps=4),  # no product: `inner` rows at once
    "proj_backward": Tiling(),
    "weights": Tiling(stages=4),
}


def tiling(key: str, like: Tensor) -> Tiling:
    """For this type: `inner` is given for two bytes per number."""
    found = TILINGS[key]
    return found if like.itemsize == 2 else replace(found, inner=found.inner // 2)


PARTS = (5, 4)  # of the rows in gradients of weights, without and with a join: 120 and 112 tiles at D = 256
