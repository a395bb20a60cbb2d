"""Agents in a worker process: many episodes on one event loop.

Runs in the worker; imports only the standard library and the user's file.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import threading
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import BinaryIO, cast

from lightrft.config.registry import AGENT_KINDS, split_kind
from lightrft.rewards.worker import Failure, ReportedError, framed, read_frame, write_frame
from lightrft.rollout.user_code import load_user_code, total_and_parts
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
    function = load_user_code(agent, "agent")
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
    """The handler of a worker: runs agents on one event loop, and reports the end of each.

    Args:
        agent: Function that is called with `base_url`, `api_key` and `row` of each episode.
    """

    def __init__(self, agent: Agent) -> None:
        raise_open_files(MAX_OPEN_FILES)
        self._agent, self._pid = agent, os.getpid()
        self._loop = asyncio.new_event_loop()
        self._loop.set_default_executor(ThreadPoolExecutor(_MAX_THREADS))
        self._tasks: set[asyncio.Task[None]] = set()

    def describe(self) -> object:
        """Return nothing; a successful load is the whole answer."""
        return None

    def serve(
        self, requests: BinaryIO, answers: BinaryIO, *, failure: Failure, inherited: tuple[int, ...]
    ) -> None:
        """Run all agents that the trainer requests, at once."""
        del inherited
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        while (sent := read_frame(requests)) is not None:
            operation = self._run(cast("dict[str, object]", sent), answers, failure)
            self._loop.call_soon_threadsafe(self._begin, operation)

    def _begin(self, operation: Coroutine[object, object, None]) -> None:
        task = self._loop.create_task(operation)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _run(self, sent: dict[str, object], answers: BinaryIO, failure: Failure) -> None:
        """Run one episode and report its reward or error."""
        request = cast("dict[str, object]", sent["request"])
        seconds = float(cast("float", request["seconds"]))
        answer: dict[str, object]
        try:
            async with asyncio.timeout(seconds):
                answer = {"ok": checked_reward(await self._result(request["arguments"]))}
        except TimeoutError as error:
            late = ReportedError(f"it did not end within {seconds:g} s")
            answer = failure(error if str(error) else late)
        except BaseException as error:  # noqa: BLE001 - SystemExit of user code included
            answer = failure(error)
        if os.getpid() != self._pid:
            os._exit(0)  # an agent forked this process: only the worker itself may answer
        write_frame(answers, framed({"number": sent["number"], **answer}))

    async def _result(self, arguments: object) -> object:
        base_url, key, row = cast("tuple[str, str, dict[str, object]]", arguments)
        if inspect.iscoroutinefunction(self._agent):
            return await cast("Awaitable[object]", self._agent(base_url, key, row))
        result = await self._loop.run_in_executor(None, self._agent, base_url, key, row)
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
    return total_and_parts(value, whole="the agent's reward", part="the agent's {!r}")


def _check_signature(name: str, found: object) -> None:
    expected = "expected async def run(base_url, api_key, row)"
    if not callable(found) or inspect.isclass(found):
        raise ReportedError(f"agent {name} is no function: {expected}")
    try:
        inspect.signature(found).bind("", "", {})
    except TypeError as error:
        raise ReportedError(f"agent {name}: {expected}; {error}") from error
