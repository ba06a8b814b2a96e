"""Rendezvous, barriers and heartbeats of the ranks of a run."""

from __future__ import annotations

import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]
import torch
import torch.distributed as dist
from accelerate import PartialState
from torch.distributed.rendezvous import rendezvous

from scalelong.errors import ScaleLongError
from scalelong.failpoints import failpoint

logger = logging.getLogger(__name__)

_BEAT_SECONDS = 2.0


class Ranks:
    """This process among the ranks of torchrun or accelerate; a single rank without them.

    A thread of each rank sends heartbeats to the shared store. A rank without a heartbeat for `timeout` seconds, or on this
    machine without a process, is dead or stopped. `barrier` waits as long as all ranks are alive; gradient collectives time
    out after `timeout` seconds.
    """

    _runs = 0

    def __init__(self, timeout: float) -> None:
        limit = timedelta(seconds=timeout)
        on_cpu = not torch.cuda.is_available()  # CPU ranks need the flag
        self.state = PartialState(cpu=on_cpu, timeout=limit, **_join(limit))
        self.device, self.is_main_process = self.state.device, self.state.is_main_process
        self.process_index, self.num_processes = self.state.process_index, self.state.num_processes
        self.step = 0  # of the run, published to the other ranks
        self._timeout, self._every = timeout, min(_BEAT_SECONDS, timeout / 10)
        self._closed = threading.Event()
        self._barriers, self._seen = 0, dict.fromkeys(range(self.num_processes), ("", time.monotonic()))
        if self.num_processes > 1:
            Ranks._runs += 1  # a unique name per run in the store
            store = dist.distributed_c10d._get_default_store()
            self._store = dist.distributed_c10d.PrefixStore(f"run {Ranks._runs}", store)
            self._pids: dict[int, int] = {}  # of the ranks on this machine
            self._store.set(f"process {self.process_index}", f"{os.getpid()} {_machine()}")
            self._store.set(str(self.process_index), "0 0")
            threading.Thread(target=self._beat, daemon=True).start()

    def barrier(self) -> None:
        """Wait for all ranks, as long as they are alive."""
        if self.num_processes == 1:
            return
        self._barriers += 1
        self._gather(f"here {self._barriers}", self.num_processes)
        if self.is_main_process:  # leaves last: it may host the store
            self._gather(f"left {self._barriers}", self.num_processes)
        else:
            self._store.add(f"left {self._barriers}", 1)

    def _gather(self, name: str, count: int) -> None:
        """Register this rank and wait for the others."""
        self._store.add(name, 1)
        wait = 0.001
        while self._store.add(name, 0) < count:
            time.sleep(wait)
            wait = min(2 * wait, 0.2)
            if wait == 0.2 and (silent := self._silent(self._timeout)) and self._store.add(name, 0) < count:
                raise RuntimeError(self._sentence(silent))

    def announced(self, name: str, here: bool) -> bool:
        """True if `here` is or was true on any rank; sets a flag in the shared store."""
        if self.num_processes == 1:
            return here
        if here:
            self._store.set(name, "")
        return here or bool(self._store.check([name]))

    def close(self) -> None:
        """End the thread."""
        self._closed.set()

    @contextmanager
    def main_first(self) -> Iterator[None]:
        """The main rank runs the block before the others do."""
        if not self.is_main_process:
            self.barrier()
        yield
        if self.is_main_process:
            self.barrier()

    @contextmanager
    def explained(self) -> Iterator[None]:
        """Name the rank that caused a communication error."""
        try:
            yield
        except ScaleLongError:
            raise
        except RuntimeError as error:
            if (explained := self.explain(error)) is error:
                raise
            raise explained from error

    def explain(self, error: RuntimeError) -> RuntimeError:
        """Add the rank that caused the error if it is dead, stopped or behind; else return the error unchanged."""
        if self.num_processes == 1:
            return error
        self._silent(0)
        time.sleep(4 * self._every)
        if silent := self._silent(3 * self._every):
            return RuntimeError(f"{self._sentence(silent)}; {str(error).partition(chr(10))[0]}")
        steps = {rank: int(seen.split()[1]) for rank, (seen, _) in self._seen.items() if seen}
        behind = [rank for rank, step in steps.items() if step < self.step]
        if behind:
            late = f"rank {behind[0]} is still at step {steps[behind[0]]}, this one at {self.step}"
            return RuntimeError(f"ranks: {late}; {error}")
        return error

    def _sentence(self, silent: list[int]) -> str:
        names = ", ".join(map(str, silent))
        last = self._seen[silent[0]][0].partition(" ")[2] or "0"
        why = f"does not answer (killed, stopped or unreachable; last seen at step {last})"
        return f"ranks: rank {names} {why}; training.rank_timeout is {self._timeout:g} s, run the same command again"

    def _silent(self, seconds: float) -> list[int]:
        """The other ranks that are gone or without a heartbeat for more than `seconds`."""
        now = time.monotonic()
        reader = threading.Thread(target=self._read, daemon=True)  # the store may be hosted by a stopped rank
        reader.start()
        reader.join(10)
        others = [(rank, since) for rank, (_, since) in self._seen.items() if rank != self.process_index]
        return [rank for rank, since in others if now - since > seconds or _is_gone(self._pids.get(rank))]

    def _read(self) -> None:
        with suppress(RuntimeError):  # the store is gone
            for rank in range(self.num_processes):
                if rank not in self._pids and self._store.check([f"process {rank}"]):
                    pid, machine = self._store.get(f"process {rank}").decode().split(" ", 1)
                    if machine == _machine():
                        self._pids[rank] = int(pid)
                if self._store.check([str(rank)]):
                    value = self._store.get(str(rank)).decode()
                    if value != self._seen[rank][0]:
                        self._seen[rank] = (value, time.monotonic())

    def _beat(self) -> None:
        beats, warned = 0, set[int]()
        with suppress(RuntimeError):  # the store is gone: the run is over, or its next collective fails
            while not self._closed.wait(self._every):
                beats += 1
                self._store.set(str(self.process_index), f"{beats} {self.step}")
                if self.is_main_process:
                    for rank in set(self._silent(self._timeout / 2)) - warned:
                        warned.add(rank)
                        logger.warning("rank %d does not answer", rank)


def is_main_rank() -> bool:
    """True on the rank that writes and prints; uses torchrun's environment before torch.distributed is initialized."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank() == 0
    return os.environ.get("RANK", "0") == "0"


def _machine() -> str:
    """Identifies a machine and PID namespace."""
    namespace = Path("/proc/self/ns/pid")
    return f"{socket.gethostname()} {namespace.stat().st_ino if namespace.exists() else ''}"


def _is_gone(pid: int | None) -> bool:
    """True if the process has ended; False for None."""
    try:
        return pid is not None and psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def _join(limit: timedelta) -> dict[str, Any]:
    """The launcher's store under a prefix that is unique to this attempt, for init_process_group.

    torchrun keeps its store when it restarts the ranks, so they would find the addresses of dead ranks
    (github.com/pytorch/pytorch/issues/135712), and its restart count may differ between machines. The main rank therefore
    picks a name and answers requests until all ranks have confirmed it.
    """
    if dist.is_initialized() or "RANK" not in os.environ or int(os.environ.get("WORLD_SIZE", "1")) < 2:
        return {}
    store, rank, size = next(rendezvous("env://", timeout=limit))
    store.set_timeout(limit)
    mine, started = secrets.token_hex(8), time.monotonic()
    if rank:
        store.set(f"call {rank}", mine)
        name = store.get(f"answer {mine}").decode()  # waits
        store.set(f"{name} {rank}", "")
    else:
        failpoint("ranks.main_joins")
        name, missing = mine, [*range(1, size)]
        while missing := [other for other in missing if not store.check([f"{name} {other}"])]:
            for other in missing:
                if store.check([f"call {other}"]):
                    store.set(f"answer {store.get(f'call {other}').decode()}", name)
            if time.monotonic() - started > limit.total_seconds():
                late = f"{size} are to start, but {missing} did not within {limit.total_seconds():g} s"
                raise RuntimeError(f"ranks: {late}; start them, or raise training.rank_timeout")
            time.sleep(0.01)
    return {"store": dist.distributed_c10d.PrefixStore(name, store), "rank": rank, "world_size": size}
