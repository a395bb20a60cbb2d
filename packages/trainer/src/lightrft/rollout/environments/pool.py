"""Worker processes that host the environments of one rank, each for many episodes."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self, TypeVar, cast

from lightrft.config import ConfigError, TrainConfig
from lightrft.config.registry import ENVIRONMENT_KINDS, split_kind, split_reference
from lightrft.rewards.process import (
    WorkerFailedError,
    WorkerProcess,
    WorkerTask,
    WorkerTimeoutError,
)
from lightrft.rollout.environments.calls import TURN_TOOL

Result = TypeVar("Result")
_TURN_SCHEMA: dict[str, object] = {"parameters": {"properties": {"action": {"type": "string"}}}}
# Longest answer of a tool that crosses the pipe, in characters for each token that is kept.
CHARACTERS_PER_TOKEN = 16


class EpisodeError(RuntimeError):
    """An episode cannot go on: its environment failed, hung or died."""


class NoRoomError(EpisodeError):
    """An episode cannot begin until another one has ended."""


@dataclass(frozen=True, slots=True)
class EnvironmentSpec:
    """Specification of the author's class and tools.

    Args:
        name: Of the class, and of its reward; None for stateless tools alone.
        schemas: Of the tools, as chat templates take them.
        has_reward: The class has `get_reward`.
        takes: What its `reset` asks for beside the row: `seed` of the prompt, `sample_seed`, and
            other makes `max_turns`.
        answers_turns: It answers all that is said in a turn, as a user does, instead of calls.
        stateless: Names of the tools that are plain functions.
    """

    name: str | None
    schemas: tuple[dict[str, object], ...]
    has_reward: bool
    takes: tuple[str, ...]
    answers_turns: bool = False
    stateless: frozenset[str] = frozenset()

    @classmethod
    def of(cls, described: Mapping[str, object]) -> Self:
        """As the worker describes it."""
        schemas = tuple(cast("list[dict[str, object]]", described["schemas"]))
        stateless = frozenset(cast("list[str]", described["stateless"]))
        takes = tuple(cast("list[str]", described["takes"]))
        own = {**described, "schemas": schemas, "stateless": stateless, "takes": takes}
        return cls(**own)  # type: ignore[arg-type]

    @property
    def functions(self) -> dict[str, dict[str, object]]:
        """Schema of each tool by its name."""
        if self.answers_turns:
            return {TURN_TOOL: _TURN_SCHEMA}
        found = [cast("dict[str, object]", schema["function"]) for schema in self.schemas]
        return {str(function["name"]): function for function in found}


class Host:
    """One worker and how often it was started: what it hosted before is gone."""

    def __init__(self, task: WorkerTask) -> None:
        self._next_task = task
        self._worker = WorkerProcess(task)
        self._is_running = False
        self.generation = 0

    def start(self) -> object:
        """Starts the worker if it does not run; what it says of itself if it was started.

        Raises:
            WorkerFailedError: It cannot be set up.
        """
        if self._is_running:
            return None
        described = self._worker.start()
        self._is_running = True
        self.generation += 1
        return described

    def ask(
        self,
        operation: str,
        episode: str,
        *,
        seconds: float,
        draws: tuple[int, int],
        **details: object,
    ) -> object:
        """One operation on one episode of a worker that runs; its draws follow from `draws`.

        Raises:
            EpisodeError: It failed, hung or died; in the latter cases the worker is gone.
            NoRoomError: The environment takes no further episode for now.
        """
        try:
            request = {"operation": operation, "episode": episode, "draws": draws, **details}
            return self._worker.call(request, seconds=seconds)
        except WorkerTimeoutError as error:
            self.close()
            raise EpisodeError(
                f"{operation} did not return within {seconds:g} s; its worker was killed"
            ) from error
        except WorkerFailedError as error:
            if not error.kind:  # the process itself ended
                self.close()
            where = f"\n{error.traceback}" if error.traceback else ""
            found = NoRoomError if error.kind == NoRoomError.__name__ else EpisodeError
            raise found(f"{operation} failed: {error}{where}") from error

    def forget(self, episode: str, *, seconds: float) -> None:
        """Closes an episode if the worker still has it.

        Raises:
            EpisodeError: See `ask`.
        """
        if self._is_running:
            self.ask("close", episode, seconds=seconds, draws=(0, 0))

    def restart_with(self, task: WorkerTask) -> None:
        """Starts with another task from the next time on."""
        self._next_task = task

    def close(self) -> None:
        """Ends the worker."""
        self._is_running = False
        self._worker.close()
        self._worker = WorkerProcess(self._next_task)


class EnvironmentPool:
    """The workers of one rank; a context manager that ends them.

    Args:
        config: Its options `environment`, `tools`, `environment_*` and whether there are rewards.
        reads_images: The model does, so that answers may have some.

    Attributes:
        specs: Of the author's class and tools; of several classes, by their names.

    Raises:
        ConfigError: The class or a tool cannot be loaded, or is not what it must be.
    """

    def __init__(self, config: TrainConfig, *, reads_images: bool = False) -> None:
        task = _task(config, reads_images=reads_images)
        count = config.environment_workers or os.cpu_count() or 1
        # Schemas take a library that is slow to import and that no episode needs.
        describing = replace(task, arguments=(*task.arguments[:3], True, *task.arguments[4:]))
        self._hosts = [Host(describing), *(Host(task) for _ in range(count - 1))]
        try:
            described = cast("dict[str, dict[str, object]]", self._hosts[0].start())
        except WorkerFailedError as error:
            raise ConfigError(f"environment or tools: {error}") from error
        self._hosts[0].restart_with(task)
        self.specs = {name: EnvironmentSpec.of(spec) for name, spec in described.items()}
        self._threads = [
            ThreadPoolExecutor(1, thread_name_prefix="environment") for _ in self._hosts
        ]

    def begin(
        self, numbers: Sequence[int], work: Callable[[int, Host], Result]
    ) -> dict[int, Future[Result | EpisodeError]]:
        """`work(number, host)` for each number, all hosts at once; not waited for.

        Episodes of one host take turns. An EpisodeError is a result; others are raised.
        """

        def serve(number: int, host: Host) -> Result | EpisodeError:
            try:
                return work(number, host)
            except EpisodeError as error:
                return error

        size = len(self._hosts)
        return {n: self._threads[n % size].submit(serve, n, self._hosts[n % size]) for n in numbers}

    def close(self) -> None:
        """Ends the workers; may be called twice."""
        for threads in self._threads:
            threads.shutdown(wait=False, cancel_futures=True)
        for host in self._hosts:
            host.close()


def _task(config: TrainConfig, *, reads_images: bool) -> WorkerTask:
    """What every worker runs; the fourth argument is whether it describes its classes."""
    environment = None if config.environment is None else _absolute(config.environment)
    place, _ = split_reference(split_kind(environment or "")[1]) or ("", "")
    return WorkerTask(
        "lightrft.rollout.environments.worker",
        "HostedEnvironments",
        (
            environment,
            tuple(_absolute(text) for text in config.tools),
            CHARACTERS_PER_TOKEN * config.max_observation_tokens,
            False,
            reads_images,
            config.environment_args or {},
            not (config.reward_fn or config.remote_rm_url or config.reward_pretrain),
        ),
        resident_bytes=int(1e9 * (config.environment_memory_gb or 0)) or None,
        passed_variables=config.environment_env,
        shown_file=place or None,
    )


def _absolute(text: str) -> str:
    """An import string that means the same in the worker; an address stays as it is."""
    kind, rest = split_kind(text)
    place, name = split_reference(rest) or ("", rest)
    if not place and kind is None:
        raise ConfigError(
            f"environment {text}: expected FILE.py:NAME or package.module:NAME, or KIND:... with "
            f"one of {', '.join(ENVIRONMENT_KINDS)}"
        )
    if not place.endswith(".py"):
        return text
    return f"{'' if kind is None else f'{kind}:'}{Path(place).resolve()}:{name}"
