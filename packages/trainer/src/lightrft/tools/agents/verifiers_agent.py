"""Agents of verifiers: an environment plays the tasks of its rows in its harness.

Wire and types: verifiers 0.4, `verifiers.v1`.
"""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

from lightrft.config.printable import one_line
from lightrft.datasets.types import DataError
from lightrft.rewards.worker import ReportedError
from lightrft.tools.agents.verifiers_tasks import COLUMN, PREFIX, EnvironmentSource, read_source

if TYPE_CHECKING:
    from verifiers.v1 import EnvConfig, Episode, Task, Trace

_MODEL = "policy"
# Names that parts of a reward may not have.
_TAKEN = ("reward", "agent")


class VerifiersAgent:
    """Agent that plays one episode of a verifiers environment for each row.

    Args:
        what: Environment as `NAME?OPTION=VALUE`; see `verifiers_tasks`.
        sandbox: Kind; `unsafe` allows a harness that runs the model's programs on this machine.

    Raises:
        ReportedError: There is no such environment, or it cannot be trained as configured.
    """

    def __init__(self, what: str, sandbox: str) -> None:
        try:
            source = read_source(f"{PREFIX}{what}")
            if source.select:
                raise DataError(f"{source.text}: select is for --prompt_data, which has the tasks")
            config = _local(source)
            self._name, self._role = source.name, _policy_role(source, config)
        except DataError as error:
            raise ReportedError(f"agent {error}") from error
        from verifiers.v1.utils.loaders import load_environment, task_type

        if sandbox != "unsafe":
            _require_safe(source, config)
        self._tasks = task_type(source.name)
        self._config = config
        self._env = load_environment(config)
        self._numbers = itertools.count()
        self._is_ready: asyncio.Future[None] | None = None

    async def __call__(
        self, base_url: str, key: str, row: Mapping[str, object]
    ) -> Mapping[str, float]:
        """Return the rewards of one episode, with its metrics.

        Raises:
            ReportedError: The row has no task of this environment, or the episode failed.
        """
        from verifiers.v1 import EvalClientConfig, ModelContext

        task = self._task(row)
        if self._is_ready is None:
            self._is_ready = asyncio.get_running_loop().create_future()
            self._serving = asyncio.create_task(self._serve(self._is_ready))
        await asyncio.shield(self._is_ready)
        # verifiers reads the key from a variable with such a name, and hides it from programs.
        name = f"LIGHTRFT_API_KEY_{next(self._numbers)}"
        os.environ[name] = key
        try:
            client = EvalClientConfig(base_url=base_url, api_key_var=name)
            context = ModelContext(client=client, model=_MODEL)
            return self._rewards(await self._env.run_episode(task, context))
        finally:
            del os.environ[name]

    async def _serve(self, is_ready: asyncio.Future[None]) -> None:
        """Hold what episodes share, for as long as this process lives."""
        try:
            async with self._env.serving():
                is_ready.set_result(None)
                await asyncio.Event().wait()
        except Exception as error:
            if is_ready.done():
                raise
            is_ready.set_exception(ReportedError(f"{PREFIX}{self._name} did not start: {error}"))

    def _task(self, row: Mapping[str, object]) -> Task:
        data = row.get(COLUMN)
        if not isinstance(data, Mapping) or row.get("task", self._name) != self._name:
            raise ReportedError(
                f"the row has no task of this environment: expected its data in the column "
                f"{COLUMN}, as --prompt_data {PREFIX}{self._name} gives them"
            )
        validated = self._tasks.data_type().model_validate(data)
        return self._tasks(validated, self._config.taskset.task)

    def _rewards(self, episode: Episode) -> Mapping[str, float]:
        traces = [trace for trace in episode.traces if trace.agent.name == self._role]
        if not episode.ok:
            error = episode.last_error or next(
                (trace.last_error for trace in episode.traces if not trace.ok), None
            )
            reason = "it said nothing" if error is None else f"{error.type}: {error.message}"
            raise ReportedError(f"verifiers: {one_line(reason, limit=400)}")
        if len(traces) != 1:
            raise ReportedError(
                f"the environment ran its {self._role} {len(traces)} times in one episode, whose "
                "rewards would be one: expected once"
            )
        return {"reward": float(traces[0].reward), **_parts(traces[0])}


def host(what: str, sandbox: str) -> VerifiersAgent:
    """Return the agent of `verifiers:WHAT`; see `VerifiersAgent`."""
    return VerifiersAgent(what, sandbox)


def _local(source: EnvironmentSource) -> EnvConfig:
    """Return the options; harnesses without a runtime run on this machine."""
    config = source.config()
    from verifiers.v1.configs.agent import agent_config_fields
    from verifiers.v1.runtimes import SubprocessConfig

    for role in agent_config_fields(config).values():
        if "runtime" not in role.model_fields_set:
            role.runtime = SubprocessConfig()
    return config


def _policy_role(source: EnvironmentSource, config: EnvConfig) -> str:
    """Return the one role that the model plays."""
    from verifiers.v1.configs.agent import agent_config_fields

    roles = agent_config_fields(config)
    names = [name for name, role in roles.items() if role.client is None]
    if len(names) != 1:
        raise DataError(
            f"{source.text}: it has the roles {', '.join(roles)}: the model can play one, so that "
            f"the others need ROLE.client.type=eval, ROLE.client.base_url and ROLE.model"
        )
    return str(names[0])


def _require_safe(source: EnvironmentSource, config: EnvConfig) -> None:
    from verifiers.v1.configs.agent import agent_config_fields
    from verifiers.v1.runtimes import SubprocessConfig
    from verifiers.v1.utils.loaders import harness_class

    roles, harnesses = agent_config_fields(config), config.agent_harnesses()
    for name, harness in harnesses.items():
        is_here = isinstance(roles[name].runtime, SubprocessConfig)
        if is_here and harness_class(harness.id).EXECUTES_CODE:
            raise ReportedError(
                f"agent {source.text}: the harness {harness.id} runs the model's programs on this "
                f"machine without a sandbox: give {name}.harness.id=null, {name}.runtime.type="
                "docker, or --sandbox unsafe"
            )


def _parts(trace: Trace) -> Mapping[str, float]:
    values = {name: metric.value for name, metric in trace.rewards.items() if metric is not None}
    values |= {name: metric for name, metric in trace.metrics.items() if metric is not None}
    return {f"{n}_" if n in _TAKEN else n: float(value) for n, value in values.items()}
