"""Agents in a worker process: many episodes on one event loop."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import cast

from lightrft.config.registry import AGENT_KINDS, split_kind
from lightrft.rewards.worker import ReportedError
from lightrft.rollout.operation_loop import HostedEpisodes, Request, settled
from lightrft.rollout.user_code import load_user_code, total_and_parts
from lightrft.strategy.distributed.network import raise_open_files

# Name of the agent's total reward in reports.
_TOTAL = "agent"
_NAMES = ("base_url", "api_key", "row")
# Each episode has connections; the episode of a program also has pipes.
MAX_OPEN_FILES = 1 << 16
Agent = Callable[..., object]


def load_agents(agent: str, sandbox: str) -> HostedAgents:
    """Return the handler for agents that a function implements.

    Args:
        agent: Import string of a user's `run(base_url, api_key, row)`, or `KIND:WHAT`.
        sandbox: Kind of the sandbox for programs of the model, for agents of a kind.

    Raises:
        ReportedError: The agent does not exist or cannot run here.
    """
    kind, what = split_kind(agent, AGENT_KINDS)
    if kind is not None:
        make = cast("Callable[[str, str], Agent]", AGENT_KINDS.load(kind))
        return HostedAgents(make(what, sandbox))
    function = cast("Agent", load_user_code(agent, "agent"))
    try:
        if inspect.isclass(function):
            raise TypeError("it is a class")
        inspect.signature(function).bind(*_NAMES)
    except TypeError as error:
        expected = "expected async def run(base_url, api_key, row)"
        raise ReportedError(f"agent {agent}: {expected}; {error}") from error
    return HostedAgents(function)


class HostedAgents(HostedEpisodes):
    """The handler of a worker: runs agents at once, each as one operation.

    Args:
        agent: Function that is called with `base_url`, `api_key` and `row` of each episode.
    """

    # An agent has its seconds of wall time, as the trainer counts them.
    counts_others = True

    def __init__(self, agent: Agent) -> None:
        raise_open_files(MAX_OPEN_FILES)
        self._agent = agent

    async def perform(self, request: Request) -> object:
        """Run the agent of one episode; return its reward."""
        arguments = dict(zip(_NAMES, cast("Sequence[object]", request["arguments"]), strict=True))
        names = tuple(inspect.signature(self._agent).parameters)
        if names[:3] != _NAMES and arguments.keys() <= {*names}:
            call = partial(self._agent, **arguments)
        else:  # a wrapper shows the names of what it wraps, and may take places alone
            call = partial(self._agent, *arguments.values())
        is_waiting = inspect.iscoroutinefunction(self._agent)
        value = await settled(call() if is_waiting else asyncio.to_thread(call))
        return checked_reward(await settled(value))


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
