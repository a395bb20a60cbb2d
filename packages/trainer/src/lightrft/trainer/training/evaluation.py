"""Greedy evaluation on held-out prompts, over all ranks, without touching the training state."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lightrft.datasets.types import Prompt
from lightrft.engines.types import SamplingParams
from lightrft.experience.exchange import SampleTable, exchange
from lightrft.experience.model_rewards import ModelRewards
from lightrft.experience.rollouts import Decoder, build_requests, pair_completions
from lightrft.experience.scoring import score_rollouts
from lightrft.experience.types import ScoredRollout
from lightrft.rewards.errors import RewardError
from lightrft.rewards.types import RewardFunction
from lightrft.strategy.strategy_base import StrategyBase


def evaluate(
    prompts: Sequence[Prompt],
    *,
    strategy: StrategyBase,
    reward_function: RewardFunction,
    decoder: Decoder,
    sampling_params: SamplingParams,
    sleep_engine: bool,
    masks_failures: bool = False,
    model_rewards: ModelRewards | None = None,
) -> dict[str, float]:
    """Mean reward and components of one completion per prompt.

    Rank r of W completes the prompts r, r + W, ...; every prompt counts once, whatever W. The
    random numbers of training belong to other requests and stay as they are.

    Args:
        prompts: All prompts, the same list on every rank.
        strategy: Generates, and exchanges objects between ranks.
        reward_function: Scores responses.
        decoder: Turns sampled ids into text.
        sampling_params: Of one completion (n = 1).
        sleep_engine: Put the engine to sleep afterwards.
        model_rewards: Reward models, or None.
        masks_failures: Leave prompts whose reward fails out of the means, and count them.

    Returns:
        `eval/reward`, `eval/<component>`, `eval/response_length`, `eval/truncated_share`,
        `eval/num_prompts`; the same on every rank. Empty without prompts.
    """
    if not prompts:
        return {}
    table = sample_and_score(
        prompts,
        strategy=strategy,
        reward_function=reward_function,
        decoder=decoder,
        sampling_params=sampling_params,
        sleep_engine=sleep_engine,
        masks_failures=masks_failures,
        model_rewards=model_rewards,
    )
    kept = table.take(np.flatnonzero(~table.is_masked).astype(np.int64))
    if not len(kept):
        raise RewardError("the reward failed for every prompt of the evaluation")
    metrics = {
        "eval/num_prompts": float(len(table)),
        "eval/reward": float(kept.rewards.mean()),
        "eval/response_length": float(table.response_lengths.mean()),
        "eval/truncated_share": float(table.is_truncated.mean()),
    }
    for column, name in enumerate(table.component_names):
        metrics[f"eval/{name}"] = float(np.nanmean(kept.components[:, column]))
    if masks_failures:
        metrics["eval/masked_share"] = float(table.is_masked.mean())
    return metrics


def sample_and_score(
    prompts: Sequence[Prompt],
    *,
    strategy: StrategyBase,
    reward_function: RewardFunction,
    decoder: Decoder,
    sampling_params: SamplingParams,
    sleep_engine: bool,
    masks_failures: bool = False,
    model_rewards: ModelRewards | None = None,
) -> SampleTable:
    """All completions of all prompts with their rewards, the same table on every rank.

    Rank r of W completes the prompts r, r + W, ...; shares may be unequal or empty.

    Args:
        prompts, strategy, reward_function, decoder, sleep_engine, masks_failures, model_rewards:
            See `evaluate`.
        sampling_params: With n completions of each prompt.

    Returns:
        Group i holds the n rows of prompt i.
    """
    positions = range(strategy.get_rank(), len(prompts), strategy.world_size)
    own = [prompts[position] for position in positions]
    completions = strategy.gather_and_generate(
        sampling_params, build_requests(own, list(positions)), sleep_engine=sleep_engine
    )
    rollouts = pair_completions(
        own,
        list(positions),
        completions,
        group_ids=list(positions),
        group_size=sampling_params.n,
        decoder=decoder,
    )
    models = None if model_rewards is None else model_rewards.score(rollouts)
    scored: Sequence[ScoredRollout] | Exception
    try:
        scored = score_rollouts(
            rollouts, reward_function, masks_failures=masks_failures, model_results=models
        )
    except Exception as error:  # noqa: BLE001 - told to all ranks, then raised
        scored = error
    return exchange(scored, strategy)
