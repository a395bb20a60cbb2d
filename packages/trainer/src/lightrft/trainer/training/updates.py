"""One optimizer step of a policy or a critic, from the rows of one optimizer batch."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch

from lightrft.algorithms.aggregation import aggregate, local_normalizer
from lightrft.algorithms.balance import balance_share
from lightrft.algorithms.kl import estimate_kl
from lightrft.algorithms.value import clipped_value_loss
from lightrft.experience.collate import micro_slices, select_experience
from lightrft.experience.forward import scoring_temperature
from lightrft.experience.minibatches import epoch_order
from lightrft.trainer.training.step_metrics import record_policy, record_ratios, record_step
from lightrft.trainer.training.token_weights import TokenWeighting, token_weights

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor, nn
    from torch.optim import Optimizer
    from torch.optim.lr_scheduler import LRScheduler

    from lightrft.algorithms.types import PolicyLossFunction
    from lightrft.experience.maker import StepExperience
    from lightrft.experience.types import ExperienceBatch
    from lightrft.models.support import SamplingSupport
    from lightrft.models.types import ActorOutput, EntropyMode
    from lightrft.strategy.strategy_base import StrategyBase
    from lightrft.trainer.training.metrics import StepMetrics
    from lightrft.trainer.training.pretrain_mix import PretrainMix


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
        aux_loss_coef: Weight of the loss that balances experts; 0 is off.
        packs_samples: Count no padding then.
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
    aux_loss_coef: float = 0.0
    packs_samples: bool = False


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
class MinibatchOrder:
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
    schedule: MinibatchOrder,
    metrics: StepMetrics,
    pretrain: PretrainMix | None = None,
) -> None:
    """All optimizer steps of one experience; every rank takes equally many."""
    position = schedule.step * schedule.num_epochs * step.plan.num_minibatches
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
                    extra_losses=()
                    if pretrain is None
                    else pretrain.shares(
                        models.actor.model,
                        position,
                        strategy=strategy,
                        micro_batch_size=settings.micro_batch_size,
                        metrics=metrics,
                    ),
                )
            position += 1
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
        rank=strategy.data_rank,
        max_tokens=settings.max_micro_tokens,
        packs_samples=settings.packs_samples,
    )


def policy_update(
    batch: ExperienceBatch,
    actor: TrainedModel,
    *,
    strategy: StrategyBase,
    settings: LossSettings,
    metrics: StepMetrics,
    slices: Sequence[slice] = (),
    extra_losses: Sequence[Callable[[], Tensor]] = (),
) -> None:
    """One optimizer step of the actor.

    loss = policy + kl_loss_coef KL - entropy_coef H + aux_loss_coef balance + further terms. The
    first three are aggregated with the same Z, which is summed over ranks before the first
    backward: the step does not depend on micro batches.

    Args:
        batch: This rank's rows of the optimizer batch.
        actor: What is updated.
        strategy, settings, metrics: As for `update_models`.
        slices: Micro batches; none cuts by rows.
        extra_losses: Micro batches of other data; each gives its share of the loss. Every rank has
            equally many.
    """
    slices = slices or micro_slices(0, len(batch.advantages), settings.micro_batch_size)
    whole = _whole_batch(batch, actor.model, slices, strategy, settings, metrics)
    micros: list[Callable[[], Tensor]] = [
        partial(_micro_batch_loss, batch, rows, whole, actor.model, settings, metrics)
        for rows in slices
    ]
    result = None
    with strategy.accumulation(len(slices) + len(extra_losses), actor.optimizer):
        for share in (*micros, *extra_losses):
            strategy.backward(share(), actor.model, actor.optimizer)
            result = strategy.optimizer_step(
                actor.optimizer, actor.model, actor.scheduler, name=actor.name
            )
    metrics.add_mean("policy_loss", 0.0, 1.0 / strategy.num_data_ranks)
    if whole.router_sums is not None:
        metrics.add_mean("aux_loss", 0.0, 1.0 / strategy.num_data_ranks)
    record_step(actor.name, result, metrics)


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
    metrics.add_mean("critic_loss", 0.0, 1.0 / strategy.num_data_ranks)
    record_step(critic.name, result, metrics)


def _normalizer(batch: ExperienceBatch, strategy: StrategyBase, settings: LossSettings) -> Tensor:
    local = local_normalizer(
        batch.rollouts.response_mask,
        settings.aggregation,
        max_response_tokens=settings.max_response_tokens,
    )
    return strategy.reduce_over_data(local, "sum")


@dataclass(frozen=True, slots=True)
class _WholeBatch:
    """What a micro batch must know of its optimizer batch over all ranks.

    Args:
        normalizer: Z.
        weights: [batch, seq] of this rank's tokens, or None where all are 1.
        router_sums: [2, experts] of all tokens, or None without balancing.
    """

    normalizer: Tensor
    weights: Tensor | None
    router_sums: Tensor | None


def _whole_batch(
    batch: ExperienceBatch,
    actor: nn.Module,
    slices: Sequence[slice],
    strategy: StrategyBase,
    settings: LossSettings,
    metrics: StepMetrics,
) -> _WholeBatch:
    weights: Tensor | None = None
    if settings.weighting is not None:
        weights = token_weights(batch, settings.weighting, strategy, metrics)
    sums: Tensor | None = None
    if settings.aux_loss_coef > 0:
        # The load of the experts is known only after all micro batches: one more forward pass.
        with torch.no_grad():
            parts = [
                _router_sums(_forward(select_experience(batch, rows), actor, entropy="none"))
                for rows in slices
            ]
        sums = strategy.reduce_over_data(torch.stack(parts).sum(dim=0), "sum")
    return _WholeBatch(_normalizer(batch, strategy, settings), weights, sums)


def _forward(
    micro: ExperienceBatch,
    actor: nn.Module,
    *,
    entropy: EntropyMode,
    support: SamplingSupport | None = None,
) -> ActorOutput:
    rollouts = micro.rollouts
    output: ActorOutput = actor(
        rollouts.token_ids,
        rollouts.attention_mask,
        scored_mask=rollouts.response_mask,
        temperature=scoring_temperature(rollouts.temperature),
        entropy=entropy,
        model_inputs=rollouts.model_inputs,
        support=support,
    )
    return output


def _router_sums(output: ActorOutput) -> Tensor:
    if output.router_sums is None:
        raise RuntimeError("balancing experts needs an actor with enable_router_sums()")
    return output.router_sums


def _micro_batch_loss(
    batch: ExperienceBatch,
    rows: slice,
    whole: _WholeBatch,
    actor: nn.Module,
    settings: LossSettings,
    metrics: StepMetrics,
) -> Tensor:
    micro = select_experience(batch, rows)
    normalizer = whole.normalizer
    rollouts, mask = micro.rollouts, micro.rollouts.response_mask
    computes_old_logprobs = micro.outputs.old_logprobs is None
    entropy: EntropyMode = "value" if computes_old_logprobs else "none"
    output = _forward(
        micro,
        actor,
        entropy="grad" if settings.entropy_coef > 0 else entropy,
        support=rollouts.support if computes_old_logprobs else None,
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
            log_kept_mass=output.log_kept_mass,
        )
    token_loss = settings.policy_loss(output.logprobs, old_logprobs, micro.advantages, mask)
    record_ratios(token_loss, output.logprobs, old_logprobs, mask, metrics)
    if whole.weights is not None:
        token_loss = token_loss.weighted(whole.weights[rows, : mask.shape[1]])
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
    if whole.router_sums is not None:
        balance = balance_share(_router_sums(output), whole.router_sums)
        metrics.add_mean("aux_loss", balance, 0.0)
        share = share + settings.aux_loss_coef * balance
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
