"""Write the tables of docs/families.md: known families at their real size, on the meta device, and every model that is tried
small, with its skips counted by hand, those found, and the oracle's verdict.

python scripts/families_table.py            # write (networks of tests/packages.txt are tried where `make test-slow` put them)
python scripts/families_table.py --check    # fail if the page is out of date
python scripts/families_table.py --known    # only the first table, in seconds
python scripts/families_table.py --sources  # only the table of repositories, which `python -m tests.sources` clones
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

import scalelong

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tests import packages, sources  # noqa: E402
from tests.families import FAMILIES, build  # noqa: E402
from tests.packages import Packaged, tried  # noqa: E402
from tests.standins import FOUND, NEGATIVE, REFUSED, StandIn  # noqa: E402
from tests.without_skips import WITHOUT_SKIPS  # noqa: E402

PAGE = ROOT / "docs" / "families.md"
OURS = "stand-in, `tests/standins`"


def models() -> dict[str, Callable[[], nn.Module]]:
    """Name and constructor of one full-size model of each family."""
    import diffusers
    from diffusers.models.unets import StableCascadeUNet
    from diffusers.pipelines.deprecated.unidiffuser.modeling_uvit import UniDiffuserModel
    from monai.networks.nets import DiffusionModelUNet

    from scalelong.backbones import UViT, UViTConfig, ddpm_cifar10
    from scalelong.lab.matrix_unet import MatrixUNet

    return {
        "`UNet2DModel` (DDPM CIFAR-10)": ddpm_cifar10,
        "`UNet2DConditionModel` (Stable Diffusion 1.5)": lambda: diffusers.UNet2DConditionModel(
            sample_size=64, cross_attention_dim=768, attention_head_dim=8
        ),
        "`UNet2DConditionModel` (SDXL)": lambda: diffusers.UNet2DConditionModel(
            sample_size=128,
            block_out_channels=(320, 640, 1280),
            down_block_types=("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
            up_block_types=("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
            transformer_layers_per_block=(1, 2, 10),
            attention_head_dim=(5, 10, 20),
            cross_attention_dim=2048,
            use_linear_projection=True,
            addition_embed_type="text_time",
            addition_time_embed_dim=256,
            projection_class_embeddings_input_dim=2816,
        ),
        "`UNet1DModel`": lambda: diffusers.UNet1DModel(extra_in_channels=64),
        "`UNet3DConditionModel`": diffusers.UNet3DConditionModel,
        "`I2VGenXLUNet`": diffusers.I2VGenXLUNet,
        "`UNetSpatioTemporalConditionModel` (SVD)": diffusers.UNetSpatioTemporalConditionModel,
        "`UNetMotionModel` (AnimateDiff)": diffusers.UNetMotionModel,
        "`Kandinsky3UNet`": diffusers.Kandinsky3UNet,
        "`StableCascadeUNet` (stage C)": lambda: StableCascadeUNet(
            in_channels=16,
            out_channels=16,
            conditioning_dim=2048,
            block_out_channels=(2048, 2048),
            num_attention_heads=(32, 32),
            down_num_layers_per_block=(8, 24),
            up_num_layers_per_block=(24, 8),
            down_blocks_repeat_mappers=(1, 1),
            up_blocks_repeat_mappers=(1, 1),
            block_types_per_layer=(("SDCascadeResBlock", "SDCascadeTimestepBlock", "SDCascadeAttnBlock"),) * 2,
            clip_text_in_channels=1280,
            clip_text_pooled_in_channels=1280,
            clip_image_in_channels=768,
            switch_level=(False,),
            dropout=(0.1, 0.1),
        ),
        "`HunyuanDiT2DModel`": lambda: diffusers.HunyuanDiT2DModel(sample_size=128, patch_size=2, in_channels=4),
        "`UniDiffuserModel` / `UTransformer2DModel`": lambda: UniDiffuserModel(
            text_dim=64, clip_img_dim=512, num_text_tokens=77, sample_size=64, in_channels=4, out_channels=4, patch_size=2,
            num_layers=30, num_attention_heads=24, attention_head_dim=64, norm_type="layer_norm",
        ),
        "MONAI `DiffusionModelUNet`": lambda: DiffusionModelUNet(spatial_dims=2, in_channels=1, out_channels=1),
        "`scalelong` `UViT` (S/2, CIFAR-10)": lambda: UViT(
            UViTConfig(image_size=32, patch_size=2, dim=512, depth=12, heads=8)
        ),
        "`scalelong` `MatrixUNet` (Eq. 3, N = 8)": lambda: MatrixUNet(width=64, layers=2, num_skips=8),
    }  # fmt: skip


def row(name: str, build: Callable[[], nn.Module]) -> str:
    with torch.device("meta"):
        skips = scalelong.find_skips(build())
    outer, inner = skips[0], skips[-1]
    reach = ", ".join(f"{kind} {count}" for kind, count in Counter(skip.reach for skip in skips).items())
    if outer is inner:
        where = f"`{outer.made_in}` → `{outer.used_in}`"
    else:
        where = f"`{outer.made_in}` → `{outer.used_in}` … `{inner.made_in}` → `{inner.used_in}`"
    return f"| {name} | {len(skips)} | {where} | {reach} |"


def known_table() -> str:
    header = ["| model | skips | made → used, outermost … innermost | reach of kappa |", "|---|---|---|---|"]
    return "\n".join(header + [row(name, build) for name, build in models().items()])


# ------------------------------------------------------------------------------------------------- what is tried, small


def tried_families() -> Iterator[dict[str, Any]]:
    """Known classes, traced as if they were unknown."""
    for family in FAMILIES:
        model, inputs = build(family), family.inputs()
        seen = len(scalelong.skips.tracing.detect.detect(model, ((), inputs)).skips())
        handle = scalelong.apply(model, "cs", kappa=0.7, example=inputs)
        assert seen == len(handle.skips), family.name
        report = scalelong.verify(model, example=inputs)
        worst = max(max(check.output_error, check.gradient_error or 0.0) for check in report.checks)
        reach = [skip.reach for skip in handle.skips]
        package = {True: "diffusers", False: "monai" if "MONAI" in family.name else "scalelong"}[family.diffusers]
        yield {"name": family.name, "package": package, "expected": family.num_skips, "found": seen, "worst": worst,
               "reach": reach}  # fmt: skip


def stand_in(each: StandIn) -> dict[str, Any]:
    return tried(Packaged(each.name, OURS, each.build, each.inputs, each.num_skips, each.refusal))


def without_skips() -> Iterator[dict[str, Any]]:
    import diffusers

    for name, (settings, example) in WITHOUT_SKIPS.items():
        kwargs = tuple(example.items())
        cls = getattr(diffusers, name)
        yield tried(
            Packaged(name, "diffusers", lambda cls=cls, settings=settings: cls(**settings), tuple, 0, "", kwargs)
        )


def of_packages() -> list[dict[str, Any]]:
    """With the folder of tests/packages.txt on the path."""
    return apart(["tests.packages"], {"PYTHONPATH": os.pathsep.join([str(packages.FOLDER), str(ROOT)])})


def of_sources() -> list[dict[str, Any]]:
    """The true classes of repositories, named with their source."""
    rows = [row for name in sources.SOURCES for row in apart(["tests.sources", name], {})]
    for row in rows:
        url, commit = sources.SOURCES[row["package"]]
        row["package"] = f"[{url.removeprefix('https://github.com/')}]({url}/tree/{commit})"
    return rows


def apart(module: list[str], environment: dict[str, str]) -> list[dict[str, Any]]:
    """What a module of tests finds in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        found = Path(folder) / "found.json"
        subprocess.run(
            [sys.executable, "-m", *module, found], env={**os.environ, **environment}, cwd=ROOT, check=True,
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        rows: list[dict[str, Any]] = json.loads(found.read_text())
    return rows


def as_counted(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    wrong = [row for row in rows if row["found"] != row["expected"]]
    if wrong:
        sys.exit(f"not as counted by hand: {wrong}")
    return rows


def everything() -> list[dict[str, Any]]:
    rows = [*tried_families(), *map(stand_in, FOUND), *map(tried, packages.monai_networks()), *of_packages()]
    rows += [*map(stand_in, REFUSED), *without_skips(), *map(stand_in, NEGATIVE)]
    return as_counted(rows)


def found_table(rows: Sequence[dict[str, Any]]) -> str:
    lines = ["| model | from | counted by hand | found | oracle | reach of kappa |", "|---|---|---|---|---|---|"]
    for each in rows:
        if each["found"]:
            counts = ", ".join(f"{kind} {count}" for kind, count in Counter(each["reach"]).items())
            verdict = "equal" if each["worst"] < 1e-6 else f"off by {each['worst']:.1e}"
            lines.append(
                f"| {each['name']} | {each['package']} | {each['expected']} | {each['found']} | {verdict} | {counts} |"
            )
    return "\n".join([*lines, "", f"{len(lines) - 2} models."])


def none_table(rows: Sequence[dict[str, Any]]) -> str:
    lines = ["| model | from | found |", "|---|---|---|"]
    lines += [f"| {each['name']} | {each['package']} | none |" for each in rows if each["found"] == 0]
    return "\n".join([*lines, "", f"{len(lines) - 2} models."])


def refused_table(rows: Sequence[dict[str, Any]]) -> str:
    lines = ["| model | from | what the error says |", "|---|---|---|"]
    for each in rows:
        if each["found"] is None:
            said = each["said"].removeprefix("model: ")
            said = said.partition("cannot be scaled: ")[2] or said
            lines.append(f"| {each['name']} | {each['package']} | {said} |")
    return "\n".join(lines)


def replaced(page: str, name: str, table: str) -> str:
    start, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    before, rest = page.split(start)
    return f"{before}{start}\n{table}\n{end}{rest.split(end)[1]}"


def main() -> None:
    torch.set_num_threads(1)
    page = PAGE.read_text()
    new = replaced(page, "table", known_table())
    cloned = all(sources.path(name).exists() for name in sources.SOURCES)
    if "--sources" in sys.argv or (cloned and "--known" not in sys.argv):
        new = replaced(new, "sources", found_table(as_counted(of_sources())))
    if not {"--known", "--sources"} & {*sys.argv}:
        rows = everything()
        for name, table in (("found", found_table), ("none", none_table), ("refused", refused_table)):
            new = replaced(new, name, table(rows))
    if "--check" in sys.argv and new != page:
        sys.exit(f"{PAGE.name} is out of date: run python scripts/families_table.py")
    PAGE.write_text(new)


if __name__ == "__main__":
    main()
