"""Bad configurations: made by hand and generated. One clear line names the key, before anything is built or written."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import math
import random
import time
import typing
from pathlib import Path
from typing import Any

import torch

from scalelong.runs.settings import RunConfig, dotted
from scalelong.runs.validation import BOUNDS
from scalelong.training.build import build_model, check_config
from tests.faults.harness import case, expect, times
from tests.training.tiny import TINY, tiny

LONG = "9" * 5000
BAD: list[tuple[str, str]] = [  # what the error must name, and the YAML
    *(("optimizer.clip_norm", f"optimizer: {{clip_norm: {value}}}") for value in (".nan", ".inf", "-1", "text", "[1]")),
    *(("optimizer.lr", f"optimizer: {{lr: {value}}}") for value in ("0", ".inf", ".nan", "-1.0e-3", "null", "{a: 1}")),
    *(("optimizer.betas", f"optimizer: {{betas: {value}}}") for value in ("[.nan, 0.9]", "[1.0, 0.9]", "[0.9]", "0.9")),
    *(("optimizer.weight_decay", f"optimizer: {{weight_decay: {value}}}") for value in (".nan", "-1")),
    *(("model.channels", f"model: {{backbone: unet, channels: {value}}}") for value in ("[]", "[0, 32]", "[33]", "[-32]")),
    *(("model.channels", f"model: {{backbone: unet, channels: {value}}}") for value in ("[32.5]", "['--out', x]", [32] * 9)),
    *(("model.depth", f"model: {{depth: {value}}}") for value in ("1000000", "0", "-2", "3", "1.5", ".inf")),
    *(("model.dim", f"model: {{dim: {value}, heads: 1}}") for value in ("0", "15", "10000000000")),
    ("model.heads", "model: {heads: 3}"),
    ("model.patch_size", "model: {patch_size: 0}"),
    ("model.backbone", "model: {backbone: vit}"),
    ("model.layers_per_block", "model: {backbone: unet, channels: [32], layers_per_block: 100000}"),
    *(("data.image_size", f"data: {{image_size: {value}}}") for value in ("100000", "0", "-8", "8.5")),
    ("data.name", "data: {name: digitz}"),
    ("data.name", "data: {name: null}"),
    ("data.workers", "data: {workers: -1}"),
    ("data.flip", "data: {flip: maybe}"),
    ("data.split", "data: {split: dev}"),
    *(("training.seed", f"training: {{seed: {value}}}") for value in ("100000000000000000000000", "-1", "1.0e23", ".nan")),
    *(("training.steps", f"training: {{steps: {value}}}") for value in ("0", "-5", "true", "1.0e400")),
    ("training.batch_size", "training: {batch_size: 0}"),
    ("training.batch_size", "training: {batch_size: 7, accumulate: 2}"),
    ("training.batch_size", "training: {batch_size: 100000000}"),
    ("training.ema_decay", "training: {ema_decay: 1.0}"),
    ("training.keep", "training: {keep: 1}"),
    ("training.precision", "training: {precision: fp8}"),
    ("training.rank_timeout", "training: {rank_timeout: .nan}"),
    ("scaling.method", "scaling: {method: css}"),
    ("scaling.kappa", "scaling: {method: cs, kappa: .nan}"),
    ("scaling.kappa", "scaling: {method: ls, kappa: .inf}"),
    ("scaling.reduction", "scaling: {method: ls, reduction: 0}"),
    ("condition.drop", "condition: {drop: 1.5}"),
    ("condition.kind", "condition: {kind: sound}"),
    ("diffusion.process", "diffusion: {process: vpp}"),
    ("sampling.guidance", "sampling: {guidance: .inf}"),
    ("sampling.guidance_interval", "sampling: {guidance_interval: [.nan, 1.0]}"),
    ("sampling.steps", "sampling: {steps: 10000000000}"),
    ("sampling.count", "sampling: {count: 0}"),
    ("aliases", "data: &a {name: digits}\nmodel: *a"),
    ("nested too deeply", "data: " + "[" * 5000),
    ("not YAML", "data: {name: !!python/object/apply:os.system ['true']}"),
    ("not YAML", f"training: {{seed: {LONG}}}"),
    ("training.seed", f"training: {{seed: 0x{LONG}}}"),
    ("more than", "# " + "x" * 100_000),
    ("keys and values", "[1, 2]"),
    ("unknown key", "trainig: {steps: 1}"),
]  # fmt: skip


def command_line(*arguments: str) -> tuple[int, str, float]:
    """Exit status, stderr and seconds of `scalelong ARGUMENTS` in this process."""
    from scalelong.cli.main import main

    heard, started = io.StringIO(), time.process_time()
    with contextlib.redirect_stderr(heard), contextlib.redirect_stdout(io.StringIO()):
        try:
            status = main([*arguments])
        except SystemExit as stopped:
            status = stopped.code if isinstance(stopped.code, int) else 1
    return status, heard.getvalue(), time.process_time() - started


def refuse_all(folder: Path) -> int:
    command_line("train", "--help")  # imports do not count
    for number, (key, text) in enumerate(BAD):
        file, out = folder / f"{number}.yaml", folder / f"run{number}"
        file.write_text(text)
        status, heard, seconds = command_line("train", "digits-demo", "--config", str(file), "--out", str(out))
        lines = [line for line in heard.splitlines() if line.startswith("error:")]
        assert status == 1 and len(lines) == 1, f"{text[:80]!r}: exit {status}, {heard[-300:]!r}"
        assert key in lines[0] and "Traceback" not in heard, f"{text[:80]!r}: {lines[0]}"
        assert len(lines[0]) < 600 and seconds < 3, f"{text[:80]!r}: {len(lines[0])} characters, {seconds:.1f} s"
        assert not out.exists(), f"{text[:80]!r}: {out} was made"
    return len(BAD)


NASTY: list[Any] = [
    0,
    -1,
    1,
    2,
    3,
    7,
    1e-9,
    0.5,
    1.5,
    2**31,
    2**63,
    10**23,
    1e308,
    -1e308,
    math.nan,
    math.inf,
    -math.inf,
]
NASTY += ["", "x", "cs", None, True, (), (0,), (32, 64), (0.9, 0.99), (math.nan, 1.0), "\0", [1], {"a": 1}, b"x"]


def generated(count: int, seed: int = 0) -> tuple[int, int]:
    """Refused and accepted; every refusal names a key, and what is accepted is finite and can be built."""
    choose, keys = random.Random(seed), list(dotted(RunConfig()))
    refused = accepted = 0
    for _ in range(count):
        config, changed = TINY, choose.sample(keys, choose.randint(1, 3))
        for key in changed:
            part, _, name = key.partition(".")
            config = dataclasses.replace(
                config, **{part: dataclasses.replace(getattr(config, part), **{name: choose.choice(NASTY)})}
            )
        values, started = {key: dotted(config)[key] for key in changed}, time.process_time()
        try:
            check_config(config)
        except (ValueError, TypeError) as error:
            assert any(part in str(error) for key in changed for part in (key, key.split(".")[0] + ".")), (
                f"{values}: {error}"
            )
            assert len(str(error).splitlines()) == 1, f"{values}: {error}"
            refused += 1
        else:
            numbers = [
                n for v in values.values() for n in (v if isinstance(v, tuple) else (v,)) if isinstance(n, float)
            ]
            assert all(
                math.isfinite(n) or (n == math.inf and "sampling.guidance_interval" in values) for n in numbers
            ), values
            if config.model.depth <= 100 and config.model.dim <= 4096:
                with torch.device("meta"), contextlib.suppress(ValueError):  # what depends on the data's shape
                    build_model(config, (1, 8, 8))
            accepted += 1
        assert time.process_time() - started < 3, values
    return refused, accepted


@case(
    14,
    f"{len(BAD)} bad configurations and 1,000 generated ones; a resume with other settings",
    passes_when="one clear line naming the key, in 3 s, nothing built or written; the difference is printed",
    protections=["settings.check"],
)
def configurations(folder: Path, protect: bool) -> str:
    from scalelong.training import train

    kinds = {hint for part in vars(RunConfig()).values() for hint in typing.get_type_hints(type(part)).values()}
    numeric = {k for k, v in dotted(RunConfig()).items() if isinstance(v, (int, float)) and not isinstance(v, bool)}
    assert kinds and numeric <= BOUNDS.keys(), f"without bounds: {numeric - BOUNDS.keys()}"
    refused, accepted = generated(times(1000, 200))
    count = refuse_all(folder)
    run = train(tiny(training_steps=1), folder / "first")
    with expect(ValueError, "optimizer.lr: 0.001 there, 0.5 asked for"):
        train(tiny(training_steps=1, optimizer_lr=0.5), run)
    return f"{count} of {count} refused by key; generated: {refused} refused, {accepted} sound"
