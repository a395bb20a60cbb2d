"""Exit codes and messages at the shell, of one process and of several under a launcher.

Which error has which code: `tests/cli/test_errors.py`.
"""

import json
import os
import signal
import tempfile
import textwrap
import time

import pytest
from tests.machine import seconds
from tests.programs import run_python

from lightrft.cli.errors import WorkerError
from lightrft.cli.launch import launch

pytestmark = pytest.mark.shard("command_line")

# A rank fails in the way of a function; the others wait for longer than a test does.
WORKER = textwrap.dedent("""
    import os, re, sys, time
    from lightrft.strategy.distributed import deadlines

    def bug():
        raise ZeroDivisionError("division by zero")

    def memory():
        raise MemoryError

    def allocator():
        import torch
        with deadlines.phase("train", 60), deadlines.phase("backward", 60):
            torch.empty(1 << 46)

    def deadline():
        with deadlines.phase("generate", 0.3):
            time.sleep(100)

    def stuck():
        deadlines._LAST_RESORT_SECONDS = 0.3
        with deadlines.phase("generate", 0.3):
            re.match(r"(a+)+$", "a" * 40 + "b")

    def killed():
        os.kill(os.getpid(), 9)

    def run(name, rank):
        if os.environ.get("RANK", "0") == rank:
            globals()[name]()
        time.sleep(100)

    if __name__ == "__main__":
        from lightrft.cli.errors import run_guarded
        sys.exit(run_guarded("lightrft", lambda: run(*sys.argv[1:])))
""")
# Name -> exit code, and what is said.
FAILURES = {
    "bug": (1, ["Traceback", "ZeroDivisionError: division by zero", "in bug"]),
    "memory": (6, ["out of memory"]),
    "allocator": (6, ["out of memory in phase 'backward'", "can't allocate memory"]),
    "deadline": (7, ["rank", "in phase 'generate'"]),
    "stuck": (7, ["deadline: rank 1 was stuck in phase 'generate'"]),
    "killed": (137, ["rank 1 was killed", "SIGKILL", "memory"]),
}


@pytest.fixture
def program(tmp_path, monkeypatch):
    """A program that nothing has launched."""
    for name in ("RANK", "WORLD_SIZE", "TORCHELASTIC_ERROR_FILE", "LIGHTRFT_LAUNCHED"):
        monkeypatch.delenv(name, raising=False)
    path = tmp_path / "program/exit_worker.py"
    path.parent.mkdir()
    path.write_text(WORKER)
    monkeypatch.setenv("PYTHONPATH", str(path.parent), prepend=os.pathsep)
    return path


@pytest.mark.full
@pytest.mark.parametrize("name", ["allocator", "deadline"])
def test_one_process_at_the_shell(program, name):
    code, expected = FAILURES[name]
    done = run_python(str(program), name, "0", timeout_seconds=200, code=code)
    assert all(text in done.stderr for text in expected), done.stderr


@pytest.mark.full
@pytest.mark.parametrize("name", ["bug", "memory", "stuck", "killed"])
def test_the_failing_ranks_message_and_code_reach_the_caller(program, monkeypatch, tmp_path, name):
    code, expected = FAILURES[name]
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    begin = time.monotonic()
    with pytest.raises(WorkerError) as caught:
        launch("exit_worker", [name, "1"], nproc_per_node=2)
    assert caught.value.code == code
    assert "rank 1" in str(caught.value)
    assert all(text in str(caught.value) for text in expected), str(caught.value)
    assert time.monotonic() - begin < seconds(60)  # not the 100 s of the other rank
    assert os.listdir(tmp_path / "temporary") == []  # neither phases nor what the agent writes


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bug", "deadline"])
def test_torchrun_shows_the_failing_ranks_message(program, name):
    torchrun = ("-m", "torch.distributed.run", "--nproc_per_node", "2", "--standalone")
    # torchrun has no other code for a failed worker.
    done = run_python(*torchrun, str(program), name, "1", timeout_seconds=200, code=1)
    assert all(text in done.stderr for text in FAILURES[name][1]), done.stderr


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


def test_the_error_of_a_process_is_kept_and_a_second_one_does_not_replace_it(tmp_path, monkeypatch):
    from lightrft.strategy.distributed.process_end import has_failed_peer, write_error_report

    for rank in (0, 1):
        (tmp_path / str(rank)).mkdir()
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "0/error.json"))
    write_error_report("first", 6)
    write_error_report("second", 1)
    assert json.loads((tmp_path / "0/error.json").read_text())["message"]["errorCode"] == 6
    assert not has_failed_peer()
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "1/error.json"))
    assert has_failed_peer()
    assert os.listdir(tmp_path / "1") == []
