"""Arguments that several verbs share."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Annotated, Any

import tyro
from tyro.extras import subcommand_cli_from_dict

from scalelong.errors import unknown_name
from scalelong.runs.folder import read_config
from scalelong.runs.settings import SamplingSettings

RunFolder = tyro.conf.Positional[Annotated[str, tyro.conf.arg(metavar="RUN")]]
RunFolders = tyro.conf.Positional[Annotated[tuple[str, ...], tyro.conf.arg(metavar="RUN ...")]]
ModelName = tyro.conf.Positional[Annotated[str, tyro.conf.arg(metavar="MODEL")]]
DataName = tyro.conf.Positional[Annotated[str, tyro.conf.arg(metavar="DATA")]]
PresetName = tyro.conf.Positional[Annotated[str, tyro.conf.arg(metavar="PRESET")]]


@dataclass(frozen=True)
class SamplingFlags(SamplingSettings):
    """`SamplingSettings` as flags, with the common flag names."""

    count: Annotated[int, tyro.conf.arg(name="num-samples", aliases=["--num"])] = 64  # number of images


def parse_over_run(command: type[Any], arguments: list[str], **options: Any) -> Any:
    """Parse flags with sampling defaults from the run, except the number of images."""
    first = tyro.cli(command, args=arguments, **options)
    own = read_config(first.run).sampling
    values = dataclasses.asdict(own) | {"count": first.sampling.count}
    if first.sampling.sampler not in ("", own.sampler):
        values["steps"] = 0  # the run's number of steps belongs to its own sampler
    default = dataclasses.replace(first, sampling=SamplingFlags(**values))
    return tyro.cli(command, args=arguments, default=default, **options)


def parse_subcommand(commands: dict[str, Any], arguments: list[str], verb: str, description: str | None) -> Any:
    """One of several commands of a verb, such as `scalelong data fetch`."""
    if arguments and not arguments[0].startswith("-") and arguments[0] not in commands:
        raise unknown_name(verb, arguments[0], commands)
    return subcommand_cli_from_dict(commands, args=arguments, prog=f"scalelong {verb}", description=description)
