"""Data workers that can be killed or stopped at any time and replaced."""

from __future__ import annotations

import os
import signal
import weakref
from collections import deque
from contextlib import suppress
from multiprocessing.connection import Connection

import torch
import torch.multiprocessing as mp
from torch import Tensor

from scalelong.data.base import DataError, Source
from scalelong.failpoints import failpoint

PREFETCH = 2  # batches read ahead by each worker


class Worker:
    """A process that reads batches into shared memory.

    It has its own pipe and shares no locks, so it can be killed or stopped at any time and replaced. (Workers of torch's
    DataLoader share queues, and its SIGCHLD handler raises anywhere.)
    """

    def __init__(self, source: Source) -> None:
        self.source = source
        self._asked: deque[list[int]] = deque()  # pending requests, oldest first
        self._slots, self._slot = torch.empty(0, 0), 0
        self._reply: tuple[int, DataError | None] = (0, None)
        self.process: mp.Process | None = None

    def ask(self, items: list[int]) -> None:
        """Request a batch; at most PREFETCH may be pending."""
        self._asked.append(items)
        if len(items) > self._slots.shape[1]:
            self.start()
        else:
            self._send(items)

    def start(self) -> None:
        """Start or restart the process and repeat pending requests."""
        self.stop()
        shape, dtype = self.source.stored
        self._slots = torch.empty((PREFETCH, max(map(len, self._asked)), *shape), dtype=dtype)
        try:
            self._slots.share_memory_()  # type: ignore[no-untyped-call]
        except RuntimeError as error:
            remedy = "enlarge /dev/shm (docker: --shm-size), or set data.workers to 0"
            raise DataError(f"data.workers: no shared memory ({error}); {remedy}") from error
        self.pipe, theirs = mp.Pipe()
        about = (self.source, self._slots, theirs, self.pipe)
        self.process = mp.Process(target=_serve, args=about, daemon=True, name="scalelong-reader")
        self.process.start()
        theirs.close()  # so that its death ends the pipe
        self._stop = weakref.finalize(self, _kill, self.process, os.getpid())  # also at exit: it ignores signals
        for items in self._asked:
            self._send(items)

    def _send(self, items: list[int]) -> None:
        self._slot = (self._slot + 1) % PREFETCH
        with suppress(OSError):  # dead: noticed when its reply is due
            self.pipe.send((self._slot, items))

    def receive(self) -> bool:
        """Receive a reply; False if the process has ended."""
        try:
            self._reply = self.pipe.recv()
        except (EOFError, OSError):
            return False
        return True

    def take(self) -> Tensor:
        """The batch just received, or the DataError that reading it raised."""
        items, (slot, error) = self._asked.popleft(), self._reply
        if error is not None:
            raise error
        return self._slots[slot, : len(items)].clone()

    def cause(self) -> str:
        """Why the process ended."""
        assert self.process is not None
        self.process.join(5)
        code = self.process.exitcode or 0
        return (
            f"killed by {signal.Signals(-code).name}, perhaps for lack of memory" if code < 0 else f"exit code {code}"
        )

    def stop(self) -> None:
        if self.process is not None:
            self._stop()
            self.pipe.close()
            self.process = None


def _kill(process: mp.Process, parent: int) -> None:
    if os.getpid() == parent:  # not in a process forked since
        process.kill()
        process.join()


def _serve(source: Source, slots: Tensor, pipe: Connection, parents_end: Connection) -> None:
    """Worker main loop; ends when the pipe closes, also if the parent dies."""
    parents_end.close()
    for number in (signal.SIGTERM, signal.SIGINT):  # sent to the process group: the parent decides when to stop
        signal.signal(number, signal.SIG_IGN)
    torch.set_num_threads(1)
    with suppress(EOFError, OSError):
        while True:
            slot, items = pipe.recv()
            failpoint("loader.read")
            try:
                slots[slot, : len(items)] = source.read_many(items)
                error = None
            except DataError as found:
                error = found
            except (OSError, RuntimeError, ValueError, TypeError, LookupError, MemoryError) as found:
                error = DataError(f"{source.where(items[0])}: cannot be read ({type(found).__name__}: {found})")
            pipe.send((slot, error))
