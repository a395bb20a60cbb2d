"""Rewards of rollouts, and the shaping that needs one row only."""

import math
from collections.abc import Callable, Sequence
from itertools import groupby

from lightrft.config import TrainConfig
from lightrft.experience.types import Rollout, ScoredRollout
from lightrft.rewards.types import RewardError, RewardFunction, RewardResult

# So many failures of single samples mean that the function itself is broken.
MAX_FAILURES_IN_A_ROW = 3


def overlong_penalty(config: TrainConfig) -> Callable[[int], float] | None:
    """What is added to the reward of a response by the tokens of its longest turn; or None.

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
    reward_function: RewardFunction,
    *,
    overlong_penalty: Callable[[int], float] | None = None,
    masks_failures: bool = False,
    model_results: Sequence[RewardResult] | None = None,
    environment_results: Sequence[RewardResult | None] | None = None,
) -> list[ScoredRollout]:
    """Scores the rollouts of one rank with one call of the reward function.

    The components of a rollout are those of the function and, with a penalty, `overlong`;
    `ScoredRollout.reward` includes the penalty.

    Args:
        rollouts: What to score.
        reward_function: Scores responses.
        overlong_penalty: Soft punishment of long responses, or None.
        masks_failures: If the call fails, score the rollouts one by one and exclude those that
            fail from the loss, their reward being 0; after three failures in a row the rest is
            excluded untried.
        model_results: What reward models add to each rollout, or None.
        environment_results: What environments add; None for an episode that failed, which is
            excluded. None without environments.

    Raises:
        RewardError: The function returned another number of results, or a value that is not
            finite; a failed reward is never replaced by a number.
    """
    if not rollouts:
        return []
    results: Sequence[RewardResult | None]
    try:
        results = _results(rollouts, reward_function)
    except RewardError:
        if not masks_failures:
            raise
        results = _results_one_by_one(rollouts, reward_function)
    scored: list[ScoredRollout] = []
    for index, (rollout, result) in enumerate(zip(rollouts, results, strict=True)):
        sources = [s[index] for s in (model_results, environment_results) if s is not None]
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
            _check_finite(rollout, reward)
        if overlong_penalty is not None:
            penalty = overlong_penalty(_longest_turn(rollout.completion.is_sampled))
            components["overlong"] = penalty
        scored.append(ScoredRollout(rollout, reward + penalty, components, unshaped_reward=reward))
    return scored


def _longest_turn(is_sampled: Sequence[bool]) -> int:
    """Tokens of the longest run that was sampled without an observation: each has its own bound."""
    return max((sum(1 for _ in run) for flag, run in groupby(is_sampled) if flag), default=0)


def _results(
    rollouts: Sequence[Rollout], reward_function: RewardFunction
) -> Sequence[RewardResult]:
    names = sorted({name for rollout in rollouts for name in rollout.prompt.columns})
    results = reward_function.score(
        [rollout.prompt.text for rollout in rollouts],
        [rollout.response_text for rollout in rollouts],
        [rollout.prompt.label for rollout in rollouts],
        {name: [rollout.prompt.columns.get(name) for rollout in rollouts] for name in names},
    )
    if len(results) != len(rollouts):
        raise RewardError(
            f"the reward function must return one result per response: got {len(results)} for "
            f"{len(rollouts)} responses"
        )
    for rollout, result in zip(rollouts, results, strict=True):
        _check_finite(rollout, result.reward)
    return results


def _results_one_by_one(
    rollouts: Sequence[Rollout], reward_function: RewardFunction
) -> list[RewardResult | None]:
    results: list[RewardResult | None] = []
    num_failures_in_a_row = 0
    for rollout in rollouts:
        result: RewardResult | None = None
        if num_failures_in_a_row < MAX_FAILURES_IN_A_ROW:
            try:
                result = _results([rollout], reward_function)[0]
            except RewardError:
                num_failures_in_a_row += 1
            else:
                num_failures_in_a_row = 0
        results.append(result)
    return results


def _check_finite(rollout: Rollout, reward: float) -> None:
    if not math.isfinite(reward):
        raise RewardError(
            f"rewards must be finite numbers: got {reward!r} for prompt {rollout.prompt.id} and "
            f"the response {rollout.response_text[:200]!r}; fix the reward function"
        )
