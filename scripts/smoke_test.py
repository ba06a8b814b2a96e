"""Smoke test of the installed package; `make dist` runs it in an empty environment.

python scripts/smoke_test.py
"""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

import torch
from diffusers import UNet2DModel

import scalelong
from scalelong.data import load_source


def command(*arguments: str, folder: Path) -> str:
    """What `scalelong ARGUMENTS` prints in this folder."""
    program = Path(sysconfig.get_path("scripts")) / "scalelong"
    done = subprocess.run([program, *arguments], cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"scalelong {' '.join(arguments)}\n{done.stdout}{done.stderr}"
    return done.stdout


def main() -> None:
    site = Path(sysconfig.get_path("purelib"))
    assert Path(scalelong.__file__).is_relative_to(site), f"{scalelong.__file__} is not in {site}"
    assert (Path(scalelong.__file__).parent / "py.typed").is_file()
    assert [load_source(name).shape for name in ("digits", "emoji32")] == [(1, 8, 8), (3, 32, 32)]

    model = UNet2DModel(sample_size=16, block_out_channels=(32, 32), down_block_types=("DownBlock2D",) * 2,
                        up_block_types=("UpBlock2D",) * 2, layers_per_block=1)  # fmt: skip
    x, t = torch.randn(2, 3, 16, 16), torch.tensor([10, 20])
    plain = model(x, t).sample
    scalelong.apply(model, "cs", kappa=0.5)
    assert not torch.allclose(model(x, t).sample, plain), "the scaling has no effect"
    scalelong.remove(model)
    torch.testing.assert_close(model(x, t).sample, plain)

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        assert "scalelong demo" in command("demo", "--help", folder=folder)
        assert command("--version", folder=folder).strip() == f"scalelong {scalelong.__version__}"
        command("train", "digits-demo", "--steps", "2", "--out", "run", folder=folder)
        command("report", "run", "--out", "report.html", folder=folder)
        assert "scalelong report" in (folder / "report.html").read_text()
        command("export", "run", "--format", "diffusers", "--out", "pipeline", folder=folder)
        assert (folder / "pipeline" / "README.md").is_file()
    sys.stdout.write(f"scalelong {scalelong.__version__} works as installed in {site}\n")


if __name__ == "__main__":
    sys.exit(main())
