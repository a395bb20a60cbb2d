"""Programs that work on Harbor tasks in the task's folders; its tests then reward them.

The tests run in a second sandbox, which gets the task's folders as the program left them. Neither
its processes nor its other files can reach the tests, which have no network.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Mapping
from pathlib import Path, PurePosixPath

from lightrft.datasets.types import DataError
from lightrft.rewards.worker import ReportedError
from lightrft.rollout.agents.agent_worker import HostedAgents
from lightrft.strategy.config import ConfigError
from lightrft.tools.agents.harbor_tasks import (
    COLUMN,
    LOGS,
    TESTS,
    HarborTask,
    files_of,
    packed,
    read_task,
)
from lightrft.tools.agents.program_agent import ProgramAgent
from lightrft.tools.rewards.sandbox import Ending, SandboxError

UNPACK = """
import io, json, os, subprocess, sys, tarfile
def unpack(data, folders):
    def within(tar):
        for entry in tar:
            # A program may have written the archive: no link of an entry before leads elsewhere.
            place = os.path.realpath("/" + os.path.dirname(entry.name)) + "/"
            is_inside = place.startswith(tuple(folder + "/" for folder in folders))
            is_plain = entry.isreg() or entry.isdir() or entry.issym() or entry.islnk()
            if is_plain and is_inside and not os.path.islink("/" + entry.name):
                yield entry
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        tar.extraction_filter = lambda entry, _: entry
        tar.extractall("/", within(tar))
"""
_PLAYS = (
    UNPACK
    + """
unpack(sys.stdin.buffer.read(), given["folders"])
os.makedirs(given["workdir"], exist_ok=True)
ended = 0
try:
    ended = subprocess.run(
        words, cwd=given["workdir"], stdin=subprocess.DEVNULL, stdout=sys.stderr,
        timeout=given["seconds"],
    ).returncode
except subprocess.TimeoutExpired:
    pass  # what it has left is tested
except OSError as error:
    sys.exit(words[0] + ": " + error.strerror)
if ended:
    sys.exit(ended if ended > 0 else 128 - ended)
def readable(entry):
    if entry.isreg() or entry.isdir():
        entry.mode |= 0o700 if entry.isdir() else 0o600
        os.chmod("/" + entry.name, entry.mode)
    return entry
with tarfile.open(fileobj=sys.stdout.buffer, mode="w|") as tar:
    for folder in given["folders"]:
        tar.add(folder, filter=readable)
"""
)
_TESTS = (
    UNPACK
    + """
data = sys.stdin.buffer.read()
unpack(data[:given["num_bytes"]], given["folders"])
unpack(data[given["num_bytes"]:], [given["tests"]])
logs = given["logs"] + "/verifier"
os.makedirs(logs)
os.makedirs(given["workdir"], exist_ok=True)
script = given["tests"] + "/test.sh"
os.chmod(script, 0o755)
os.environ.update(given["environment"])
try:
    subprocess.run(
        ["bash", "-c", script], cwd=given["workdir"], stdin=subprocess.DEVNULL,
        stdout=sys.stderr, timeout=given["seconds"],
    )
except subprocess.TimeoutExpired:
    sys.exit("the tests did not end within %g s" % given["seconds"])
for name in ("reward.json", "reward.txt"):
    path = os.path.join(logs, name)
    if os.path.isfile(path):
        with open(path, errors="replace") as file:
            print(json.dumps(file.read(65536)))
        break
else:
    sys.exit("the tests wrote no reward.txt and no reward.json in " + logs)
"""
)


def host_program(command: str, sandbox: str, seconds: float, pays: bool) -> HostedAgents:
    """Return the handler of a worker that runs a program for each episode.

    Args:
        command: Command line of the program.
        sandbox: Kind of the sandbox.
        seconds: Deadline of one episode.
        pays: Its output is its reward; otherwise something else pays.

    Raises:
        ReportedError: The command cannot be run, or no sandbox works here.
    """
    try:
        return HostedAgents(TaskProgram(command, sandbox, seconds=seconds, pays=pays))
    except (ConfigError, SandboxError) as error:
        raise ReportedError(f"agent_command {command}: {error}") from error


class TaskProgram(ProgramAgent):
    """A program that runs for each episode, with the tests of a task if its row has one."""

    async def __call__(self, base_url: str, key: str, row: Mapping[str, object]) -> object:
        """Return the reward of an episode; for a task, what its tests paid.

        Raises:
            ReportedError: The program failed, or the tests wrote no reward.
            SandboxError: The sandbox did not start.
        """
        if COLUMN not in row:
            return await super().__call__(base_url, key, row)
        if self._is_unsafe:
            raise ReportedError(
                "a task of Harbor has folders of its own, which --sandbox unsafe cannot give it: "
                "expected --sandbox bubblewrap"
            )
        deadline = time.monotonic() + self._seconds
        try:
            task = await asyncio.to_thread(read_task, Path(str(row[COLUMN])))
        except DataError as error:
            raise ReportedError(str(error)) from error
        hidden = [each for each in self._shown if f"/{each.parts[1]}" in task.folders]
        if hidden:
            raise ReportedError(
                f"agent_command names {hidden[0]}, and the task {task.folder.name} has a folder "
                f"/{hidden[0].parts[1]} of its own: expected it elsewhere"
            )
        shown = {name: value for name, value in row.items() if name != COLUMN}
        left = await self._start(
            (base_url, key, shown),
            starter=_PLAYS,
            given={
                "workdir": str(task.workdir),
                "folders": task.folders,
                "seconds": task.agent_seconds,
                "variables": task.variables,
            },
            stdin=packed(task.copies),
            folders=task.folders,
        )
        self._require_end(left)
        tested = await asyncio.to_thread(self._test, task, left.stdout, deadline)
        self._require_end(tested)
        return _reward(tested.stdout)

    def _test(self, task: HarborTask, left: bytes, deadline: float) -> Ending:
        """Run the tests on the archive that a program left."""
        values = {
            "workdir": str(task.workdir),
            "folders": task.folders,
            "num_bytes": len(left),
            "tests": TESTS,
            "logs": LOGS,
            "seconds": task.test_seconds,
            "environment": {"PATH": self._path, **task.variables, **task.test_variables},
        }
        return self._sandbox.run(
            f"import json\ngiven = json.loads({json.dumps(values)!r})\n{_TESTS}".encode(),
            stdin=left + packed(files_of(task.folder / "tests", PurePosixPath(TESTS))),
            deadline=deadline,
            folders=[*task.folders, TESTS, LOGS],
        )


def _reward(output: bytes) -> object:
    """Parse the reward that the tests wrote: a number, or an object of numbers."""
    written = str(json.loads(output))
    for read in (float, json.loads):
        with contextlib.suppress(ValueError, RecursionError):
            return read(written)
    raise ReportedError(
        "the tests wrote no reward: expected a number or an object of numbers as JSON, got "
        f"{written!r:.100}"
    )
