"""`lightrft` starts fast and says what it can do."""

from __future__ import annotations

import os
import resource
import subprocess
import sys

import pytest

from lightrft.cli.main import COMMANDS, main, usage

SECONDS = 0.3
# A busy neighbour on the same core makes processor time longer, too.
NUM_TRIES = 5
HEAVY = ("torch", "transformers", "numpy", "pydantic", "datasets")


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """An environment in which only the first start compiles, as a user's."""
    inherited = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    return {**inherited, "PYTHONPYCACHEPREFIX": str(tmp_path_factory.mktemp("compiled"))}


@pytest.mark.parametrize(
    "argv", [["--help"], ["--version"], ["train", "--help"], ["quickstart", "--help"]]
)
def test_help_needs_no_heavy_package_and_little_time(argv, compiled):
    code = (
        "import sys; from lightrft.cli.main import main; code = main(sys.argv[1:]); "
        f"loaded = [name for name in {HEAVY!r} if name in sys.modules]; "
        "sys.exit(f'loaded {loaded}' if loaded else code)"
    )
    durations = []
    for _ in range(NUM_TRIES):
        before = processor_seconds()
        done = subprocess.run(
            [sys.executable, "-c", code, *argv], capture_output=True, text=True, check=False,
            env=compiled,
        )  # fmt: skip
        durations.append(processor_seconds() - before)
        assert done.returncode == 0, done.stderr
        assert "lightrft" in done.stdout
        if durations[-1] < SECONDS:
            return
    raise AssertionError(f"{durations} seconds")


def processor_seconds():
    """Time that ended child processes spent on processors: other load does not count."""
    usage_of_children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage_of_children.ru_utime + usage_of_children.ru_stime


def test_the_help_lists_every_command(capsys):
    assert main([]) == 0
    text = capsys.readouterr().out.rstrip("\n")
    assert text == usage()
    assert all(name in text for name in COMMANDS)


def test_version_is_that_of_the_distribution(capsys):
    assert main(["--version"]) == 0
    name, number = capsys.readouterr().out.split()
    assert name == "lightrft"
    assert number[0].isdigit()


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself(capsys, command):
    assert main([command, "--help"]) == 0
    assert f"usage: lightrft {command}" in capsys.readouterr().out
