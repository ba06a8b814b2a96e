"""What a run's records say about its stability: which blocks oscillate, whether gradients spike, what to try.

Example: scalelong diagnose runs/digits-ls
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

import tyro

from scalelong.cli.arguments import RunFolder
from scalelong.stability.diagnosis import diagnose


@dataclass(frozen=True)
class Diagnose:
    """The command line."""

    run: RunFolder  # a run folder, best of a run trained with --probe-every
    json: bool = False  # print the sentences with their numbers as JSON


def main(arguments: list[str]) -> None:
    """Print the diagnosis."""
    command = tyro.cli(Diagnose, args=arguments, prog="scalelong diagnose", description=__doc__)
    found = diagnose(command.run)
    if command.json:
        print(json.dumps([asdict(sentence) for sentence in found], indent=1))
        return
    for sentence in found:
        print(f"{'!' if sentence.alarming else ' '} {sentence.about:10} {sentence.text}")
