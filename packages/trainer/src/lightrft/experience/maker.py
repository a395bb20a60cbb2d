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
from lightrft.experience.collate import collate, micro_slices
from lightrft.experience.dynamic import (
    DynamicSampling,
    Selection,
    apply_selection,
    mixed_groups,
    select_groups,
)
from lightrft.experience.exchange import SampleTable, exchange, merge
from lightrft.experience.fire import generate_fire
from lightrft.experience.forward import ForwardModels, compute_outputs
from lightrft.experience.minibatches import MinibatchPlan, plan_minibatches
from lightrft.experience.rollouts import (
    Decoder,
    build_requests,
    global_positions,
    pair_completions,
)
from lightrft.experience.scoring import OverlongPenalty, score_rollouts
from lightrft.experience.stages import StageMeter
from lightrft.rewards.errors import RewardError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from lightrft.datasets.types import Prompt
    from lightrft.engines.types import SamplingParams
    from lightrft.experience.types import ExperienceBatch, Rollout, ScoredRollout
    from lightrft.rewards.types import RewardFunction
    from lightrft.strategy.strategy_base import StrategyBase


@dataclass(frozen=True, slots=True)
class MakerSettings:
    """How experience is made.

    Args:
        sampling_params: How responses are drawn; `n` is the group size.
        train_batch_size: Samples of one optimizer batch, over all ranks.
        micro_rollout_batch_size: Rows of one forward pass without graph.
        pad_token_id: Fills rows to equal length; never looked at.
        seed: Fixes the optimizer batches.
        overlong_penalty: Soft punishment of long responses, or None.
        sleep_engine: Put the engine to sleep after generation.
        masks_reward_failures: Exclude samples whose reward fails from the loss.
        first_token_temperature: Draw the first token of a response at this temperature (FIRE);
            None draws it like the others.
        dynamic_sampling: Replace groups without signal, or None.
        max_micro_tokens: Cut micro batches by tokens, padding included, instead of rows; None is
            off.
    """

    sampling_params: SamplingParams
    train_batch_size: int
    micro_rollout_batch_size: int
    pad_token_id: int
    seed: int
    overlong_penalty: OverlongPenalty | None = None
    sleep_engine: bool = True
    masks_reward_failures: bool = False
    first_token_temperature: float | None = None
    dynamic_sampling: DynamicSampling | None = None
    max_micro_tokens: int | None = None


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
    ) -> None:
        self._strategy = strategy
        self._models = models
        self._reward_function = reward_function
        self._decoder = decoder
        self._settings = settings
        self._device = device

    def make(
        self,
        prompts: Sequence[Prompt],
        *,
        step: int,
        first_request_id: int,
        advantage: AdvantageSettings,
        shaping: RewardShaping,
        next_prompts: Callable[[], Sequence[Prompt]] | None = None,
        defers_actor: bool = False,
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
            defers_actor: Leave old logprobs and entropies to the update if the step has one
                optimizer batch.
        """
        settings, meter = self._settings, StageMeter()
        samples = self._collect(prompts, first_request_id, advantage, next_prompts, meter)
        table = samples.table
        plan = plan_minibatches(
            table.lengths,
            train_batch_size=settings.train_batch_size,
            world_size=self._strategy.world_size,
            seed=settings.seed,
            step=step,
        )
        index = plan.row_index(self._strategy.get_rank())
        batch = collate(
            table.take(index),
            pad_token_id=settings.pad_token_id,
            temperature=settings.sampling_params.temperature,
            device=self._device,
            num_uncompared_tokens=0 if settings.first_token_temperature is None else 1,
        )
        with meter.stage("forward"):
            outputs = compute_outputs(
                batch,
                self._models,
                slices=self._micro_slices(plan, table),
                scores_actor=not (defers_actor and plan.num_minibatches == 1),
            )
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
            rows_per_minibatch=settings.train_batch_size // self._strategy.world_size,
            table=table,
            rewards=shaped,
            plan=plan,
            scored=tuple(samples.scored),
            meter=meter,
            num_prompts=samples.num_prompts,
            num_rounds=samples.num_rounds,
            selection=samples.selection,
        )

    def _micro_slices(self, plan: MinibatchPlan, table: SampleTable) -> Sequence[slice]:
        """The forward passes over this rank's rows; every rank has equally many."""
        settings, rank = self._settings, self._strategy.get_rank()
        rows_per_minibatch = settings.train_batch_size // self._strategy.world_size
        if settings.max_micro_tokens is None:
            num_rows = plan.num_minibatches * rows_per_minibatch
            return micro_slices(0, num_rows, settings.micro_rollout_batch_size)
        return [
            slice(index * rows_per_minibatch + rows.start, index * rows_per_minibatch + rows.stop)
            for index in range(plan.num_minibatches)
            for rows in plan.micro_slices(
                table.lengths, index=index, rank=rank, max_tokens=settings.max_micro_tokens
            )
        ]

    def _collect(
        self,
        prompts: Sequence[Prompt],
        first_request_id: int,
        advantage: AdvantageSettings,
        next_prompts: Callable[[], Sequence[Prompt]] | None,
        meter: StageMeter,
    ) -> _Samples:
        """All samples of the step; with dynamic sampling as many batches as it takes."""
        dynamic = self._settings.dynamic_sampling
        num_wanted = len(prompts) * self._strategy.world_size
        max_rounds = 1 if dynamic is None or next_prompts is None else dynamic.max_num_batches
        rounds: list[_Samples] = []
        num_mixed = 0
        # Every rank sees the same table, so all take the same number of rounds.
        while len(rounds) < max_rounds and num_mixed < num_wanted:
            if rounds and next_prompts is not None:
                prompts = next_prompts()
            offset = sum(item.num_prompts for item in rounds)
            rounds.append(self._sample_round(prompts, first_request_id, offset, advantage, meter))
            num_mixed += len(mixed_groups(rounds[-1].table))
            if dynamic is None:
                break
        samples = _join_rounds(rounds)
        _check_any_scored(samples.table)
        if dynamic is None:
            return samples
        selection = select_groups(samples.table, num_wanted)
        table = apply_selection(samples.table, selection)
        kept = set(table.group_ids.tolist())
        return replace(
            samples,
            table=table,
            scored=[item for item in samples.scored if item.rollout.group_id in kept],
            selection=selection,
        )

    def _sample_round(
        self,
        prompts: Sequence[Prompt],
        first_request_id: int,
        offset: int,
        advantage: AdvantageSettings,
        meter: StageMeter,
    ) -> _Samples:
        """The samples of one batch of prompts, the first of which has number `offset`."""
        sampling_params = self._settings.sampling_params
        baseline: SampleTable | None = None
        if advantage.estimator.needs_greedy_rewards:
            greedy = greedy_params(sampling_params)
            _, baseline = self._sample(prompts, first_request_id, offset, greedy, meter)
        scored, table = self._sample(prompts, first_request_id, offset, sampling_params, meter)
        return _Samples(scored, table, baseline, len(prompts) * self._strategy.world_size)

    def _sample(
        self,
        prompts: Sequence[Prompt],
        first_request_id: int,
        offset: int,
        sampling_params: SamplingParams,
        meter: StageMeter,
    ) -> tuple[list[ScoredRollout], SampleTable]:
        """This rank's scored rollouts and the table of all ranks."""
        scored: list[ScoredRollout] = []
        problem: Exception | None = None
        with meter.stage("rollout"):
            rollouts = self._generate(prompts, first_request_id, offset, sampling_params)
        with meter.stage("reward"):
            try:
                scored = score_rollouts(
                    rollouts,
                    self._reward_function,
                    overlong_penalty=self._settings.overlong_penalty,
                    masks_failures=self._settings.masks_reward_failures,
                )
            except Exception as error:  # noqa: BLE001 - told to all ranks, then raised
                problem = error
        with meter.stage("exchange"):
            return scored, exchange(problem or scored, self._strategy)

    def _generate(
        self,
        prompts: Sequence[Prompt],
        first_request_id: int,
        offset: int,
        sampling_params: SamplingParams,
    ) -> list[Rollout]:
        with_images = [prompt.id for prompt in prompts if prompt.images or prompt.videos]
        if with_images:
            raise ValueError(
                f"prompts with images or videos cannot be trained on: got rows {with_images[:10]}; "
                "remove those columns or rows"
            )
        positions = global_positions(
            len(prompts), rank=self._strategy.get_rank(), world_size=self._strategy.world_size
        )
        positions = tuple(offset + position for position in positions)
        request_ids = [first_request_id + position for position in positions]
        requests = build_requests(prompts, request_ids)
        first_temperature = self._settings.first_token_temperature
        if first_temperature is None or sampling_params.is_greedy:
            completions = self._strategy.gather_and_generate(
                sampling_params, requests, sleep_engine=self._settings.sleep_engine
            )
        else:
            completions = generate_fire(
                self._strategy,
                sampling_params,
                requests,
                first_token_temperature=first_temperature,
                sleep_engine=self._settings.sleep_engine,
            )
        return pair_completions(
            prompts,
            request_ids,
            completions,
            group_ids=positions,
            group_size=sampling_params.n,
            decoder=self._decoder,
        )


@dataclass(frozen=True, slots=True)
class _Samples:
    """Samples of one or several batches of prompts: this rank's, and the tables of all ranks."""

    scored: list[ScoredRollout]
    table: SampleTable
    baseline: SampleTable | None
    num_prompts: int
    num_rounds: int = 1
    selection: Selection | None = None


def _join_rounds(rounds: Sequence[_Samples]) -> _Samples:
    if len(rounds) == 1:
        return rounds[0]
    baselines = [item.baseline for item in rounds if item.baseline is not None]
    return _Samples(
        scored=[scored for item in rounds for scored in item.scored],
        table=merge([item.table for item in rounds]),
        baseline=merge(baselines) if baselines else None,
        num_prompts=sum(item.num_prompts for item in rounds),
        num_rounds=len(rounds),
    )


def _check_any_scored(table: SampleTable) -> None:
    if table.is_masked.all():
        raise RewardError(
            f"the reward failed for all {len(table)} samples of the step: there is nothing to "
            "train on; run with reward_failure=raise to see the cause"
        )


def greedy_params(sampling_params: SamplingParams) -> SamplingParams:
    """One completion by the most likely token at every position, under the same stops."""
    return replace(sampling_params, temperature=0.0, top_p=1.0, top_k=-1, min_p=0.0, n=1)


def _per_group(baseline: SampleTable, table: SampleTable) -> Tensor:
    """Reward of the one greedy sample of each row's group: [rows of table] float64."""
    by_group = dict(zip(baseline.group_ids.tolist(), baseline.rewards.tolist(), strict=True))
    return torch.tensor([by_group[group] for group in table.group_ids.tolist()]).double()
