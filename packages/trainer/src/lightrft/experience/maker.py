"""Prompts in, experience out: the five stages of one rollout, in order, with timers."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from lightrft.experience.assemble import (
    AdvantageSettings,
    RewardShaping,
    ShapedRewards,
    assemble,
    shape_rewards,
)
from lightrft.experience.carry import PartialRolloutState
from lightrft.experience.collate import collate, micro_slices
from lightrft.experience.forward import ForwardModels, compute_outputs
from lightrft.experience.minibatches import MinibatchPlan, plan_minibatches
from lightrft.experience.replay import replayed_support
from lightrft.experience.sampling import MakerSettings, RolloutSampler
from lightrft.experience.stages import StageMeter

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from lightrft.datasets.types import Prompt
    from lightrft.experience.dynamic import (
        Selection,
    )
    from lightrft.experience.exchange import SampleTable
    from lightrft.experience.model_rewards import ModelRewards
    from lightrft.experience.partial import PartialReport
    from lightrft.experience.rollouts import (
        Decoder,
    )
    from lightrft.experience.types import ExperienceBatch, RolloutBatch, ScoredRollout
    from lightrft.rewards.types import RewardFunction
    from lightrft.strategy.strategy_base import StrategyBase


NOTHING_CARRIED = PartialRolloutState()


@dataclass(frozen=True, slots=True)
class StepExperience:
    """What one rank trains on in one step, and what all ranks know about the step.

    Args:
        batch: This rank's rows, optimizer batch after optimizer batch.
        rows_per_minibatch: Rows of `batch` in each optimizer batch.
        table: The samples of all ranks.
        rewards: The rewards the estimator saw, of the rows of `table`.
        plan: Which rows of `table` each rank trains in which optimizer batch.
        scored: This rank's own rollouts.
        meter: Duration and memory of each stage on this rank; the update adds its own.
        num_prompts: Prompts that were rolled out, over all ranks.
        num_rounds: Batches of prompts among them.
        selection: What dynamic sampling did, or None.
        partial: What partial rollouts did, or None.
        use_rollout_logprobs: The old logprobs are the engine's.
    """

    batch: ExperienceBatch
    rows_per_minibatch: int
    table: SampleTable
    rewards: ShapedRewards
    plan: MinibatchPlan
    scored: tuple[ScoredRollout, ...]
    meter: StageMeter
    num_prompts: int
    num_rounds: int = 1
    selection: Selection | None = None
    partial: PartialReport | None = None
    use_rollout_logprobs: bool = False

    def rows_of_minibatch(self, index: int) -> slice:
        """Rows of `batch` that belong to one optimizer batch."""
        start = index * self.rows_per_minibatch
        return slice(start, start + self.rows_per_minibatch)


class ExperienceMaker:
    """Generates, scores, exchanges, looks at and rates the samples of one step.

    Args:
        strategy: Generates, and exchanges objects between ranks.
        models: The models that look at the samples.
        reward_function: Scores responses.
        decoder: Turns sampled ids into text.
        settings: How.
        device: Where the padded tensors go.
        model_rewards: Reward models, or None.
        release_engine: Called after the last generation of a step.
    """

    def __init__(
        self,
        strategy: StrategyBase,
        models: ForwardModels,
        reward_function: RewardFunction,
        *,
        decoder: Decoder,
        settings: MakerSettings,
        device: torch.device,
        model_rewards: ModelRewards | None = None,
        release_engine: Callable[[], None] | None = None,
    ) -> None:
        self._strategy = strategy
        self._release_engine = release_engine
        self._models = models
        self._settings = settings
        self._device = device
        self._sampler = RolloutSampler(
            strategy,
            reward_function,
            decoder=decoder,
            settings=settings,
            model_rewards=model_rewards,
        )

    def make(
        self,
        prompts: Sequence[Prompt],
        *,
        step: int,
        first_request_id: int,
        advantage: AdvantageSettings,
        shaping: RewardShaping,
        next_prompts: Callable[[], Sequence[Prompt]] | None = None,
        reuses_policy_logprobs: bool = False,
        carry: PartialRolloutState = NOTHING_CARRIED,
    ) -> StepExperience:
        """The experience of one step.

        Args:
            prompts: This rank's prompts; every rank passes equally many.
            step: Fixes the optimizer batches, together with the seed.
            first_request_id: Request id of the first prompt of the step over all ranks. Prompts
                that are rolled out with the same id and seed get the same random numbers.
            advantage: How rewards become advantages in this step.
            shaping: What happens to the rewards before that.
            next_prompts: This rank's share of further prompts, for dynamic sampling.
            reuses_policy_logprobs: Leave old logprobs and entropies to the update if the step has
                one optimizer batch.
            carry: Responses that the step before left unfinished.
        """
        settings, meter = self._settings, StageMeter()
        samples = self._sampler.collect(
            prompts, first_request_id, advantage, next_prompts, meter, carry
        )
        if self._release_engine is not None:
            self._release_engine()
        table = samples.table
        plan = self._plan(table, step)
        index = plan.row_index(self._strategy.data_rank)
        version = None if samples.partial is None else samples.partial.version
        batch = self._collate(table.take(index), version)
        with meter.stage("forward"):
            outputs = compute_outputs(
                batch,
                self._models,
                slices=self._micro_slices(plan, table),
                scores_actor=not settings.use_rollout_logprobs
                and not (reuses_policy_logprobs and plan.num_minibatches == 1),
            )
        if settings.use_rollout_logprobs:
            sampled = torch.where(batch.response_mask, batch.rollout_logprobs, 0.0)
            outputs = replace(outputs, old_logprobs=sampled)
        shaped = shape_rewards(table, shaping)
        experience = assemble(
            table,
            torch.from_numpy(index),
            batch,
            outputs,
            rewards=shaped.rewards,
            greedy_rewards=None
            if samples.baseline is None
            else _per_group(samples.baseline, table),
            settings=advantage,
            strategy=self._strategy,
        )
        return StepExperience(
            batch=experience,
            rows_per_minibatch=settings.train_batch_size // self._strategy.num_data_ranks,
            table=table,
            rewards=shaped,
            plan=plan,
            scored=tuple(samples.scored),
            meter=meter,
            num_prompts=samples.num_prompts,
            num_rounds=samples.num_rounds,
            selection=samples.selection,
            partial=samples.partial,
            use_rollout_logprobs=settings.use_rollout_logprobs,
        )

    def _plan(self, table: SampleTable, step: int) -> MinibatchPlan:
        return plan_minibatches(
            table.lengths,
            train_batch_size=self._settings.train_batch_size,
            world_size=self._strategy.num_data_ranks,
            seed=self._settings.seed,
            step=step,
        )

    def _collate(self, table: SampleTable, version: int | None) -> RolloutBatch:
        settings = self._settings
        return collate(
            table,
            pad_token_id=settings.pad_token_id,
            temperature=settings.sampling_params.temperature,
            device=self._device,
            num_uncompared_tokens=0 if settings.first_token_temperature is None else 1,
            version=version,
            support=replayed_support(
                settings.sampling_params, self._strategy.inference_engine_type
            ),
        )

    def _micro_slices(self, plan: MinibatchPlan, table: SampleTable) -> Sequence[slice]:
        """The forward passes over this rank's rows; every rank has equally many."""
        settings, rank = self._settings, self._strategy.data_rank
        rows_per_minibatch = settings.train_batch_size // self._strategy.num_data_ranks
        if settings.max_micro_tokens is None:
            num_rows = plan.num_minibatches * rows_per_minibatch
            return micro_slices(0, num_rows, settings.micro_rollout_batch_size)
        return [
            slice(index * rows_per_minibatch + rows.start, index * rows_per_minibatch + rows.stop)
            for index in range(plan.num_minibatches)
            for rows in plan.micro_slices(
                table.lengths,
                index=index,
                rank=rank,
                max_tokens=settings.max_micro_tokens,
                packs_samples=settings.packs_samples,
            )
        ]


def _per_group(baseline: SampleTable, table: SampleTable) -> Tensor:
    """Reward of the one greedy sample of each row's group: [rows of table] float64."""
    by_group = dict(zip(baseline.group_ids.tolist(), baseline.rewards.tolist(), strict=True))
    return torch.tensor([by_group[group] for group in table.group_ids.tolist()]).double()
