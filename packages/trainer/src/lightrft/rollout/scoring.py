"""Rewards of rollouts, and the shaping that needs one row only."""

from collections.abc import Callable, Sequence
from itertools import groupby

from lightrft.config import TrainConfig
from lightrft.records.rollout import Rollout, ScoredRollout
from lightrft.rewards.types import RewardResult
from lightrft.rollout.group_scorer import require_finite


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
    results: Sequence[RewardResult | None],
    *,
    overlong_penalty: Callable[[int], float] | None = None,
    model_results: Sequence[RewardResult] | None = None,
    environment_results: Sequence[RewardResult | None] | None = None,
) -> list[ScoredRollout]:
    """Rollouts with the sum of their rewards.

    The components of a rollout are those of the function and, with a penalty, `overlong`;
    `ScoredRollout.reward` includes the penalty.

    Args:
        rollouts: What was scored.
        results: What the reward function says of each; None where it failed, which excludes the
            rollout from the loss, its reward being 0.
        overlong_penalty: Soft punishment of long responses, or None.
        model_results: What reward models add to each rollout, or None.
        environment_results: What environments add; None for an episode that failed, which is
            excluded. None without environments.

    Raises:
        RewardError: A reward is not finite; a failed one is never replaced by a number.
    """
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
            require_finite(rollout, reward)
        if overlong_penalty is not None:
            penalty = overlong_penalty(_longest_turn(rollout.completion.is_sampled))
            components["overlong"] = penalty
        scored.append(ScoredRollout(rollout, reward + penalty, components, unshaped_reward=reward))
    return scored


def _longest_turn(is_sampled: Sequence[bool]) -> int:
    """Tokens of the longest run that was sampled without an observation: each has its own bound."""
    return max((sum(1 for _ in run) for flag, run in groupby(is_sampled) if flag), default=0)
