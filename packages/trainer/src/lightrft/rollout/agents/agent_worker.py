"""Agents as they live in a worker process: many episodes on one event loop.

Runs in the worker; imports the standard library and the user's file.
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

# Of agents that are no coroutines, each of which waits in a thread of its own.
_MAX_THREADS = 1024
# Under which the report shows what an agent returned.
_TOTAL = "agent"
# Each episode has connections, and that of a program pipes beside them.
MAX_OPEN_FILES = 1 << 16
Agent = Callable[[str, str, dict[str, object]], object]


def load_agents(agent: str) -> HostedAgents:
    """The handler for agents of a user's function.

    Args:
        agent: Import string of `run(base_url, api_key, row)`.

    Raises:
        ReportedError: There is no such function.
    """
    place = (split_reference(agent) or ("", ""))[0]
    if place.endswith(".py"):
        # The user's imports from beside the file work, as if it were run as a script.
        sys.path.insert(0, str(Path(place).resolve().parent))
    try:
        found = load_reference(agent, kind="agent")
    except ConfigError as error:
        raise ReportedError(str(error)) from error
    _check_signature(agent, found)
    return HostedAgents(cast("Agent", found))


def load_kind(agent: str, sandbox: str) -> HostedAgents:
    """The handler for agents of another make.

    Args:
        agent: `KIND:WHAT`.
        sandbox: Kind of the sandbox for programs of the model.

    Raises:
        ReportedError: There is no such agent, or it cannot run here.
    """
    kind, what = split_kind(agent, AGENT_KINDS)
    make = cast("Callable[[str, str], Agent]", AGENT_KINDS.load(str(kind)))
    return HostedAgents(make(what, sandbox))


class HostedAgents:
    """The handler of a worker: starts agents, and tells which have ended.

    Args:
        agent: Called with `base_url`, `api_key` and `row` of each episode.
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
        """Nothing: that it could be loaded is all there is to say."""
        return None

    def __call__(self, request: object) -> object:
        """`start` begins episodes; `wait` gives those that have ended, at the latest in a while."""
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
        """One episode; whatever it raises is told."""
        found: dict[str, object] = {"number": episode["number"], "reward": None, "error": None}
        seconds = float(cast("float", episode["seconds"]))
        try:
            async with asyncio.timeout(seconds):
                found["reward"] = checked_reward(await self._result(episode))
        except TimeoutError as error:
            late = f"it did not end within {seconds:g} s"
            found["error"] = f"TimeoutError: {error}" if str(error) else late
        except ReportedError as error:
            found["error"] = str(error)
        except BaseException as error:  # noqa: BLE001 - SystemExit of user code included
            found["error"] = f"{type(error).__name__}: {error}"
        self._ended.put(found)

    async def _result(self, episode: Mapping[str, object]) -> object:
        given = (
            str(episode["base_url"]),
            str(episode["key"]),
            cast("dict[str, object]", episode["row"]),
        )
        if inspect.iscoroutinefunction(self._agent):
            return await cast("Awaitable[object]", self._agent(*given))
        found = await self._loop.run_in_executor(None, self._agent, *given)
        return await found if inspect.isawaitable(found) else found


def checked_reward(value: object) -> list[object] | None:
    """What an agent returned as [total, parts], or None.

    Raises:
        ReportedError: It is no finite number, no dict of such and not None, or one of its parts
            has a name that would hide another one.
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
