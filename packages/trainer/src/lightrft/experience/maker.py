"""Prompts in, experience out: the five stages of one rollout, in order, with timers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lightrft.algorithms.moments import Moments
from lightrft.config import TrainConfig
from lightrft.datasets.types import Prompt
from lightrft.experience.assemble import (
    AdvantageSettings,
    ShapedRewards,
    assemble,
    shape_rewards,
)
from lightrft.experience.carry import PartialRolloutState
from lightrft.experience.collate import collate, micro_slices
from lightrft.experience.dynamic import (
    Selection,
)
from lightrft.experience.exchange import SampleTable
from lightrft.experience.forward import ForwardModels, compute_outputs
from lightrft.experience.minibatches import MinibatchPlan, plan_minibatches
from lightrft.experience.model_rewards import ModelRewards
from lightrft.experience.partial import PartialReport
from lightrft.experience.replay import replayed_support
from lightrft.experience.rollouts import (
    Decoder,
)
from lightrft.experience.sampling import RolloutSampler, training_params
from lightrft.experience.stages import StageMeter
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
    """Generates, scores and exchanges the samples of one step, and estimates advantages.

    Args:
        strategy: Generates, and exchanges objects between ranks.
        models: The scoring models.
        reward_function: Scores responses.
        decoder: Turns sampled ids into text.
        config: How.
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
        config: TrainConfig,
        model_rewards: ModelRewards | None = None,
        release_engine: Callable[[], None] | None = None,
    ) -> None:
        self._strategy = strategy
        self._release_engine = release_engine
        self._models = models
        self._config = config
        self._pad_token_id = int(decoder.pad_token_id or 0)  # masked everywhere
        self._sampler = RolloutSampler(
            strategy,
            reward_function,
            decoder=decoder,
            config=config,
            model_rewards=model_rewards,
        )

    def make(
        self,
        prompts: Sequence[Prompt],
        *,
        step: int,
        first_request_id: int,
        advantage: AdvantageSettings,
        moments: Moments | None = None,
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
            moments: Of all rewards before this step, or None without running normalisation.
            next_prompts: This rank's share of further prompts, for dynamic sampling.
            reuses_policy_logprobs: Leave old logprobs and entropies to the update if the step has
                one optimizer batch.
            carry: Responses that the step before left unfinished.
        """
        config, meter = self._config, StageMeter()
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
                scores_actor=not config.use_rollout_logprobs
                and not (reuses_policy_logprobs and plan.num_minibatches == 1),
            )
        if config.use_rollout_logprobs:
            sampled = torch.where(batch.response_mask, batch.rollout_logprobs, 0.0)
            outputs = replace(outputs, old_logprobs=sampled)
        shaped = shape_rewards(table, moments, config)
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
            rows_per_minibatch=config.train_batch_size // self._strategy.num_data_ranks,
            table=table,
            rewards=shaped,
            plan=plan,
            scored=tuple(samples.scored),
            meter=meter,
            num_prompts=samples.num_prompts,
            num_rounds=samples.num_rounds,
            selection=samples.selection,
            partial=samples.partial,
            use_rollout_logprobs=config.use_rollout_logprobs,
        )

    def _plan(self, table: SampleTable, step: int) -> MinibatchPlan:
        return plan_minibatches(
            table.lengths,
            train_batch_size=self._config.train_batch_size,
            world_size=self._strategy.num_data_ranks,
            seed=self._config.seed,
            step=step,
        )

    def _collate(self, table: SampleTable, version: int | None) -> RolloutBatch:
        params, engine_type = training_params(self._config), self._strategy.inference_engine_type
        return collate(
            table,
            pad_token_id=self._pad_token_id,
            temperature=params.temperature,
            device=self._strategy.device,
            num_uncompared_tokens=int(self._config.use_fire),
            version=version,
            support=replayed_support(params, engine_type),
        )

    def _micro_slices(self, plan: MinibatchPlan, table: SampleTable) -> Sequence[slice]:
        """The forward passes over this rank's rows; every rank has equally many."""
        config, rank = self._config, self._strategy.data_rank
        rows_per_minibatch = config.train_batch_size // self._strategy.num_data_ranks
        max_tokens = config.max_micro_tokens(config.micro_rollout_batch_size)
        if max_tokens is None:
            num_rows = plan.num_minibatches * rows_per_minibatch
            return micro_slices(0, num_rows, config.micro_rollout_batch_size)
        return [
            slice(index * rows_per_minibatch + rows.start, index * rows_per_minibatch + rows.stop)
            for index in range(plan.num_minibatches)
            for rows in plan.micro_slices(
                table.lengths,
                index=index,
                rank=rank,
                max_tokens=max_tokens,
                packs_samples=config.packing_samples,
            )
        ]


def _per_group(baseline: SampleTable, table: SampleTable) -> Tensor:
    """Reward of the one greedy sample of each row's group: [rows of table] float64."""
    by_group = dict(zip(baseline.group_ids.tolist(), baseline.rewards.tolist(), strict=True))
    return torch.tensor([by_group[group] for group in table.group_ids.tolist()]).double()
