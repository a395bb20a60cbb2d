"""One optimizer step of a policy or a critic, from the rows of one optimizer batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from lightrft.algorithms import aggregate, clipped_value_loss, estimate_kl, local_normalizer
from lightrft.experience.collate import micro_slices, select_experience
from lightrft.experience.forward import scoring_temperature
from lightrft.experience.minibatches import epoch_order
from lightrft.trainer.step_metrics import record_policy
from lightrft.trainer.token_weights import TokenWeighting, token_weights

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor, nn
    from torch.optim import Optimizer
    from torch.optim.lr_scheduler import LRScheduler

    from lightrft.algorithms.policy import PolicyLossFunction
    from lightrft.algorithms.types import TokenLoss
    from lightrft.experience.maker import StepExperience
    from lightrft.experience.types import ExperienceBatch
    from lightrft.models.types import ActorOutput
    from lightrft.strategy.optimizers import OptimizerStepResult
    from lightrft.strategy.strategy_base import StrategyBase
    from lightrft.trainer.metrics import StepMetrics


@dataclass(frozen=True, slots=True)
class TrainedModel:
    """A model with what updates it, and the prefix of its metrics."""

    name: str
    model: nn.Module
    optimizer: Optimizer
    scheduler: LRScheduler | None


@dataclass(frozen=True, slots=True)
class LossSettings:
    """What an update minimises.

    Args:
        policy_loss: One loss value per token.
        aggregation: How they become one number.
        max_response_tokens: Constant of the aggregation seq-mean-token-sum-norm.
        micro_batch_size: Rows of one forward and backward pass.
        kl_loss_coef: Weight of the KL to the reference model in the loss; 0 is off.
        kl_estimator: Its estimator.
        entropy_coef: Weight of the entropy bonus; 0 is off.
        value_clip: Clip range of the critic's loss; None is off.
        weighting: Which tokens the policy loss counts, and how much.
        max_micro_tokens: Cut micro batches by tokens instead of rows; None is off.
    """

    policy_loss: PolicyLossFunction
    aggregation: str
    max_response_tokens: int
    micro_batch_size: int
    kl_loss_coef: float = 0.0
    kl_estimator: str = "k3"
    entropy_coef: float = 0.0
    value_clip: float | None = 0.2
    weighting: TokenWeighting | None = None
    max_micro_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class UpdateModels:
    """What one step trains, and the moving average that follows the actor.

    Args:
        actor, critic: The models; None is absent.
        ema_model, ema_beta: The average and the weight of its past.
        trains_actor: False leaves the actor as it is, while the critic learns.
    """

    actor: TrainedModel
    critic: TrainedModel | None = None
    ema_model: nn.Module | None = None
    ema_beta: float = 0.992
    trains_actor: bool = True


@dataclass(frozen=True, slots=True)
class Schedule:
    """How often and in which order a step's optimizer batches are visited.

    Args:
        num_epochs: Visits of each.
        seed, step: Fix the order.
    """

    num_epochs: int
    seed: int
    step: int


def update_models(
    step: StepExperience,
    models: UpdateModels,
    *,
    strategy: StrategyBase,
    settings: LossSettings,
    schedule: Schedule,
    metrics: StepMetrics,
) -> None:
    """All optimizer steps of one experience; every rank takes equally many."""
    for epoch in range(schedule.num_epochs):
        for index in epoch_order(
            step.plan.num_minibatches, seed=schedule.seed, step=schedule.step, epoch=epoch
        ):
            batch = select_experience(step.batch, step.rows_of_minibatch(index))
            slices = _token_slices(step, index, strategy, settings)
            if models.trains_actor:
                policy_update(
                    batch,
                    models.actor,
                    strategy=strategy,
                    settings=settings,
                    metrics=metrics,
                    slices=slices,
                )
            if models.critic is not None:
                value_update(
                    batch,
                    models.critic,
                    strategy=strategy,
                    settings=settings,
                    metrics=metrics,
                    slices=slices,
                )
            if models.ema_model is not None and models.trains_actor:
                strategy.moving_average(models.actor.model, models.ema_model, beta=models.ema_beta)


def _token_slices(
    step: StepExperience, index: int, strategy: StrategyBase, settings: LossSettings
) -> tuple[slice, ...]:
    """Micro batches of one optimizer batch by tokens; () where they are cut by rows."""
    if settings.max_micro_tokens is None:
        return ()
    return step.plan.micro_slices(
        step.table.lengths,
        index=index,
        rank=strategy.get_rank(),
        max_tokens=settings.max_micro_tokens,
    )


def policy_update(
    batch: ExperienceBatch,
    actor: TrainedModel,
    *,
    strategy: StrategyBase,
    settings: LossSettings,
    metrics: StepMetrics,
    slices: Sequence[slice] = (),
) -> None:
    """One optimizer step of the actor.

    loss = policy + kl_loss_coef KL - entropy_coef H, all aggregated with the same Z, which is
    summed over ranks before the first backward: the step does not depend on micro batches.
    """
    normalizer = _normalizer(batch, strategy, settings)
    weights: Tensor | None = None
    if settings.weighting is not None:
        weights = token_weights(batch, settings.weighting, strategy, metrics)
    slices = slices or micro_slices(0, len(batch.advantages), settings.micro_batch_size)
    result = None
    with strategy.accumulation(len(slices), actor.optimizer):
        for rows in slices:
            micro = select_experience(batch, rows)
            width = micro.advantages.shape[1]
            micro_weights = None if weights is None else weights[rows, :width]
            loss = _policy_share(micro, actor.model, normalizer, settings, metrics, micro_weights)
            strategy.backward(loss, actor.model, actor.optimizer)
            result = strategy.optimizer_step(
                actor.optimizer, actor.model, actor.scheduler, name=actor.name
            )
    metrics.add_mean("policy_loss", 0.0, 1.0 / strategy.world_size)
    _record_step(actor.name, result, metrics)


def value_update(
    batch: ExperienceBatch,
    critic: TrainedModel,
    *,
    strategy: StrategyBase,
    settings: LossSettings,
    metrics: StepMetrics,
    slices: Sequence[slice] = (),
) -> None:
    """One optimizer step of the critic, aggregated like the policy's."""
    normalizer = _normalizer(batch, strategy, settings)
    slices = slices or micro_slices(0, len(batch.advantages), settings.micro_batch_size)
    result = None
    with strategy.accumulation(len(slices), critic.optimizer):
        for rows in slices:
            micro = select_experience(batch, rows)
            loss = _value_share(micro, critic.model, normalizer, settings, metrics)
            strategy.backward(loss, critic.model, critic.optimizer)
            result = strategy.optimizer_step(
                critic.optimizer, critic.model, critic.scheduler, name=critic.name
            )
    metrics.add_mean("critic_loss", 0.0, 1.0 / strategy.world_size)
    _record_step(critic.name, result, metrics)


def _normalizer(batch: ExperienceBatch, strategy: StrategyBase, settings: LossSettings) -> Tensor:
    local = local_normalizer(
        batch.rollouts.response_mask,
        settings.aggregation,
        max_response_tokens=settings.max_response_tokens,
    )
    return strategy.all_reduce(local, "sum")


def _policy_share(
    micro: ExperienceBatch,
    actor: nn.Module,
    normalizer: Tensor,
    settings: LossSettings,
    metrics: StepMetrics,
    weights: Tensor | None,
) -> Tensor:
    rollouts, mask = micro.rollouts, micro.rollouts.response_mask
    is_first_look = micro.outputs.old_logprobs is None
    output: ActorOutput = actor(
        rollouts.token_ids,
        rollouts.attention_mask,
        scored_mask=mask,
        temperature=scoring_temperature(rollouts.temperature),
        entropy="grad" if settings.entropy_coef > 0 else "value" if is_first_look else "none",
        model_inputs=rollouts.model_inputs,
    )
    old_logprobs = micro.outputs.old_logprobs
    if old_logprobs is None:
        old_logprobs = output.logprobs.detach()
        record_policy(
            old_logprobs,
            output.entropy,
            rollouts,
            micro.outputs.ref_logprobs,
            metrics,
            kl_estimator=settings.kl_estimator,
        )
    token_loss = settings.policy_loss(output.logprobs, old_logprobs, micro.advantages, mask)
    _record_ratios(token_loss, output.logprobs, old_logprobs, mask, metrics)
    if weights is not None:
        token_loss = token_loss.weighted(weights)
    share = aggregate(token_loss.loss, mask, settings.aggregation, normalizer)
    metrics.add_mean("policy_loss", share, 0.0)
    if settings.kl_loss_coef > 0 and micro.outputs.ref_logprobs is not None:
        kl = estimate_kl(
            output.logprobs,
            micro.outputs.ref_logprobs,
            mask,
            estimator=settings.kl_estimator,
            old_logprobs=old_logprobs,
        )
        kl_share = aggregate(kl, mask, settings.aggregation, normalizer)
        share = share + settings.kl_loss_coef * kl_share
    if settings.entropy_coef > 0 and output.entropy is not None:
        entropy_share = aggregate(output.entropy, mask, settings.aggregation, normalizer)
        share = share - settings.entropy_coef * entropy_share
    return share


def _value_share(
    micro: ExperienceBatch,
    critic: nn.Module,
    normalizer: Tensor,
    settings: LossSettings,
    metrics: StepMetrics,
) -> Tensor:
    rollouts, mask = micro.rollouts, micro.rollouts.response_mask
    values: Tensor = critic(
        rollouts.token_ids, rollouts.attention_mask, model_inputs=rollouts.model_inputs
    )
    old_values = micro.outputs.values
    if old_values is None:
        raise RuntimeError("the critic's values are missing from the experience")
    loss = clipped_value_loss(values, old_values, micro.returns, mask, clip=settings.value_clip)
    share = aggregate(loss, mask, settings.aggregation, normalizer)
    metrics.add_mean("critic_loss", share, 0.0)
    return share


@torch.no_grad()
def _record_ratios(
    token_loss: TokenLoss,
    logprobs: Tensor,
    old_logprobs: Tensor,
    mask: Tensor,
    metrics: StepMetrics,
) -> None:
    log_ratio = torch.where(mask, logprobs.detach() - old_logprobs, 0.0)
    metrics.add_masked_mean("ratio_mean", token_loss.ratio, mask)
    metrics.add_max("ratio_max", token_loss.ratio.where(mask, -torch.inf).amax())
    metrics.add_masked_mean("clip_fraction_low", token_loss.is_clipped_low, mask)
    metrics.add_masked_mean("clip_fraction_high", token_loss.is_clipped_high, mask)
    metrics.add_masked_mean("clamped_share", token_loss.is_clamped, mask)
    # expm1(d) - d = r - 1 - ln r, without the cancellation near 0.
    metrics.add_masked_mean("approx_kl", log_ratio.expm1() - log_ratio, mask)


def _record_step(name: str, result: OptimizerStepResult | None, metrics: StepMetrics) -> None:
    if result is None:
        raise RuntimeError(
            f"the optimizer of the {name} did not act on the last micro batch of its batch"
        )
    prefix = "" if name == "actor" else f"{name}_"
    is_finite = 0.0 if result.is_skipped else 1.0
    metrics.add_mean(f"{prefix}grad_norm", result.grad_norm if is_finite else 0.0, is_finite)
    metrics.add_mean(f"{name}_lr", result.learning_rate, 1.0)
    metrics.add_mean(f"{prefix}skipped_steps", 1.0 - is_finite, 1.0)
