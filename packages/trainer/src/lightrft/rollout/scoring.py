"""Rewards of rollouts, shaping of single rows, and scored samples of a source."""

import math
import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from itertools import groupby
from typing import Self

from lightrft.config import LearningOptions
from lightrft.engines.ledger import LedgerEntry
from lightrft.engines.media.media import MEDIA_KINDS, Media
from lightrft.records.rollout import Rollout, ScoredRollout
from lightrft.records.sample_ledger import FUNCTION, MODELS, SampleLedger
from lightrft.records.table import RowTable, exchange
from lightrft.rewards.build import call_style
from lightrft.rewards.types import (
    CONVERSATIONS,
    ENVIRONMENTS,
    MEDIA_COLUMNS,
    UNDECIDED,
    KeptEnvironment,
    RewardError,
    RewardFunction,
    RewardResult,
    UsesEngine,
)
from lightrft.rollout.ledger_records import take_evidence
from lightrft.rollout.source import SampleRequests, Samples, SourceParts
from lightrft.strategy.distributed.deadlines import phase

# After this many failures in a row, the function itself counts as broken.
MAX_FAILURES_IN_A_ROW = 3

GroupResults = Sequence[RewardResult | None]


class GroupScorer:
    """Scorer that calls the reward function once per group; a context manager.

    On exit it waits for no call. A function that computes elsewhere (in separate processes, behind
    a service) scores groups while others are still generated. Any other function scores them in
    the caller's thread when `results` is called. Both make the same calls and return results in
    the order of the rollouts, so timing does not matter. A function with `whole_batch` gets one
    call for all rollouts.

    Args:
        reward_function: Function that scores responses.
        columns: Names of the data's columns; every call gets all of them.
        ledger: Ledger that records the rewards; None keeps no record.
        masks_failures: Whether to score the rollouts of a failed call one by one, with the result
            None for those that fail. After three failures in a row the rest of the call is
            skipped. After three groups in a row without a score, later groups are skipped too.
        has_media: Whether calls get the media of their prompts as columns `images` and `videos`.
    """

    def __init__(
        self,
        reward_function: RewardFunction,
        *,
        columns: Iterable[str] = (),
        masks_failures: bool = False,
        ledger: SampleLedger | None = None,
        has_media: bool = False,
    ) -> None:
        parallel_calls, self._is_whole = call_style(reward_function)
        self._function = reward_function
        self._columns = sorted(set(columns))
        self._masks_failures, self._has_media = masks_failures, has_media
        self._ledger = ledger or SampleLedger()
        self._num_threads = 0 if self._is_whole else parallel_calls
        self._threads: ThreadPoolExecutor | None = None
        self._calls: dict[int, Future[GroupResults]] = {}
        self._is_closed = threading.Event()
        # The group with the smallest id whose call has failed.
        self._lock = threading.Lock()
        self._failed_group: int | None = None

    @property
    def overlaps(self) -> bool:
        """Return whether `add` starts a call."""
        return self._num_threads > 0

    def add(self, group: Sequence[Rollout]) -> None:
        """Begin to score a group if this does not block the caller.

        Args:
            group: All rollouts of the group, as they will be passed to `results`.
        """
        if not self.overlaps:
            return
        if self._threads is None:
            self._threads = ThreadPoolExecutor(self._num_threads, thread_name_prefix="reward-call")
        group_id = group[0].group_id
        self._calls[group_id] = self._threads.submit(self._score_in_thread, group_id, group)

    def results(self, rollouts: Sequence[Rollout]) -> GroupResults:
        """Return one result per rollout, in order; None for a failure, or `UNDECIDED`.

        Args:
            rollouts: Rollouts of whole groups.

        Raises:
            RewardError: The call of a group failed; of several errors, the first group's.
        """
        whole = self._whole(rollouts) if self._is_whole else None
        if whole is not None:
            return whole
        groups: dict[int, list[Rollout]] = {}
        for rollout in rollouts:
            groups.setdefault(rollout.group_id, []).append(rollout)
        for key, group in groups.items():
            if key not in self._calls:
                self.add(group)
        results: dict[int, RewardResult | None] = {}
        num_broken = 0
        for key, group in groups.items():
            call = self._calls.get(key)
            group_results = self._score(group) if call is None else call.result()
            results |= {id(r): each for r, each in zip(group, group_results, strict=True)}
            num_broken = num_broken + 1 if all(result is None for result in group_results) else 0
            if num_broken == MAX_FAILURES_IN_A_ROW:
                self.close()
                break
        for rollout in rollouts:
            if id(rollout) not in results:
                entry = self._ledger.of(rollout.sample_id)
                entry.has_failed = entry.is_abandoned = True
        return [results.get(id(rollout)) for rollout in rollouts]

    def close(self) -> None:
        """Prevent further calls."""
        self._is_closed.set()
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _score_in_thread(self, group_id: int, group: Sequence[Rollout]) -> GroupResults:
        with self._lock:
            failed = self._failed_group
        if failed is not None and group_id > failed:
            return []  # not needed: the earlier group's error is raised first
        try:
            return self._score(group)
        except BaseException:
            with self._lock:
                known = self._failed_group
                self._failed_group = group_id if known is None else min(group_id, known)
            raise

    def _whole(self, rollouts: Sequence[Rollout]) -> GroupResults | None:
        """Return results of one call for all rollouts; None if it failed and groups come next."""
        try:
            return self.call_reward(rollouts) if rollouts else []
        except RewardError:
            if not self._masks_failures:
                raise
        return None

    def _score(self, rollouts: Sequence[Rollout]) -> GroupResults:
        try:
            return self.call_reward(rollouts)
        except RewardError:
            if not self._masks_failures:
                raise
        results: list[RewardResult | None] = []
        num_failures = 0
        for rollout in rollouts:
            result: RewardResult | None = None
            if num_failures < MAX_FAILURES_IN_A_ROW and not self._is_closed.is_set():
                try:
                    (result,) = self.call_reward([rollout])
                except RewardError:
                    num_failures += 1
                else:
                    num_failures = 0
            if result is None:
                self._ledger.of(rollout.sample_id).has_failed = True
            results.append(result)
        return results

    def call_reward(self, rollouts: Sequence[Rollout]) -> Sequence[RewardResult]:
        """Score rollouts with one call of the reward function."""
        rows = [rollout.prompt for rollout in rollouts]
        texts, labels = [row.text for row in rows], [row.label for row in rows]
        columns = {name: [row.columns.get(name) for row in rows] for name in self._columns}
        responses = [rollout.response_text for rollout in rollouts]
        rest = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
        inputs = list(zip(texts, labels, rest or [{}] * len(rows), strict=True))
        offered: dict[str, Sequence[object]] = {
            **self._media_columns(rollouts),
            CONVERSATIONS: [rollout.messages for rollout in rollouts],
            **columns,
            **_kept_environments(rollouts),
        }
        results = self._function.score(texts, responses, labels, offered)
        _check_results(rollouts, results)
        rewards = [UNDECIDED if result is None else result for result in results]
        for rollout, values, result in zip(rollouts, inputs, rewards, strict=True):
            entry = self._ledger.of(rollout.sample_id)
            entry.given = values
            entry.reward_is(FUNCTION, result, rollout.token_ids)
        return rewards

    def _media_columns(self, rollouts: Sequence[Rollout]) -> dict[str, list[Media]]:
        """Return the media of each prompt by column; {} for text-only prompts."""
        if not self._has_media:
            return {}
        prompt_media = [rollout.prompt_media for rollout in rollouts]
        return {
            kind.plural: [Media({name: media[name]}) for media in prompt_media]
            for name, kind in MEDIA_KINDS.items()
            if kind.plural in MEDIA_COLUMNS
        }


def _kept_environments(rollouts: Sequence[Rollout]) -> dict[str, list[KeptEnvironment]]:
    """Return kept environments by column; {} if none were kept."""
    if all(rollout.environment is None for rollout in rollouts):
        return {}
    return {ENVIRONMENTS: [rollout.environment or KeptEnvironment() for rollout in rollouts]}


def _check_results(rollouts: Sequence[Rollout], results: Sequence[RewardResult | None]) -> None:
    if len(results) != len(rollouts):
        raise RewardError(
            f"the reward function must return one result per response: got {len(results)} for "
            f"{len(rollouts)} responses"
        )
    for rollout, result in zip(rollouts, results, strict=True):
        if result is not None:
            require_finite(rollout, result.reward)


def require_finite(rollout: Rollout, reward: float) -> None:
    """Raise a RewardError that names the prompt if the reward is not finite."""
    if not math.isfinite(reward):
        raise RewardError(
            f"rewards must be finite numbers: got {reward!r} for prompt {rollout.prompt.id} and "
            f"the response {rollout.response_text[:200]!r}; fix the reward function"
        )


def overlong_penalty(config: LearningOptions) -> Callable[[int], float] | None:
    """Return the reward penalty as a function of the tokens in the longest turn; or None.

    At most 0: 0 up to max_tokens - buffer_tokens, then linear, -factor at max_tokens and beyond.

    Source: Yu et al. 2025 (DAPO), arXiv:2503.14476, eq. 13.
    """
    if not config.overlong_buffer:
        return None
    size, factor = config.overlong_buffer_len, config.overlong_buffer_penalty_factor

    def penalty(num_tokens: int) -> float:
        excess = num_tokens - (config.generate_max_len - size)
        return -factor * min(max(excess / size, 0.0), 1.0)

    return penalty


def score_rollouts(
    rollouts: Sequence[Rollout],
    results: Sequence[RewardResult | None],
    *,
    overlong_penalty: Callable[[int], float] | None = None,
    model_results: Sequence[RewardResult] = (),
    environment_results: Sequence[RewardResult | None] = (),
    ledger: SampleLedger | None = None,
) -> list[ScoredRollout]:
    """Return rollouts with the sum of their rewards.

    A rollout has the components of the function and, with a penalty, `overlong`;
    `ScoredRollout.reward` includes the penalty.

    Args:
        rollouts: Rollouts that were scored.
        results: Results of the reward function. None (a failure) and `UNDECIDED` exclude the
            rollout from the loss, with reward 0.
        overlong_penalty: Soft penalty for long responses, or None.
        model_results: Rewards of the reward models; () without them.
        environment_results: Rewards of the environments; None excludes a failed episode. ()
            without environments.
        ledger: Ledger that records the penalties; None keeps no record.

    Raises:
        RewardError: A reward is not finite; a failed one is never replaced by a number.
    """
    scored: list[ScoredRollout] = []
    for index, (rollout, result) in enumerate(zip(rollouts, results, strict=True)):
        rollout = replace(rollout, environment=None)  # read by now
        sources = [added[index] for added in (model_results, environment_results) if added]
        if result is None or result is UNDECIDED or None in sources:
            known = UNDECIDED.components if result is UNDECIDED else {}
            scored.append(ScoredRollout(rollout, 0.0, known, is_masked=True))
            continue
        penalty, reward = 0.0, result.reward
        components = dict(result.components)
        for added in sources:
            if added is None:
                continue
            reward += added.reward
            components |= added.components
            require_finite(rollout, reward)
        if overlong_penalty is not None:
            # Each sampled run between observations has its limit.
            runs = groupby(rollout.completion.is_sampled)
            longest = max((sum(1 for _ in run) for flag, run in runs if flag), default=0)
            penalty = overlong_penalty(longest)
            components["overlong"] = penalty
            if ledger is not None:
                ledger.of(rollout.sample_id).penalty = penalty
        scored.append(ScoredRollout(rollout, reward + penalty, components, unshaped_reward=reward))
    return scored


def open_scorer(parts: SourceParts, requests: SampleRequests) -> GroupScorer:
    """Return a scorer for rollouts of the requests' prompts."""
    engine = parts.session.engine
    if engine is not None and isinstance(parts.reward_function, UsesEngine):
        parts.reward_function.use_engine(engine)
    return GroupScorer(
        parts.reward_function,
        columns={name for prompt in requests.prompts for name in prompt.columns},
        masks_failures=parts.config.reward_failure == "mask",
        ledger=requests.ledger,
        has_media=any(prompt.media for prompt in requests.prompts)
        or (parts.config.has_agent and parts.encoder.reads_media),
    )


def finished_samples(
    parts: SourceParts,
    requests: SampleRequests,
    rollouts: Sequence[Rollout],
    *,
    scorer: GroupScorer,
    environment_results: Sequence[RewardResult | None] = (),
    special_ids: Collection[int] = (),
    carried: Iterable[LedgerEntry] = (),
    branches: Mapping[int, Sequence[Rollout]] | None = None,
) -> Samples:
    """Return one batch of samples, scored, with their evidence; collective.

    Args:
        parts: Parts of the run.
        requests: Requests that were sampled.
        rollouts: Rollouts of whole groups.
        scorer: Scorer of these groups; it may have begun some of them.
        environment_results: Rewards of the environments; () without them.
        special_ids: Token ids that the text of an observation must not contain.
        carried: Ledger entries from earlier steps, of these rollouts and of unfinished ones.
        branches: Further rows of episodes by the sample id of the first row, whose reward they
            share; None without branches.
    """
    config, timer, scored = parts.config, requests.timer, list[ScoredRollout]()
    problem: Exception | None = None
    with timer.stage("reward"), phase("reward", timedelta(minutes=config.timeout_minutes)):
        # A collective: this rank must not fail alone before it.
        models: Sequence[RewardResult] = ()
        if parts.model_rewards is not None:
            models = parts.model_rewards.score(rollouts, parts.encoder)
            for rollout, result in zip(rollouts, models, strict=True):
                requests.ledger.of(rollout.sample_id).reward_is(MODELS, result)
        try:
            with scorer:
                results = scorer.results(rollouts)
            scored = score_rollouts(
                rollouts,
                results,
                overlong_penalty=overlong_penalty(config) if requests.shapes_rewards else None,
                model_results=models,
                environment_results=environment_results,
                ledger=requests.ledger,
            )
            scored = with_branches(scored, branches or {}, requests.ledger)
        except Exception as error:  # noqa: BLE001 - sent to all ranks, then raised
            problem = error
    with timer.stage("exchange"):
        table = exchange(problem or scored, parts.context)
        evidence = None
        if config.ledger_gate and parts.session.engine is not None and requests.is_recorded:
            rows = [item.rollout for item in scored]
            evidence = take_evidence(
                rows,
                parts.session,
                ledger=requests.ledger,
                special_ids=special_ids,
                carried=carried,
            )
    return Samples(scored, table, requests.num_prompts, evidence=evidence)


def with_branches(
    scored: Sequence[ScoredRollout],
    branches: Mapping[int, Sequence[Rollout]],
    ledger: SampleLedger,
) -> list[ScoredRollout]:
    """Append the further rows of episodes, with the rewards of their first rows.

    Args:
        scored: First rows of the episodes.
        branches: Further rows by sample id of the first row.
        ledger: Ledger that records the shared rewards.
    """
    further = []
    for item in scored:
        first = ledger.of(item.rollout.sample_id)
        for row in branches.get(item.rollout.sample_id, ()):
            ledger.of(row.sample_id).share(first, row.token_ids)
            further.append(replace(item, rollout=row))
    return [*scored, *further]


def require_rewards(table: RowTable, greedy: RowTable | None = None) -> None:
    """Raise a RewardError if the reward failed for every sample of a step.

    Args:
        table: Samples; those without a baseline are masked.
        greedy: Greedy completions that serve as baseline, or None.
    """
    tables = [table] if greedy is None else [table, greedy]
    if table.is_masked.all() and not any(each.is_undecided.any() for each in tables):
        baseline = "" if greedy is None else ", or for the greedy completions that they need"
        raise RewardError(
            f"the reward failed for all {len(table)} samples of the step{baseline}: there is "
            "nothing to train on; run with reward_failure=raise to see the cause"
        )
