"""The palette of reports, plots and experiments: a method has the same colour everywhere."""

from __future__ import annotations

from collections.abc import Sequence

PALETTE = (  # on a light and on a dark page
    ("#5b6472", "#a8b2c0"),  # grey, for the unscaled network alone
    ("#1f6fb4", "#62b0f4"),
    ("#c8500a", "#ff9257"),
    ("#00806a", "#35c9a8"),
    ("#8a4fb0", "#cb9bee"),
    ("#9a7000", "#e5b94f"),
    ("#c03a76", "#ff8cba"),
    ("#2487a8", "#7ad3ec"),
)
GREY, BLUE, ORANGE, GREEN, PURPLE, OCHRE, PINK, TEAL = (light for light, _ in PALETTE)
METHODS = {"none": 0, "cs": 1, "ls": 2, "rsqrt2": 3, "universal": 4, "cs_reversed": 5, "mp_cat": 6, "rezero": 7}


def assign(methods: Sequence[str]) -> list[int]:
    """An entry of the palette for each: the method's own, or for its second and later ones the next that is free.

    >>> assign(["none", "cs", "cs", "ls"])
    [0, 1, 3, 2]
    """
    taken = {METHODS[method] for method in methods if method in METHODS}
    free = [index for index in range(1, len(PALETTE)) if index not in taken]
    found, seen, others = [], set(), 0
    for method in methods:
        index = METHODS.get(method, 0)
        if method not in METHODS or method in seen:
            cycle = free or range(1, len(PALETTE))
            index, others = cycle[others % len(cycle)], others + 1
        seen.add(method)
        found.append(index)
    return found


def colour(name: str) -> str:
    """The colour of a method, by its name or a label that begins with it, on a white page.

    >>> colour("cs 0.7") == colour("cs")
    True
    """
    return PALETTE[METHODS.get(name.partition(" ")[0], len(PALETTE) - 1)][0]
