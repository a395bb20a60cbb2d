"""Optimizer steps of policy and critic in one step of a run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from lightrft.algorithms.aggregation import aggregate, balance_share, local_normalizer
from lightrft.algorithms.interface import PolicyLossFunction
from lightrft.algorithms.masking import (
    entropy_threshold,
    high_entropy_mask,
    high_entropy_mask_per_sequence,
)
from lightrft.algorithms.moments import effective_sample_fraction, effective_sample_sums
from lightrft.algorithms.value import clipped_value_loss
from lightrft.config import TrainConfig
from lightrft.experience.maker import StepExperience, run_policy
from lightrft.experience.minibatches import epoch_order, micro_slices
from lightrft.models.types import ActorOutput, EntropyMode, TokenLossFunction
from lightrft.records.batch import (
    ExperienceBatch,
    join_micro_batches,
    select_experience,
    select_rollouts,
)
from lightrft.stages.metrics import StepMetrics
from lightrft.stages.policy.objective import LossTokens, PolicyObjective
from lightrft.stages.policy.step_metrics import record_policy, record_ratios
from lightrft.stages.stage import TrainedModel, TrainedModels, optimizer_step, record_total

if TYPE_CHECKING:
    from lightrft.algorithms.correction_terms import CorrectionTerm
    from lightrft.stages.observer import Observer
    from lightrft.stages.policy.pretrain_mix import PretrainMix
    from lightrft.strategy.model_training import ModelTraining


@dataclass(frozen=True, slots=True)
class PolicyUpdate:
    """Optimizer steps of one step of a run, with their objective, models and metrics.

    Args:
        config: Options of the run, with `loss_agg_mode` set.
        policy_loss: Loss function with one value per token.
        training: Strategy part that prepared the models.
        metrics: Receives the numbers.
        corrections: Terms for the difference between engine and trainer; () is none.
        kl_coef: Weight of the KL to the reference model in the loss; 0 is off.
        observer: Receives the computed tensors; None where nothing is recorded.
        loss_inside: The actor computes the loss inside its output projection; see
            `objective.why_loss_outside`.
        gate: Called with the policy's logprobs [batch, seq] before the optimizer acts, if the
            update computes them; None is not called.
    """

    config: TrainConfig
    policy_loss: PolicyLossFunction
    training: ModelTraining
    metrics: StepMetrics
    corrections: tuple[CorrectionTerm, ...] = ()
    kl_coef: float = 0.0
    observer: Observer | None = None
    loss_inside: bool = False
    gate: Callable[[Tensor], object] | None = None

    def train(
        self,
        step: StepExperience,
        models: TrainedModels,
        *,
        step_number: int,
        pretrain: PretrainMix | None = None,
    ) -> None:
        """Take all optimizer steps of one experience; every rank takes equally many.

        Args:
            step: Experience to train on.
            models: Models to train.
            step_number: Number of the step in the run; fixes the order of the optimizer batches.
            pretrain: Texts whose loss is mixed in, or None.
        """
        config, plan, context = self.config, step.plan, self.training.context
        actor, critic = models.main, models.named("critic")
        trains_actor = step_number >= config.freezing_actor_steps
        position = step_number * config.max_epochs * plan.num_minibatches
        for epoch in range(config.max_epochs):
            for index in epoch_order(
                plan.num_minibatches, seed=config.seed, step=step_number, epoch=epoch
            ):
                batch = select_experience(step.batch, plan.places(index, context.data_rank))
                slices = plan.micro_slices(
                    step.table.lengths,
                    index=index,
                    rank=context.data_rank,
                    micro_batch_size=config.micro_train_batch_size,
                    config=config,
                )
                if trains_actor:
                    texts: Sequence[Callable[[], Tensor]] = ()
                    if pretrain is not None:
                        texts = pretrain.shares(
                            actor.model, position, context, config, self.metrics
                        )
                    self.policy_step(batch, actor, slices=slices, extra_losses=texts)
                position += 1
                if critic is not None:
                    self.value_step(batch, critic, slices=slices)
                if models.average is not None and trains_actor:
                    self.training.moving_average(actor.model, models.average, beta=config.ema_beta)

    def policy_step(
        self,
        batch: ExperienceBatch,
        actor: TrainedModel,
        *,
        slices: Sequence[slice] = (),
        extra_losses: Sequence[Callable[[], Tensor]] = (),
    ) -> None:
        """Take one optimizer step of the actor.

        loss = policy + kl_coef KL - entropy_coef H + aux_loss_coef balance + further terms. The
        first three are aggregated with the same Z. It is summed over ranks before the first
        backward, so micro batches do not change the step.

        Args:
            batch: This rank's rows of the optimizer batch.
            actor: Model to update.
            slices: Micro batches; () cuts by rows.
            extra_losses: Loss shares of micro batches of other data, equally many on every rank.
        """
        slices = slices or self._row_slices(batch)
        weights, sums = self.token_weights(batch), None
        if self.config.aux_loss_coef > 0:
            sums = self._router_sums(batch, actor.model, slices)
        normalizer = self._normalizer(batch)
        logprobs = list[Tensor]()
        shares = [
            partial(
                self._policy_share, batch, rows, actor.model, normalizer, weights, sums, logprobs
            )
            for rows in slices
        ]

        def check() -> None:
            if self.gate is not None:
                self.gate(join_micro_batches(logprobs, batch.rollouts.token_ids.shape[1]))

        self.optimize(actor, [*shares, *extra_losses], normalizer, check)
        record_total("policy_loss", self.training.context, self.metrics)
        if sums is not None:
            record_total("aux_loss", self.training.context, self.metrics)

    def value_step(
        self, batch: ExperienceBatch, critic: TrainedModel, *, slices: Sequence[slice] = ()
    ) -> None:
        """Take one optimizer step of the critic, aggregated like the policy's."""
        normalizer = self._normalizer(batch)
        shares = [
            partial(self._value_share, select_experience(batch, rows), critic.model, normalizer)
            for rows in slices or self._row_slices(batch)
        ]
        self.optimize(critic, shares, normalizer)
        record_total("critic_loss", self.training.context, self.metrics)

    def optimize(
        self,
        trained: TrainedModel,
        shares: Sequence[Callable[[], Tensor]],
        normalizer: Tensor,
        before_step: Callable[[], None] = lambda: None,
    ) -> None:
        """Take one optimizer step on the sum of shares, divided by Z over all ranks; record it."""
        if self.observer is not None:
            self.observer.begin_update(trained.name, normalizer)
        result = optimizer_step(
            trained,
            shares,
            training=self.training,
            metrics=self.metrics,
            timeout_minutes=self.config.timeout_minutes,
            before_step=before_step,
        )
        if self.observer is not None:
            self.observer.end_update(result)

    def row_weights(self, micro: ExperienceBatch) -> Tensor | None:
        """Return the importance weight of each row: [batch]; None without `prompt_importance`."""
        return micro.rollouts.draw_weights if self.config.prompt_importance else None

    def _row_slices(self, batch: ExperienceBatch) -> Sequence[slice]:
        return micro_slices(0, len(batch.advantages), self.config.micro_train_batch_size)

    def _normalizer(self, batch: ExperienceBatch) -> Tensor:
        local = local_normalizer(
            batch.rollouts.response_mask,
            str(self.config.loss_agg_mode),
            max_response_tokens=self.config.max_response_tokens,
            row_shares=batch.rollouts.row_shares,
        )
        return self.training.context.reduce_over_data(local, "sum")

    def token_weights(self, batch: ExperienceBatch) -> Tensor | None:
        """Return the weights of tokens before the forward pass: [batch, seq]; None if all are 1.

        They include the corrections, except corrections that need the policy of that pass. The
        weights multiply only the numerator of the loss: Z still counts every response token.
        Collective: every rank calls it.

        Args:
            batch: This rank's rows of the optimizer batch.

        Raises:
            RuntimeError: The experience lacks logprobs or entropies from before the update.
        """
        weights: Tensor | None = None
        if self.config.high_entropy_token_ratio > 0:
            weights = self._entropy_mask(batch).float()
        if self.corrections and not self._corrects_in_pass(batch):
            factors = self.correction_of(batch)
            weights = factors if weights is None else weights * factors
        return weights

    def _entropy_mask(self, batch: ExperienceBatch) -> Tensor:
        """Mark the tokens where the policy at the start of the step is least certain."""
        entropy, mask = batch.outputs.entropy, batch.rollouts.response_mask
        if entropy is None:
            raise RuntimeError("choosing tokens by entropy needs the entropies before the update")
        ratio = self.config.high_entropy_token_ratio
        if self.config.high_entropy_scope == "sequence":
            kept = high_entropy_mask_per_sequence(entropy, mask, ratio=ratio)
        else:
            shares: list[list[float]] = self.training.context.gather_objects(
                entropy[mask].tolist(), self.training.context.dp_group
            )
            everyone = torch.tensor([value for share in shares for value in share])
            threshold = entropy_threshold(everyone, everyone.isfinite(), ratio=ratio)
            kept = high_entropy_mask(entropy, mask, threshold=threshold.to(entropy.device))
        self.metrics.add_masked_mean("high_entropy_share", kept, mask)
        return kept

    @property
    def follows_policy(self) -> bool:
        """Return whether corrections compare the policy of each forward pass."""
        return any(term.follows_policy for term in self.corrections)

    def _corrects_in_pass(self, batch: ExperienceBatch) -> bool:
        """Return whether corrections need the logprobs of the forward pass."""
        return self.follows_policy or batch.outputs.old_logprobs is None

    def correction_of(self, batch: ExperienceBatch, new_logprobs: Tensor | None = None) -> Tensor:
        """Return the factor of each token for the gap between trainer and engine."""
        rollouts, mask, metrics = batch.rollouts, batch.rollouts.response_mask, self.metrics
        trainer_logprobs = batch.outputs.sampling_logprobs
        if trainer_logprobs is None:
            raise RuntimeError("an off-policy correction needs the logprobs before the update")
        support = rollouts.support
        is_unknown = support is not None and not support.suffices
        if is_unknown and batch.outputs.log_kept_mass is None:
            raise RuntimeError(
                "an off-policy correction of truncated samples needs their kept mass"
            )
        from lightrft.algorithms.corrections import correction_weights  # of runs with some

        result = correction_weights(
            trainer_logprobs,
            rollouts.rollout_logprobs,
            mask,
            terms=self.corrections,
            advantages=batch.advantages,
            new_logprobs=new_logprobs,
        )
        if any(term.mean_one for term in self.corrections):
            result = result.normalized(self.training.context.reduce_over_data(result.sums, "sum"))
        means = {
            "correction_weight": result.weights,
            "correction_raw_weight": result.raw,
            "correction_capped_share": result.is_capped,
            "correction_rejected_share": result.is_rejected,
            "correction_invalid_share": result.is_invalid,
        }
        metrics.add_masked_means(means, mask)
        metrics.add_max("correction_raw_weight_max", result.raw.where(mask, -torch.inf).max())
        sums = effective_sample_sums(result.weights, mask)
        metrics.add_sums("correction_effective_share", sums, effective_sample_fraction)
        return result.weights

    def _corrected(self, tokens: LossTokens, old_logprobs: Tensor, engine: Tensor) -> LossTokens:
        """Weight some tokens by corrections that act on single tokens; logprobs are [tokens]."""
        from lightrft.algorithms.corrections import correction_weights  # of runs with some

        result = correction_weights(
            old_logprobs[None],
            engine[None],
            tokens.mask,
            terms=self.corrections,
            advantages=tokens.advantages,
        )
        return tokens.weighted(result.weights)

    def _router_sums(
        self, batch: ExperienceBatch, actor: nn.Module, slices: Sequence[slice]
    ) -> Tensor:
        """Return [2, experts] over all tokens of the optimizer batch, by one more forward pass.

        The load of the experts is known only after all micro batches.
        """
        with torch.no_grad():
            parts = [
                _router_sums(
                    run_policy(
                        actor, select_rollouts(batch.rollouts, rows), entropy="none", support=None
                    )
                )
                for rows in slices
            ]
        return self.training.context.reduce_over_data(torch.stack(parts).sum(dim=0), "sum")

    def _policy_share(
        self,
        batch: ExperienceBatch,
        rows: slice,
        actor: nn.Module,
        normalizer: Tensor,
        weights: Tensor | None,
        router_sums: Tensor | None,
        scored: list[Tensor],
    ) -> Tensor:
        """Return the loss of one micro batch.

        Args:
            batch, rows: Optimizer batch and rows of the micro batch.
            actor: Policy model.
            normalizer: Z of the optimizer batch over all ranks.
            weights: [batch, seq] of this rank's tokens, or None where all are 1.
            router_sums: [2, experts] of all tokens, or None without balancing.
            scored: Receives the logprobs for the gate.
        """
        config, micro, metrics = self.config, select_experience(batch, rows), self.metrics
        mask = micro.rollouts.response_mask
        objective = PolicyObjective(config, self.policy_loss, normalizer, self.kl_coef)
        factors = None if weights is None else weights[rows, : mask.shape[1]]
        tokens = LossTokens.of(
            micro,
            mode=str(config.loss_agg_mode),
            factors=factors,
            row_weights=self.row_weights(micro),
        )

        def share_of(
            logprobs: Tensor, entropy: Tensor | None, rows: Tensor, columns: Tensor
        ) -> Tensor:
            entropies = None if entropy is None else entropy[None]
            chosen = tokens.at(rows, columns)
            if self.corrections and self._corrects_in_pass(micro):
                engine = micro.rollouts.rollout_logprobs[rows, columns]
                chosen = self._corrected(chosen, logprobs, engine)
            return objective.terms(chosen, logprobs[None], entropies)[0]

        output, seen = self._score(micro, actor, share_of if self.loss_inside else None)
        if self.gate is not None:
            scored.append(output.sampling_logprobs.detach())
        if self.corrections and self._corrects_in_pass(micro):
            tokens = tokens.weighted(self.correction_of(seen, output.sampling_logprobs))
        share, parts, losses = objective.terms(tokens, output.logprobs, output.entropy)
        old_logprobs = tokens.old_logprobs_or(output.logprobs)
        record_ratios(losses, output.logprobs, old_logprobs, mask, metrics)
        metrics.add_mean("policy_loss", parts["policy"], 0.0)
        self._observe(seen, {"new": output.logprobs, "weights": tokens.factors}, parts)
        share = share if output.loss is None else output.loss
        if router_sums is not None:
            balance = balance_share(_router_sums(output), router_sums)
            metrics.add_mean("aux_loss", balance, 0.0)
            share = share + config.aux_loss_coef * balance
        return share

    def _observe(
        self,
        micro: ExperienceBatch,
        values: Mapping[str, Tensor | None],
        terms: Mapping[str, Tensor],
    ) -> None:
        if self.observer is None:
            return
        rollouts, outputs = micro.rollouts, micro.outputs
        first = {"old_logprobs": outputs.old_logprobs, "log_kept_mass": outputs.log_kept_mass}
        self.observer.micro_batch(
            rollouts.sample_ids, rollouts.attention_mask, {**values, **first}, terms
        )

    def _score(
        self, micro: ExperienceBatch, actor: nn.Module, token_loss: TokenLossFunction | None
    ) -> tuple[ActorOutput, ExperienceBatch]:
        """Return the actor's output for a micro batch, and the batch with the old logprobs.

        In the first pass the output's logprobs are the old ones, and the metrics record them.
        """
        rollouts, is_first = micro.rollouts, micro.outputs.old_logprobs is None
        entropy: EntropyMode = "value" if is_first else "none"
        support, needs_mass = rollouts.support, is_first or self.follows_policy
        output = run_policy(
            actor,
            rollouts,
            entropy="grad" if self.config.entropy_coef > 0 else entropy,
            support=support if support is None or needs_mass else support.of_logprobs,
            token_loss=token_loss,
        )
        if not is_first:
            return output, micro
        seen = replace(
            micro.outputs,
            old_logprobs=output.logprobs.detach(),
            entropy=output.entropy,
            log_kept_mass=output.log_kept_mass,
        )
        record_policy(rollouts, seen, self.metrics, kl_estimator=self.config.kl_estimator_name)
        return output, replace(micro, outputs=seen)

    def _value_share(self, micro: ExperienceBatch, critic: nn.Module, normalizer: Tensor) -> Tensor:
        rollouts, mask = micro.rollouts, micro.rollouts.response_mask
        values: Tensor = critic(rollouts.token_ids, rollouts.attention_mask, media=rollouts.media)
        old_values = micro.outputs.values
        if old_values is None:
            raise RuntimeError("the critic's values are missing from the experience")
        clip = self.config.value_clip or None
        loss = clipped_value_loss(values, old_values, micro.returns, mask, clip=clip)
        row_weights = self.row_weights(micro)
        if row_weights is not None:
            loss = loss * row_weights.unsqueeze(-1)
        mode, shares = str(self.config.loss_agg_mode), rollouts.row_shares
        share = aggregate(loss, mask, mode, normalizer, row_shares=shares)
        self._observe(micro, {"new": values}, {"value": share})
        self.metrics.add_mean("critic_loss", share, 0.0)
        return share


def _router_sums(output: ActorOutput) -> Tensor:
    if output.router_sums is None:
        raise RuntimeError("balancing experts needs an actor with enable_router_sums()")
    return output.router_sums
