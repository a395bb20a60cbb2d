"""Rewards and model outputs to advantages: shaping, estimation, one global whitening, clipping."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from lightrft.algorithms.advantages.row_level import estimate_row_advantages
from lightrft.algorithms.advantages.token_level import (
    broadcast_to_tokens,
    estimate_token_advantages,
    token_rewards,
)
from lightrft.algorithms.declarations import advantage_traits
from lightrft.algorithms.kl import estimate_kl
from lightrft.algorithms.moments import Moments, masked_moments, moments_of, whiten
from lightrft.algorithms.shaping import clip_rewards, normalize_rewards
from lightrft.algorithms.types import RowAdvantageInputs, TokenAdvantageInputs
from lightrft.experience.types import ExperienceBatch

if TYPE_CHECKING:
    from torch import Tensor

    from lightrft.algorithms.types import AdvantageFunction, TokenAdvantages
    from lightrft.experience.exchange import SampleTable
    from lightrft.experience.types import PolicyOutputs, RolloutBatch
    from lightrft.strategy.strategy_base import StrategyBase


@dataclass(frozen=True, slots=True)
class AdvantageSettings:
    """How rewards become advantages.

    Args:
        estimator: Turns rewards into advantages.
        whitens: Subtract the mean and divide by the standard deviation over all response tokens
            of the step.
        advantage_clip: Bound of the magnitude of an advantage; 0 is off.
        gamma, lambd: Discount per token, and the mix of generalised advantage estimation.
        kl_reward_coef: Weight of the KL penalty in the reward; 0 is off.
        kl_estimator: Its estimator.
    """

    estimator: AdvantageFunction
    whitens: bool
    advantage_clip: float = 0.0
    gamma: float = 1.0
    lambd: float = 0.95
    kl_reward_coef: float = 0.0
    kl_estimator: str = "k1"


@dataclass(frozen=True, slots=True)
class RewardShaping:
    """What happens to the rewards of a step before advantages, over the rows of all ranks.

    Args:
        moments: Of all rewards before this step, or None without running normalisation.
        minus_mean: Subtract the running mean, too.
        clip: Bound of the magnitude of a reward; 0 is off.
    """

    moments: Moments | None = None
    minus_mean: bool = False
    clip: float = 0.0


@dataclass(frozen=True, slots=True)
class ShapedRewards:
    """Rewards of the rows of all ranks, as the estimator sees them.

    Args:
        rewards: [rows] float64.
        is_clipped: [rows] bool.
        shaping: The shaping of the next step.
    """

    rewards: Tensor
    is_clipped: Tensor
    shaping: RewardShaping


def shape_rewards(table: SampleTable, shaping: RewardShaping) -> ShapedRewards:
    """Running normalisation, then clipping. Excluded rows do not count into the moments."""
    rewards = torch.from_numpy(table.rewards)
    is_clipped = torch.zeros(len(table), dtype=torch.bool)
    if shaping.moments is not None:
        is_scored = torch.from_numpy(~table.is_masked)
        moments = shaping.moments.merge(moments_of(rewards[is_scored]))
        rewards = normalize_rewards(rewards, moments, minus_mean=shaping.minus_mean)
        shaping = replace(shaping, moments=moments)
    if shaping.clip > 0:
        rewards, is_clipped = clip_rewards(rewards, limit=shaping.clip)
    return ShapedRewards(rewards, is_clipped, shaping)


def assemble(
    table: SampleTable,
    rows: Tensor,
    rollouts: RolloutBatch,
    outputs: PolicyOutputs,
    *,
    rewards: Tensor,
    greedy_rewards: Tensor | None,
    settings: AdvantageSettings,
    strategy: StrategyBase,
) -> ExperienceBatch:
    """The experience of one rank.

    Args:
        table: The samples of all ranks.
        rows: [batch] int64, the rows of `table` that `rollouts` holds.
        rollouts, outputs: This rank's rows.
        rewards: [rows of table] from `shape_rewards`.
        greedy_rewards: [rows of table] rewards of the greedy completions; ReMax only.
        settings: How.
        strategy: Sums the moments over all ranks.

    Raises:
        RuntimeError: An advantage is not finite.
    """
    estimated = _estimate(table, rows, rollouts, outputs, rewards, greedy_rewards, settings)
    advantages, mask = estimated.advantages, rollouts.response_mask
    if settings.whitens:
        moments = masked_moments(
            advantages,
            mask,
            sum_over_ranks=lambda sums: strategy.reduce_over_data(sums, "sum"),
        )
        advantages = whiten(advantages, mask, moments)
    if settings.advantage_clip > 0:
        advantages = advantages.clamp(-settings.advantage_clip, settings.advantage_clip)
    if not bool(torch.isfinite(advantages).all()):
        bad = rollouts.sample_ids[~torch.isfinite(advantages).all(dim=1)].tolist()
        raise RuntimeError(
            f"advantages must be finite: those of samples {bad[:10]} are not; look at their "
            "rewards, and at the logprobs of actor and reference model"
        )
    return ExperienceBatch(rollouts, outputs, advantages.float(), estimated.returns.float())


def _estimate(
    table: SampleTable,
    rows: Tensor,
    rollouts: RolloutBatch,
    outputs: PolicyOutputs,
    rewards: Tensor,
    greedy_rewards: Tensor | None,
    settings: AdvantageSettings,
) -> TokenAdvantages:
    mask = rollouts.response_mask
    kl = _reward_kl(outputs, mask, settings)
    if advantage_traits(settings.estimator).is_token_level:
        local = rewards[rows].to(mask.device, torch.float32)
        shaped = token_rewards(local, mask, kl=kl, kl_coef=settings.kl_reward_coef)
        return estimate_token_advantages(
            settings.estimator,
            TokenAdvantageInputs(shaped, mask, outputs.values, settings.gamma, settings.lambd),
        )
    row_advantages = estimate_row_advantages(
        settings.estimator,
        RowAdvantageInputs(
            rewards=rewards,
            group_ids=torch.from_numpy(table.group_ids),
            lengths=torch.from_numpy(table.response_lengths),
            greedy_rewards=greedy_rewards,
            is_scored=torch.from_numpy(~table.is_masked),
        ),
    )
    return broadcast_to_tokens(
        row_advantages[rows].to(mask.device, torch.float32),
        mask,
        kl=kl,
        kl_coef=settings.kl_reward_coef,
        gamma=settings.gamma,
    )


def _reward_kl(outputs: PolicyOutputs, mask: Tensor, settings: AdvantageSettings) -> Tensor | None:
    if settings.kl_reward_coef == 0 or outputs.ref_logprobs is None:
        return None
    if outputs.old_logprobs is None:
        raise RuntimeError("a KL penalty in the reward needs the logprobs before the update")
    return estimate_kl(
        outputs.old_logprobs,
        outputs.ref_logprobs,
        mask,
        estimator=settings.kl_estimator,
        old_logprobs=outputs.old_logprobs,
    )
