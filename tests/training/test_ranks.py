"""Ranks: waiting for each other, and who is named when one does not answer. Faults of real ranks: tests/faults."""

from __future__ import annotations

import multiprocessing
import os

import pytest

from scalelong.training.ranks import Ranks
from tests.faults.processes import free_port


def test_one_process_is_the_main_rank_and_waits_for_nobody() -> None:
    ranks = Ranks(timeout=300.0)
    ranks.barrier()
    with ranks.main_first():
        pass
    error = RuntimeError("of its own")
    assert ranks.explain(error) is error
    assert (ranks.is_main_process, ranks.process_index, ranks.num_processes) == (True, 0, 1)


def _rank(rank: int, port: str) -> None:
    world = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "MASTER_PORT": port}
    os.environ.update({key: str(value) for key, value in world.items()} | {"MASTER_ADDR": "127.0.0.1"})
    ranks = Ranks(timeout=300.0)
    order = f"order{port}"
    with ranks.main_first():
        assert ranks.is_main_process or ranks._store.check([order])
        ranks._store.set(order, "")
    ranks.barrier()
    if rank == 1:
        os._exit(0)
    with pytest.raises(RuntimeError, match="ranks: rank 1 does not answer"):
        ranks.barrier()
    os._exit(7)


@pytest.mark.slow
def test_a_rank_that_ended_is_named_at_the_next_barrier() -> None:
    spawn, port = multiprocessing.get_context("spawn"), free_port()
    processes = [spawn.Process(target=_rank, args=(rank, port)) for rank in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [7, 0]
