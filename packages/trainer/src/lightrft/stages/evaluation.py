"""Greedy evaluation on held-out prompts, over all ranks, without touching the training state."""

from collections.abc import Sequence

import numpy as np

from lightrft.config import TrainConfig
from lightrft.datasets.types import Prompt
from lightrft.rewards.types import RewardError
from lightrft.rollout.sampler import RolloutSampler, greedy_params


def evaluate(
    prompts: Sequence[Prompt], sampler: RolloutSampler, config: TrainConfig
) -> dict[str, float]:
    """Mean reward and components of one completion per prompt; collective.

    Every prompt counts once, whatever the number of ranks. The random numbers of training belong
    to other requests and stay as they are. With `reward_failure=mask`, prompts whose reward fails
    are left out of the means, and counted.

    Args:
        prompts: All prompts, the same list on every rank.
        sampler: Generates and scores; the engine stays awake.
        config: How.

    Returns:
        `eval/reward`, `eval/<component>`, `eval/response_length`, `eval/truncated_share`,
        `eval/num_prompts`; the same on every rank. Empty without prompts.
    """
    if not prompts:
        return {}
    _, table = sampler.sample_all(prompts, greedy_params(config))
    kept = table.take(np.flatnonzero(~table.is_masked).astype(np.int64))
    if not len(kept):
        raise RewardError("the reward failed for every prompt of the evaluation")
    metrics = {
        "eval/num_prompts": float(len(table)),
        "eval/reward": float(kept.rewards.mean()),
        "eval/response_length": float(table.sampled_lengths.mean()),
        "eval/truncated_share": float(table.is_truncated.mean()),
    }
    for column, name in enumerate(table.component_names):
        metrics[f"eval/{name}"] = float(np.nanmean(kept.components[:, column]))
    if config.reward_failure == "mask":
        metrics["eval/masked_share"] = float(table.is_masked.mean())
    return metrics
