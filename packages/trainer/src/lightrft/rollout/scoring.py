"""Rewards of rollouts, the shaping that needs one row only, and the samples of a source."""

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
from lightrft.rewards.types import (
    CONVERSATIONS,
    ENVIRONMENTS,
    MEDIA_COLUMNS,
    UNDECIDED,
    CallStyle,
    KeptEnvironment,
    RewardError,
    RewardFunction,
    RewardResult,
    UsesEngine,
)
from lightrft.rollout.ledger_records import take_evidence
from lightrft.rollout.source import SampleRequests, Samples, SourceParts
from lightrft.strategy.distributed.deadlines import phase

# So many failures in a row mean that the function itself is broken.
MAX_FAILURES_IN_A_ROW = 3

GroupResults = Sequence[RewardResult | None]


class GroupScorer:
    """Scores rollouts with one call for each group; a context manager that waits for no call.

    A function that computes elsewhere (in processes of its own, behind a service) scores groups
    while others are still generated; any other one scores them in the caller's thread, when the
    results are asked for. The calls are the same, and results have the places of their rollouts,
    so that timing changes nothing. A function with `whole_batch` gets one call for everything.

    Args:
        reward_function: Scores responses.
        columns: Names of the data's columns; every call gets all of them.
        ledger: Receives each reward when it is given; None is one that nobody reads.
        masks_failures: Where a call fails, score its rollouts one by one, and give None for those
            that fail; after three failures in a row the rest of the call is not tried, and after
            three groups in a row, of which nothing was scored, no later group counts.
        has_media: Every call gets the media of its prompts, as the columns `images` and `videos`.
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
        style = reward_function if isinstance(reward_function, CallStyle) else None
        self._function = reward_function
        self._columns = sorted(set(columns))
        self._masks_failures, self._has_media = masks_failures, has_media
        self._ledger = ledger or SampleLedger()
        self._is_whole = style is not None and style.whole_batch
        self._num_threads = 0 if style is None or self._is_whole else style.parallel_calls
        self._threads: ThreadPoolExecutor | None = None
        self._calls: dict[int, Future[GroupResults]] = {}
        self._is_closed = threading.Event()
        # The group with the smallest id whose call has failed.
        self._lock = threading.Lock()
        self._failed_group: int | None = None

    @property
    def overlaps(self) -> bool:
        """Whether `add` starts a call."""
        return self._num_threads > 0

    def add(self, group: Sequence[Rollout]) -> None:
        """Begins to score a group, where that does not hold up the caller.

        Args:
            group: All its rollouts, as they will be given to `results`.
        """
        if not self.overlaps:
            return
        if self._threads is None:
            self._threads = ThreadPoolExecutor(self._num_threads, thread_name_prefix="reward-call")
        group_id = group[0].group_id
        self._calls[group_id] = self._threads.submit(self._score_in_thread, group_id, group)

    def results(self, rollouts: Sequence[Rollout]) -> GroupResults:
        """One result for each rollout, in order: None where it failed, or `UNDECIDED`.

        Args:
            rollouts: Of whole groups.

        Raises:
            RewardError: The call of a group failed; of several, that of the first one.
        """
        whole = self._whole(rollouts) if self._is_whole else None
        if whole is not None:
            return whole
        places: dict[int, list[int]] = {}
        for place, rollout in enumerate(rollouts):
            places.setdefault(rollout.group_id, []).append(place)
        groups = {key: [rollouts[place] for place in found] for key, found in places.items()}
        for key, group in groups.items():
            if key not in self._calls:
                self.add(group)
        results: list[RewardResult | None] = [None] * len(rollouts)
        num_broken, scored = 0, set[int]()
        for key, group in groups.items():
            call = self._calls.get(key)
            found = self._score(group) if call is None else call.result()
            for place, result in zip(places[key], found, strict=True):
                results[place] = result
            scored.update(places[key])
            num_broken = num_broken + 1 if all(result is None for result in found) else 0
            if num_broken == MAX_FAILURES_IN_A_ROW:
                self.close()
                break
        for place in set(range(len(rollouts))) - scored:
            entry = self._ledger.of(rollouts[place].sample_id)
            entry.has_failed = entry.is_abandoned = True
        return results

    def close(self) -> None:
        """Begins no further call."""
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
            return []  # nobody asks for it: the error of the earlier group is raised before
        try:
            return self._score(group)
        except BaseException:
            with self._lock:
                known = self._failed_group
                self._failed_group = group_id if known is None else min(group_id, known)
            raise

    def _whole(self, rollouts: Sequence[Rollout]) -> GroupResults | None:
        """The results of one call for everything; None if it failed and groups are to be tried."""
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
        rest = [
            dict(zip(columns, found, strict=True)) for found in zip(*columns.values(), strict=True)
        ]
        given = list(zip(texts, labels, rest or [{}] * len(rows), strict=True))
        offered: dict[str, Sequence[object]] = {
            **self._media_columns(rollouts),
            CONVERSATIONS: [rollout.messages for rollout in rollouts],
            **columns,
            **_kept_environments(rollouts),
        }
        results = self._function.score(texts, responses, labels, offered)
        _check_results(rollouts, results)
        found = [UNDECIDED if result is None else result for result in results]
        for rollout, values, result in zip(rollouts, given, found, strict=True):
            entry = self._ledger.of(rollout.sample_id)
            entry.given = values
            entry.reward_is(FUNCTION, result, rollout.token_ids)
        return found

    def _media_columns(self, rollouts: Sequence[Rollout]) -> dict[str, list[Media]]:
        """The media of each prompt by their columns; {} for prompts of text."""
        if not self._has_media:
            return {}
        given = [rollout.prompt_media for rollout in rollouts]
        return {
            kind.plural: [Media({name: media[name]}) for media in given]
            for name, kind in MEDIA_KINDS.items()
            if kind.plural in MEDIA_COLUMNS
        }


def _kept_environments(rollouts: Sequence[Rollout]) -> dict[str, list[KeptEnvironment]]:
    """What environments kept, by its column; {} where nothing is kept."""
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
    """Raises a RewardError that names the prompt, unless the reward is a finite number."""
    if not math.isfinite(reward):
        raise RewardError(
            f"rewards must be finite numbers: got {reward!r} for prompt {rollout.prompt.id} and "
            f"the response {rollout.response_text[:200]!r}; fix the reward function"
        )


def overlong_penalty(config: LearningOptions) -> Callable[[int], float] | None:
    """Addition to the reward of a response by the tokens of its longest turn; or None.

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
    """Rollouts with the sum of their rewards.

    The components of a rollout are those of the function and, with a penalty, `overlong`;
    `ScoredRollout.reward` includes the penalty.

    Args:
        rollouts: What was scored.
        results: What the reward function says of each. None, where it failed, and `UNDECIDED`
            exclude the rollout from the loss, its reward being 0.
        overlong_penalty: Soft punishment of long responses, or None.
        model_results: What reward models add to each rollout; () without them.
        environment_results: What environments add; None for an episode that failed, which is
            excluded. () without environments.
        ledger: Receives the penalties; None is one that nobody reads.

    Raises:
        RewardError: A reward is not finite; a failed one is never replaced by a number.
    """
    scored: list[ScoredRollout] = []
    for index, (rollout, result) in enumerate(zip(rollouts, results, strict=True)):
        rollout = replace(rollout, environment=None)  # read by now
        sources = [given[index] for given in (model_results, environment_results) if given]
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
            penalty = overlong_penalty(_longest_turn(rollout.completion.is_sampled))
            components["overlong"] = penalty
            if ledger is not None:
                ledger.of(rollout.sample_id).penalty = penalty
        scored.append(ScoredRollout(rollout, reward + penalty, components, unshaped_reward=reward))
    return scored


def _longest_turn(is_sampled: Sequence[bool]) -> int:
    """Tokens of the longest run that was sampled without an observation: each has its own bound."""
    return max((sum(1 for _ in run) for flag, run in groupby(is_sampled) if flag), default=0)


def open_scorer(parts: SourceParts, requests: SampleRequests) -> GroupScorer:
    """A scorer of rollouts of the prompts of these requests."""
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
    """The samples of one batch of prompts, scored, with their evidence; collective.

    Args:
        parts: Of the run.
        requests: What was asked for.
        rollouts: Of whole groups.
        scorer: Of these groups; it may have begun with some.
        environment_results: What environments add; () without them.
        special_ids: Ids that no text of an observation may have.
        carried: Ledger entries of earlier steps, of these rollouts and of those that go on.
        branches: Further rows of episodes by the sample id of their first ones, whose rewards they
            get; None without.
    """
    config, timer, scored = parts.config, requests.timer, list[ScoredRollout]()
    problem: Exception | None = None
    with timer.stage("reward"), phase("reward", timedelta(minutes=config.timeout_minutes)):
        # A collective: no failure of this rank alone may come before it.
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
        except Exception as error:  # noqa: BLE001 - told to all ranks, then raised
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
    """Scored rollouts, and behind them the further rows of their episodes, with their rewards.

    Args:
        scored: First rows.
        branches: By sample id of the first row.
        ledger: Receives that the rewards are those of the further rows, too.
    """
    further = []
    for item in scored:
        first = ledger.of(item.rollout.sample_id)
        for row in branches.get(item.rollout.sample_id, ()):
            ledger.of(row.sample_id).share(first, row.token_ids)
            further.append(replace(item, rollout=row))
    return [*scored, *further]


def require_rewards(table: RowTable, greedy: RowTable | None = None) -> None:
    """Raises a RewardError if the reward failed for every sample of a step.

    Args:
        table: The samples; those without a baseline are masked.
        greedy: The completions that they are compared with, or None.
    """
    tables = [table] if greedy is None else [table, greedy]
    if table.is_masked.all() and not any(each.is_undecided.any() for each in tables):
        baseline = "" if greedy is None else ", or for the greedy completions that they need"
        raise RewardError(
            f"the reward failed for all {len(table)} samples of the step{baseline}: there is "
            "nothing to train on; run with reward_failure=raise to see the cause"
        )
