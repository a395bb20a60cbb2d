"""Reinforcement as a stage: rollouts, experience, and the update of actor and critic."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, cast

import numpy as np
from torch import nn

from lightrft.config import ConfigError, TrainConfig
from lightrft.datasets.batch_stream import Batches, planned_steps
from lightrft.datasets.types import Prompt
from lightrft.engines.media.encoder import TEXT_ENCODER, Encoder, PromptEncoder
from lightrft.engines.media.families import family_of
from lightrft.experience.maker import ForwardModels
from lightrft.models import SequenceModel
from lightrft.reporting.alarms import alarms
from lightrft.rewards.types import RewardError, RewardFunction
from lightrft.rollout.model_rewards import ModelRewards
from lightrft.rollout.sampler import RolloutSampler, greedy_params
from lightrft.rollout.source import SourceParts
from lightrft.stages.policy.algorithm import (
    check_algorithm,
    decide,
    unused_algorithm_options,
)
from lightrft.stages.policy.maker import ExperienceMaker, PolicyBatch, PolicyMemory, SampleLogs
from lightrft.stages.policy.models import FrozenModels, configure_models
from lightrft.stages.policy.objective import why_loss_outside
from lightrft.stages.policy.step_metrics import experience_metrics, record_experience
from lightrft.stages.policy.updates import (
    NoObserver,
    ObservedStep,
    StepObserver,
    Update,
    open_observer,
)
from lightrft.stages.stage import Stage, Step, TrainedModels, Work

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, ProcessorMixin

    from lightrft.rollout.environments.environments import Environments
    from lightrft.rollout.sampler import SingleTurns
    from lightrft.stages.policy.pretrain_mix import PretrainMix
    from lightrft.strategy.strategy_base import StrategyBase


@dataclass(frozen=True, slots=True)
class RolloutParts:
    """Parts that rollouts are made and scored with.

    Args:
        reward: Scores responses.
        tokenizer: Of the actor.
        model_rewards: Reward models whose scores are added to the reward, or None.
        environments: Answer the calls of responses of several turns; or single turns.
        processor: Of images; None for models of text.
    """

    reward: RewardFunction
    tokenizer: PreTrainedTokenizerBase
    model_rewards: ModelRewards | None
    environments: Environments | SingleTurns
    processor: object | None = None


@dataclass(frozen=True, slots=True)
class PolicyData:
    """Prompts and texts of a run.

    Args:
        prompts: This rank's batches of prompts; None where callers pass them.
        eval_prompts: Held-out prompts, all of them on every rank.
        pretrain: Texts whose language-modelling loss is mixed in, or None.
    """

    prompts: Batches[Prompt] | None = None
    eval_prompts: Sequence[Prompt] = ()
    pretrain: PretrainMix | None = None


class PolicyStage(Stage[PolicyBatch]):
    """Rolls out, scores and trains; the engine's weights follow the actor's.

    Args:
        config: Options of the run; what they leave to the machine is decided.
        strategy: Trains over ranks and hosts the rollout engine.
        models: "actor" first, then "critic" if there is one.
        frozen: Reference model of the KL term, and teacher.
        parts: What rollouts are made and scored with.
        data: Prompts and texts.
        logs: Receive samples.

    Raises:
        ConfigError: A part or model is missing, or options do not fit.
    """

    syncs_engine = True
    item_name = "prompts"

    def __init__(
        self,
        config: TrainConfig,
        strategy: StrategyBase,
        models: TrainedModels,
        frozen: FrozenModels,
        *,
        parts: RolloutParts,
        data: PolicyData,
        logs: SampleLogs,
    ) -> None:
        self.config, algorithm = decide(config)
        self.strategy, self.models, self.algorithm = strategy, models, algorithm
        self.data, self.loader = data, data.prompts
        self.text_part = parts.tokenizer
        self._check_options(frozen)
        if self.config.has_episodes and not parts.environments.answers_calls:
            raise ConfigError(
                "environment and tools need workers: pass environments= "
                "(lightrft.rollout.environments.environments.Environments) to the trainer"
            )
        actor, critic = models.main.model, models.named("critic")
        encoder = prompt_encoder(parts, strategy.unwrap_model(actor))
        self.memory: PolicyMemory = PolicyMemory.initial(self.config)
        self.maker = ExperienceMaker(
            self.config,
            algorithm,
            strategy,
            actor,
            ForwardModels(
                actor, frozen.reference, None if critic is None else critic.model, frozen.teacher
            ),
            RolloutSampler(
                SourceParts(
                    strategy.session,
                    self.config,
                    parts.tokenizer,
                    parts.reward,
                    parts.model_rewards,
                    encoder,
                ),
                parts.environments.source,
                needs_greedy=algorithm.estimator_traits.needs_greedy_rewards,
            ),
            parts.tokenizer,
            encoder,
            logs,
        )

    def _check_options(self, frozen: FrozenModels) -> None:
        """Checks and configures the models, and warns about options without effect."""
        config, algorithm, strategy = self.config, self.algorithm, self.strategy
        critic = self.models.named("critic")
        config.check_world_size(strategy.world_size)
        check_algorithm(
            config,
            algorithm,
            has_critic=critic is not None,
            has_reference=frozen.reference is not None,
            engine_type=strategy.inference_engine_type,
            has_teacher=frozen.teacher is not None,
        )
        actor = self.models.main.model
        configure_models(
            config,
            strategy,
            (actor, None if critic is None else critic.model, frozen.reference, frozen.teacher),
        )
        reason = why_loss_outside(
            config, algorithm.loss_traits, strategy.unwrap_model(actor), algorithm.corrections
        )
        self.computes_loss_inside = reason is None
        if config.fused_linear_logprob:
            place = "inside the output projection" if reason is None else f"after it: {reason}"
            strategy.print(f"the policy loss is computed {place}")
        for text in unused_algorithm_options(
            config, algorithm, has_reference=frozen.reference is not None
        ):
            strategy.print(f"warning: option without effect: {text}")
        if algorithm.loss_traits.couples_rows:
            strategy.print(
                f"warning: policy_loss {config.policy_loss} couples rows of a micro-batch: "
                "the step depends on micro_train_batch_size"
            )

    def planned_steps(self) -> int:
        """See `Stage`."""
        return planned_steps(self.loader, self.config, self.strategy.world_size)

    def draw(self, step: Step) -> PolicyBatch:
        """See `Stage`."""
        if step.data is None:
            raise ValueError(
                "make_experience needs prompts: pass them, give prompts_dataloader= at "
                "construction, or call fit(prompts_dataloader=...)"
            )
        return self.roll_out(cast("Sequence[Prompt]", step.data.next_batch()), step)

    def roll_out(self, prompts: Sequence[Prompt], step: Step) -> PolicyBatch:
        """The experience of given prompts; collective."""
        return self.maker.make(prompts, step, self.memory)

    def update(self, batch: PolicyBatch, step: Step) -> Work:
        """See `Stage`; no optimizer step where there is nothing to learn from."""
        experience, maker = batch.experience, self.maker
        kl_coef = maker.kl_coef(self.memory)
        record_experience(experience, step.metrics, self.config)
        if maker.models.reference is not None:
            step.metrics.add_max("kl_coef", kl_coef)
        names = [each.name for each in self.models.trained]
        work = Work(tuple(n for n in names if n != "actor" or maker.trains_actor(step)))
        observer = self._observer(batch, step)
        why_idle = experience.samples.why_idle
        if why_idle is not None:
            self.strategy.print(f"warning: no update in step {step.number}: {why_idle}")
        else:
            Update(
                self.config,
                self.algorithm.policy_loss,
                self.strategy,
                step.metrics,
                self.algorithm.corrections,
                kl_coef=kl_coef if self.config.use_kl_loss else 0.0,
                observer=observer,
                loss_inside=self.computes_loss_inside,
            ).train(
                experience, self.models, step_number=step.number - 1, pretrain=self.data.pretrain
            )
            lengths, scored = experience.table.lengths, experience.table.sampled_lengths
            work = Work(work.models, lengths, scored, self.config.max_epochs)
        observer.finish()
        return work

    def _observer(self, batch: PolicyBatch, step: Step) -> StepObserver:
        """The receiver of the step's numbers; collective where one is due."""
        every = self.config.audit_every
        if every <= 0 or step.number % every:
            return NoObserver()
        return open_observer(
            "audit",
            ObservedStep(
                step.number,
                replace(self.config, loss_agg_mode=self.algorithm.asked_aggregation),
                self.strategy,
                self.models,
                batch.experience,
                self.maker.kl_coef(self.memory),
                self.memory.moments,
                step.num_planned,
            ),
        )

    def finish(self, batch: PolicyBatch, metrics: dict[str, float]) -> dict[str, float]:
        """See `Stage`."""
        self.maker.encoder.forget()
        self.memory = self.memory.after_step(batch.experience, kl=metrics.get("kl_per_response"))
        return metrics | experience_metrics(
            batch.experience, metrics, num_epochs=self.config.max_epochs
        )

    def evaluate(self) -> dict[str, float]:
        """See `evaluate_prompts`."""
        return evaluate_prompts(self.data.eval_prompts, self.maker.sampler, self.config)

    def alarms(self, metrics: Mapping[str, float]) -> list[str]:
        """See `Stage`."""
        compares_groups = self.algorithm.estimator_traits.needs_groups
        return alarms(self.config, metrics, compares_groups=compares_groups)

    def resumed(self) -> None:
        """Counts the weights of unfinished responses as this process's engine does."""
        engine = self.strategy.inference_engine
        if engine is not None:
            carry = self.memory.carry.rebased(engine.weights_version)
            self.memory = replace(self.memory, carry=carry)

    def close(self) -> None:
        """Closes the logs of samples."""
        self.maker.logs.close()


def prompt_encoder(parts: RolloutParts, actor: nn.Module) -> Encoder:
    """The encoder of prompts; that of text without a processor or for a model of text.

    With environments it is theirs, so that each image is encoded once.
    """
    if parts.processor is None or not isinstance(actor, SequenceModel):
        return TEXT_ENCODER
    family = family_of(actor.config)
    if family is None:
        return TEXT_ENCODER
    own = parts.environments.encoder
    if own.reads_media:
        return own
    return PromptEncoder(cast("ProcessorMixin", parts.processor), family)


def evaluate_prompts(
    prompts: Sequence[Prompt], sampler: RolloutSampler, config: TrainConfig
) -> dict[str, float]:
    """Mean reward and components of one completion per prompt; collective.

    Every prompt counts once, whatever the number of ranks. The random numbers of training belong
    to other requests and stay as they are. Prompts whose reward could not be decided, or fails
    with `reward_failure=mask`, are left out of the means, and counted.

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
    if not len(kept) and not table.is_undecided.any():
        raise RewardError("the reward failed for every prompt of the evaluation")
    metrics = {
        "eval/num_prompts": float(len(table)),
        # Nothing could be decided: what the model wrote must not end the run.
        "eval/reward": float(kept.rewards.mean()) if len(kept) else math.nan,
        "eval/response_length": float(table.sampled_lengths.mean()),
        "eval/truncated_share": float(table.is_truncated.mean()),
    }
    for column, name in enumerate(table.component_names):
        values = kept.components[:, column]
        if not np.isnan(values).all():
            metrics[f"eval/{name}"] = float(np.nanmean(values))
    if config.reward_failure == "mask" or table.is_masked.any():
        metrics["eval/masked_share"] = float(table.is_masked.mean())
    return metrics
