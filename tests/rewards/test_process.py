"""The start of a worker process is bounded by what it does, not by a clock."""

import itertools
import tempfile
from types import SimpleNamespace

import pytest

from lightrft.rewards import process
from lightrft.rewards.consumption import Consumption
from lightrft.rewards.process import WorkerFailedError, WorkerProcess, WorkerTask

STARTS = """
import time
from contextlib import ExitStack
from lightrft.utils.scratch import scratch_folder

def computes():
    while True:
        pass

def waits():
    time.sleep(3600)

class echo:
    def describe(self):
        return "ready"

class keeps(echo):
    def __init__(self):
        self.kept = ExitStack()
        self.kept.enter_context(scratch_folder())
"""


@pytest.fixture
def task_of(tmp_path, monkeypatch):
    (tmp_path / "starts_of_workers.py").write_text(STARTS)
    monkeypatch.syspath_prepend(str(tmp_path))
    return lambda name, **limits: WorkerTask("starts_of_workers", name, **limits)


@pytest.mark.full
@pytest.mark.parametrize("name", ["computes", "waits"])
def test_a_start_that_does_not_end_is_refused_with_what_it_did(task_of, name):
    worker = WorkerProcess(task_of(name, start_seconds=1.0))
    with pytest.raises(WorkerFailedError, match="was not ready after") as caught:
        worker.start()
    assert not worker.is_running
    computed, waited = (
        float(word) for word in str(caught.value).split() if word.replace(".", "").isdigit()
    )
    assert (computed > waited) == (name == "computes")
    assert max(computed, waited) >= 1.0


@pytest.mark.parametrize("reason", ["a busy machine", "many threads"])
def test_a_start_may_take_long_by_the_clock_or_by_what_it_computes(task_of, monkeypatch, reason):
    if reason == "many threads":
        monkeypatch.setattr(Consumption, "is_over", lambda _: True)
    else:
        clock = itertools.chain([0.0], itertools.repeat(200.0))
        monkeypatch.setattr(process, "time", SimpleNamespace(monotonic=lambda: next(clock)))
        assert WorkerTask("", "").start_seconds < 200
    worker = WorkerProcess(task_of("echo"))
    try:
        assert worker.start() == "ready"
    finally:
        worker.close()


def test_what_neither_computes_nor_waits_ends_as_well(task_of, monkeypatch):
    monkeypatch.setattr(Consumption, "is_over", lambda _: False)  # a disk that does not answer
    with pytest.raises(WorkerFailedError, match="was not ready after"):
        WorkerProcess(task_of("waits", start_seconds=0.1)).start()


def test_the_temporary_folders_of_an_ended_worker_are_removed(task_of, tmp_path, monkeypatch):
    """Of one that is killed, as all are, and does not clean up by itself."""
    place = tmp_path / "temporary"
    (place / "lightrft_scratch_left").mkdir(parents=True)
    monkeypatch.setattr(tempfile, "tempdir", str(place))
    monkeypatch.setenv("TMPDIR", str(place))
    worker = WorkerProcess(task_of("keeps"))
    assert worker.start() == "ready"
    (folder,) = place.iterdir()
    assert folder.name != "lightrft_scratch_left"
    worker.close()
    assert not any(place.iterdir())
