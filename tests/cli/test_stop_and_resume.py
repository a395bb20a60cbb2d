"""Runs that are stopped or killed at the shell, and the same command that continues them."""

import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests import runs
from tests.machine import seconds
from tests.programs import run_program
from tests.runs import (
    digest,
    lines,
    rollout_options,
    say_rows,
    steps,
    tiny_models,
    words,
    write_inputs,
)

pytestmark = pytest.mark.shard("command_line")

SECONDS = 240
REWARD = f"""
import time
from pathlib import Path
{runs.REWARD.replace("def score", "def shares")}
FOLDER = Path(__file__).parent


def score(responses):
    if len(responses) == 4:  # rows on which functions are tried before a model is built
        return [0.0] * 4
    calls = FOLDER / f"calls_{{len(list(FOLDER.glob('calls_*')))}}"
    calls.touch()
    pause = FOLDER / "pause_at"
    if pause.exists() and int(calls.name.split("_")[1]) == int(pause.read_text()):
        (FOLDER / "paused").touch()
        while pause.exists():
            time.sleep(0.02)
    return shares(responses)


score.whole_batch = True  # one call a step
"""
ENVIRONMENT = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@pytest.fixture
def folder(tmp_path):
    return write_inputs(tiny_models(tmp_path, "model"), say_rows(20), reward=REWARD)


class Command:
    """`lightrft train` of five steps in a process of its own."""

    def __init__(self, folder, name, *extra, launcher=(), **changes):
        self.folder, self.run = folder, folder / name
        sizes = {"train_batch_size": 16, "micro_train_batch_size": 8, "generate_max_len": 6}
        rules = {"reward_running_norm": True, "save_steps": 1, "max_steps": None, **changes}
        options = rollout_options(folder, name, **{**sizes, **rules})
        start = launcher or (sys.executable, "-m", "lightrft.cli.main", "train")
        self.words = [*start, *words(options), *extra]
        self.environment = {k: v for k, v in os.environ.items() if k not in ENVIRONMENT}
        self.environment["OMP_NUM_THREADS"] = "1"

    def finish(self, code=0):
        """Run to the end, which has to be this exit code; return what was written."""
        how = {"timeout_seconds": SECONDS, "env": self.environment, "code": code}
        done = run_program(*self.words, **how)
        return done.stdout, done.stderr

    def signal_in_rollout(self, number, call):
        """Return exit code and messages of a run that got a signal while call `call` was scored."""
        return self.act_in_rollout(lambda process: process.send_signal(number), call)

    def act_in_rollout(self, act, call):
        """Do the same of a run to which something is done meanwhile."""
        for path in (*self.folder.glob("calls_*"), self.folder / "paused"):
            path.unlink(missing_ok=True)
        pause = self.folder / "pause_at"
        pause.write_text(str(call))
        process = subprocess.Popen(
            self.words,
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        begin = time.monotonic()
        while not (self.folder / "paused").exists():
            assert process.poll() is None, process.communicate()
            assert time.monotonic() - begin < seconds(SECONDS)
            time.sleep(0.05)
        act(process)
        pause.unlink()
        output, messages = process.communicate(timeout=seconds(SECONDS))
        return process.returncode, output, messages

    def events(self):
        return [(entry["event"], entry["step"]) for entry in lines(self.run / "events.jsonl")]


@pytest.mark.full
def test_a_stopped_and_a_killed_run_are_continued_by_the_same_command(folder):
    whole = Command(folder, "whole")
    whole.finish()
    broken = Command(folder, "broken")

    # Call 0 of a process scores the rollouts of its first step.
    code, _, messages = broken.signal_in_rollout(signal.SIGTERM, call=1)
    assert code == 75, messages
    assert messages.splitlines()[-1].startswith("lightrft: stopped as asked after step 1")
    assert len(messages.splitlines()) == 1
    assert not (broken.run / "summary.json").exists()

    code, output, _ = broken.signal_in_rollout(signal.SIGKILL, call=2)
    assert code == -signal.SIGKILL
    assert "continuing" in output
    for name in ("checkpoint", "weights", "optimizer", "generators", "data", "engine"):
        assert f"\n  {name}" in output
    assert "1 of 1 processes" in output
    assert "step 2/5  reward" in output
    assert "phase 'generate' took" in (broken.run / "logs/rank_0.log").read_text()

    output, _ = broken.finish()
    assert "after step 3" in output
    assert broken.events() == [
        ("started", 0),
        ("stopped", 1),
        ("resumed", 1),
        ("resumed", 3),
        ("finished", 5),
    ]
    assert [row["step"] for row in steps(whole.run)] == [1, 2, 3, 4, 5]
    assert len({row["reward"] for row in steps(whole.run)}) == 5
    assert (steps(broken.run), digest(broken.run)) == (steps(whole.run), digest(whole.run))

    files = {path: path.stat().st_mtime_ns for path in broken.run.rglob("*")}
    output, messages = broken.finish()
    assert messages == ""
    assert "is complete after 5 steps: nothing is left to do" in output
    assert files == {path: path.stat().st_mtime_ns for path in broken.run.rglob("*")}

    _, messages = Command(folder, "broken", max_steps=7).finish(2)
    assert "complete after 5 steps:\nlightrft:   max_steps: None -> 7" in messages
    assert "new folder" in messages


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_all_ranks_stop_together_and_continue_exactly(folder, number):
    whole = Command(folder, "whole", "--nproc_per_node", "2")
    whole.finish()
    broken = Command(folder, "broken", "--nproc_per_node", "2", save_steps=-1)
    code, _, messages = broken.signal_in_rollout(number, call=4)
    assert code == 75, messages
    (line,) = messages.splitlines()
    assert line.startswith("lightrft: stopped as asked after step")
    output, _ = broken.finish()
    assert "2 of 2 processes" in output
    output, messages = broken.finish()
    assert (messages, output.count("nothing is left to do")) == ("", 1)
    assert (steps(broken.run), digest(broken.run)) == (steps(whole.run), digest(whole.run))


def require_continued(command):
    output, _ = command.finish()
    assert "continuing" in output
    assert command.events()[-1] == ("finished", 5)


@pytest.mark.slow
def test_a_killed_launcher_leaves_no_writers_and_the_same_command_continues(folder):
    broken = Command(folder, "broken", "--nproc_per_node", "2")
    code, _, _ = broken.signal_in_rollout(signal.SIGKILL, call=6)
    assert code == -signal.SIGKILL
    require_continued(broken)


@pytest.mark.slow
def test_under_torchrun_the_ranks_stop_with_a_checkpoint_and_say_so(folder):
    torchrun = (
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc_per_node",
        "2",
        "--standalone",
        "-m",
        "lightrft.cli.train",
    )
    broken = Command(folder, "broken", launcher=torchrun)
    code, _, messages = broken.signal_in_rollout(signal.SIGTERM, call=4)
    assert code != 0
    assert "stopped as asked after step" in messages
    require_continued(broken)
    output, _ = broken.finish()
    assert output.count("nothing is left to do") == 1


@pytest.mark.slow
def test_a_run_that_needs_more_memory_than_there_is_names_phase_and_remedies(folder):
    def leave_80_mb(process):
        pages = int(Path(f"/proc/{process.pid}/statm").read_text().split()[0])
        limit = pages * resource.getpagesize() + 80 * 2**20
        resource.prlimit(process.pid, resource.RLIMIT_AS, (limit, limit))

    sizes = {"n_samples_per_prompt": 64, "train_batch_size": 256, "micro_train_batch_size": 256}
    command = Command(folder, "large", generate_max_len=96, **sizes)
    code, _, messages = command.act_in_rollout(leave_80_mb, call=0)
    assert code == 6, messages
    assert "lightrft: out of memory in phase 'train'" in messages
    assert "1. --micro_train_batch_size 128 (now 256)" in messages
    assert "Traceback" not in messages
