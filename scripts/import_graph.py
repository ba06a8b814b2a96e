"""Draw which package imports which into docs/assets/import-graph.png, in the layers that import-linter enforces.

Example: python scripts/import_graph.py
"""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path

import matplotlib
import tomllib

matplotlib.use("agg")
import matplotlib.pyplot as plt
from matplotlib.patches import FancyBboxPatch

ROOT = Path(__file__).parents[1]
SRC = ROOT / "src" / "scalelong"
OUT = ROOT / "docs" / "assets" / "import-graph.png"


def layers() -> list[list[str]]:
    """Packages from top to bottom, as pyproject.toml lists them."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    listed = next(contract["layers"] for contract in contracts if contract["type"] == "layers")
    return [[name.strip().removeprefix("scalelong.") for name in layer.split("|")] for layer in listed]


def imports() -> Counter[tuple[str, str]]:
    """How many import statements of one package name another."""
    found: Counter[tuple[str, str]] = Counter()
    for file in SRC.rglob("*.py"):
        importer = file.relative_to(SRC).parts[0].removesuffix(".py")
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("scalelong"):
                parts = (node.module or "").split(".")[1:2] or [alias.name for alias in node.names]
                found.update((importer, part) for part in parts)
    return found


def size(package: str) -> str:
    """Files and lines of a package."""
    folder = SRC / package
    files = list(folder.rglob("*.py")) if folder.is_dir() else [SRC / f"{package}.py"]
    lines = sum(len(file.read_text().splitlines()) for file in files)
    return f"{len(files)} files, {lines:,} lines" if folder.is_dir() else f"{lines} lines"


def main() -> None:
    """Draw the packages as boxes, one row per layer, and an arrow per importing pair."""
    rows, counts = layers(), imports()
    place = {
        name: ((2.5, 6.0, 9.5)[depth % 3] if len(row) == 1 else 2.5 + 3.5 * column, -depth)
        for depth, row in enumerate(rows)
        for column, name in enumerate(row)
    }
    figure, axes = plt.subplots(figsize=(11, 0.8 * len(rows)))
    for (importer, imported), count in sorted(counts.items()):
        if importer in place and imported in place and importer != imported:
            style = {"arrowstyle": "-|>", "color": "#4e79a7", "alpha": 0.5, "lw": 0.6 + 0.1 * min(count, 25)}
            (x, y), (x2, y2) = place[importer], place[imported]
            axes.annotate("", (x2, y2 + 0.3), (x, y - 0.3), arrowprops=style | {"connectionstyle": "arc3,rad=0.08"})
    for name, (x, y) in place.items():
        box = FancyBboxPatch((x - 1.2, y - 0.27), 2.4, 0.54, boxstyle="round,pad=0.03", fc="white", ec="#333", zorder=3)
        axes.add_patch(box)
        axes.text(x, y + 0.09, name, ha="center", va="center", fontsize=11, weight="bold", zorder=4)
        axes.text(x, y - 0.14, size(name), ha="center", va="center", fontsize=8, color="#555", zorder=4)
    axes.set(xlim=(0, 12), ylim=(-len(rows) + 0.4, 0.6))
    axes.axis("off")
    OUT.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(OUT, dpi=110, bbox_inches="tight")


if __name__ == "__main__":
    main()
