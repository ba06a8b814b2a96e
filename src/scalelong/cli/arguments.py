"""Positional arguments, with the names that --help shows."""

from __future__ import annotations

from typing import Annotated

import tyro

RunFolder = tyro.conf.Positional[Annotated[str, tyro.conf.arg(metavar="RUN")]]
RunFolders = tyro.conf.Positional[Annotated[tuple[str, ...], tyro.conf.arg(metavar="RUN ...")]]
ModelName = tyro.conf.Positional[Annotated[str, tyro.conf.arg(metavar="MODEL")]]
DataName = tyro.conf.Positional[Annotated[str, tyro.conf.arg(metavar="DATA")]]
PresetName = tyro.conf.Positional[Annotated[str, tyro.conf.arg(metavar="PRESET")]]
