"""Steps that go wrong, and what a step depends on: values that are not finite, spikes, determinism."""

from __future__ import annotations

import math
from pathlib import Path

import torch
from safetensors.torch import load_file

from scalelong.runs.events import read_events
from scalelong.training import Trainer, loop
from tests.faults.harness import PATIENCE, case, times
from tests.faults.processes import launch
from tests.training.tiny import Spike, assert_same_run, assert_same_weights, losses, newest, tiny

POISONS = ("nan loss", "inf gradient", "inf loss", "nan gradient")


class Poison(torch.autograd.Function):
    """The identity, but for one row: its value (loss) or its gradient is not finite."""

    @staticmethod
    def forward(ctx, output: torch.Tensor, row: int, value: float, what: str) -> torch.Tensor:
        ctx.row, ctx.value, ctx.what = row, value, what
        output = output.clone()
        if what == "loss":
            output[row] = value
        return output

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        gradient = gradient.clone()
        gradient[ctx.row] = ctx.value if ctx.what == "gradient" else 0  # else the gradient would show it to all ranks
        return gradient, None, None, None


def poisoned(kind: str, rank: int, step: int) -> None:
    """Make every Trainer of this process poison the second sample of step `step` on rank `rank`, whenever it is seen."""
    value, what = float(kind.split()[0]), kind.split()[1]
    real = Trainer.__init__

    def init(self: Trainer, *args: object) -> None:
        real(self, *args)
        seen: list[torch.Tensor] = []

        def output(_module: object, args: tuple[torch.Tensor, ...], result: torch.Tensor) -> torch.Tensor:
            if not seen and self.step + 1 == step and self.ranks.process_index == rank:
                seen.append(args[0][1].clone())
            for row, x in enumerate(args[0] if seen else ()):
                if torch.equal(x, seen[0]):
                    return Poison.apply(result, row, value, what)
            return result

        self.model.register_forward_hook(output)

    loop.Trainer.__init__ = init


@case(
    5,
    "NaN or Inf in loss or gradient on one rank",
    passes_when="the same decision on all ranks, sample and t named",
    protections=["step.share"],
)
def nonfinite(folder: Path, protect: bool) -> str:
    kinds = POISONS[: times(4, 2)]
    for kind in kinds:
        name = kind.replace(" ", "-")
        for policy in ("raise", "skip"):
            config = tiny(training_on_nonfinite=policy, training_log_every=5, training_rank_timeout=20 * PATIENCE)
            run = launch(folder / f"{name}-{policy}", config, 2, prepare=lambda kind=kind: poisoned(kind, 1, 3))
            codes = run.wait()
            sentences = [line for line in run.log.splitlines() if "step 3: the" in line and "not finite" in line]
            assert len(sentences) == 2, f"{kind}, {policy}: {len(sentences)} of 2 ranks noticed it\n{run.log[-1500:]}"
            said = {line.removeprefix("error: ").partition("; policy")[0] for line in sentences}
            assert len(said) == 1, f"{kind}, {policy}: the ranks disagree, {said}"
            assert codes == [int(policy == "raise")] * 2, f"{kind}, {policy}: exit codes {codes}"
            what = kind.split()[1]  # step 3 covers samples 16 to 23, rank 1 has the last four of them
            assert f"the {what} is not finite" in sentences[0] and "samples [21] at t = [0." in sentences[0], sentences[
                0
            ]
            if policy == "skip":
                train = [record for record in read_events(run.folder)[0] if record["kind"] == "train"]
                assert train[-1]["skipped"] == 1
    return f"{2 * len(kinds)} of {2 * len(kinds)}: both ranks decided the same and named the sample and its t"


@case(
    6,
    "loss spike x100",
    passes_when="noticed within a step, recorded, policy (warn, skip, rewind)",
    protections=["guard.spikes"],
)
def spike(folder: Path, protect: bool) -> str:
    for log_every in (1, 7):
        for policy in ("warn", "skip", "rewind"):
            config = tiny(training_steps=24, training_on_spike=policy, training_log_every=log_every)
            trainer = Trainer(config, folder / f"{policy}{log_every}")
            Spike(trainer, step=15)
            seen: list[int] = []
            trainer.observers.append(lambda step, _m, t=trainer, s=seen: s.append(step) if t.guard.avoid else None)
            trainer.run()
            records = [record for record in read_events(trainer.folder)[0] if record["kind"] == "spike"]
            assert [(record["at"], record["policy"]) for record in records] == [(15, policy)], records
            assert trainer.guard.skipped == ([] if policy == "warn" else [15])
            if policy == "rewind":
                assert seen[0] == 13, "it did not return to the checkpoint of step 12 at once"
        assert_same_weights(folder / f"skip{log_every}", folder / f"rewind{log_every}")
    return "warned, skipped, rewound; each recorded at step 15"


@case(
    15,
    "determinism: 3 repeats, workers 0, 1, 2, ranks 1, 2, accumulation 1, 2, 4",
    passes_when="bitwise; bitwise; within 1e-5 over 50 steps in float32 at a stable learning rate",
    protections=["random.counter"],
)
def determinism(folder: Path, protect: bool) -> str:
    def run(name: str, ranks: int = 1, lr: float = 1e-4, **changes: object) -> Path:
        config = tiny(training_steps=50, training_checkpoint_every=50, optimizer_lr=lr, **changes)
        launch(folder / name, config, ranks).finish()
        return folder / name

    def distance(one: Path, other: Path) -> float:
        pairs = zip(losses(one), losses(other), strict=True)
        furthest = max(abs(a - b) for (_, a), (_, b) in pairs)
        first, second = (load_file(newest(each) / "model.safetensors") for each in (one, other))
        return max(furthest, *(float((value - second[key]).abs().max()) for key, value in first.items()))

    whole = run("whole")
    for repeat in range(2):
        assert_same_run(whole, run(f"repeat{repeat}"))
    for workers in (0, 1, 2):
        assert_same_run(whole, run(f"workers{workers}", data_workers=workers, data_resident_mb=0))
    found = {"2 ranks": distance(whole, run("ranks", 2))}
    for parts in (2, 4):
        found[f"{parts} micro-batches"] = distance(whole, run(f"parts{parts}", training_accumulate=parts))
    assert all(value <= 1e-5 for value in found.values()), found
    fast = distance(run("fast", lr=1e-2), run("fast2", 2, lr=1e-2))
    assert math.isfinite(fast)
    shown = ", ".join(f"{name} {value:.0e}" for name, value in found.items())
    return f"repeats and workers identical to the bit; {shown} at rate 1e-4; 2 ranks {fast:.0e} at 1e-2"
