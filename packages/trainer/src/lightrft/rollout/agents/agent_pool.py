"""Worker processes that run the agents of one rank, with many episodes per process."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from typing import cast

from lightrft.config import ConfigError, ScoringOptions
from lightrft.config.registry import AGENT_KINDS, split_kind
from lightrft.rewards.process import WorkerFailedError, WorkerTask, WorkerTimeoutError
from lightrft.rewards.types import RewardResult
from lightrft.rollout.user_code import absolute_reference
from lightrft.rollout.workers import WorkerLostError, Workers

logger = logging.getLogger(__name__)
_MAX_CRASHES = 2
# Episodes are long: the first lines that a worker prints in this time are shown before they end.
_SHOWN_SECONDS = 0.5
_WORKER = "lightrft.rollout.agents.agent_worker"


# Base URL and API key of the endpoint, and columns of the data row.
AgentTask = tuple[str, str, dict[str, object]]


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


# Receives the end of an episode, or the number of one that begins again in another process.
Tell = Callable[[AgentEnd | int], None]


class AgentPool:
    """Workers of one rank.

    An agent that its worker outlives ends alone. A worker that dies begins once more with the
    agents that it had.

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
        self._workers = [
            Workers(task, name=self.name, shown_seconds=_SHOWN_SECONDS) for _ in range(count)
        ]
        self._threads = ThreadPoolExecutor(count, thread_name_prefix="agents")
        try:
            self._workers[0].started()
        except WorkerFailedError as error:
            self.close()
            text = str(error)
            named = text if self.name in text else f"agent {agent}: {text}"
            raise ConfigError(named) from error

    def run(self, tasks: Mapping[int, AgentTask], tell: Tell) -> None:
        """Start all agents at once.

        Args:
            tasks: Arguments of the agents by index of their episodes.
            tell: Callback from other threads, for restarts and once for the end of each task.
        """
        count = len(self._workers)
        for number, workers in enumerate(self._workers):
            share = dict(list(tasks.items())[number::count])
            if share:
                self._threads.submit(self._run_share, workers, share, tell)

    def _run_share(self, workers: Workers, share: dict[int, AgentTask], tell: Tell) -> None:
        """Run the agents of one worker until the last one ends; report errors, raise none."""
        failure = ""
        try:
            with contextlib.suppress(WorkerFailedError):  # a start that fails is repeated below
                workers.started()
            for num_crashes in range(_MAX_CRASHES):
                for number in share if num_crashes else ():
                    tell(number)
                failure, may_repeat = self._attempt(workers, share, tell)
                if not (share and may_repeat):
                    break
        except Exception as error:  # noqa: BLE001 - reported for every episode
            failure = f"{type(error).__name__}: {error}"
        for number in share:
            tell(AgentEnd(number, failure=failure))

    def _attempt(
        self, workers: Workers, share: dict[int, AgentTask], tell: Tell
    ) -> tuple[str, bool]:
        """Run agents in one worker; `share` keeps those that had not ended when it did.

        Returns:
            Reason why the worker ended, and whether these agents may begin once more.
        """
        answers, reason = dict[Future[object], int](), ""
        late = f"it did not end within {self._seconds:g} s"
        try:
            worker, _ = workers.started()
            begun = time.monotonic()
            for number, task in share.items():
                request = {"operation": "run", "episode": str(number), "arguments": task}
                answers[worker.send(request, seconds=self._seconds)] = number
        except WorkerFailedError as error:
            return str(error), not error.kind
        except WorkerLostError as error:
            return str(error), True
        for answer in as_completed(answers):
            problem, number = answer.exception(), answers[answer]
            if problem is None:
                tell(AgentEnd(number, _result(answer.result())))
            elif isinstance(problem, WorkerTimeoutError):
                tell(AgentEnd(number, failure=late))
            elif isinstance(problem, WorkerFailedError) and problem.kind:
                tell(AgentEnd(number, failure=f"{problem}{problem.where}"))
            else:
                reason = str(problem)
                continue
            del share[number]
        is_late = time.monotonic() - begun > self._seconds
        return (late, False) if is_late else (reason, True)

    def close(self) -> None:
        """Close the workers; calling it twice is allowed."""
        for workers in self._workers:
            workers.close()
        self._threads.shutdown(wait=False, cancel_futures=True)


def _function(config: ScoringOptions) -> tuple[str, WorkerTask]:
    """Return name and task of workers that host a function."""
    agent, place = absolute_reference(str(config.agent), "agent", AGENT_KINDS)
    is_kind = split_kind(agent, AGENT_KINDS)[0] is not None
    return agent if is_kind else agent.rpartition(":")[2], WorkerTask(
        _WORKER,
        "load_agents",
        (agent, config.sandbox),
        passed_variables=config.environment_env,
        shown_file=None if is_kind else place,
    )


def _program(config: ScoringOptions) -> tuple[str, WorkerTask]:
    """Return name and task of workers that run a program for each episode."""
    if config.sandbox == "unsafe":
        logger.warning(
            "agent_command: --sandbox unsafe: the program runs on this machine with limits of time "
            "and memory, but can use the network, read files and leave processes behind"
        )
    pays = not config.num_rewards
    arguments = (config.agent_command, config.sandbox, config.agent_timeout_seconds, pays)
    task = WorkerTask("lightrft.tools.agents.program_agent", "host_program", arguments)
    return str(config.agent_command), task


def _result(reward: object) -> RewardResult | None:
    if reward is None:
        return None
    total, parts = cast("tuple[float, dict[str, float]]", reward)
    return RewardResult(total, {"agent": total, **parts})
