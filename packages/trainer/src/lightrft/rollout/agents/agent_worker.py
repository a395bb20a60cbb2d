"""Agents in a worker process: many episodes on one event loop.

Runs in the worker; imports only the standard library and the user's file.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import queue
import sys
import threading
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import cast

from lightrft.config import ConfigError
from lightrft.config.registry import AGENT_KINDS, load_reference, split_kind, split_reference
from lightrft.rewards.user_task import finite_number
from lightrft.rewards.worker import ReportedError
from lightrft.strategy.distributed.network import raise_open_files

# Agents that are not coroutines each wait in a separate thread.
_MAX_THREADS = 1024
# Name of the agent's total reward in reports.
_TOTAL = "agent"
# Each episode has connections; the episode of a program also has pipes.
MAX_OPEN_FILES = 1 << 16
Agent = Callable[[str, str, dict[str, object]], object]


def load_agents(agent: str) -> HostedAgents:
    """Return the handler for agents that a user's function implements.

    Args:
        agent: Import string of `run(base_url, api_key, row)`.

    Raises:
        ReportedError: The function does not exist.
    """
    place = (split_reference(agent) or ("", ""))[0]
    if place.endswith(".py"):
        # Imports from the file's folder work as if the file were run as a script.
        sys.path.insert(0, str(Path(place).resolve().parent))
    try:
        function = load_reference(agent, kind="agent")
    except ConfigError as error:
        raise ReportedError(str(error)) from error
    _check_signature(agent, function)
    return HostedAgents(cast("Agent", function))


def load_kind(agent: str, sandbox: str) -> HostedAgents:
    """Return the handler for agents of a registered kind.

    Args:
        agent: `KIND:WHAT`.
        sandbox: Kind of the sandbox for the model's programs.

    Raises:
        ReportedError: The agent does not exist or cannot run here.
    """
    kind, what = split_kind(agent, AGENT_KINDS)
    make = cast("Callable[[str, str], Agent]", AGENT_KINDS.load(str(kind)))
    return HostedAgents(make(what, sandbox))


class HostedAgents:
    """The handler of a worker: starts agents and reports which have ended.

    Args:
        agent: Function that is called with `base_url`, `api_key` and `row` of each episode.
    """

    def __init__(self, agent: Agent) -> None:
        raise_open_files(MAX_OPEN_FILES)
        self._agent = agent
        self._ended: queue.SimpleQueue[dict[str, object]] = queue.SimpleQueue()
        self._loop = asyncio.new_event_loop()
        self._loop.set_default_executor(ThreadPoolExecutor(_MAX_THREADS))
        self._tasks: set[asyncio.Task[None]] = set()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()

    def describe(self) -> object:
        """Return nothing; a successful load is the whole answer."""
        return None

    def __call__(self, request: object) -> object:
        """Start episodes (`start`) or return ended ones, possibly none after a while (`wait`)."""
        asked = cast("dict[str, object]", request)
        if asked["operation"] == "start":
            for episode in cast("list[dict[str, object]]", asked["episodes"]):
                self._loop.call_soon_threadsafe(self._begin, episode)
            return None
        ended = []
        with contextlib.suppress(queue.Empty):
            ended.append(self._ended.get(timeout=float(cast("float", asked["seconds"]))))
            while True:
                ended.append(self._ended.get_nowait())
        return ended

    def _begin(self, episode: dict[str, object]) -> None:
        task = self._loop.create_task(self._run(episode))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _run(self, episode: dict[str, object]) -> None:
        """Run one episode and report its reward or error."""
        report: dict[str, object] = {"number": episode["number"], "reward": None, "error": None}
        seconds = float(cast("float", episode["seconds"]))
        try:
            async with asyncio.timeout(seconds):
                report["reward"] = checked_reward(await self._result(episode))
        except TimeoutError as error:
            late = f"it did not end within {seconds:g} s"
            report["error"] = f"TimeoutError: {error}" if str(error) else late
        except ReportedError as error:
            report["error"] = str(error)
        except BaseException as error:  # noqa: BLE001 - SystemExit of user code included
            report["error"] = f"{type(error).__name__}: {error}"
        self._ended.put(report)

    async def _result(self, episode: Mapping[str, object]) -> object:
        arguments = (
            str(episode["base_url"]),
            str(episode["key"]),
            cast("dict[str, object]", episode["row"]),
        )
        if inspect.iscoroutinefunction(self._agent):
            return await cast("Awaitable[object]", self._agent(*arguments))
        result = await self._loop.run_in_executor(None, self._agent, *arguments)
        return await result if inspect.isawaitable(result) else result


def checked_reward(value: object) -> list[object] | None:
    """Return an agent's reward as [total, parts], or None.

    Raises:
        ReportedError: The value is not a finite number, a dict of finite numbers or None, or a
            part has a reserved name.
    """
    if value is None:
        return None
    if isinstance(value, Mapping):
        if not value:
            raise ReportedError("the agent returned an empty dict: expected at least one number")
        wrong = next((n for n in value if not isinstance(n, str) or n == _TOTAL), None)
        if wrong is not None:
            text = f"expected a text other than {_TOTAL!r}, the name of the whole reward"
            raise ReportedError(f"the agent returned a part named {wrong!r:.80}: {text}")
        parts = {n: finite_number(f"the agent's {n!r}", item) for n, item in value.items()}
        total = parts.pop("reward", None)
        return [
            finite_number("the agent's sum", sum(parts.values())) if total is None else total,
            parts,
        ]
    return [finite_number("the agent's reward", value), {}]


def _check_signature(name: str, found: object) -> None:
    expected = "expected async def run(base_url, api_key, row)"
    if not callable(found) or inspect.isclass(found):
        raise ReportedError(f"agent {name} is no function: {expected}")
    try:
        inspect.signature(found).bind("", "", {})
    except TypeError as error:
        raise ReportedError(f"agent {name}: {expected}; {error}") from error
