"""Programs that want more than a sandbox gives: each costs its own reward and leaves nothing."""

from __future__ import annotations

import os
import re
import signal
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
from tests.tools.rewards.hostile_programs import PRELUDE, PROGRAMS, QUICK

from lightrft.tools.rewards.sandbox import Ending, Sandbox, SandboxLimits

MIB = 1 << 20
# Small, so that what passes a limit takes little of the machine.
LIMITS = SandboxLimits(cpu_seconds=0.6, memory_bytes=256 * MIB, total_bytes=320 * MIB)
NOISE_BYTES = 256 * MIB  # of what else the machine does


@pytest.fixture(scope="module")
def sandbox():
    made = Sandbox("bubblewrap", LIMITS)
    yield made
    made.close()


def machine() -> tuple[int, set[int], set[str]]:
    """Shared memory, processes below this one, and temporary folders."""
    text = Path("/proc/meminfo").read_text()
    (shared,) = re.findall(r"Shmem:\s+(\d+)", text)
    processes = {each.pid for each in psutil.Process().children(recursive=True)}
    folders = {path.name for path in Path(tempfile.gettempdir()).glob(f"lightrft*{os.getpid()}*")}
    return 1024 * int(shared), processes, folders


def end(ending: Ending) -> str:
    """How it ended, in a word and in its last lines."""
    if ending.reason != "ended" or ending.returncode is None:
        return ending.reason
    number = ending.returncode - 128 if ending.returncode > 128 else -ending.returncode
    if number == signal.SIGKILL:
        return "timeout"
    if number > 0:
        return signal.Signals(number).name
    return ending.stderr.decode(errors="replace")[-400:]


def check(sandbox: Sandbox, name: str) -> None:
    attack, expected = PROGRAMS[name]
    source = f"{PRELUDE}\n{attack}\nprint('SURVIVED', flush=True)\n".encode()
    before = machine()
    with ThreadPoolExecutor(2) as threads:
        first, hostile, last = threads.map(
            sandbox.run, (b"print('well')", source, b"print('well')")
        )
    assert first == last == Ending("ended", 0, b"well\n", b"")
    assert b"SURVIVED" not in hostile.stdout, hostile
    assert re.search(expected, end(hostile)), hostile
    after = machine()
    assert after[1:] == before[1:]
    assert after[0] < before[0] + NOISE_BYTES


@pytest.mark.parametrize("name", QUICK)
def test_a_hostile_program_costs_its_own_reward_and_leaves_nothing(sandbox, name) -> None:
    check(sandbox, name)


@pytest.mark.slow
@pytest.mark.shard("hostile")
@pytest.mark.parametrize("name", sorted(PROGRAMS.keys() - set(QUICK)))
def test_every_hostile_program_costs_its_own_reward_and_leaves_nothing(sandbox, name) -> None:
    check(sandbox, name)
