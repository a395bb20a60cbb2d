"""Exit codes and messages at the shell, of one process and of several under a launcher."""

from __future__ import annotations

import json
import os
import signal
import tempfile
import textwrap
import time

import pytest
from tests.machine import seconds
from tests.programs import run_python

from lightrft.cli.errors import WorkerError, run_guarded
from lightrft.cli.launch import launch

pytestmark = pytest.mark.shard("command_line")

# One program for all cells: `torch` is imported only by those that need it.
WORKER = textwrap.dedent("""
    import errno, os, sys, time

    def of_rank(rank, error):
        if os.environ.get("RANK", "0") == str(rank):
            raise error
        time.sleep(100)

    def data(rank):
        from lightrft.datasets.types import DataError
        of_rank(rank, DataError("line 3 is odd"))

    def reward(rank):
        from lightrft.rewards.types import RewardError
        of_rank(rank, RewardError("sample 4 failed"))

    def usage(rank):
        from lightrft.strategy.config import ConfigError
        of_rank(rank, ConfigError("no such option"))

    def preflight(rank):
        from lightrft.cli.errors import PreflightError
        of_rank(rank, PreflightError("no such package"))

    def disk(rank):
        of_rank(rank, OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/full/file"))

    def bug(rank):
        of_rank(rank, ZeroDivisionError("division by zero"))

    def memory(rank):
        of_rank(rank, MemoryError())

    def allocator(rank):
        import torch
        from lightrft.strategy.distributed.deadlines import phase
        if os.environ.get("RANK", "0") == str(rank):
            with phase("train", 60), phase("backward", 60):
                torch.empty(1 << 46)
        time.sleep(100)

    def deadline(rank):
        from lightrft.strategy.distributed.deadlines import phase
        if os.environ.get("RANK", "0") == str(rank):
            with phase("generate", 0.3):
                time.sleep(100)
        time.sleep(100)

    def stuck(rank):
        import re
        from lightrft.strategy.distributed import deadlines
        deadlines._LAST_RESORT_SECONDS = 0.3
        if os.environ.get("RANK", "0") == str(rank):
            with deadlines.phase("generate", 0.3):
                re.match(r"(a+)+$", "a" * 40 + "b")
        time.sleep(100)

    def killed(rank):
        if os.environ.get("RANK", "0") == str(rank):
            os.kill(os.getpid(), 9)
        time.sleep(100)

    def verification(rank):
        from lightrft.strategy.weight_sync.verification import WeightSyncError
        of_rank(rank, WeightSyncError("hash", "p differs"))

    def stopped(rank):
        from lightrft.strategy.distributed.process_end import RunStoppedError
        of_rank(rank, RunStoppedError(3, "run"))

    def interrupted(rank):
        of_rank(rank, KeyboardInterrupt())

    def fine(rank):
        pass

    if __name__ == "__main__":
        from lightrft.cli.errors import run_guarded
        name, rank = sys.argv[1:]
        sys.exit(run_guarded("lightrft", lambda: globals()[name](int(rank)) or 0))
""")

CASES = [
    ("fine", 0, []),
    ("bug", 1, ["Traceback", "ZeroDivisionError: division by zero", "of_rank"]),
    ("usage", 2, ["no such option"]),
    ("preflight", 3, ["no such package"]),
    ("disk", 3, ["No space left", "/full/file"]),
    ("data", 4, ["line 3 is odd"]),
    ("reward", 5, ["sample 4 failed"]),
    ("memory", 6, ["out of memory", "MemoryError"]),
    ("allocator", 6, ["out of memory in phase 'backward'", "can't allocate memory"]),
    ("deadline", 7, ["rank", "in phase 'generate'"]),
    ("verification", 8, ["p differs"]),
    ("stopped", 75, ["stopped as asked after step 3"]),
    ("interrupted", 130, ["interrupted"]),
]
WITHOUT_TRACEBACK = {
    "usage",
    "preflight",
    "disk",
    "data",
    "reward",
    "memory",
    "allocator",
    "verification",
    "stopped",
    "interrupted",
}
LAUNCHER = ("RANK", "WORLD_SIZE", "TORCHELASTIC_ERROR_FILE", "LIGHTRFT_LAUNCHED", "LOCAL_RANK")


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    path = tmp_path_factory.mktemp("program") / "exit_worker.py"
    path.write_text(WORKER)
    return path


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch):
    for name in LAUNCHER:
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("name", "code", "expected"),
    [case for case in CASES if case[0] not in ("allocator", "deadline", "verification")],
)
def test_one_process(program, capsys, monkeypatch, name, code, expected):
    monkeypatch.syspath_prepend(str(program.parent))
    import exit_worker

    monkeypatch.setattr(exit_worker.time, "sleep", lambda seconds: None)
    assert run_guarded("lightrft", lambda: getattr(exit_worker, name)(0) or 0) == code
    assert_message(capsys.readouterr().err, name, expected, prefix="lightrft: ")


@pytest.mark.full
@pytest.mark.multiprocess
@pytest.mark.parametrize("name", ["allocator", "deadline", "verification"])
def test_one_process_at_the_shell(program, name):
    code, expected = next((code, expected) for n, code, expected in CASES if n == name)
    done = run_python(str(program), name, "0", timeout_seconds=200)
    assert done.returncode == code, done.stderr
    assert_message(done.stderr, name, expected, prefix="")


@pytest.mark.full
@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("name", "code", "expected"),
    [
        ("bug", 1, ["Traceback", "ZeroDivisionError: division by zero", "of_rank"]),
        ("memory", 6, ["out of memory"]),
        ("stuck", 7, ["deadline: rank 1 was stuck in phase 'generate'"]),
        ("killed", 137, ["rank 1 was killed", "SIGKILL", "memory"]),
    ],
)
def test_the_failing_ranks_message_and_code_reach_the_caller(
    program, monkeypatch, name, code, expected
):
    monkeypatch.setenv("PYTHONPATH", str(program.parent))
    begin = time.monotonic()
    with pytest.raises(WorkerError) as caught:
        launch("exit_worker", [name, "1"], nproc_per_node=2)
    assert caught.value.code == code
    assert "rank 1" in str(caught.value)
    for text in expected:
        assert text in str(caught.value)
    assert time.monotonic() - begin < seconds(60)  # not the 100 s of the other rank


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.parametrize(("name", "code", "expected"), CASES[1:])
def test_every_code_reaches_the_caller_through_the_launcher(
    program, monkeypatch, tmp_path, name, code, expected
):
    monkeypatch.setenv("PYTHONPATH", str(program.parent))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(WorkerError) as caught:
        launch("exit_worker", [name, "1"], nproc_per_node=2)
    assert caught.value.code == code
    for text in expected:
        assert text in str(caught.value)
    assert os.listdir(tmp_path) == []  # neither phases nor what the agent writes


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.parametrize("name", ["bug", "data", "allocator", "deadline"])
def test_torchrun_shows_the_failing_ranks_message(program, name):
    expected = next(expected for n, _, expected in CASES if n == name)
    done = run_python(
        "-m",
        "torch.distributed.run",
        "--nproc_per_node",
        "2",
        "--standalone",
        str(program),
        name,
        "1",
        timeout_seconds=200,
    )
    assert done.returncode == 1  # torchrun has no other code for a failed worker
    for text in expected:
        assert text in done.stderr


@pytest.mark.multiprocess
def test_a_signal_before_anything_was_done_ends_the_launcher(program):
    code = (
        "import sys, os, signal; from lightrft.cli.launch import passing_on, STOP_SIGNALS\n"
        "from lightrft.cli.errors import run_guarded\n"
        "def body():\n"
        "    with passing_on(STOP_SIGNALS):\n"
        "        os.kill(os.getpid(), signal.SIGTERM)\n"
        "    return 0\n"
        "sys.exit(run_guarded('lightrft', body))"
    )
    done = run_python("-c", code, timeout_seconds=60)
    assert done.returncode == 128 + signal.SIGTERM == 143
    assert done.stderr == "lightrft: stopped by SIGTERM before the run started\n"


def assert_message(text, name, expected, *, prefix):
    for part in expected:
        assert part in text, text
    if name == "fine":
        assert text == ""
    elif prefix:
        assert all(line.startswith(prefix) for line in text.splitlines())
    if name in WITHOUT_TRACEBACK:
        assert "Traceback" not in text, text


def test_the_error_of_a_process_is_kept_and_a_second_one_does_not_replace_it(tmp_path, monkeypatch):
    from lightrft.strategy.distributed.process_end import has_failed_peer, write_error_report

    for rank in (0, 1):
        (tmp_path / str(rank)).mkdir()
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "0" / "error.json"))
    write_error_report("first", 6)
    write_error_report("second", 1)
    assert json.loads((tmp_path / "0" / "error.json").read_text())["message"]["errorCode"] == 6
    assert not has_failed_peer()
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "1" / "error.json"))
    assert has_failed_peer()
    assert os.listdir(tmp_path / "1") == []
