"""Processes of a run, and which of several failures is told."""

import json
import os
import tempfile
import textwrap

import pytest

from lightrft.cli.errors import WorkerError
from lightrft.cli.launch import become_only_process, free_port, launch, worker_error


def failure(rank, exitcode, path=None, **report):
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

    if path is not None:
        extra = {"py_callstack": "", "timestamp": str(int(report["seconds"]))}
        path.write_text(json.dumps({"message": {**report, "extraInfo": extra}}))
    return ProcessFailure(rank, 1, exitcode, str(path))


def test_the_first_report_wins_over_later_ones_and_over_ended_peers(tmp_path):
    failures = {
        0: failure(0, -15),
        1: failure(1, 1, tmp_path / "1", message="lost peer", errorCode=1, seconds=20.6),
        2: failure(2, 4, tmp_path / "2", message="bad data", errorCode=4, seconds=20.2),
        3: failure(3, -15),
    }
    error = worker_error(failures)
    assert str(error) == "rank 2: bad data"
    assert error.code == 4


def test_a_killed_process_is_told_by_its_signal():
    error = worker_error({0: failure(0, -15), 1: failure(1, -9)})
    assert "rank 1" in str(error)
    assert "SIGKILL" in str(error)
    assert error.code == 137


LOST = (
    "RuntimeError: [../gloo/transport/tcp/pair.cc:525] Connection closed by peer [127.0.0.1]:3154",
    "saving into ckpt/_actor failed: rank 0: RuntimeError: Connection reset by peer",
    "DistNetworkError: failed to recv, got 0 bytes",
)


@pytest.mark.parametrize("text", LOST)
@pytest.mark.parametrize("code", [-9, -11, 1])
def test_a_survivor_is_not_blamed_for_the_peer_that_died(tmp_path, text, code):
    failures = {
        # Noticed later, since the agent looks only now and then.
        0: failure(0, 2, tmp_path / "0", message=text, errorCode=2, seconds=20.1),
        1: failure(1, code),
    }
    error = worker_error(failures)
    assert str(error).startswith("rank 1 ")
    assert "peer" not in str(error)
    # Positive control: a report of its own comes before a death.
    failures[2] = failure(2, 4, tmp_path / "2", message="bad data", errorCode=4, seconds=20.2)
    assert str(worker_error(failures)) == "rank 2: bad data"


def test_one_that_lost_a_peer_of_another_machine_is_told(tmp_path):
    failures = {
        0: failure(0, 1, tmp_path / "0", message=LOST[0], errorCode=1, seconds=20.1),
        1: failure(1, -15),
    }
    assert str(worker_error(failures)) == f"rank 0: {LOST[0]}"


def test_one_process_is_a_group_of_its_own():
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    become_only_process()
    assert [os.environ[name] for name in names[:4]] == ["0", "0", "1", "1"]
    assert int(os.environ["MASTER_PORT"]) > 1023


def test_free_ports_differ():
    assert len({free_port() for _ in range(5)}) > 1


def test_message_and_code_of_the_failing_rank_reach_the_caller(tmp_path, monkeypatch):
    (tmp_path / "failing_worker.py").write_text(
        textwrap.dedent("""
            import os, sys, time
            from lightrft.cli.errors import run_guarded
            from lightrft.datasets.types import DataError

            def body():
                if os.environ["RANK"] == "1":
                    raise DataError("line 3 is odd: " + sys.argv[1])
                time.sleep(60)
                return 0

            sys.exit(run_guarded("worker", body))
        """)
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (tmp_path / "scratch").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "scratch"))
    with pytest.raises(WorkerError) as caught:
        launch("failing_worker", ["x y"], nproc_per_node=2)
    assert list((tmp_path / "scratch").iterdir()) == []
    assert str(caught.value) == "rank 1: line 3 is odd: x y"
    assert caught.value.code == 4
