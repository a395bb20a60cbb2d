"""Worker processes that host the environments of one rank, each for many episodes."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TypeVar, cast

from lightrft.config import ConfigError, ScoringOptions
from lightrft.config.files import typed
from lightrft.rewards.process import (
    WorkerFailedError,
    WorkerTask,
    WorkerTimeoutError,
)
from lightrft.rollout.environments.calls import TURN_TOOL
from lightrft.rollout.environments.worker import EnvironmentFullError
from lightrft.rollout.user_code import absolute_reference
from lightrft.rollout.workers import EpisodeError, SharedWorker, Workers

Result = TypeVar("Result")
_TURN_SCHEMA: dict[str, object] = {"parameters": {"properties": {"action": {"type": "string"}}}}
# Longest answer of a tool that crosses the pipe, in characters per token that is kept.
CHARACTERS_PER_TOKEN = 16
# Operations of one worker; a thread waits for each.
_MAX_IN_FLIGHT = 256


class NoRoomError(EpisodeError):
    """An episode cannot begin until another one has ended."""


@dataclass(frozen=True, slots=True)
class EnvironmentSpec:
    """Specification of the author's class and tools.

    Args:
        name: Name of the class, and of its reward; None for stateless tools alone.
        schemas: Schemas of the tools, as chat templates take them.
        has_reward: The class has `get_reward`.
        takes: Arguments of its `reset` in addition to the row: `seed` of the prompt,
            `sample_seed`, and with adapters `max_turns`.
        answers_turns: It answers whole turns, as a user does, instead of calls.
        stateless: Names of the tools that are plain functions.
    """

    name: str | None
    schemas: tuple[dict[str, object], ...]
    has_reward: bool
    takes: tuple[str, ...]
    answers_turns: bool = False
    stateless: tuple[str, ...] = ()

    @property
    def functions(self) -> dict[str, dict[str, object]]:
        """Schema of each tool by its name."""
        if self.answers_turns:
            return {TURN_TOOL: _TURN_SCHEMA}
        functions = [cast("dict[str, object]", schema["function"]) for schema in self.schemas]
        return {str(function["name"]): function for function in functions}


@dataclass(slots=True)
class Host:
    """The worker of an episode, for one piece of work.

    Args:
        worker: Worker that runs.
        generation: Number of workers so far; each start loses the episodes.
        episode: Key of the episode.
        seconds: Limit of an operation.
        stateless: Names of the tools that are plain functions.
    """

    worker: SharedWorker
    generation: int
    episode: str
    seconds: float
    stateless: Collection[str]

    def ask(self, operation: str, *, draws: tuple[int, int] = (0, 0), **details: object) -> object:
        """Perform one operation on the episode.

        Its random numbers depend on `draws`.

        Raises:
            EpisodeError: It failed, hung or ended its worker.
            NoRoomError: The environment takes no further episode for now.
            WorkerLostError: The worker has ended otherwise.
        """
        request = {"operation": operation, "episode": self.episode, "draws": draws, **details}
        try:
            return self.worker.send(request, seconds=self.seconds).result()
        except WorkerTimeoutError as error:
            text = f"{operation} did not return within {self.seconds:g} s; {error}"
            raise EpisodeError(text) from error
        except WorkerFailedError as error:
            error_type = (
                NoRoomError if error.kind == EnvironmentFullError.__name__ else EpisodeError
            )
            raise error_type(f"{operation} failed: {error}{error.where}") from error


class EnvironmentPool:
    """Workers of one rank; a context manager that ends them.

    Args:
        config: Options `environment`, `tools`, `environment_*` and whether there are rewards.
        reads_images: The model reads images, so answers may have some.

    Attributes:
        specs: Specifications of the author's classes with the tools, by name.

    Raises:
        ConfigError: The class or a tool cannot be loaded, or is invalid.
    """

    def __init__(self, config: ScoringOptions, *, reads_images: bool = False) -> None:
        task, self._seconds = _task(config, reads_images=reads_images), config.tool_timeout_seconds
        count = config.environment_workers or os.cpu_count() or 1
        # Schemas need a library that is slow to import and that no episode needs.
        describing = replace(task, arguments=task.arguments[:-1])
        self._workers = [Workers(describing), *(Workers(task) for _ in range(count - 1))]
        try:
            self._workers[0].started()
        except WorkerFailedError as error:
            raise ConfigError(f"environment or tools: {error}") from error
        self._workers[0].task = task
        described = cast("dict[str, dict[str, object]]", self._workers[0].described)
        overlap = [spec.pop("waits") for spec in described.values()]
        self.specs = {name: typed(EnvironmentSpec, spec, name) for name, spec in described.items()}
        self.stateless = {name for spec in self.specs.values() for name in spec.stateless}
        num_threads = _MAX_IN_FLIGHT if any(overlap) else 1
        self._threads = [
            ThreadPoolExecutor(num_threads, thread_name_prefix="environment") for _ in self._workers
        ]

    def begin(self, number: int, work: Callable[[Host], Result]) -> Future[Result | EpisodeError]:
        """Start `work(host)` on the host of the episode with this number.

        Episodes of one host take turns, unless there are coroutines. Work is restarted if another
        operation ended its worker. An EpisodeError is a result; others are raised.
        """
        place = number % len(self._workers)
        workers = self._workers[place]

        def serve() -> Result | EpisodeError:
            try:
                return workers.attempt(
                    lambda: work(
                        Host(*workers.started(), str(number), self._seconds, self.stateless)
                    )
                )
            except EpisodeError as error:
                return error

        return self._threads[place].submit(serve)

    def forget(self, number: int) -> Future[object]:
        """Close an episode if its worker still has it."""
        worker = self._workers[number % len(self._workers)].current
        if worker is None or not worker.is_running:
            closed: Future[object] = Future()
            closed.set_result(None)
            return closed
        return self.begin(number, lambda host: host.ask("close"))

    def close(self) -> None:
        """End the workers; may be called twice."""
        for threads in self._threads:
            threads.shutdown(wait=False, cancel_futures=True)
        for workers in self._workers:
            workers.close()


def _task(config: ScoringOptions, *, reads_images: bool) -> WorkerTask:
    """Return the task of each worker; its last argument is whether it describes its classes."""
    environment, place = None, ""
    if config.environment is not None:
        environment, place = absolute_reference(config.environment, "environment")
    return WorkerTask(
        "lightrft.rollout.environments.worker",
        "HostedEnvironments",
        (
            environment,
            tuple(absolute_reference(text, "tool")[0] for text in config.tools),
            CHARACTERS_PER_TOKEN * config.max_observation_tokens,
            reads_images,
            config.environment_args or {},
            not config.num_rewards,
            False,
        ),
        resident_bytes=int(1e9 * (config.environment_memory_gb or 0)) or None,
        memory_option="--environment_memory_gb",
        passed_variables=config.environment_env,
        shown_file=place or None,
    )
