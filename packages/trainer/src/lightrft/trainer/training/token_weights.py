"""Which response tokens the policy loss counts, and how much.

The weights multiply the numerator of the loss only: Z still counts every response token.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lightrft.algorithms.correction_terms import CorrectionTerm
from lightrft.algorithms.corrections import correction_weights
from lightrft.algorithms.entropy import (
    entropy_threshold,
    high_entropy_mask,
    high_entropy_mask_per_sequence,
)
from lightrft.config import TrainConfig
from lightrft.experience.types import ExperienceBatch
from lightrft.strategy.strategy_base import StrategyBase
from lightrft.trainer.training.metrics import StepMetrics


def token_weights(
    batch: ExperienceBatch,
    config: TrainConfig,
    terms: Sequence[CorrectionTerm],
    strategy: StrategyBase,
    metrics: StepMetrics,
) -> Tensor | None:
    """Weights of the tokens of one optimizer batch: [batch, seq], or None where all are 1.

    Collective with the scope "batch": every rank calls it.

    Args:
        batch: This rank's rows of the optimizer batch.
        config: Which share of the tokens to keep, those where the policy at the start of the step
            is least certain.
        terms: Weights for the difference between engine and trainer; () is off.
        strategy: Gathers the entropies of all ranks.
        metrics: Receives shares and weights.

    Raises:
        RuntimeError: The experience lacks logprobs or entropies from before the update.
    """
    weights: Tensor | None = None
    if config.high_entropy_token_ratio > 0:
        weights = _entropy_mask(batch, config, strategy, metrics).float()
    if terms:
        factors = _correction(batch, terms, strategy, metrics)
        weights = factors if weights is None else weights * factors
    return weights


def _entropy_mask(
    batch: ExperienceBatch,
    config: TrainConfig,
    strategy: StrategyBase,
    metrics: StepMetrics,
) -> Tensor:
    entropy, mask = batch.outputs.entropy, batch.rollouts.response_mask
    if entropy is None:
        raise RuntimeError("choosing tokens by entropy needs the entropies before the update")
    ratio = config.high_entropy_token_ratio
    if config.high_entropy_scope == "sequence":
        kept = high_entropy_mask_per_sequence(entropy, mask, ratio=ratio)
    else:
        shares: list[list[float]] = strategy.gather_objects(
            entropy[mask].tolist(), strategy.dp_group
        )
        everyone = torch.tensor([value for share in shares for value in share])
        threshold = entropy_threshold(everyone, everyone.isfinite(), ratio=ratio)
        kept = high_entropy_mask(entropy, mask, threshold=threshold.to(entropy.device))
    metrics.add_masked_mean("high_entropy_share", kept, mask)
    return kept


def _correction(
    batch: ExperienceBatch,
    terms: Sequence[CorrectionTerm],
    strategy: StrategyBase,
    metrics: StepMetrics,
) -> Tensor:
    rollouts, mask = batch.rollouts, batch.rollouts.response_mask
    trainer_logprobs = batch.outputs.sampling_logprobs
    if trainer_logprobs is None:
        raise RuntimeError("an off-policy correction needs the logprobs before the update")
    if rollouts.support is not None and batch.outputs.log_kept_mass is None:
        raise RuntimeError("an off-policy correction of truncated samples needs their kept mass")
    found = correction_weights(
        trainer_logprobs,
        rollouts.rollout_logprobs,
        mask,
        terms=terms,
        advantages=batch.advantages,
    )
    if any(term.mean_one for term in terms):
        found = found.normalized(strategy.reduce_over_data(found.sums, "sum"))
    metrics.add_masked_mean("correction_weight", found.weights, mask)
    metrics.add_masked_mean("correction_raw_weight", found.raw, mask)
    metrics.add_max("correction_raw_weight_max", found.raw.where(mask, -torch.inf).max())
    metrics.add_masked_mean("correction_capped_share", found.is_capped, mask)
    metrics.add_masked_mean("correction_rejected_share", found.is_rejected, mask)
    metrics.add_masked_mean("correction_invalid_share", found.is_invalid, mask)
    metrics.add_effective_samples("correction_effective_share", found.weights, mask)
    return found.weights
