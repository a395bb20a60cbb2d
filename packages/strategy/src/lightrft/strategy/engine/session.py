"""The rollout engine's life beside a trainer: start, sleep, generation over ranks, weights."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from torch import nn

from lightrft.engines.base import RolloutEngine
from lightrft.engines.factory import build_engine
from lightrft.engines.types import Completion, EngineStatus, GenerationRequest, SamplingParams
from lightrft.strategy.config import StrategyConfig
from lightrft.strategy.distributed.collectives import gather_objects, group_rank, group_size
from lightrft.strategy.distributed.context import DistributedContext
from lightrft.strategy.distributed.deadlines import phase
from lightrft.strategy.engine.generation import (
    SHARED_BY_GROUP,
    PromptBatch,
    as_sampling_params,
    check_engine_type,
    engine_config,
)
from lightrft.strategy.weight_sync.parameter_source import ParameterSource
from lightrft.strategy.weight_sync.sync import WeightSync, WeightSyncReport, sync_actor

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class RankStatus:
    """What a rank tells the others before or after generating."""

    num_prompts: int = 0
    is_multimodal: bool = False
    error: str | None = None


class EngineSession:
    """One engine and what the ranks do with it; created without an engine.

    Args:
        ranks: Started.
        config: Of the strategy.

    Attributes:
        weight_sync: Sends weights to the engine; made at the first update.
        last_weight_sync: What the last update did.
    """

    def __init__(self, ranks: DistributedContext, config: StrategyConfig) -> None:
        self._ranks = ranks
        self._config = config
        self._engine: RolloutEngine | None = None
        self._next_request_id = 0
        self.weight_sync: WeightSync | None = None
        self.last_weight_sync: WeightSyncReport | None = None

    @property
    def engine(self) -> RolloutEngine | None:
        """The engine, if there is one."""
        return self._engine

    @engine.setter
    def engine(self, engine: RolloutEngine | None) -> None:
        self._engine = engine
        self.weight_sync = None

    @property
    def running(self) -> RolloutEngine:
        """The engine.

        Raises:
            NotImplementedError: There is none.
        """
        if self._engine is None:
            raise NotImplementedError("Inference engine is not initialized.")
        return self._engine

    @property
    def status(self) -> EngineStatus:
        """SLEEPED without an engine."""
        return EngineStatus.SLEEPED if self._engine is None else self._engine.status

    @property
    def shares_engine(self) -> bool:
        """Whether this rank's engine spans several ranks, which then generate together."""
        return (
            self._engine is not None
            and group_size(self._ranks.engine_group) > 1
            and SHARED_BY_GROUP.get(self._engine.name, True)
        )

    def start(
        self, config: StrategyConfig, engine_type: str, module: nn.Module | None
    ) -> RolloutEngine:
        """See `StrategyBase.setup_inference_engine`; a rank that cannot ends all of them.

        Raises:
            RuntimeError: Another rank could not start its engine. The failing rank raises its own
                error.
        """
        kind = check_engine_type(engine_type)
        if kind != config.engine_type:
            self._ranks.print(
                f"engine type is {kind} (the configuration said {config.engine_type})"
            )
        self._config.engine_type = kind
        wanted = engine_config(config, kind, has_gpu=self._ranks.has_gpu, module=module)
        if config.engine_tp_size > wanted.tensor_parallel_size:
            self._ranks.print(
                f"the {kind} engine is not tensor-parallel: engine_tp_size "
                f"{config.engine_tp_size} only forms groups, each rank generates its own prompts"
            )
        self.close()
        with phase("start the inference engine", self._ranks.timeout):
            engine, problem = _attempt(lambda: build_engine(wanted, module=module))
            self.gather_status(RankStatus(), problem, what="the engine did not start")
        if engine is None:
            raise RuntimeError("the engine did not start")
        self.engine = engine
        return engine

    def close(self) -> None:
        """Closes the engine, which is forgotten. Idempotent."""
        if self._engine is not None:
            self._engine.close()
            self.engine = None

    def mark_stale(self) -> None:
        """To be called when the trainer's weights have changed."""
        if self._engine is not None:
            self._engine.mark_stale("the trainer's weights changed since its last update")

    def sleep(self, level: int) -> None:
        """Puts an engine that is awake to sleep, if sleeping is enabled.

        Args:
            level: 1 keeps the weights on the host, 2 drops them.
        """
        if not self._config.enable_engine_sleep or self.status is EngineStatus.SLEEPED:
            return
        with phase("put the inference engine to sleep", self._ranks.timeout):
            self.running.sleep(level)
            self._ranks.free_memory()
        self._ranks.print("Sleeped inference engine")

    def wake_up(self, tags: tuple[str, ...] | None = None) -> None:
        """Wakes an engine that sleeps, or a part of it."""
        if self._engine is None or self._engine.status is EngineStatus.WAKEUP:
            return
        begin = time.monotonic()
        with phase("wake up the inference engine", self._ranks.timeout):
            # First, so that the trainer's cached memory is there for the engine.
            self._ranks.free_memory()
            self._engine.wake_up(tags)
        if self.status is EngineStatus.WAKEUP:
            self._ranks.report_memory("after wakeup inference engine")
            took = time.monotonic() - begin
            self._ranks.print(f"Finished {self._engine.name} wakeup, TIMECOST {took:.3f}")

    def update_weights(self, model: nn.Module, source: ParameterSource) -> WeightSyncReport:
        """See `StrategyBase.update_engine_weights`.

        Args:
            model: The actor as the strategy prepared it.
            source: Its parameters.
        """
        if self.weight_sync is None:
            self.weight_sync = WeightSync(self.running, world=self._ranks.world_group)
        # The cache needs most memory, so it comes last: buckets and gathered weights are gone then.
        self.wake_up(("weights",))
        with phase("update the engine's weights", self._ranks.timeout):
            report = sync_actor(
                self.weight_sync,
                model,
                source,
                self._config,
                device=self._ranks.device,
                wake_cache=self.wake_up,
            )
        self._ranks.print(report.summary())
        self.last_weight_sync = report
        self._ranks.free_memory()
        return report

    def generate_local(
        self, requests: Sequence[GenerationRequest], sampling_params: SamplingParams
    ) -> list[Completion]:
        """Generates on this rank's engine, without any communication of our own."""
        return self.running.generate(requests, sampling_params) if requests else []

    def gather_and_generate(self, batch: PromptBatch, sampling_params: object) -> list[Completion]:
        """This rank's completions, prompt-major; see `StrategyBase.gather_and_generate`.

        Raises:
            RuntimeError: Another rank failed; the message names it. The failing rank raises its
                own error, so every rank raises.
        """
        with phase("generate", self._ranks.timeout):
            params, problem = _attempt(lambda: as_sampling_params(sampling_params))
            statuses = self.gather_status(RankStatus(len(batch), batch.is_multimodal), problem)
            before = sum(status.num_prompts for status in statuses[: self._ranks.rank])
            first_id = self._next_request_id + before
            self._next_request_id += sum(status.num_prompts for status in statuses)
            is_multimodal = any(status.is_multimodal for status in statuses)
            completions, problem = _attempt(
                lambda: self._generate(
                    batch, params or SamplingParams(), first_id, is_multimodal=is_multimodal
                )
            )
            self.gather_status(RankStatus(), problem)
        return completions or []

    def gather_status(
        self,
        own: RankStatus,
        problem: Exception | None,
        *,
        what: str = "generation failed",
    ) -> list[RankStatus]:
        """What all ranks say; raises on every rank if one has a problem."""
        if problem is not None:
            own = dataclasses.replace(own, error=f"{type(problem).__name__}: {problem}")
        statuses = self._ranks.gather_objects(own)
        failed = [(rank, s.error) for rank, s in enumerate(statuses) if s.error is not None]
        if not failed:
            return statuses
        text = "; ".join(f"rank {rank}: {error}" for rank, error in failed)
        if problem is not None:
            problem.add_note(f"{what} on {text}")
            raise problem
        raise RuntimeError(f"{what} on {text}")

    def _generate(
        self,
        batch: PromptBatch,
        params: SamplingParams,
        first_id: int,
        *,
        is_multimodal: bool,
    ) -> list[Completion]:
        if not self.shares_engine:
            requests = batch.requests(first_id, is_multimodal=is_multimodal)
            return self._checked(self.generate_local(requests, params), len(requests) * params.n)
        gathered = self._gather_results(
            lambda: batch.requests(first_id, is_multimodal=is_multimodal)
        )
        everyone = [request for part in gathered for request in part]
        if self.running.runs_on_every_rank:
            completions = self.generate_local(everyone, params)
        else:
            is_leader = group_rank(self._ranks.engine_group) == 0
            answers = self._gather_results(
                lambda: self.generate_local(everyone, params) if is_leader else []
            )
            completions = answers[0]
        self._checked(completions, len(everyone) * params.n)
        own = group_rank(self._ranks.engine_group)
        start = sum(len(part) for part in gathered[:own]) * params.n
        return completions[start : start + len(gathered[own]) * params.n]

    def _gather_results(self, produce: Callable[[], list[T]]) -> list[list[T]]:
        """Every group member's result; a failure of one is raised by all of them."""
        result, problem = _attempt(produce)
        error = None if problem is None else f"{type(problem).__name__}: {problem}"
        answers = gather_objects((result or [], error), self._ranks.engine_group)
        if problem is not None:
            raise problem
        for member, (_, text) in enumerate(answers):
            if text is not None:
                raise RuntimeError(f"member {member} of the engine group failed: {text}")
        return [part for part, _ in answers]

    @staticmethod
    def _checked(completions: list[Completion], expected: int) -> list[Completion]:
        if len(completions) != expected:
            raise RuntimeError(
                f"the engine returned {len(completions)} completions, expected {expected} "
                "(prompts times n)"
            )
        return completions


def _attempt(action: Callable[[], T]) -> tuple[T | None, Exception | None]:
    """The result, or the error, which is to be shared with the other ranks and then raised."""
    try:
        return action(), None
    except Exception as error:  # noqa: BLE001
        return None, error
