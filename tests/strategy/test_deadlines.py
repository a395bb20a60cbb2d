import time

import pytest
from tests.machine import seconds
from tests.programs import run_python

from lightrft.strategy.distributed import deadlines
from lightrft.strategy.distributed.deadlines import HANG_EXIT_CODE, peer_phases, phase

HANGING = """
import time
from lightrft.strategy.distributed.deadlines import phase
with phase("outer", 60):
    with phase("quick", 30):
        pass
    with phase("generate", 0.5):
        time.sleep(30)
"""
# A lock held without the GIL being released: `faulthandler`'s timer must still fire.
STUCK_WITH_THE_GIL = """
import lightrft.strategy.distributed.deadlines as deadlines
import re
deadlines._LAST_RESORT_SECONDS = 0.5
with deadlines.phase("generate", 0.5):
    re.match(r"(a+)+$", "a" * 40 + "b")
"""


def run(code):
    return run_python("-c", code, timeout_seconds=100)


@pytest.mark.full
def test_expired_phase_ends_the_process_and_names_itself():
    begin = time.monotonic()
    done = run(HANGING)
    assert done.returncode == HANG_EXIT_CODE == 7
    assert "rank 0 spent more than 0.5 s in phase 'generate'" in done.stderr
    assert "time.sleep" in done.stderr or "<module>" in done.stderr
    assert time.monotonic() - begin < seconds(60)


@pytest.mark.full
def test_interpreter_that_holds_the_gil_is_ended_too():
    done = run(STUCK_WITH_THE_GIL)
    assert done.returncode != 0
    assert "Timeout" in done.stderr


def test_finished_phases_leave_nothing_behind():
    with phase("a", 0.2), phase("b", 0.2):
        pass
    time.sleep(0.5)
    assert peer_phases() == []


def test_exceptions_pass():
    with pytest.raises(KeyError), phase("a", 60):
        raise KeyError("x")


def test_deadline_must_be_positive():
    with pytest.raises(ValueError, match="positive"), phase("a", 0):
        pass


class CountingStore:
    def __init__(self):
        self.texts = []

    def set(self, key, text):
        self.texts.append(text.partition(" (since")[0])


def test_micro_batches_share_one_record_and_one_thread(monkeypatch):
    store, now = CountingStore(), [100.0]
    monkeypatch.setattr(deadlines, "shared_store", lambda: store)
    monkeypatch.setattr(deadlines.time, "monotonic", lambda: now[0])
    with phase("generate", 1e6):
        pass
    watchers = set()
    for _ in range(64):
        with phase("train", 1e6), phase("a part of it", 1e6):
            watchers.add(deadlines.Watcher.running)
    assert store.texts == ["generate", "train"]
    assert len(watchers) == 1
    # What takes longer than a second is told, inner phases and pauses too.
    with phase("train", 1e6):
        now[0] += 2
        with phase("wait", 1e6):
            now[0] += 2
    assert store.texts[2:] == ["wait", "train"]
    now[0] += 2
    with phase("save", 1e6):
        now[0] += 2
    assert store.texts[4:] == ["save", "between phases, after save"]
