"""The samples of one step: generated, scored, exchanged; drawn again for zero-variance groups."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from lightrft.algorithms.declarations import advantage_traits
from lightrft.config import TrainConfig
from lightrft.datasets.types import Prompt
from lightrft.engines.types import SamplingParams
from lightrft.experience.assemble import AdvantageSettings
from lightrft.experience.carry import InFlightGroup, PartialRolloutState
from lightrft.experience.dynamic import (
    Selection,
    apply_selection,
    mixed_groups,
    select_groups,
)
from lightrft.experience.exchange import SampleTable, exchange, merge
from lightrft.experience.fire import generate_fire
from lightrft.experience.model_rewards import ModelRewards
from lightrft.experience.partial import (
    PartialReport,
    finish_groups,
    open_groups,
)
from lightrft.experience.rollouts import (
    Decoder,
    build_requests,
    global_positions,
    pair_completions,
)
from lightrft.experience.scoring import OverlongPenalty, score_rollouts
from lightrft.experience.stages import StageMeter
from lightrft.experience.types import Rollout, ScoredRollout
from lightrft.rewards.errors import RewardError
from lightrft.rewards.types import RewardFunction
from lightrft.strategy.strategy_base import StrategyBase


def training_params(config: TrainConfig) -> SamplingParams:
    """How the responses of training are drawn."""
    return SamplingParams(
        temperature=config.temperature,
        top_p=config.top_p,
        top_k=config.top_k,
        max_tokens=config.generate_max_len,
        n=config.n_samples_per_prompt,
        seed=config.seed,
    )


def overlong_penalty(config: TrainConfig) -> OverlongPenalty | None:
    """The soft punishment of long responses, or None."""
    if not config.overlong_buffer:
        return None
    return OverlongPenalty(
        max_tokens=config.generate_max_len,
        buffer_tokens=config.overlong_buffer_len,
        factor=config.overlong_buffer_penalty_factor,
    )


@dataclass(frozen=True, slots=True)
class Samples:
    """Samples of one or several batches of prompts: this rank's, and the tables of all ranks."""

    scored: list[ScoredRollout]
    table: SampleTable
    baseline: SampleTable | None
    num_prompts: int
    num_rounds: int = 1
    selection: Selection | None = None
    partial: PartialReport | None = None


class RolloutSampler:
    """Generates and scores the samples of a step, over all ranks.

    Args:
        strategy: Generates, and exchanges objects between ranks.
        reward_function: Scores responses.
        decoder: Turns sampled ids into text.
        config: How.
        model_rewards: Reward models, or None.
    """

    def __init__(
        self,
        strategy: StrategyBase,
        reward_function: RewardFunction,
        *,
        decoder: Decoder,
        config: TrainConfig,
        model_rewards: ModelRewards | None = None,
    ) -> None:
        self._strategy = strategy
        self._reward_function = reward_function
        self._decoder = decoder
        self._config = config
        self._params = training_params(config)
        self._overlong_penalty = overlong_penalty(config)
        self._model_rewards = model_rewards

    def collect(
        self,
        prompts: Sequence[Prompt],
        first_request_id: int,
        advantage: AdvantageSettings,
        next_prompts: Callable[[], Sequence[Prompt]] | None,
        meter: StageMeter,
        carry: PartialRolloutState,
    ) -> Samples:
        """All samples of the step; with dynamic sampling as many batches as it takes."""
        if self._config.partial_rollout:
            return self._collect_partial(prompts, first_request_id, next_prompts, meter, carry)
        is_dynamic = self._config.dynamic_sampling
        num_wanted = len(prompts) * self._strategy.world_size
        draws_more = is_dynamic and next_prompts is not None
        max_rounds = self._config.max_num_gen_batches if draws_more else 1
        rounds: list[Samples] = []
        num_mixed = 0
        # Every rank sees the same table, so all take the same number of rounds.
        while len(rounds) < max_rounds and num_mixed < num_wanted:
            if rounds and next_prompts is not None:
                prompts = next_prompts()
            offset = sum(item.num_prompts for item in rounds)
            rounds.append(self._sample_round(prompts, first_request_id, offset, advantage, meter))
            num_mixed += len(mixed_groups(rounds[-1].table))
        samples = _join_rounds(rounds)
        _check_any_scored(samples.table)
        if not is_dynamic:
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

    def _collect_partial(
        self,
        prompts: Sequence[Prompt],
        first_request_id: int,
        next_prompts: Callable[[], Sequence[Prompt]] | None,
        meter: StageMeter,
        carry: PartialRolloutState,
    ) -> Samples:
        """The groups that are finished first, and what goes on in the next step."""
        config, strategy, params = self._config, self._strategy, self._params
        num_wanted, num_prompts = len(prompts) * strategy.world_size, 0
        groups = list(carry.groups)
        while True:
            _check_text_only(prompts)
            first = first_request_id + num_prompts
            groups += open_groups(
                prompts, first_request_id=first, group_size=params.n, strategy=strategy
            )
            num_prompts += num_wanted
            if next_prompts is None or len(groups) >= config.num_prompts_in_flight:
                break
            prompts = next_prompts()
        with meter.stage("rollout"):
            chosen, report = finish_groups(
                replace(carry, groups=tuple(groups)),
                num_wanted,
                config=config,
                sampling_params=params,
                strategy=strategy,
            )
            own = range(strategy.get_rank(), num_wanted, strategy.world_size)
            rollouts = [item for i in own for item in self._group_rollouts(chosen[i], i)]
        scored, table = self._score(rollouts, meter)
        _check_any_scored(table)
        return Samples(scored, table, None, num_prompts, partial=report)

    def _group_rollouts(self, group: InFlightGroup, group_id: int) -> list[Rollout]:
        rollouts = pair_completions(
            [group.prompt],
            [group.request_id],
            group.completions(self._params.logprobs_mode),
            group_ids=[group_id],
            group_size=len(group.samples),
            decoder=self._decoder,
        )
        return [
            replace(item, token_versions=sample.versions)
            for item, sample in zip(rollouts, group.samples, strict=True)
        ]

    def _sample_round(
        self,
        prompts: Sequence[Prompt],
        first_request_id: int,
        offset: int,
        advantage: AdvantageSettings,
        meter: StageMeter,
    ) -> Samples:
        """The samples of one batch of prompts, the first of which has number `offset`."""
        sampling_params = self._params
        baseline: SampleTable | None = None
        if advantage_traits(advantage.estimator).needs_greedy_rewards:
            greedy = greedy_params(sampling_params)
            _, baseline = self._sample(prompts, first_request_id, offset, greedy, meter)
        scored, table = self._sample(prompts, first_request_id, offset, sampling_params, meter)
        return Samples(scored, table, baseline, len(prompts) * self._strategy.world_size)

    def _sample(
        self,
        prompts: Sequence[Prompt],
        first_request_id: int,
        offset: int,
        sampling_params: SamplingParams,
        meter: StageMeter,
    ) -> tuple[list[ScoredRollout], SampleTable]:
        """This rank's scored rollouts and the table of all ranks."""
        with meter.stage("rollout"):
            rollouts = self._generate(prompts, first_request_id, offset, sampling_params)
        return self._score(rollouts, meter)

    def _score(
        self, rollouts: Sequence[Rollout], meter: StageMeter
    ) -> tuple[list[ScoredRollout], SampleTable]:
        scored: list[ScoredRollout] = []
        problem: Exception | None = None
        with meter.stage("reward"):
            # A collective: no failure of this rank alone may come before it.
            models = None if self._model_rewards is None else self._model_rewards.score(rollouts)
            try:
                scored = score_rollouts(
                    rollouts,
                    self._reward_function,
                    overlong_penalty=self._overlong_penalty,
                    masks_failures=self._config.reward_failure == "mask",
                    model_results=models,
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
        _check_text_only(prompts)
        positions = global_positions(
            len(prompts), rank=self._strategy.get_rank(), world_size=self._strategy.world_size
        )
        positions = tuple(offset + position for position in positions)
        request_ids = [first_request_id + position for position in positions]
        requests = build_requests(prompts, request_ids)
        # The trainer releases the engine, after the last of several generations.
        if not self._config.use_fire or sampling_params.is_greedy:
            completions = self._strategy.gather_and_generate(
                sampling_params, requests, sleep_engine=False
            )
        else:
            completions = generate_fire(
                self._strategy,
                sampling_params,
                requests,
                first_token_temperature=self._config.first_token_temperature,
                sleep_engine=False,
            )
        return pair_completions(
            prompts,
            request_ids,
            completions,
            group_ids=positions,
            group_size=sampling_params.n,
            decoder=self._decoder,
        )


def _check_text_only(prompts: Sequence[Prompt]) -> None:
    with_images = [prompt.id for prompt in prompts if prompt.images or prompt.videos]
    if with_images:
        raise ValueError(
            f"prompts with images or videos cannot be trained on: got rows {with_images[:10]}; "
            "remove those columns or rows"
        )


def _join_rounds(rounds: Sequence[Samples]) -> Samples:
    if len(rounds) == 1:
        return rounds[0]
    baselines = [item.baseline for item in rounds if item.baseline is not None]
    return Samples(
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
