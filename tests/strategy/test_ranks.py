import os
import time

import pytest
import torch.distributed as dist
from tests.machine import seconds
from tests.ranks import RankFailure, run_multiprocess


def report(rank, world_size, factor):
    assert os.environ["RANK"] == os.environ["LOCAL_RANK"] == str(rank)
    assert os.environ["WORLD_SIZE"] == os.environ["LOCAL_WORLD_SIZE"] == str(world_size)
    assert os.environ["OMP_NUM_THREADS"] == "1"
    return rank * factor


def fail_on_one(rank, world_size):
    if rank == 1:
        raise ZeroDivisionError("planted")
    time.sleep(3600)


def hang(rank, world_size):
    time.sleep(3600)  # longer than any deadline of a busy machine


def use_the_store_late(rank, world_size):
    dist.init_process_group("gloo")
    time.sleep(rank)  # rank 0 has left by then
    dist.distributed_c10d._get_default_store().add("users", 1)


def test_results_come_by_rank(monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")  # of another process group
    assert run_multiprocess(report, 2, args=(10,)) == [0, 10]


def test_failure_of_one_rank_ends_all_and_shows_its_traceback():
    begin = time.monotonic()
    with pytest.raises(RankFailure, match=r"(?s)- rank 1 -.*\n  File .*ZeroDivisionError: planted"):
        run_multiprocess(fail_on_one, 2)
    assert time.monotonic() - begin < seconds(40)


def test_ranks_may_start_groups_when_rank_0_has_left():
    run_multiprocess(use_the_store_late, 2)


@pytest.mark.full
def test_deadline_is_kept():
    begin = time.monotonic()
    with pytest.raises(RankFailure, match="did not finish before the deadline"):
        run_multiprocess(hang, 1, timeout_seconds=3)
    assert time.monotonic() - begin < seconds(20)
