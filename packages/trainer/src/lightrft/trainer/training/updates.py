"""One optimizer step of a policy or a critic, from the rows of one optimizer batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lightrft.algorithms.aggregation import aggregate, local_normalizer
from lightrft.algorithms.balance import balance_share
from lightrft.algorithms.correction_terms import CorrectionTerm
from lightrft.algorithms.kl import estimate_kl
from lightrft.algorithms.types import PolicyLossFunction
from lightrft.algorithms.value import clipped_value_loss
from lightrft.config import TrainConfig
from lightrft.experience.collate import select_experience
from lightrft.experience.forward import scoring_temperature
from lightrft.experience.maker import StepExperience
from lightrft.experience.minibatches import epoch_order, micro_slices
from lightrft.experience.types import ExperienceBatch
from lightrft.models.support import SamplingSupport
from lightrft.models.types import ActorOutput, EntropyMode
from lightrft.strategy.strategy_base import StrategyBase
from lightrft.trainer.training.metrics import StepMetrics
from lightrft.trainer.training.pretrain_mix import PretrainMix
from lightrft.trainer.training.step_metrics import record_policy, record_ratios, record_step
from lightrft.trainer.training.token_weights import token_weights


@dataclass(frozen=True, slots=True)
class TrainedModel:
    """A model with what updates it, and the prefix of its metrics."""

    name: str
    model: nn.Module
    optimizer: Optimizer
    scheduler: LRScheduler | None


@dataclass(frozen=True, slots=True)
class Objective:
    """What an update minimises.

    Args:
        config: Coefficients and sizes, `loss_agg_mode` decided.
        policy_loss: One loss value per token.
        corrections: Terms for the difference between engine and trainer; () is none.
        kl_coef: Weight of the KL to the reference model in the loss; 0 is off.
    """

    config: TrainConfig
    policy_loss: PolicyLossFunction
    corrections: tuple[CorrectionTerm, ...] = ()
    kl_coef: float = 0.0

    @property
    def aggregation(self) -> str:
        """How the losses of tokens become one number."""
        return str(self.config.loss_agg_mode)


@dataclass(frozen=True, slots=True)
class TrainedModels:
    """What a run trains.

    Args:
        actor, critic: The models; None is absent.
        ema_model: The moving average of the actor, which follows it; or None.
    """

    actor: TrainedModel
    critic: TrainedModel | None = None
    ema_model: nn.Module | None = None

    @property
    def trained(self) -> tuple[TrainedModel, ...]:
        """Actor and critic."""
        return (self.actor,) if self.critic is None else (self.actor, self.critic)


def update_models(
    step: StepExperience,
    models: TrainedModels,
    *,
    strategy: StrategyBase,
    objective: Objective,
    step_number: int,
    metrics: StepMetrics,
    pretrain: PretrainMix | None = None,
) -> None:
    """All optimizer steps of one experience; every rank takes equally many.

    Args:
        step: What to train on.
        models: What is trained.
        strategy, objective, metrics: How, and where numbers go.
        step_number: Of the step in the run; fixes the order of the optimizer batches.
        pretrain: Texts whose loss is mixed in, or None.
    """
    config, num_batches = objective.config, step.plan.num_minibatches
    trains_actor = step_number >= config.freezing_actor_steps
    position = step_number * config.max_epochs * num_batches
    for epoch in range(config.max_epochs):
        for index in epoch_order(num_batches, seed=config.seed, step=step_number, epoch=epoch):
            batch = select_experience(step.batch, step.plan.places(index))
            slices = step.plan.micro_slices(
                step.table.lengths,
                index=index,
                rank=strategy.data_rank,
                micro_batch_size=config.micro_train_batch_size,
                config=config,
            )
            if trains_actor:
                policy_update(
                    batch,
                    models.actor,
                    strategy=strategy,
                    objective=objective,
                    metrics=metrics,
                    slices=slices,
                    extra_losses=()
                    if pretrain is None
                    else pretrain.shares(
                        models.actor.model,
                        position,
                        strategy=strategy,
                        micro_batch_size=config.micro_train_batch_size,
                        metrics=metrics,
                    ),
                )
            position += 1
            if models.critic is not None:
                value_update(
                    batch,
                    models.critic,
                    strategy=strategy,
                    objective=objective,
                    metrics=metrics,
                    slices=slices,
                )
            if models.ema_model is not None and trains_actor:
                strategy.moving_average(models.actor.model, models.ema_model, beta=config.ema_beta)


def _row_slices(batch: ExperienceBatch, config: TrainConfig) -> Sequence[slice]:
    return micro_slices(0, len(batch.advantages), config.micro_train_batch_size)


def policy_update(
    batch: ExperienceBatch,
    actor: TrainedModel,
    *,
    strategy: StrategyBase,
    objective: Objective,
    metrics: StepMetrics,
    slices: Sequence[slice] = (),
    extra_losses: Sequence[Callable[[], Tensor]] = (),
) -> None:
    """One optimizer step of the actor.

    loss = policy + kl_coef KL - entropy_coef H + aux_loss_coef balance + further terms. The
    first three are aggregated with the same Z, which is summed over ranks before the first
    backward: the step does not depend on micro batches.

    Args:
        batch: This rank's rows of the optimizer batch.
        actor: What is updated.
        strategy, objective, metrics: As for `update_models`.
        slices: Micro batches; none cuts by rows.
        extra_losses: Micro batches of other data; each gives its share of the loss. Every rank has
            equally many.
    """
    slices = slices or _row_slices(batch, objective.config)
    whole = _whole_batch(batch, actor.model, slices, strategy, objective, metrics)
    micros: list[Callable[[], Tensor]] = [
        partial(_micro_batch_loss, batch, rows, whole, actor.model, objective, metrics)
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
    objective: Objective,
    metrics: StepMetrics,
    slices: Sequence[slice] = (),
) -> None:
    """One optimizer step of the critic, aggregated like the policy's."""
    normalizer = _normalizer(batch, strategy, objective)
    slices = slices or _row_slices(batch, objective.config)
    result = None
    with strategy.accumulation(len(slices), critic.optimizer):
        for rows in slices:
            micro = select_experience(batch, rows)
            loss = _value_share(micro, critic.model, normalizer, objective, metrics)
            strategy.backward(loss, critic.model, critic.optimizer)
            result = strategy.optimizer_step(
                critic.optimizer, critic.model, critic.scheduler, name=critic.name
            )
    metrics.add_mean("critic_loss", 0.0, 1.0 / strategy.num_data_ranks)
    record_step(critic.name, result, metrics)


def _normalizer(batch: ExperienceBatch, strategy: StrategyBase, objective: Objective) -> Tensor:
    local = local_normalizer(
        batch.rollouts.response_mask,
        objective.aggregation,
        max_response_tokens=objective.config.generate_max_len,
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
    objective: Objective,
    metrics: StepMetrics,
) -> _WholeBatch:
    weights: Tensor | None = None
    if objective.config.high_entropy_token_ratio > 0 or objective.corrections:
        weights = token_weights(batch, objective.config, objective.corrections, strategy, metrics)
    sums: Tensor | None = None
    if objective.config.aux_loss_coef > 0:
        # The load of the experts is known only after all micro batches: one more forward pass.
        with torch.no_grad():
            parts = [
                _router_sums(_forward(select_experience(batch, rows), actor, entropy="none"))
                for rows in slices
            ]
        sums = strategy.reduce_over_data(torch.stack(parts).sum(dim=0), "sum")
    return _WholeBatch(_normalizer(batch, strategy, objective), weights, sums)


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
    objective: Objective,
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
        entropy="grad" if objective.config.entropy_coef > 0 else entropy,
        support=rollouts.support if computes_old_logprobs else None,
    )
    old_logprobs = micro.outputs.old_logprobs
    if old_logprobs is None:
        old_logprobs = output.logprobs.detach()
        seen = replace(
            micro.outputs,
            old_logprobs=old_logprobs,
            entropy=output.entropy,
            log_kept_mass=output.log_kept_mass,
        )
        record_policy(rollouts, seen, metrics, kl_estimator=objective.config.kl_estimator)
    token_loss = objective.policy_loss(output.logprobs, old_logprobs, micro.advantages, mask)
    record_ratios(token_loss, output.logprobs, old_logprobs, mask, metrics)
    if whole.weights is not None:
        token_loss = token_loss.weighted(whole.weights[rows, : mask.shape[1]])
    share = aggregate(token_loss.loss, mask, objective.aggregation, normalizer)
    metrics.add_mean("policy_loss", share, 0.0)
    if objective.kl_coef > 0 and micro.outputs.ref_logprobs is not None:
        kl = estimate_kl(
            output.logprobs,
            micro.outputs.ref_logprobs,
            mask,
            estimator=objective.config.kl_estimator,
            old_logprobs=old_logprobs,
        )
        kl_share = aggregate(kl, mask, objective.aggregation, normalizer)
        share = share + objective.kl_coef * kl_share
    if objective.config.entropy_coef > 0 and output.entropy is not None:
        entropy_share = aggregate(output.entropy, mask, objective.aggregation, normalizer)
        share = share - objective.config.entropy_coef * entropy_share
    if whole.router_sums is not None:
        balance = balance_share(_router_sums(output), whole.router_sums)
        metrics.add_mean("aux_loss", balance, 0.0)
        share = share + objective.config.aux_loss_coef * balance
    return share


def _value_share(
    micro: ExperienceBatch,
    critic: nn.Module,
    normalizer: Tensor,
    objective: Objective,
    metrics: StepMetrics,
) -> Tensor:
    rollouts, mask = micro.rollouts, micro.rollouts.response_mask
    values: Tensor = critic(
        rollouts.token_ids, rollouts.attention_mask, model_inputs=rollouts.model_inputs
    )
    old_values = micro.outputs.values
    if old_values is None:
        raise RuntimeError("the critic's values are missing from the experience")
    clip = objective.config.value_clip or None
    loss = clipped_value_loss(values, old_values, micro.returns, mask, clip=clip)
    share = aggregate(loss, mask, objective.aggregation, normalizer)
    metrics.add_mean("critic_loss", share, 0.0)
    return share
