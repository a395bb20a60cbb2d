"""Slow tests and the shards in which `.ci/slow` runs them."""

import re
from pathlib import Path

import pytest
from tests.programs import run_program

ROOT = Path(__file__).parent.parent
# They measure, and are no tests of the suite.
OF_BENCHMARKS = {"overheads", "decoder", "peers_speed"}
# Chosen by its marker, since the tests need its environment.
OF_ENGINES = {"sglang"}
# Their fast tests need what only the shard has: many examples, packages that are in no lock.
WHOLE = {"fuzz", "fuzz_files", "trackers"}
NEEDS_A_PACKAGE = re.compile(r"^\w*( = )?pytest\.importorskip\(", re.MULTILINE)
NAMES_A_SHARD = re.compile(r'mark\.shard\("(\w+)"\)')


def slow(repository, *names):
    return run_program("bash", repository / ".ci/slow", *names)


@pytest.fixture(scope="module")
def listed(repository):
    return slow(repository).stdout.split()


def test_every_slow_test_of_what_was_collected_is_in_a_shard_that_ci_runs(collected, listed):
    assert len(listed) == len(set(listed)) > 30
    for path, is_slow, shard in collected:
        assert shard in listed if is_slow else shard is None or shard in listed, path


def test_every_shard_has_tests(collected, listed, pytestconfig):
    folders = pytestconfig.getini("testpaths")
    files = {path for path, _, _ in collected}
    paths = [path for folder in folders for path in (ROOT / folder).rglob("test_*.py")]
    missing = [path.read_text() for path in paths if str(path) not in files]
    # A module that needs a package which is not there has no tests, and still names its shard.
    if not all(map(NEEDS_A_PACKAGE.search, missing)):
        pytest.skip("only a part of the tests was collected")
    found = {shard for _, is_slow, shard in collected if is_slow or shard in WHOLE}
    found |= {shard for text in missing for shard in NAMES_A_SHARD.findall(text)}
    assert found | OF_BENCHMARKS | OF_ENGINES == set(listed)


def test_a_shard_that_nobody_knows_is_refused_with_the_names(repository):
    done = slow(repository, "kills", "kils")
    assert done.returncode == 2
    assert "no shard is called kils" in done.stderr
    assert "episode_kills" in done.stderr
    assert done.stdout == ""
