"""The samples of one step: generated, scored, exchanged; drawn again for zero-variance groups."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from lightrft.algorithms.declarations import advantage_traits
from lightrft.experience.dynamic import (
    DynamicSampling,
    Selection,
    apply_selection,
    mixed_groups,
    select_groups,
)
from lightrft.experience.exchange import SampleTable, exchange, merge
from lightrft.experience.fire import generate_fire
from lightrft.experience.partial import (
    PartialReport,
    PartialRollout,
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
from lightrft.rewards.errors import RewardError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from lightrft.datasets.types import Prompt
    from lightrft.engines.types import SamplingParams
    from lightrft.experience.assemble import AdvantageSettings
    from lightrft.experience.carry import InFlightGroup, PartialRolloutState
    from lightrft.experience.model_rewards import ModelRewards
    from lightrft.experience.stages import StageMeter
    from lightrft.experience.types import Rollout, ScoredRollout
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
        max_micro_tokens: Cut micro batches by tokens instead of rows; None is off.
        packs_samples: Count no padding then: the models lay out packed streams.
        partial: Carry unfinished responses over to the next step, or None.
        use_rollout_logprobs: The engine's logprobs are the old ones; the actor is not asked.
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
    packs_samples: bool = False
    partial: PartialRollout | None = None
    use_rollout_logprobs: bool = False


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
        settings: How.
        model_rewards: Reward models, or None.
    """

    def __init__(
        self,
        strategy: StrategyBase,
        reward_function: RewardFunction,
        *,
        decoder: Decoder,
        settings: MakerSettings,
        model_rewards: ModelRewards | None = None,
    ) -> None:
        self._strategy = strategy
        self._reward_function = reward_function
        self._decoder = decoder
        self._settings = settings
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
        if self._settings.partial is not None:
            return self._collect_partial(
                prompts, first_request_id, self._settings.partial, next_prompts, meter, carry
            )
        dynamic = self._settings.dynamic_sampling
        num_wanted = len(prompts) * self._strategy.world_size
        max_rounds = 1 if dynamic is None or next_prompts is None else dynamic.max_num_batches
        rounds: list[Samples] = []
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

    def _collect_partial(
        self,
        prompts: Sequence[Prompt],
        first_request_id: int,
        partial: PartialRollout,
        next_prompts: Callable[[], Sequence[Prompt]] | None,
        meter: StageMeter,
        carry: PartialRolloutState,
    ) -> Samples:
        """The groups that are finished first, and what goes on in the next step."""
        settings, strategy = self._settings, self._strategy
        params = settings.sampling_params
        num_wanted, num_prompts = len(prompts) * strategy.world_size, 0
        groups = list(carry.groups)
        while True:
            _check_text_only(prompts)
            first = first_request_id + num_prompts
            groups += open_groups(
                prompts, first_request_id=first, group_size=params.n, strategy=strategy
            )
            num_prompts += num_wanted
            if next_prompts is None or len(groups) >= partial.num_prompts:
                break
            prompts = next_prompts()
        with meter.stage("rollout"):
            chosen, report = finish_groups(
                replace(carry, groups=tuple(groups)),
                num_wanted,
                settings=partial,
                sampling_params=params,
                strategy=strategy,
                sleep_engine=settings.sleep_engine,
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
            group.completions(self._settings.sampling_params.logprobs_mode),
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
        sampling_params = self._settings.sampling_params
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
                    overlong_penalty=self._settings.overlong_penalty,
                    masks_failures=self._settings.masks_reward_failures,
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
