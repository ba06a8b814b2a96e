"""Fault injection at named points, for tests; inactive unless SCALELONG_FAILPOINT is set.

SCALELONG_FAILPOINT=save.before_manifest                       kill -9 of the process that reaches this point
SCALELONG_FAILPOINT=save.before_manifest=raise:OSError@3       raise a built-in error at the third visit
SCALELONG_FAILPOINT=build.source=delay:5,checkpoint.verify=off sleep 5 s here; switch a protection off there

Actions: kill (default), stop (SIGSTOP), delay:SECONDS, raise:ERROR, each at visit N (`@N`, default the first one; delay
acts at every visit unless N is given), and `off`, which switches a protection off to show that its test can fail.
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
    if VARIABLE not in os.environ:
        return
    for point, action, visit in _actions():
        if point != name or action == "off":
            continue
        _visits[name] += 1
        kind, _, argument = action.partition(":")
        if visit and _visits[name] != visit:
            continue
        if kind == "delay":
            time.sleep(float(argument))
        elif kind == "raise":
            raise getattr(builtins, argument)(f"injected at {name}")
        else:
            os.kill(os.getpid(), {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}[kind])


def protected(name: str) -> bool:
    """False if SCALELONG_FAILPOINT switches the protection `name` off.

    >>> protected("checkpoint.verify")
    True
    """
    return VARIABLE not in os.environ or all(action != "off" for point, action, _ in _actions() if point == name)


def _actions() -> list[tuple[str, str, int]]:
    """(point, action, visit) of each part of the variable; visit 0 is every visit."""
    found = []
    for part in os.environ[VARIABLE].split(","):
        point, _, rest = part.partition("=")
        action, _, visit = rest.partition("@")
        action = action or "kill"
        found.append((point.strip(), action, int(visit or not action.startswith("delay"))))
    return found
