"""The samples of one step: generated, scored, exchanged; drawn again for zero-variance groups."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from datetime import timedelta

from lightrft.config import TrainConfig
from lightrft.datasets.types import Prompt
from lightrft.engines.ledger import LedgerEntry
from lightrft.engines.media.encoder import PromptEncoder
from lightrft.engines.types import Completion, GenerationRequest, SamplingParams
from lightrft.records.exchange import RowTable, exchange, merge
from lightrft.records.media import check_media, media_request
from lightrft.records.step_timer import StepTimer
from lightrft.records.types import Rollout, ScoredRollout
from lightrft.rewards.types import RewardError, RewardFunction, RewardResult
from lightrft.rollout.carry import InFlightGroup, PartialRolloutState
from lightrft.rollout.dynamic import Selection, apply_selection, mixed_groups, select_groups
from lightrft.rollout.environments.rounds import Environments
from lightrft.rollout.fire import fire_segments, generate_fire
from lightrft.rollout.group_scorer import GroupScorer
from lightrft.rollout.ledger_records import Evidence, share_entries, take_evidence
from lightrft.rollout.model_rewards import ModelRewards
from lightrft.rollout.partial import PartialReport, finish_groups, open_groups
from lightrft.rollout.rollout_groups import Decoder, RolloutGroups
from lightrft.rollout.scoring import overlong_penalty, score_rollouts
from lightrft.strategy.distributed.deadlines import phase
from lightrft.strategy.distributed.outlet import report_count
from lightrft.strategy.strategy_base import StrategyBase

NOTHING_CARRIED = PartialRolloutState()


def training_params(config: TrainConfig) -> SamplingParams:
    """How the responses of training are drawn."""
    return SamplingParams(
        temperature=config.temperature,
        top_p=config.top_p,
        top_k=config.top_k,
        max_tokens=config.generate_max_len,
        n=config.n_samples_per_prompt,
        stop=config.stop,
        seed=config.seed,
    )


def greedy_params(config: TrainConfig) -> SamplingParams:
    """One completion by the most likely token at every position, under the stops of training."""
    return replace(training_params(config), temperature=0.0, top_p=1.0, top_k=-1, n=1)


@dataclass(frozen=True, slots=True)
class Samples:
    """Samples of one or several batches of prompts.

    Args:
        scored: This rank's own rollouts.
        table: The rows of all ranks that are trained on.
        num_prompts: Prompts that were rolled out, over all ranks.
        num_rounds: Batches of prompts among them.
        greedy: The greedy completions of all ranks, or None where the estimator needs none.
        selection: What dynamic sampling did, or None.
        partial: What partial rollouts did, or None.
        evidence: Journal and ledger of this rank for the ledger gate, or None without it.
        tool_names: Of the tools that could be called, or None without environments and tools.
    """

    scored: Sequence[ScoredRollout]
    table: RowTable
    num_prompts: int
    num_rounds: int = 1
    greedy: RowTable | None = None
    selection: Selection | None = None
    partial: PartialReport | None = None
    evidence: Evidence | None = None
    tool_names: tuple[str, ...] | None = None


class RolloutSampler:
    """Generates and scores samples over all ranks, for training and for evaluation.

    Args:
        strategy: Generates, and exchanges objects between ranks.
        reward_function: Scores responses.
        model_rewards: Reward models, or None.
        decoder: Turns sampled ids into text.
        config: How.
        needs_greedy: Every step samples greedy completions, too.
        environments: Answer the calls of responses of several turns, or None.
        encoder: Of prompts with images or videos, for vision-language models.
    """

    def __init__(
        self,
        strategy: StrategyBase,
        reward_function: RewardFunction,
        model_rewards: ModelRewards | None,
        *,
        decoder: Decoder,
        config: TrainConfig,
        needs_greedy: bool = False,
        environments: Environments | None = None,
        encoder: PromptEncoder | None = None,
    ) -> None:
        self._encoder = encoder
        self._environments = environments
        self._strategy = strategy
        self._reward_function = reward_function
        self._model_rewards = model_rewards
        self._decoder = decoder
        self._config = config
        self._needs_greedy = needs_greedy

    def collect(
        self,
        prompts: Sequence[Prompt],
        *,
        first_request_id: int,
        timer: StepTimer,
        next_prompts: Callable[[], Sequence[Prompt]] | None = None,
        carry: PartialRolloutState = NOTHING_CARRIED,
        step: int | None = None,
    ) -> Samples:
        """All samples of one step.

        Args:
            prompts: This rank's prompts; every rank passes equally many.
            first_request_id: Request id of the first prompt of the step over all ranks. Prompts
                that are rolled out with the same id and seed get the same random numbers.
            timer: Measures the step.
            next_prompts: This rank's share of further prompts, for dynamic sampling and partial
                rollouts; None if there are none.
            carry: Responses that the step before left unfinished.
            step: Of the run, for the journal of environments; None writes none.
        """
        engine = self._strategy.inference_engine
        if engine is not None:
            engine.ledger.take()  # of a step that was given up
        if self._config.partial_rollout:
            samples = self._collect_partial(prompts, first_request_id, next_prompts, carry, timer)
        else:
            samples = self._collect_rounds(prompts, first_request_id, next_prompts, step, timer)
        if samples.table.is_masked.all():
            raise RewardError(
                f"the reward failed for all {len(samples.table)} samples of the step: there is "
                "nothing to train on; run with reward_failure=raise to see the cause"
            )
        if not self._config.dynamic_sampling:
            return samples
        selection = select_groups(samples.table, len(prompts) * self._strategy.world_size)
        table = apply_selection(samples.table, selection)
        kept = set(table.group_ids.tolist())
        scored = [item for item in samples.scored if item.rollout.group_id in kept]
        return replace(samples, table=table, scored=scored, selection=selection)

    def _collect_rounds(
        self,
        prompts: Sequence[Prompt],
        first_request_id: int,
        next_prompts: Callable[[], Sequence[Prompt]] | None,
        step: int | None,
        timer: StepTimer,
    ) -> Samples:
        """One batch of prompts; with dynamic sampling as many as it takes."""
        config = self._config
        num_wanted = len(prompts) * self._strategy.world_size
        draws_more = config.dynamic_sampling and next_prompts is not None
        max_rounds = config.max_num_gen_batches if draws_more else 1
        scored: list[ScoredRollout] = []
        tables: list[RowTable] = []
        greedy: list[RowTable] = []
        num_prompts, num_mixed = 0, 0
        # Every rank sees the same table, so all take the same number of rounds.
        while len(tables) < max_rounds and num_mixed < num_wanted:
            if tables and next_prompts is not None:
                prompts = next_prompts()
            check_media(prompts, self._config)
            num_new = len(prompts) * self._strategy.world_size
            positions = own_positions(self._strategy, num_new, first=num_prompts)
            if self._needs_greedy:
                params = greedy_params(config)
                greedy.append(self._sample(prompts, positions, first_request_id, params, timer)[1])
            with self._recording():
                own, table = self._sample(
                    prompts,
                    positions,
                    first_request_id,
                    training_params(config),
                    timer,
                    step=step,
                    batch=len(tables),
                )
            scored += own
            tables.append(table)
            num_prompts += num_new
            num_mixed += len(mixed_groups(table))
        return Samples(
            scored=scored,
            table=merge(tables),
            num_prompts=num_prompts,
            num_rounds=len(tables),
            greedy=merge(greedy) if greedy else None,
            evidence=self._evidence([item.rollout for item in scored], timer),
            tool_names=None if self._environments is None else self._environments.tool_names,
        )

    def _recording(self) -> AbstractContextManager[None]:
        """Has the engine write down what it samples, for the ledger gate."""
        engine = self._strategy.inference_engine
        if engine is None or not self._config.ledger_gate:
            return nullcontext()
        return engine.ledger.recording()

    def _evidence(
        self,
        rollouts: Sequence[Rollout],
        timer: StepTimer,
        *,
        carried: Sequence[LedgerEntry] | None = None,
    ) -> Evidence | None:
        """What this rank knows for the ledger gate; collective.

        Responses that go on in the next step may do so on any rank, so with `carried`, the
        entries of earlier steps, every rank gets the entries of all.
        """
        if self._strategy.inference_engine is None or not self._config.ledger_gate:
            return None
        with timer.stage("exchange"):
            special = () if self._environments is None else self._environments.special_ids
            own = take_evidence(rollouts, self._strategy, special_ids=special)
            return own if carried is None else share_entries(own, carried, self._strategy)

    def _collect_partial(
        self,
        prompts: Sequence[Prompt],
        first_request_id: int,
        next_prompts: Callable[[], Sequence[Prompt]] | None,
        carry: PartialRolloutState,
        timer: StepTimer,
    ) -> Samples:
        """The groups that are finished first, and what goes on in the next step."""
        config, strategy, params = self._config, self._strategy, training_params(self._config)
        num_wanted, num_prompts = len(prompts) * strategy.world_size, 0
        groups = list(carry.groups)
        while True:
            check_media(prompts, self._config)
            first = first_request_id + num_prompts
            groups += open_groups(
                prompts, first_request_id=first, group_size=params.n, strategy=strategy
            )
            num_prompts += num_wanted
            if next_prompts is None or len(groups) >= config.num_prompts_in_flight:
                break
            prompts = next_prompts()
        with timer.stage("rollout"), self._recording():
            chosen, report = finish_groups(
                replace(carry, groups=tuple(groups)),
                num_wanted,
                config=config,
                sampling_params=params,
                strategy=strategy,
            )
            own = own_positions(strategy, num_wanted)
            rollouts = [item for i in own for item in self._group_rollouts(chosen[i], i)]
        scored, table = self._score(rollouts, timer)
        evidence = self._evidence(rollouts, timer, carried=carry.entries)
        if evidence is not None:
            report = replace(report, carry=report.carry.with_entries(evidence.entries.values()))
        return Samples(scored, table, num_prompts, partial=report, evidence=evidence)

    def _group_rollouts(self, group: InFlightGroup, group_id: int) -> list[Rollout]:
        size = len(group.samples)
        rollouts = RolloutGroups(
            [group.prompt],
            [group.request_id],
            group_ids=[group_id],
            group_size=size,
            decoder=self._decoder,
        ).in_order(group.completions(training_params(self._config).logprobs_mode))
        return [
            replace(item, token_versions=sample.versions, segments=sample.segments)
            for item, sample in zip(rollouts, group.samples, strict=True)
        ]

    def sample_all(
        self, prompts: Sequence[Prompt], params: SamplingParams
    ) -> tuple[list[ScoredRollout], RowTable]:
        """Completions of all prompts with their rewards, for an evaluation; collective.

        Rank r of W completes the prompts r, r + W, ...; shares may be unequal or empty. The length
        of a response does not change its reward.

        Args:
            prompts: All prompts, the same list on every rank.
            params: With n completions of each prompt.

        Returns:
            This rank's own, and the same table on every rank; group i holds the n rows of prompt
            i.
        """
        positions = own_positions(self._strategy, len(prompts))
        own = [prompts[position] for position in positions]
        return self._sample(own, positions, 0, params, StepTimer(), shapes_rewards=False)

    def _sample(
        self,
        prompts: Sequence[Prompt],
        positions: Sequence[int],
        first_request_id: int,
        params: SamplingParams,
        timer: StepTimer,
        *,
        shapes_rewards: bool = True,
        step: int | None = None,
        batch: int = 0,
    ) -> tuple[list[ScoredRollout], RowTable]:
        """This rank's scored rollouts and the table of all ranks.

        The engine stays awake: the caller lets it sleep after the last of several generations.
        """
        request_ids = [first_request_id + position for position in positions]
        with self._group_scorer(prompts) as scorer:
            if self._environments is not None:
                with timer.stage("rollout"):
                    rollouts, results = self._environments.sample(
                        self._strategy,
                        prompts,
                        request_ids,
                        params,
                        group_ids=positions,
                        step=step,
                        batch=batch,
                        on_group=scorer.add,
                    )
                return self._score(
                    rollouts,
                    timer,
                    shapes_rewards=shapes_rewards,
                    scorer=scorer,
                    environment_results=results,
                )
            groups = RolloutGroups(
                prompts,
                request_ids,
                group_ids=positions,
                group_size=params.n,
                decoder=self._decoder,
                on_group=scorer.add,
            )
            with timer.stage("rollout"):
                rollouts = self._generate(
                    groups, build_requests(prompts, request_ids, self._encoder), params
                )
            return self._score(rollouts, timer, shapes_rewards=shapes_rewards, scorer=scorer)

    def _generate(
        self, groups: RolloutGroups, requests: Sequence[GenerationRequest], params: SamplingParams
    ) -> list[Rollout]:
        """This rank's rollouts; groups that are complete go to their scorer on the way."""
        config = self._config
        if config.use_fire and not params.is_greedy:
            completions = generate_fire(
                self._strategy,
                params,
                requests,
                first_token_temperature=config.first_token_temperature,
            )
            return [
                replace(item, segments=fire_segments(item.completion, group_size=params.n))
                for item in groups.in_order(completions)
            ]
        total, done = len(requests) * params.n, 0

        def take(finished: Sequence[Completion]) -> None:
            nonlocal done
            groups.add(finished)
            done += len(finished)
            report_count("generate", done, total)

        completions = self._strategy.gather_and_generate(
            params, requests, sleep_engine=False, on_finished=take
        )
        report_count("generate", 0, 0)
        return groups.in_order(completions)

    def _group_scorer(self, prompts: Sequence[Prompt]) -> GroupScorer:
        return GroupScorer(
            self._reward_function,
            columns={name for prompt in prompts for name in prompt.columns},
            masks_failures=self._config.reward_failure == "mask",
        )

    def _score(
        self,
        rollouts: Sequence[Rollout],
        timer: StepTimer,
        *,
        shapes_rewards: bool = True,
        environment_results: Sequence[RewardResult | None] | None = None,
        scorer: GroupScorer | None = None,
    ) -> tuple[list[ScoredRollout], RowTable]:
        """Scored rollouts of this rank, and the table of all ranks.

        Args:
            rollouts: Of whole groups.
            timer: Measures it.
            shapes_rewards: Whether length changes the reward.
            environment_results: What environments add, or None.
            scorer: Which has begun with some groups; None begins here.
        """
        scored: list[ScoredRollout] = []
        problem: Exception | None = None
        limit = timedelta(minutes=self._config.timeout_minutes)
        with timer.stage("reward"), phase("reward", limit):
            # A collective: no failure of this rank alone may come before it.
            models = None
            if self._model_rewards is not None:
                models = self._model_rewards.score(rollouts, self._encoder)
            try:
                with scorer or self._group_scorer([item.prompt for item in rollouts]) as calls:
                    results = calls.results(rollouts)
                scored = score_rollouts(
                    rollouts,
                    results,
                    overlong_penalty=overlong_penalty(self._config) if shapes_rewards else None,
                    model_results=models,
                    environment_results=environment_results,
                )
            except Exception as error:  # noqa: BLE001 - told to all ranks, then raised
                problem = error
        with timer.stage("exchange"):
            return scored, exchange(problem or scored, self._strategy)


def own_positions(strategy: StrategyBase, num_total: int, *, first: int = 0) -> range:
    """Positions of this rank's prompts among `num_total` of all ranks, counted from `first`.

    A distributed sampler gives consecutive prompts to consecutive ranks, so the positions (and
    with them the random numbers of a prompt) do not depend on the number of ranks.
    """
    return range(first + strategy.get_rank(), first + num_total, strategy.world_size)


def build_requests(
    prompts: Sequence[Prompt], request_ids: Sequence[int], encoder: PromptEncoder | None = None
) -> list[GenerationRequest]:
    """One request a prompt; the request id fixes its random numbers.

    Args:
        prompts, request_ids: One id for each prompt.
        encoder: Of prompts with images or videos.
    """
    pairs = zip(prompts, request_ids, strict=True)
    return [media_request(prompt, request_id, encoder) for prompt, request_id in pairs]
