"""The paper's theorems, checked by numbers on the network they are about (the matrix UNet of Eq. 3).

verify_theory() -> one Study per statement: rows of prediction, measurement and verdict, and the numbers of a picture.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor

import torch

from scalelong.lab.backward import study_theorem33
from scalelong.lab.findings import Finding, Study
from scalelong.lab.forward import study_theorem31
from scalelong.lab.lemma32 import study_lemma32
from scalelong.lab.sensitivity import study_theorem34

__all__ = [
    "STUDIES",
    "Finding",
    "Study",
    "study_lemma32",
    "study_theorem31",
    "study_theorem33",
    "study_theorem34",
    "verify_theory",
]

STUDIES: dict[str, Callable[[bool, int], Study]] = {
    "lemma32": study_lemma32,
    "theorem31": study_theorem31,
    "theorem33": study_theorem33,
    "theorem34": study_theorem34,
}


def verify_theory(quick: bool = False, seed: int = 0) -> list[Study]:
    """Every study, in the order of the paper's statements; a process for each core, the same numbers however many."""
    cores = min(len(STUDIES), len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(cores, mp_context=context) as pool:
        longest_first = sorted(STUDIES, key=["theorem31", "theorem34", "theorem33", "lemma32"].index)
        futures = {name: pool.submit(_run, name, quick, seed) for name in longest_first}
        return [futures[name].result() for name in STUDIES]


def _run(name: str, quick: bool, seed: int) -> Study:
    torch.set_num_threads(1)
    return STUDIES[name](quick, seed)
