"""Rollouts on the ranks that train, where other ranks sample."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from lightrft.config import LearningOptions
from lightrft.datasets.batch_stream import Draws
from lightrft.datasets.types import Prompt
from lightrft.engines.types import SamplingParams
from lightrft.records.rollout import ScoredRollout
from lightrft.records.table import RowTable
from lightrft.rollout.in_flight import bytes_of_ranks
from lightrft.rollout.source import InFlight, Samples
from lightrft.stages.policy.split.messages import DrawnReport, SampledStep, Start
from lightrft.stages.stage import Step, last_sampled_step
from lightrft.strategy.distributed.context import DistributedContext
from lightrft.strategy.engine.session import EngineSession
from lightrft.strategy.split.bridge import Bridge

MEGABYTE = 2**20


class RemoteRollouts:
    """Commands to the ranks that sample; the rows stay there until they are trained.

    Args:
        bridge: Bridge to the ranks that sample.
        config: Options of the run.
        session, context: Engine and groups of the ranks that train.
    """

    def __init__(
        self,
        bridge: Bridge,
        config: LearningOptions,
        session: EngineSession,
        context: DistributedContext,
    ) -> None:
        self.bridge, self._config = bridge, config
        self._session, self._context = session, context
        self._num_steps: int | None = None
        self._report: DrawnReport | None = None

    def draw(self, step: Step, in_flight: InFlight) -> Samples:
        """Return a step's samples without rows; meanwhile the other ranks sample the next steps."""
        start = None
        if self._num_steps is None:
            start, self._num_steps = self._start(step, in_flight), step.number - 1
        last, sync = last_sampled_step(step, self._config), self._session.last_weight_sync
        with step.timer.stage("wait"):
            answers = self.bridge.ask("draw", step.number, last, start, sync)
        steps = cast("list[SampledStep]", answers)
        is_counted = self._context.rank == 0  # the others have the names alone
        for name, total, count in (mean for each in steps for mean in each.means):
            step.metrics.add_mean(name, total * is_counted, count * is_counted)
        return steps[0].for_training

    def _start(self, step: Step, in_flight: InFlight) -> Start:
        """Return the state for the first step of this process, complete on the first rank."""
        parts = bytes_of_ranks(in_flight, self._context)
        data = _stream(step)
        return Start(
            parts,
            in_flight.num_requests,
            data.episode,
            data.num_consumed,
            data.sampler_state,
            step.num_planned,
            self._config.shared_prefix,
        )

    def complete(self, step: Step) -> None:
        """Wait until the step's sampling is complete, and record its metrics."""
        with step.timer.stage("wait"):
            reports = cast("list[DrawnReport]", self.bridge.ask("drawn"))
        self._report = first = reports[0]
        for _ in range(first.num_prompts // self._config.rollout_batch_size):
            _stream(step).next_batch()  # checkpoints read the position from it
        self.bridge.peer_wants_stop |= any(each.is_asked_to_stop for each in reports)
        rollout = max(each.seconds.get("rollout", 0.0) for each in reports)
        step.metrics.add_max("rollout_seconds", rollout)
        rewards = [each.seconds.get("reward", 0.0) for each in reports]
        step.metrics.add_max("reward_seconds", max(rewards))
        received = max(each.num_received_bytes for each in reports)
        step.metrics.add_max("bridge/generating_mb", received / MEGABYTE)
        step.metrics.add_max("bridge/training_mb", self.bridge.take_received() / MEGABYTE)
        for each in reports:
            idle = each.seconds.get("rollout", 0.0) - each.busy_seconds
            step.metrics.add_mean("idle_seconds", max(0.0, idle), 1.0)
            step.metrics.add_mean("thin_seconds", each.thin_seconds, 1.0)

    def completed(self, number: int) -> tuple[InFlight, int]:
        """Return the rows in flight after a completed step, and its number of sampled tokens."""
        self._num_steps = number
        if self._report is None:
            raise RuntimeError("a step ends before its sampling has")
        return InFlight(self._report.num_requests), self._report.num_tokens

    def saved_rows(self) -> list[bytes] | None:
        """Return the rows in flight after the completed steps; None before the first step."""
        if self._num_steps is None:
            return None
        return cast("list[bytes]", self.bridge.ask("save", self._num_steps))

    def sample_all(
        self, prompts: Sequence[Prompt], params: SamplingParams
    ) -> tuple[Sequence[ScoredRollout], RowTable]:
        """Have the other ranks, which hold the same prompts, sample them."""
        del prompts
        return (), cast("list[RowTable]", self.bridge.ask("evaluate", params))[0]


def _stream(step: Step) -> Draws[Prompt]:
    if step.data is None:
        raise ValueError("rollout_ranks needs a loader of prompts")
    return cast("Draws[Prompt]", step.data)
