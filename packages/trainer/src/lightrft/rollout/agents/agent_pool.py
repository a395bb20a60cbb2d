"""Worker processes that run the agents of one rank, with many episodes per process."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Self, cast

from lightrft.config import ConfigError, RewardOptions, ScoringOptions
from lightrft.config.registry import AGENT_KINDS, split_kind, split_reference
from lightrft.rewards.process import (
    WorkerFailedError,
    WorkerProcess,
    WorkerTask,
    WorkerTimeoutError,
)
from lightrft.rewards.types import RewardResult

logger = logging.getLogger(__name__)
# Extra time after the deadline for a worker whose agents do not stop.
GRACE_SECONDS = 5.0
_WAIT_SECONDS = 0.5
_MAX_CRASHES = 2
_WORKER = "lightrft.rollout.agents.agent_worker"


@dataclass(frozen=True, slots=True)
class AgentTask:
    """An episode in the form that an agent receives.

    Args:
        number: Index of the episode.
        base_url, key: URL and API key of the endpoint.
        row: Columns of the data row.
    """

    number: int
    base_url: str
    key: str
    row: dict[str, object]


@dataclass(frozen=True, slots=True)
class AgentEnd:
    """The end of an agent's episode.

    Args:
        number: Index of the episode.
        reward: Reward that the agent returned, or None.
        failure: Reason for a failed episode; "" if it succeeded.
    """

    number: int
    reward: RewardResult | None = None
    failure: str = ""


@dataclass(frozen=True, slots=True)
class AgentRestart:
    """The restart of an agent whose worker process had to be replaced."""

    number: int


Tell = Callable[[AgentEnd | AgentRestart], None]


class AgentPool:
    """Workers of one rank; a context manager that ends them.

    Args:
        config: Options `agent` or `agent_command`, `environment_workers` and
            `agent_timeout_seconds`.

    Raises:
        ConfigError: The agent cannot be loaded.
    """

    def __init__(self, config: ScoringOptions) -> None:
        self._seconds = config.agent_timeout_seconds
        self.name, task = _program(config) if config.agent_command else _function(config)
        agent = str(config.agent_command or config.agent)
        count = config.environment_workers or os.cpu_count() or 1
        self._workers = [WorkerProcess(task, name=self.name) for _ in range(count)]
        self._threads = ThreadPoolExecutor(count, thread_name_prefix="agents")
        try:
            self._workers[0].start()
        except WorkerFailedError as error:
            self.close()
            text = str(error)
            named = text if self.name in text else f"agent {agent}: {text}"
            raise ConfigError(named) from error

    def run(self, tasks: Sequence[AgentTask], tell: Tell) -> list[Future[None]]:
        """Start all agents at once.

        Args:
            tasks: Tasks of the agents.
            tell: Callback from other threads, for restarts and once for the end of each task.
        """
        count = len(self._workers)
        shares = [tasks[number::count] for number in range(count)]
        return [
            self._threads.submit(_WorkerEpisodes(worker, self._seconds, tell).run, share)
            for worker, share in zip(self._workers, shares, strict=True)
            if share
        ]

    def close(self) -> None:
        """Close the workers; calling it twice is allowed."""
        for worker in self._workers:
            worker.close()
        self._threads.shutdown(wait=False, cancel_futures=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


@dataclass(slots=True)
class _WorkerEpisodes:
    """Episodes of one worker."""

    worker: WorkerProcess
    seconds: float
    tell: Tell

    def run(self, tasks: Sequence[AgentTask]) -> None:
        """Run episodes until the last one ends; report errors instead of raising them."""
        waiting = {task.number: task for task in tasks}
        try:
            self._follow(waiting)
        except Exception as error:  # noqa: BLE001 - reported for every episode
            self._fail(waiting, f"{type(error).__name__}: {error}")

    def _follow(self, waiting: dict[int, AgentTask]) -> None:
        deadline, num_crashes = self._start(waiting, is_first=True), 0
        while waiting:
            try:
                if deadline is None:
                    deadline = self._start(waiting, is_first=False)
                if deadline is None:
                    continue
                self._take(waiting, deadline)
                if waiting and time.monotonic() > deadline + GRACE_SECONDS:
                    raise WorkerTimeoutError
            except WorkerTimeoutError:
                self.worker.close()
                self._fail(waiting, f"it did not end within {self.seconds:g} s")
            except WorkerFailedError as error:
                self.worker.close()
                num_crashes, deadline = num_crashes + 1, None
                if num_crashes == _MAX_CRASHES or error.kind:
                    self._fail(waiting, str(error))

    def _start(self, waiting: dict[int, AgentTask], *, is_first: bool) -> float | None:
        """Start the remaining episodes; return their deadline, or None if the worker fails."""
        episodes = [
            {
                "number": task.number,
                "base_url": task.base_url,
                "key": task.key,
                "row": task.row,
                "seconds": self.seconds,
            }
            for task in waiting.values()
        ]
        for number in () if is_first else waiting:
            self.tell(AgentRestart(number))
        try:
            if not self.worker.is_running:
                self.worker.start()
            self.worker.call({"operation": "start", "episodes": episodes}, seconds=self.seconds)
        except (WorkerFailedError, WorkerTimeoutError):
            if not is_first:
                raise
            return None
        return time.monotonic() + self.seconds

    def _take(self, waiting: dict[int, AgentTask], deadline: float) -> None:
        """Report the agents that have ended."""
        left = max(0.0, deadline - time.monotonic()) + GRACE_SECONDS
        request = {"operation": "wait", "seconds": _WAIT_SECONDS}
        ended = cast("list[dict[str, object]]", self.worker.call(request, seconds=left))
        for end in ended:
            task = waiting.pop(int(cast("int", end["number"])), None)
            if task is not None:
                self.tell(_end_of(task.number, end))

    def _fail(self, waiting: dict[int, AgentTask], reason: str) -> None:
        for number in waiting:
            self.tell(AgentEnd(number, failure=reason))
        waiting.clear()


def _function(config: ScoringOptions) -> tuple[str, WorkerTask]:
    """Return name and task of workers that host a function."""
    agent, passed = str(config.agent), config.environment_env
    if split_kind(agent, AGENT_KINDS)[0] is not None:
        arguments = (agent, config.sandbox)
        return agent, WorkerTask(_WORKER, "load_kind", arguments, passed_variables=passed)
    place, name = split_reference(agent) or ("", "")
    if not place:
        kinds = ", ".join(f"{kind}:NAME" for kind in AGENT_KINDS)
        raise ConfigError(f"agent {agent}: expected FILE.py:NAME, package.module:NAME or {kinds}")
    shown_file = place if place.endswith(".py") else None
    if shown_file:
        agent = f"{Path(place).resolve()}:{name}"
    task = WorkerTask(
        _WORKER, "load_agents", (agent,), shown_file=shown_file, passed_variables=passed
    )
    return name, task


def _program(config: ScoringOptions) -> tuple[str, WorkerTask]:
    """Return name and task of workers that run a program for each episode."""
    if config.sandbox == "unsafe":
        logger.warning(
            "agent_command: --sandbox unsafe: the program runs on this machine with limits of time "
            "and memory, but can use the network, read files and leave processes behind"
        )
    pays = not has_other_rewards(config)
    arguments = (config.agent_command, config.sandbox, config.agent_timeout_seconds, pays)
    task = WorkerTask("lightrft.tools.agents.harbor_agent", "host_program", arguments)
    return str(config.agent_command), task


def has_other_rewards(config: RewardOptions) -> bool:
    """Return whether anything besides the agent gives rewards."""
    return bool(config.reward_fn or config.remote_rm_url or config.reward_pretrain)


def _end_of(number: int, found: dict[str, object]) -> AgentEnd:
    if found["error"] is not None:
        return AgentEnd(number, failure=str(found["error"]))
    if found["reward"] is None:
        return AgentEnd(number)
    total, parts = cast("tuple[float, dict[str, float]]", found["reward"])
    return AgentEnd(number, RewardResult(total, {"agent": total, **parts}))
