"""Agents that are programs; each episode runs in a sandbox with the endpoint as its network.

The sandbox has a separate loopback interface. The starter listens there on the endpoint's port
and sends the listener to this process, which accepts its connections and forwards their bytes.
So the address is the same on both sides, and leads nowhere else.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shlex
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from urllib.parse import urlsplit

from lightrft.config import ConfigError
from lightrft.config.printable import one_line
from lightrft.rewards.worker import ReportedError
from lightrft.rollout.agents.agent_worker import HostedAgents
from lightrft.run.provenance import named_paths
from lightrft.tools.rewards.sandbox import Ending, Sandbox, SandboxError, SandboxLimits

_CHUNK = 1 << 16
# Connections of one program; further ones wait to be accepted.
_MAX_CONNECTIONS = 128
_MAX_LINE_BYTES = 1 << 16
_PATH = "/usr/local/bin:/usr/bin:/bin"
# Folders of the sandbox itself, which a command cannot name.
_OWN_FOLDERS = frozenset(map(Path, ("/", "/dev", "/proc", "/sys", "/tmp")))
_ACCEPT_SECONDS = 0.1

_STARTER = """
import json, os, socket, sys
given = json.loads({given!r})
if given["port"]:
    with socket.create_server(("127.0.0.1", given["port"]), backlog=128) as listener:
        with socket.socket(fileno=given["channel"]) as channel:
            socket.send_fds(channel, [b"1"], [listener.fileno()])
with open("row.json", "w") as file:
    file.write(given["row"])
os.environ.update(given["environment"])
words = [word.replace("{{row}}", os.path.abspath("row.json")) for word in given["words"]]
try:
    os.execvp(words[0], words)
except OSError as error:
    sys.exit(words[0] + ": " + error.strerror)
"""
_LOOKS_FOR = "import shutil; print(shutil.which({program!r}, path={path!r}) is not None)"


def host_program(command: str, sandbox: str, seconds: float, pays: bool) -> HostedAgents:
    """Return the handler of a worker that runs a program for each episode.

    Args:
        command, sandbox, seconds, pays: See `ProgramAgent`.

    Raises:
        ReportedError: The command cannot be run, or no sandbox works here.
    """
    try:
        return HostedAgents(ProgramAgent(command, sandbox, seconds=seconds, pays=pays))
    except (ConfigError, SandboxError) as error:
        raise ReportedError(f"agent_command {command}: {error}") from error


class ProgramAgent:
    """A program that runs for each episode.

    Args:
        command: Command line of the program.
        sandbox: Kind of the sandbox.
        seconds: Deadline of one episode.
        pays: Its output is its reward; otherwise something else pays.

    Raises:
        ConfigError: The sandbox does not have the program, or no sandbox works here.
        SandboxError: A path of the command cannot be shown in the sandbox.
    """

    def __init__(self, command: str, sandbox: str, *, seconds: float, pays: bool) -> None:
        paths = named_paths(command)
        self._words = [
            str(Path(word).absolute()) if Path(word).exists() else word
            for word in shlex.split(command)
        ]
        self._seconds, self._pays, self._is_unsafe = seconds, pays, sandbox == "unsafe"
        self._sandbox = Sandbox(sandbox, _limits(seconds))
        try:
            self._path = self._show(paths)
            self._check_program()
        except BaseException:
            self._sandbox.close()
            raise

    async def __call__(self, base_url: str, key: str, row: Mapping[str, object]) -> object:
        """Return the reward of one episode, or None if something else pays.

        Raises:
            ReportedError: It failed, was ended at a limit, or printed no reward.
            SandboxError: The sandbox did not start.
        """
        deadline = time.monotonic() + self._seconds
        ours, theirs = socket.socketpair()
        source = self._source(base_url, key, row, theirs.fileno())

        def run() -> Ending:
            # This thread closes it, since it may begin after the episode is over.
            with theirs:
                channel = None if self._is_unsafe else theirs.fileno()
                return self._sandbox.run(source, deadline=deadline, channel=channel)

        with ours:
            relay = asyncio.create_task(_relay(ours, _port(base_url)))
            try:
                return self._result(await asyncio.to_thread(run))
            finally:
                relay.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await relay

    def _source(self, base_url: str, key: str, row: Mapping[str, object], channel: int) -> bytes:
        environment = {
            "PATH": self._path,
            "OPENAI_BASE_URL": base_url,
            "OPENAI_API_KEY": key,
            "ANTHROPIC_BASE_URL": base_url.removesuffix("/v1"),
            "ANTHROPIC_API_KEY": key,
        }
        values = {
            "port": 0 if self._is_unsafe else _port(base_url),
            "channel": channel,
            "row": json.dumps(row),
            "environment": environment,
            "words": [word.replace("{base_url}", base_url) for word in self._words],
        }
        return _STARTER.format(given=json.dumps(values)).encode()

    def _show(self, paths: Sequence[Path]) -> str:
        """Make the sandbox show what the command names; return its PATH."""
        prefix = Path(sys.prefix)
        has_python = self._is_unsafe or self._sandbox.interpreter == os.path.realpath(
            sys.executable
        )
        seen = [Path("/usr"), *([prefix] if has_python else [])]
        if not self._is_unsafe:
            reserved = [str(each) for each in paths if each.resolve() in _OWN_FOLDERS]
            if reserved:
                raise ConfigError(
                    f"it names {reserved[0]}, which a sandbox has of its own: name a file or a "
                    "folder below it"
                )
            hidden = [each for each in paths if not any(map(each.is_relative_to, seen))]
            self._sandbox.show([*seen[1:], *hidden])
        return f"{prefix}/bin:{_PATH}" if has_python else _PATH

    def _check_program(self) -> None:
        program = self._words[0].replace("{row}", "row.json")
        source = _LOOKS_FOR.format(program=program, path=self._path)
        if self._sandbox.run(source.encode()).stdout.strip() != b"True":
            raise ConfigError(
                f"the sandbox has no program {program}: it shows {self._path} and the files and "
                "folders that the command names"
            )

    def _result(self, ending: Ending) -> object:
        if ending.reason != "ended":
            raise ReportedError(self._end(ending.reason))
        if ending.returncode:
            text = f"the program ended with exit code {ending.returncode}"
            raise ReportedError(f"{text}: {one_line(_last(ending.stderr)) or 'no error'}")
        if not self._pays:
            return None
        line = _last(ending.stdout)
        try:
            return json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ReportedError(
                "the last line that the program printed is no reward: expected a number or an "
                f"object of numbers as JSON, got {line!r:.100}"
            ) from error

    def _end(self, reason: str) -> str:
        limits = self._sandbox.limits
        return {
            "deadline": f"it did not end within {self._seconds:g} s",
            "output": f"the program printed more than {limits.output_bytes} bytes",
            "memory": f"the program held more than {limits.total_bytes} bytes of memory",
            "timeout": f"the program computed for more than {limits.total_seconds:g} s",
        }[reason]


def _limits(seconds: float) -> SandboxLimits:
    """Return the limits of an agent: a deadline, and any number of processes it needs."""
    return SandboxLimits(
        cpu_seconds=min(seconds, 1e7),
        # Runtimes other than Python reserve far more addresses than they use.
        memory_bytes=1 << 40,
        total_bytes=2 << 30,
        num_processes=256,
        num_files=1024,
        file_bytes=64 << 20,
        folder_bytes=256 << 20,
        output_bytes=16 << 20,
        is_counted=False,
    )


async def _relay(channel: socket.socket, port: int) -> None:
    """Pass connections of a sandbox on to the endpoint, until it is cancelled."""
    slots, loop = asyncio.Semaphore(_MAX_CONNECTIONS), asyncio.get_running_loop()
    file = await _listener(channel)
    if file is None:
        return  # the program needs no listener, or did not start
    async with asyncio.TaskGroup() as group:
        with socket.socket(fileno=file) as listener:
            listener.setblocking(False)
            while True:
                await slots.acquire()
                try:
                    line, _ = await loop.sock_accept(listener)
                except OSError:  # no file descriptor is free: the program waits
                    slots.release()
                    await asyncio.sleep(_ACCEPT_SECONDS)
                    continue
                passed = group.create_task(_pass_on(line, port))
                passed.add_done_callback(lambda _: slots.release())


async def _listener(channel: socket.socket) -> int | None:
    """Receive the listener over a channel, if one comes."""
    loop, is_there = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(channel, is_there.set)
    try:
        await is_there.wait()
    finally:
        loop.remove_reader(channel)
    return next(iter(socket.recv_fds(channel, 1, 1)[1]), None)


async def _pass_on(line: socket.socket, port: int) -> None:
    """Copy both directions of a connection, each until its sender closes that side."""
    writers: list[asyncio.StreamWriter] = []
    try:
        reader, writer = await asyncio.open_connection(sock=line)
        writers.append(writer)
        there, to_there = await asyncio.open_connection("127.0.0.1", port)
        writers.append(to_there)
        async with asyncio.TaskGroup() as ways:
            ways.create_task(_copy(reader, to_there))
            ways.create_task(_copy(there, writer))
    except* OSError:
        pass  # either side has gone
    finally:
        for writer in writers:
            writer.close()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(_CHUNK):
        writer.write(data)
        await writer.drain()
    writer.write_eof()


def _port(base_url: str) -> int:
    return urlsplit(base_url).port or 0


def _last(output: bytes) -> str:
    """Return the last line that is not empty."""
    lines = output.strip().rsplit(b"\n", 1)
    return lines[-1][-_MAX_LINE_BYTES:].decode(errors="replace")
