"""Many steps with the embedded engine: nothing grows."""

import os
from pathlib import Path

import pytest
from tests.programs import run_python

pytestmark = pytest.mark.shard("soak")

QUANTITIES = ("memory_kib", "descriptors", "threads", "temporary_files")


def rows(**growth):
    """Forty steps whose quantities grow by so much a step, after a start that fills caches."""
    return [
        {
            name: 100.0 + growth.get(name, 0.0) * step + (20.0 if step > 5 else 4.0 * step)
            for name in QUANTITIES
        }
        for step in range(40)
    ]


@pytest.mark.parametrize("name", QUANTITIES)
def test_a_planted_leak_is_found_and_a_filled_cache_is_none(script, too_steep, name):
    assert script.QUANTITIES == QUANTITIES
    assert too_steep(script.slopes(rows())) == {}
    found = too_steep(script.slopes(rows(**{name: 20.0})))
    assert found == {name: pytest.approx(20.0)}


def test_what_is_measured_follows_what_is_held(script, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    before = script.measure()
    files = [(tmp_path / str(number)).open("w") for number in range(3)]
    after = script.measure()
    assert after["descriptors"] == before["descriptors"] + 3
    assert after["temporary_files"] == before["temporary_files"] + 3
    for file in files:
        file.close()


# In a process of its own: a heap that earlier tests used has room for some of the blocks.
HEAP = """
import soak

before = soak.measure()["memory_kib"]
blocks = [bytearray(b"x" * 4000) for _ in range(10_000)]
print(soak.measure()["memory_kib"] - before)
# What stays pins the heap's end, so that nothing is returned unasked.
blocks = blocks[::100]
print(soak.measure()["memory_kib"] - before)
"""


def test_memory_is_what_is_held_and_not_what_a_heap_keeps(script, tmp_path):
    folder = str(Path(script.__file__).parent)
    changes = {"PYTHONPATH": folder, "TMPDIR": str(tmp_path)}
    done = run_python("-c", HEAP, code=0, timeout_seconds=240, env=os.environ | changes)
    whole, hundredth = map(float, done.stdout.split())
    assert whole > 36_000
    assert hundredth < 9_000


@pytest.mark.slow
@pytest.mark.timeout(3500)
def test_a_leak_a_little_above_the_bound_is_found_in_200_steps(soak, too_steep):
    found = too_steep(soak("hf", 200, leak_kib=20))
    assert list(found) == ["memory_kib"]
    assert found["memory_kib"] < 36  # the leak, and what is allowed beside it


@pytest.mark.slow
@pytest.mark.timeout(3500)
def test_a_thousand_steps_hold_no_more_than_the_first_hundreds(soak, too_steep):
    assert too_steep(soak("hf", 1000)) == {}
