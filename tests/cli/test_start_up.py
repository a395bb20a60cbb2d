"""`lightrft` starts fast and says what it can do."""

import os
import re
import resource

import pytest
from tests.programs import run_python
from tests.runs import rollout_options, row_options, tiny_models, words, write_inputs

from lightrft.cli.main import COMMANDS, main, usage

# What any command line of this size imports; a busy neighbour makes its processor time longer, too.
FLOOR = (
    "import argparse, dataclasses, hashlib, importlib.metadata, inspect, json, logging, socket, "
    "typing, urllib.parse"
)
MAX_RATIO = 2.5
NUM_TRIES = 5
HEAVY = ("torch", "transformers", "numpy", "pydantic", "datasets")


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """An environment in which only the first start compiles, as a user's."""
    inherited = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    found = {**inherited, "PYTHONPYCACHEPREFIX": str(tmp_path_factory.mktemp("compiled"))}
    processor_seconds(found, FLOOR)
    return found


@pytest.mark.parametrize(
    "module",
    ["lightrft.cli.main", "lightrft.cli.errors", "lightrft.config.options", "lightrft.cli.train"],
)
def test_an_interruption_while_modules_are_imported_is_one_line(module):
    code = f"""if True:
        import sys
        class Interrupts:
            def find_spec(self, name, path=None, target=None):
                if name == {module!r}:
                    raise KeyboardInterrupt
        sys.meta_path.insert(0, Interrupts())
        from lightrft.cli import command
        sys.argv[1:] = ["train", "--help"]
        sys.exit(command())
    """
    done = run_python("-c", code)
    assert (done.returncode, done.stderr) == (130, "lightrft: interrupted\n")


@pytest.mark.parametrize(
    "argv", [["--help"], ["--version"], ["train", "--help"], ["quickstart", "--help"]]
)
def test_help_needs_no_heavy_package_and_little_time(argv, compiled):
    code = (
        "import sys; from lightrft.cli.main import main; code = main(sys.argv[1:]); "
        f"loaded = [name for name in {HEAVY!r} if name in sys.modules]; "
        "sys.exit(f'loaded {loaded}' if loaded else code)"
    )
    ratios = []
    for _ in range(NUM_TRIES):
        floor, _ = processor_seconds(compiled, FLOOR)
        seconds, done = processor_seconds(compiled, code, *argv)
        assert done.returncode == 0, done.stderr
        assert "lightrft" in done.stdout
        ratios.append(seconds / floor)
        if ratios[-1] < MAX_RATIO:
            return
    raise AssertionError(f"{ratios} times the imports of the standard library")


def processor_seconds(environment, *words):
    """Time that a Python process spent on processors, and how it ended."""

    def spent():
        usage = resource.getrusage(resource.RUSAGE_CHILDREN)
        return usage.ru_utime + usage.ru_stime

    before = spent()
    done = run_python("-c", *words, env=environment)
    return spent() - before, done


def test_version_is_that_of_the_distribution(capsys):
    assert main(["--version"]) == 0
    name, number = capsys.readouterr().out.split()
    assert name == "lightrft"
    assert number[0].isdigit()


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself(capsys, command):
    assert main([command, "--help"]) == 0
    assert f"usage: lightrft {command}" in capsys.readouterr().out


def test_no_time_goes_into_a_search_for_garbage_at_the_end():
    code = (
        "import atexit, gc, sys; from lightrft.cli.main import main\n"
        "atexit.register(lambda: print(gc.get_freeze_count()))\n"
        "sys.exit(main(['--help']))"
    )
    done = run_python("-c", code, code=0)
    assert int(done.stdout.splitlines()[-1]) > 1000  # objects


def test_the_help_lists_each_command_once_below_a_heading_and_init_run_first(capsys):
    assert main([]) == 0
    text = capsys.readouterr().out
    assert text.rstrip("\n") == usage()
    names = re.findall(r"^  ([\w-]+)  ", text, re.MULTILINE)
    assert sorted(names) == sorted([*COMMANDS, *COMMANDS.installed])
    assert names[0] == "init-run"
    assert len(re.findall(r"^[a-z ]+:$", text, re.MULTILINE)) == 5


# Functions are counted before a command imports them by name; where the loop begins, the frames are
# printed that lead there.
STACK = """
import sys, traceback
from lightrft.cli.main import main
from lightrft.datasets import files
from lightrft.run import resume
from lightrft.run.loop import Loop

calls = []

def counted(module, name):
    called = getattr(module, name)
    def call(*arguments, **keywords):
        calls.append(name)
        return called(*arguments, **keywords)
    setattr(module, name, call)

counted(resume, "plan_run")
counted(files, "read_rows")

def stop(*_, **__):
    frames = [f.name for f in traceback.extract_stack() if "/src/lightrft/" in f.filename]
    print("frames:", *frames)
    print("calls:", *sorted(calls))
    sys.exit(0)

Loop.run = stop
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.full
@pytest.mark.parametrize("command", ["sft", "train"])
def test_a_start_is_five_frames_one_plan_and_one_reading_of_the_rows(tmp_path, command):
    folder = tiny_models(tmp_path, "model")
    if command == "train":
        options = rollout_options(write_inputs(folder))
    else:
        rows = folder / "rows.jsonl"
        rows.write_text('{"prompt": "1 + 1?", "completion": "2"}\n' * 8)
        options = row_options(folder / "model", rows, folder / "run")
    done = run_python("-c", STACK, command, *words(options))
    lines = done.stdout.splitlines()
    (line,) = [each for each in lines if each.startswith("frames:")]
    begin, *between = line.removeprefix("frames:").split()
    assert begin == "main"
    assert len(between) <= 5, between
    assert "calls: plan_run read_rows" in lines
