"""Rewards and model outputs to advantages: shaping, estimation, one global whitening, clipping."""

from dataclasses import dataclass

import torch
from torch import Tensor

from lightrft.algorithms.advantages.row_level import estimate_row_advantages
from lightrft.algorithms.advantages.token_level import (
    broadcast_to_tokens,
    estimate_token_advantages,
    token_rewards,
    turn_discounts,
)
from lightrft.algorithms.declarations import advantage_traits
from lightrft.algorithms.kl import estimate_kl
from lightrft.algorithms.moments import Moments, masked_moments, moments_of, whiten
from lightrft.algorithms.shaping import clip_rewards, normalize_rewards
from lightrft.algorithms.types import (
    AdvantageFunction,
    RowAdvantageInputs,
    TokenAdvantageInputs,
    TokenAdvantages,
)
from lightrft.config import TrainConfig
from lightrft.records.batch import ExperienceBatch, PolicyOutputs, RolloutBatch
from lightrft.records.table import RowTable
from lightrft.strategy.strategy_base import StrategyBase


class NumericsError(RuntimeError):
    """Numbers of a step cannot be trained on, or an alarm ended the run; the message says which."""


@dataclass(frozen=True, slots=True)
class AdvantageSettings:
    """How rewards become advantages in one step.

    Args:
        config: Discounts, clip ranges and the KL estimator.
        estimator: Turns rewards into advantages.
        kl_coef: Weight of the KL penalty in the reward; 0 is off.
        moments: Of all rewards before the step, or None without running normalisation.
    """

    config: TrainConfig
    estimator: AdvantageFunction
    kl_coef: float = 0.0
    moments: Moments | None = None


@dataclass(frozen=True, slots=True)
class ShapedRewards:
    """Rewards of the rows of all ranks, as the estimator sees them.

    Args:
        rewards: [rows] float64.
        is_clipped: [rows] bool.
        moments: Of all rewards so far, or None without running normalisation.
    """

    rewards: Tensor
    is_clipped: Tensor
    moments: Moments | None


def shape_rewards(table: RowTable, moments: Moments | None, config: TrainConfig) -> ShapedRewards:
    """Running normalisation, then clipping, over the rows of all ranks.

    Args:
        table: The samples; excluded rows do not count into the moments.
        moments: Of all rewards before this step, or None without running normalisation.
        config: reward_running_norm_minus_mean and reward_clip.
    """
    rewards = torch.from_numpy(table.rewards)
    is_clipped = torch.zeros(len(table), dtype=torch.bool)
    if moments is not None:
        is_scored = torch.from_numpy(~table.is_masked)
        moments = moments.merge(moments_of(rewards[is_scored]))
        minus_mean = config.reward_running_norm_minus_mean
        rewards = normalize_rewards(rewards, moments, minus_mean=minus_mean)
    if config.reward_clip > 0:
        rewards, is_clipped = clip_rewards(rewards, limit=config.reward_clip)
    return ShapedRewards(rewards, is_clipped, moments)


def assemble(
    table: RowTable,
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
        table: The rows of all ranks.
        rows: [batch] int64, the rows of `table` that `rollouts` holds.
        rollouts, outputs: This rank's rows.
        rewards: [rows of table] from `shape_rewards`.
        greedy_rewards: [rows of table] rewards of the greedy completions; ReMax only.
        settings: How.
        strategy: Sums the moments over all ranks.

    Raises:
        NumericsError: An advantage is not finite.
    """
    estimated = _estimate(table, rows, rollouts, outputs, rewards, greedy_rewards, settings)
    advantages, mask = estimated.advantages, rollouts.response_mask
    if advantage_traits(settings.estimator).whitens or settings.config.advantages_norm:
        moments = masked_moments(
            advantages, mask, sum_over_ranks=lambda sums: strategy.reduce_over_data(sums, "sum")
        )
        advantages = whiten(advantages, mask, moments)
    clip = settings.config.advantage_clip
    if clip > 0:
        advantages = advantages.clamp(-clip, clip)
    if not bool(torch.isfinite(advantages).all()):
        bad = rollouts.sample_ids[~torch.isfinite(advantages).all(dim=1)].tolist()
        raise NumericsError(
            f"advantages must be finite: those of samples {bad[:10]} are not; look at their "
            "rewards, and at the logprobs of actor and reference model"
        )
    return ExperienceBatch(rollouts, outputs, advantages.float(), estimated.returns.float())


def _estimate(
    table: RowTable,
    rows: Tensor,
    rollouts: RolloutBatch,
    outputs: PolicyOutputs,
    rewards: Tensor,
    greedy_rewards: Tensor | None,
    settings: AdvantageSettings,
) -> TokenAdvantages:
    mask, config = rollouts.response_mask, settings.config
    kl = _reward_kl(outputs, mask, settings)
    gamma: float | Tensor = config.gamma
    if config.turn_credit == "discounted":
        gamma = turn_discounts(mask, gamma=config.gamma)
    if advantage_traits(settings.estimator).is_token_level:
        local = rewards[rows].to(mask.device, torch.float32)
        shaped = token_rewards(local, mask, kl=kl, kl_coef=settings.kl_coef)
        return estimate_token_advantages(
            settings.estimator,
            TokenAdvantageInputs(shaped, mask, outputs.values, gamma, config.lambd),
        )
    row_advantages = estimate_row_advantages(
        settings.estimator,
        RowAdvantageInputs(
            rewards=rewards,
            group_ids=torch.from_numpy(table.group_ids),
            lengths=torch.from_numpy(table.sampled_lengths),
            greedy_rewards=greedy_rewards,
            is_scored=torch.from_numpy(~table.is_masked),
        ),
    )
    return broadcast_to_tokens(
        row_advantages[rows].to(mask.device, torch.float32),
        mask,
        kl=kl,
        kl_coef=settings.kl_coef,
        gamma=gamma,
    )


def _reward_kl(outputs: PolicyOutputs, mask: Tensor, settings: AdvantageSettings) -> Tensor | None:
    if settings.kl_coef == 0 or outputs.ref_logprobs is None:
        return None
    if outputs.old_logprobs is None:
        raise RuntimeError("a KL penalty in the reward needs the logprobs before the update")
    return estimate_kl(
        outputs.old_logprobs,
        outputs.ref_logprobs,
        mask,
        estimator=settings.config.kl_estimator,
        old_logprobs=outputs.old_logprobs,
    )
