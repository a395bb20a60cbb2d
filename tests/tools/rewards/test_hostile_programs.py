"""Programs that want more than a sandbox gives: each costs its own reward and leaves nothing."""

import re
import signal
import tempfile
import tomllib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from tests.machine import wait_until

from lightrft.tools.rewards.sandbox import Ending, Sandbox, SandboxLimits

DATA = tomllib.loads(Path(__file__).with_name("hostile_programs.toml").read_text("utf-8"))
PROGRAMS = {
    f"{kind}: {name}": program
    for kind in ("time", "memory", "other")
    for name, program in DATA[kind].items()
}
MIB = 1 << 20
# Small, so that what passes a limit takes little of the machine.
LIMITS = SandboxLimits(cpu_seconds=0.6, memory_bytes=256 * MIB, total_bytes=320 * MIB)
NOISE_BYTES = 512 * MIB  # of what else the machine does


# Those of agents, which are bounded by a deadline and have files of four times the size.
OF_AGENTS = replace(LIMITS, is_counted=False, file_bytes=4 * LIMITS.file_bytes)


@pytest.fixture(scope="module")
def folder():
    """A temporary folder that programs of every user reach."""
    before, place = tempfile.tempdir, Path(tempfile.mkdtemp(prefix="lightrft-test-"))
    place.chmod(0o755)
    tempfile.tempdir = str(place)
    yield place
    tempfile.tempdir = before
    assert not any(place.iterdir())
    place.rmdir()


@pytest.fixture(scope="module", params=[LIMITS], ids=["program"])
def sandbox(request, folder):
    made = Sandbox("bubblewrap", request.param)
    yield made
    made.close()


def shared_bytes():
    (shared,) = re.findall(r"Shmem:\s+(\d+)", Path("/proc/meminfo").read_text())
    return 1024 * int(shared)


def left(folder):
    """Processes below this one, and temporary folders."""
    processes = {each.pid for each in psutil.Process().children(recursive=True)}
    return processes, {path.name for path in folder.iterdir()}


def end(ending):
    """How it ended, in a word and in its last lines."""
    if ending.reason != "ended" or ending.returncode is None:
        return ending.reason
    number = ending.returncode - 128 if ending.returncode > 128 else -ending.returncode
    if number == signal.SIGKILL:
        return "timeout"
    if number > 0:
        return signal.Signals(number).name
    return ending.stderr.decode(errors="replace")[-400:]


def check(sandbox, folder, name):
    attack = PROGRAMS[name]
    lines = (DATA["prelude"], attack["program"], "print('SURVIVED', flush=True)\n")
    source = "\n".join(lines).encode()
    before, shared = left(folder), shared_bytes()
    with ThreadPoolExecutor(2) as threads:
        first, hostile, last = threads.map(
            sandbox.run, (b"print('well')", source, b"print('well')")
        )
    assert first == last == Ending("ended", 0, b"well\n", b"")
    assert b"SURVIVED" not in hostile.stdout, hostile
    assert re.search(attack["ends"], end(hostile)), hostile
    assert left(folder) == before
    assert wait_until(lambda: shared_bytes() < shared + NOISE_BYTES)


@pytest.mark.full
@pytest.mark.parametrize("name", DATA["quick"])
def test_a_hostile_program_costs_its_own_reward_and_leaves_nothing(sandbox, folder, name):
    check(sandbox, folder, name)


@pytest.mark.parametrize("sandbox", [OF_AGENTS], ids=["agent"], indirect=True)
@pytest.mark.parametrize("name", DATA["with_agents"])
def test_a_hostile_agent_gets_no_more_memory(sandbox, folder, name):
    check(sandbox, folder, name)


def test_honest_programs_end_well(folder):
    """They use what the filter or the looks could mistake."""
    made = Sandbox("bubblewrap")
    try:
        assert made.run(DATA["honest"].encode()) == Ending("ended", 0, b"well\n", b"")
    finally:
        made.close()


@pytest.mark.slow
@pytest.mark.shard("hostile")
@pytest.mark.parametrize("name", sorted(PROGRAMS.keys() - set(DATA["quick"])))
def test_every_hostile_program_costs_its_own_reward_and_leaves_nothing(sandbox, folder, name):
    check(sandbox, folder, name)
