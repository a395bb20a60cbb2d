"""Rewards of rollouts, the shaping that needs one row only, and the samples of a source."""

from collections.abc import Callable, Collection, Sequence
from datetime import timedelta
from itertools import groupby

from lightrft.config import TrainConfig
from lightrft.datasets.types import Prompt
from lightrft.engines.ledger import LedgerEntry
from lightrft.records.rollout import Rollout, ScoredRollout
from lightrft.records.table import RowTable, exchange
from lightrft.rewards.types import RewardError, RewardResult
from lightrft.rollout.group_scorer import GroupScorer, require_finite
from lightrft.rollout.ledger_records import Evidence, share_entries, take_evidence
from lightrft.rollout.source import SampleRequests, Samples, SourceParts
from lightrft.strategy.distributed.deadlines import phase


def overlong_penalty(config: TrainConfig) -> Callable[[int], float] | None:
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
) -> list[ScoredRollout]:
    """Rollouts with the sum of their rewards.

    The components of a rollout are those of the function and, with a penalty, `overlong`;
    `ScoredRollout.reward` includes the penalty.

    Args:
        rollouts: What was scored.
        results: What the reward function says of each; None where it failed, which excludes the
            rollout from the loss, its reward being 0.
        overlong_penalty: Soft punishment of long responses, or None.
        model_results: What reward models add to each rollout; () without them.
        environment_results: What environments add; None for an episode that failed, which is
            excluded. () without environments.

    Raises:
        RewardError: A reward is not finite; a failed one is never replaced by a number.
    """
    scored: list[ScoredRollout] = []
    for index, (rollout, result) in enumerate(zip(rollouts, results, strict=True)):
        sources = [given[index] for given in (model_results, environment_results) if given]
        if result is None or None in sources:
            scored.append(ScoredRollout(rollout, 0.0, is_masked=True))
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
        scored.append(ScoredRollout(rollout, reward + penalty, components, unshaped_reward=reward))
    return scored


def _longest_turn(is_sampled: Sequence[bool]) -> int:
    """Tokens of the longest run that was sampled without an observation: each has its own bound."""
    return max((sum(1 for _ in run) for flag, run in groupby(is_sampled) if flag), default=0)


def open_scorer(parts: SourceParts, prompts: Sequence[Prompt]) -> GroupScorer:
    """A scorer of rollouts of these prompts."""
    return GroupScorer(
        parts.reward_function,
        columns={name for prompt in prompts for name in prompt.columns},
        masks_failures=parts.config.reward_failure == "mask",
    )


def finished_samples(
    parts: SourceParts,
    requests: SampleRequests,
    rollouts: Sequence[Rollout],
    *,
    scorer: GroupScorer,
    environment_results: Sequence[RewardResult | None] = (),
    special_ids: Collection[int] = (),
    carried: Sequence[LedgerEntry] | None = None,
) -> Samples:
    """The samples of one batch of prompts, scored, with their evidence; collective.

    Args:
        parts: Of the run.
        requests: What was asked for.
        rollouts: Of whole groups.
        scorer: Of these groups; it may have begun with some.
        environment_results: What environments add; () without them.
        special_ids: Ids that no text of an observation may have.
        carried: See `_evidence`.
    """
    scored, table = score(
        parts, requests, rollouts, scorer=scorer, environment_results=environment_results
    )
    evidence = None
    gated = parts.config.ledger_gate and parts.session.engine is not None
    if gated and requests.is_recorded:
        with requests.timer.stage("exchange"):
            evidence = _evidence(parts, rollouts, special_ids, carried)
    return Samples(scored, table, requests.num_prompts, evidence=evidence)


def _evidence(
    parts: SourceParts,
    rollouts: Sequence[Rollout],
    special_ids: Collection[int],
    carried: Sequence[LedgerEntry] | None,
) -> Evidence:
    """Facts of this rank for the ledger gate; collective.

    Responses that go on in the next step may do so on any rank, so with `carried`, the entries of
    earlier steps, every rank gets the entries of all.
    """
    own = take_evidence(rollouts, parts.session, special_ids=special_ids)
    return own if carried is None else share_entries(own, carried, parts.context)


def score(
    parts: SourceParts,
    requests: SampleRequests,
    rollouts: Sequence[Rollout],
    *,
    scorer: GroupScorer,
    environment_results: Sequence[RewardResult | None] = (),
) -> tuple[list[ScoredRollout], RowTable]:
    """Scored rollouts of this rank, and the table of all ranks; collective.

    Args:
        parts, requests, rollouts, scorer, environment_results: See `finished_samples`.
    """
    config, scored = parts.config, list[ScoredRollout]()
    problem: Exception | None = None
    limit = timedelta(minutes=config.timeout_minutes)
    with requests.timer.stage("reward"), phase("reward", limit):
        # A collective: no failure of this rank alone may come before it.
        models: Sequence[RewardResult] = ()
        if parts.model_rewards is not None:
            models = parts.model_rewards.score(rollouts, parts.encoder)
        try:
            with scorer:
                results = scorer.results(rollouts)
            scored = score_rollouts(
                rollouts,
                results,
                overlong_penalty=overlong_penalty(config) if requests.shapes_rewards else None,
                model_results=models,
                environment_results=environment_results,
            )
        except Exception as error:  # noqa: BLE001 - told to all ranks, then raised
            problem = error
    with requests.timer.stage("exchange"):
        return scored, exchange(problem or scored, parts.context)


def require_rewards(table: RowTable) -> None:
    """Raises a RewardError if the reward failed for every sample of a step."""
    if table.is_masked.all():
        raise RewardError(
            f"the reward failed for all {len(table)} samples of the step: there is nothing to "
            "train on; run with reward_failure=raise to see the cause"
        )
