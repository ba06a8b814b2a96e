"""`scalelong diagnose`."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

import tyro

from scalelong.cli.arguments import RunFolder


@dataclass(frozen=True)
class Diagnose:
    """Diagnose the stability of a run: which blocks oscillate, whether gradients spike, what to try.

    Example: scalelong diagnose runs/digits-ls
    """

    run: RunFolder  # a run folder, ideally trained with --probe-every; or the file of an OscillationProbe
    json: bool = False  # print JSON


def main(arguments: list[str]) -> None:
    """Print the diagnosis."""
    from scalelong.stability import diagnosis

    command = tyro.cli(Diagnose, args=arguments, prog="scalelong diagnose")
    found = diagnosis.diagnose(command.run)
    if command.json:
        print(json.dumps([asdict(sentence) for sentence in found], indent=1))
        return
    for sentence in found:
        print(f"{'!' if sentence.alarming else ' '} {sentence.about:10} {sentence.text}")
