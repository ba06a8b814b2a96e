"""Fault injection at named points, for tests; inactive unless SCALELONG_FAILPOINT is set.

SCALELONG_FAILPOINT=save.before_manifest                       kill -9 of the process that reaches this point
SCALELONG_FAILPOINT=save.before_manifest=raise:OSError@3       raise a built-in error at the third visit
SCALELONG_FAILPOINT=build.source=delay:5,loader.read=stop      sleep 5 s here, SIGSTOP there

Actions: kill (default), stop (SIGSTOP), delay:SECONDS, raise:ERROR, each at visit N (`@N`, default the first one; delay
acts at every visit unless N is given).
"""

from __future__ import annotations

import builtins
import os
import signal
import time
from collections import Counter

VARIABLE = "SCALELONG_FAILPOINT"

_visits: Counter[str] = Counter()


def failpoint(name: str) -> None:
    """Run the action that SCALELONG_FAILPOINT sets for the point `name`.

    >>> failpoint("save.before_manifest")
    """
    for part in os.environ[VARIABLE].split(",") if VARIABLE in os.environ else ():
        point, _, rest = part.partition("=")
        if point.strip() != name:
            continue
        action, _, visit = rest.partition("@")
        kind, _, argument = action.partition(":")
        _visits[name] += 1
        if (visit or kind != "delay") and _visits[name] != int(visit or 1):
            continue
        if kind == "delay":
            time.sleep(float(argument))
        elif kind == "raise":
            raise getattr(builtins, argument)(f"injected at {name}")
        else:
            os.kill(os.getpid(), signal.SIGSTOP if kind == "stop" else signal.SIGKILL)
