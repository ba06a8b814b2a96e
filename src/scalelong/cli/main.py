"""Entry point of `scalelong VERB ...`; imports the verb lazily."""

from __future__ import annotations

import importlib
import io
import logging
import os
import re
import sys
import warnings
from collections.abc import Sequence
from dataclasses import fields

from scalelong import __version__
from scalelong.errors import StoppedError, one_line, unknown_name
from scalelong.progress import LogHandler, write_stderr
from scalelong.runs.settings import RunConfig

VERBS = {
    "demo": "train none, cs and ls on digits and compare them",
    "train": "train a preset; run again to resume",
    "sample": "sample images from a trained run",
    "compare": "compare runs: mean ± sd over seeds, steps and seconds to a loss or quality",
    "report": "write an HTML report of runs",
    "evaluate": "measure the FID of a run",
    "probe": "linear probes on the features of a run",
    "export": "export a run with a model card",
    "data": "download, check and encode datasets",
    "autoencoder": "train a small autoencoder for latent diffusion",
    "inspect": "show the long skips of a model: stages, channels, coefficients, reach of kappa",
    "coordcheck": "coordinate check: activation scale across widths, in muP and standard parametrization",
    "transfer": "learning-rate transfer: train a preset at several widths and rates",
    "kappa": "recommend kappa from data, noise process and number of skips",
    "diagnose": "diagnose a run: oscillation, spikes, skipped steps",
    "theory": "check the paper's theorems numerically",
    "doctor": "report versions, devices, extras and cached data",
}

_PARTS = "|".join(field.name for field in fields(RunConfig))
_SETTING = re.compile(rf"(?<![-\w.'])((?:{_PARTS})\.)?([a-z]+(?:_[a-z]+)*)(?![\w(])(?:=(?:True\b|'?(\w*)'?))?")
_ARGUMENTS = {"allow_amplify": "scaling.", "axis": "scaling.", "source": ""}  # of Python that are named in remedies

_LIST = "\n".join(f"  {verb:11}  {what}" for verb, what in VERBS.items())
USAGE = f"usage: scalelong VERB [options]\n\n{_LIST}\n\nscalelong VERB --help lists the options of a verb."


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb and return the exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] in ("-h", "--help"):
        print(USAGE)
        return 0 if arguments else 2
    if arguments[0] == "--version":
        print(f"scalelong {__version__}")
        return 0
    # bytes that the locale could not decode are lone surrogates in Python
    if unreadable := [text for text in arguments if any("\ud800" <= letter <= "\udfff" for letter in text)]:
        print(f"error: {unreadable[0]!a} is not text in this locale; set PYTHONUTF8=1", file=sys.stderr)
        return 2
    verb, rest = arguments[0], arguments[1:]
    if verb not in VERBS:
        print(f"error: {unknown_name('verb', verb, VERBS)}\n\n{USAGE}", file=sys.stderr)
        return 2
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # the terminal may not support all characters
    if os.environ.get("NO_COLOR"):
        os.environ.setdefault("PYTHON_TYRO_ANSI_CODES", "False")
    logging.basicConfig(format="%(message)s", level=logging.INFO, handlers=[LogHandler()])
    if not os.environ.get("SCALELONG_DEBUG"):
        warnings.formatwarning = lambda message, *_, **__: f"warning: {message}\n"  # without the line of code
    for noisy in ("httpx", "accelerate", "matplotlib", "torch"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    try:
        importlib.import_module(f"scalelong.cli.{verb}").main(rest)
        if sys.stdout is not None:  # closed by the caller
            sys.stdout.flush()
    except BrokenPipeError:  # as in `scalelong ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except StoppedError as stopped:
        print(stopped, end="\n" if str(stopped) else "")
        return StoppedError.code
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except Exception as error:
        if os.environ.get("SCALELONG_DEBUG"):
            raise
        write_stderr(f"error: {as_flags(one_line(error), verb)}\n")
        return 1
    return 0


def as_flags(message: str, verb: str) -> str:
    """Rewrite the remedy of an error (after the last semicolon) to name flags instead of settings."""
    head, semicolon, remedy = message.rpartition("; ")

    def flag(found: re.Match[str]) -> str:
        part, name, value = found.groups()
        if not part and (name not in _ARGUMENTS or "=" not in found[0]):
            return found[0]
        part = (part or _ARGUMENTS[name]) if verb == "train" else ""
        return f"--{part}{name.replace('_', '-')}" + (f" {value}" if value else "")

    return head + semicolon + _SETTING.sub(flag, remedy) if semicolon else message


if __name__ == "__main__":
    sys.exit(main())
