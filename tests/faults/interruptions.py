"""`apply`, `remove`, `load` and `fold` ended by an error at every line of the package that they run."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import torch
from torch import nn

import scalelong
from scalelong.skips import example
from tests.faults.harness import case, times

HOME = str(Path(scalelong.__file__).parent)
RECOVERY = {"restore"}  # a second fault while the first one is undone is not injected
ERRORS = (MemoryError, KeyboardInterrupt, OSError)


@contextmanager
def interrupted(at: int, error: type[BaseException]) -> Iterator[list[int]]:
    """Raise `error` at the `at`-th new line of the package that is run; yields the count of lines so far.

    A line counts once per function call depth-first run, so that loops do not repeat the same point.
    """
    count, seen = [0], set()

    def trace(frame: FrameType, event: str, _argument: Any) -> Any:
        code = frame.f_code
        if not code.co_filename.startswith(HOME) or code.co_name in RECOVERY:
            return None
        if code.co_filename == example.__file__ and frame.f_lineno in _handlers():
            return trace
        if event == "line" and (place := (code, frame.f_lineno)) not in seen:
            seen.add(place)
            count[0] += 1
            if count[0] == at:
                raise error("injected")
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield count
    finally:
        sys.settrace(before)


def _handlers() -> set[int]:
    """Lines of example.py that undo: those of `undisturbed`'s finally block and of the guard's handler."""
    if not _LINES:
        undoing = False
        for number, line in enumerate(Path(example.__file__).read_text().splitlines(), 1):
            indent = len(line) - len(line.lstrip())
            if line.strip() in ("finally:", "except BaseException:"):
                undoing, level = True, indent
            elif undoing and line.strip() and indent <= level:
                undoing = False
            if undoing:
                _LINES.add(number)
    return _LINES


_LINES: set[int] = set()


def state_of(model: nn.Module) -> list[Any]:
    """Everything that must be as before: weights, config, hooks, attributes, modes, random states."""
    parts: list[Any] = [random.getstate(), str(np.random.get_state()), torch.get_rng_state().tolist()]
    for name, module in model.named_modules():
        tables = {key: list(value) for key, value in vars(module).items() if isinstance(value, (dict, set))}
        hooks = {
            key: list(map(id, v.values()))
            for key, v in vars(module).items()
            if "hooks" in key and v and isinstance(v, dict)
        }
        parts.append((name, module.training, sorted(vars(module)), tables, hooks))
    parts.append({name: value.detach().clone() for name, value in model.state_dict().items()})
    parts.append(dict(getattr(model, "config", None) or {}) if hasattr(model, "register_to_config") else None)
    return parts


def same(a: list[Any], b: list[Any]) -> bool:
    weights_a, weights_b = a[-2], b[-2]
    plain = a[:-2] + a[-1:] == b[:-2] + b[-1:]
    return (
        plain
        and weights_a.keys() == weights_b.keys()
        and all(torch.equal(v, weights_b[k]) for k, v in weights_a.items())
    )


def unet() -> nn.Module:
    import diffusers

    blocks = {"down_block_types": ("DownBlock2D", "DownBlock2D"), "up_block_types": ("UpBlock2D", "UpBlock2D")}
    torch.manual_seed(0)
    model: nn.Module = diffusers.UNet2DModel(
        sample_size=8, in_channels=1, out_channels=1, block_out_channels=(8, 8), layers_per_block=1, norm_num_groups=4,
        **blocks,
    )  # fmt: skip
    model.train()
    model.mid_block.eval()  # a part in another mode
    return model


def uvit() -> nn.Module:
    torch.manual_seed(0)
    return scalelong.UViT(scalelong.UViTConfig(image_size=8, patch_size=4, dim=16, depth=4, heads=2)).train()


def scaled(method: str, **options: Any) -> Callable[[], nn.Module]:
    return lambda: scalelong.apply(uvit(), method, **options).model


def operations(folder: Path) -> dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module], Any]]]:
    """What is interrupted: a model to start from, and what is done to it."""
    saved = scalelong.save(scalelong.apply(uvit(), "ls").model, folder / "saved")
    call = (torch.zeros(1, 1, 8, 8), torch.zeros(1))
    return {
        "remove": (lambda: scalelong.apply(unet(), "cs").model, scalelong.remove),
        "apply cs": (unet, lambda model: scalelong.apply(model, "cs")),
        "apply ls": (uvit, lambda model: scalelong.apply(model, "ls")),
        "load": (uvit, lambda model: scalelong.load(model, saved)),
        "load again": (scaled("ls"), lambda model: scalelong.load(model, saved)),
        "fold": (scaled("cs"), scalelong.fold),
        "apply with an example": (
            unet,
            lambda model: scalelong.apply(model, "cs", example=call, placement="after_norm"),
        ),
    }


def interrupt_everywhere(
    name: str, build: Callable[[], nn.Module], act: Callable[[nn.Module], Any], stride: int
) -> int:
    """Interrupt at every `stride`-th line; returns how many interruptions there were."""
    with interrupted(0, MemoryError) as count:
        act(build_quietly(build))
    lines, model = count[0], build()
    done = 0
    for at in range(1 + stride // 2, lines + 1, stride):
        error, before = ERRORS[at % len(ERRORS)], state_of(model)
        try:
            with interrupted(at, error):
                act(model)
        except BaseException as raised:  # noqa: BLE001 (what was injected)
            assert "injected" in str(raised), f"{name}, line {at}: {raised!r}"
            assert same(before, state_of(model)), f"{name}, {error.__name__} at line {at} of {lines}: not as before"
            done += 1
        else:
            model = build()  # the error was handled inside, as optional steps may
    return done


def build_quietly(build: Callable[[], nn.Module]) -> nn.Module:
    """Build without counting lines."""
    trace = sys.gettrace()
    sys.settrace(None)
    try:
        return build()
    finally:
        sys.settrace(trace)


@case(
    16,
    "`apply`, `remove`, `load`, `fold` failing or interrupted at every line (MemoryError, KeyboardInterrupt, OSError)",
    passes_when="the model, its config, hooks, weights, random state and training flags are exactly as before",
    protections=["skips.restore"],
)
def interruptions(folder: Path, protect: bool) -> str:
    strides = dict.fromkeys(("apply with an example", "fold"), times(5, 29))  # they run the model dozens of times
    done = {
        name: interrupt_everywhere(name, *act, strides.get(name, times(1, 5)))
        for name, act in operations(folder).items()
    }
    return ", ".join(f"{name}: {count}" for name, count in done.items()) + " interruptions undone"
