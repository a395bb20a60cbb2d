"""Reinforcement as a stage: rollouts, experience, and the update of actor and critic."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, cast

import numpy as np
from torch import nn

from lightrft.config import ConfigError, RolloutOptions, TrainConfig
from lightrft.datasets.batch_stream import Batches, known_items, planned_steps
from lightrft.datasets.media import encoder_of
from lightrft.datasets.prompt_sampler import GroupResult, SampledRows
from lightrft.datasets.types import Prompt
from lightrft.engines.media.families import family_of
from lightrft.engines.media.text_encoder import TEXT_ENCODER, Encoder
from lightrft.experience.maker import ForwardModels, TeacherFunction
from lightrft.models import SequenceModel
from lightrft.records.media import media_of
from lightrft.records.table import RowTable
from lightrft.reporting.alarms import alarms
from lightrft.rewards.types import RewardError, RewardFunction
from lightrft.rollout.sampler import RolloutSampler, greedy_params
from lightrft.rollout.source import InFlight, SourceParts
from lightrft.stages.models import FrozenModels, configure_models
from lightrft.stages.policy.algorithm import (
    check_algorithm,
    decide,
    unused_algorithm_options,
)
from lightrft.stages.policy.maker import (
    ExperienceMaker,
    PolicyBatch,
    PolicyMemory,
    SampleLogs,
    stored_bytes,
)
from lightrft.stages.policy.objective import why_loss_outside
from lightrft.stages.policy.step_metrics import (
    experience_metrics,
    record_experience,
    record_tallies,
)
from lightrft.stages.policy.updates import PolicyUpdate
from lightrft.stages.stage import Stage, Step, TrainedModels, Work
from lightrft.strategy.backend import inner_module

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, ProcessorMixin

    from lightrft.experience.teachers import TeacherRows
    from lightrft.rollout.agents.agents import Agents
    from lightrft.rollout.environments.environments import Environments
    from lightrft.rollout.model_rewards import ModelRewards
    from lightrft.rollout.sampler import SingleTurns
    from lightrft.stages.observer import Observer
    from lightrft.stages.policy.pretrain_mix import PretrainMix
    from lightrft.stages.policy.split.training_side import RemoteRollouts
    from lightrft.strategy.strategy_base import StrategyBase

# Share of a step with idle or nearly idle engines, above which streaming is proposed.
MAX_WAITING_SHARE = 1 / 3
CHUNK_MULTIPLE = 16


@dataclass(frozen=True, slots=True)
class RolloutParts:
    """Parts that generate and score rollouts.

    Args:
        reward: Scores responses.
        tokenizer: Tokenizer of the actor.
        model_rewards: Reward models whose scores are added to the reward, or None.
        environments: Answer calls in responses of several turns; or single turns.
        processor: Processor of images; None for models of text.
        has_rewards: Something scores responses; without it their reward is a meaningless 0.
    """

    reward: RewardFunction
    tokenizer: PreTrainedTokenizerBase
    model_rewards: ModelRewards | None
    environments: Agents | Environments | SingleTurns
    processor: object | None = None
    has_rewards: bool = True


@dataclass(frozen=True, slots=True)
class PolicyData:
    """Prompts and texts of a run.

    Args:
        prompts: This rank's batches of prompts; None where callers pass them.
        eval_prompts: Held-out prompts, all of them on every rank.
        pretrain: Texts whose language-modelling loss is mixed in, or None.
        teacher_rows: Texts of the prompts for teachers, or None.
    """

    prompts: Batches[Prompt] | None = None
    eval_prompts: Sequence[Prompt] = ()
    pretrain: PretrainMix | None = None
    teacher_rows: TeacherRows | None = None


class PolicyStage(Stage[PolicyBatch]):
    """Stage that rolls out, scores and trains; the engine's weights follow the actor's.

    Args:
        config: Options of the run, with the machine's choices made.
        strategy: Trains over ranks and hosts the rollout engine.
        models: "actor" first, then "critic" if there is one.
        frozen: Reference model of the KL term, and teacher.
        parts: Parts that generate and score rollouts.
        data: Prompts and texts.
        logs: Logs of samples.

    Raises:
        ConfigError: A part or model is missing, or options do not fit.
    """

    syncs_engine = True
    item_name = "prompts"
    # No dropout in adapters either: old and new logprobs come from different passes.
    kept_dropout = "none"
    _is_advised = False

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
        self.has_rewards, self.reward = parts.has_rewards, parts.reward
        self.text_part = parts.tokenizer
        self._check_options(frozen, parts)
        actor, critic = models.main.model, models.named("critic")
        encoder = prompt_encoder(parts, inner_module(actor))
        self.memory: PolicyMemory = PolicyMemory.initial(
            self.config,
            strategy.context.rank,
            strategy.world_size,
            media=media_of(known_items(data.prompts)) if encoder.reads_media else {},
        )
        self.maker = ExperienceMaker(
            self.config,
            algorithm,
            strategy.backend,
            strategy.session,
            actor,
            ForwardModels(
                actor,
                frozen.reference,
                None if critic is None else critic.model,
                self._teacher(frozen),
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
            data.teacher_rows,
            self._remote_rollouts(),
            self.computes_loss_inside,
        )

    def _remote_rollouts(self) -> RemoteRollouts | None:
        """Return the rollouts of the ranks that only generate, if there are any."""
        if not self.config.rollout_ranks:
            return None
        from lightrft.stages.policy.split.training_side import RemoteRollouts
        from lightrft.strategy.split.remote_engine import RemoteEngine

        engine = self.strategy.inference_engine
        if not isinstance(engine, RemoteEngine):
            raise ConfigError(
                "rollout_ranks works only with lightrft train and lightrft.trainer.train"
            )
        return RemoteRollouts(
            engine.bridge, self.config, self.strategy.session, self.strategy.context
        )

    def _teacher(self, frozen: FrozenModels) -> TeacherFunction | None:
        """Return the function that scores samples for the teachers; None without any."""
        if not self.config.teacher_places:
            return None
        from lightrft.stages.policy.teacher import build_teacher

        rows, context = self.data.teacher_rows, self.strategy.context
        return build_teacher(self.config, frozen.teachers, rows, context)

    def _check_options(self, frozen: FrozenModels, parts: RolloutParts) -> None:
        """Check and configure the models, and warn about options without effect."""
        config, algorithm, strategy = self.config, self.algorithm, self.strategy
        if self.config.has_episodes and not parts.environments.answers_calls:
            raise ConfigError(
                "environment and tools need workers: pass environments= "
                "(lightrft.rollout.environments.environments.Environments) to the trainer"
            )
        critic = self.models.named("critic")
        config.check_world_size(strategy.world_size)
        if config.overlap_choices(strategy.world_size):
            raise ConfigError(f"overlap {config.overlap} is of whole runs: give what it sets")
        check_algorithm(
            config,
            algorithm,
            has_critic=critic is not None,
            has_reference=frozen.reference is not None,
            engine_type=strategy.inference_engine_type,
            has_teacher=bool(frozen.teachers),
        )
        actor = self.models.main.model
        self.config = config = configure_models(
            config,
            strategy.context,
            (actor, None if critic is None else critic.model, *frozen.all),
            kept=self.kept_dropout,
        )
        reason = why_loss_outside(
            config, algorithm.loss_traits, inner_module(actor), algorithm.corrections
        )
        self.computes_loss_inside = reason is None
        if config.fused_linear_logprob:
            place = "inside the output projection" if reason is None else f"after it: {reason}"
            strategy.print(f"the policy loss is computed {place}")
        if config.keeps_rows:
            how = config.correction or (
                "engine logprobs" if config.use_rollout_logprobs else "none"
            )
            strategy.print(f"off_policy_correction of rows of older weights: {how}")
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
        """Return the number of steps of the whole run."""
        return planned_steps(self.loader, self.config, self.strategy.world_size)

    def draw(self, step: Step) -> PolicyBatch:
        """Return the batch of one step."""
        return self.maker.make(None, step, self.memory)

    def roll_out(self, prompts: Sequence[Prompt], step: Step) -> PolicyBatch:
        """Return the experience of these prompts; collective."""
        return self.maker.make(prompts, step, self.memory)

    def results(self, batch: PolicyBatch) -> Sequence[GroupResult]:
        """Return the outcomes of the step's groups for the prompt sampler."""
        return batch.experience.samples.groups

    def client_state(self) -> dict[str, object]:
        """Return the memory, on the first rank with the rows in flight of all ranks."""
        from lightrft.rollout.in_flight import bytes_of_ranks

        remote, flight = self.maker.remote, self.memory.in_flight
        parts = None if remote is None else remote.saved_rows()
        if parts is None:
            parts = bytes_of_ranks(flight, self.strategy.context)
        # The rows of this rank are among those of all ranks.
        without_rows = replace(self.memory, in_flight=InFlight(flight.num_requests))
        return {**without_rows.to_client_state(), "carry": stored_bytes(parts)}

    def update(self, batch: PolicyBatch, step: Step) -> Work:
        """Take all optimizer steps of one step; none if there is nothing to learn from."""
        experience, maker = batch.experience, self.maker
        kl_coef = maker.kl_coef(self.memory)
        record_experience(experience, step.metrics, self.config, has_rewards=self.has_rewards)
        record_tallies(self.reward, step.metrics)
        if maker.models.reference is not None:
            step.metrics.add_max("kl_coef", kl_coef)
        names = [each.name for each in self.models.trained]
        work = Work(tuple(n for n in names if n != "actor" or maker.trains_actor(step)))
        observer = self.observe_step(batch, step) if step.is_due(self.config.audit_every) else None
        skip_reason = experience.samples.skip_reason
        if skip_reason is not None:
            self.strategy.print(f"warning: no update in step {step.number}: {skip_reason}")
        else:
            PolicyUpdate(
                self.config,
                self.algorithm.policy_loss,
                self.strategy.training,
                step.metrics,
                self.algorithm.corrections,
                kl_coef=kl_coef if self.config.use_kl_loss else 0.0,
                observer=observer,
                loss_inside=self.computes_loss_inside,
                gate=batch.gate,
            ).train(
                experience, self.models, step_number=step.number - 1, pretrain=self.data.pretrain
            )
            lengths, scored = experience.table.lengths, experience.table.sampled_lengths
            work = Work(work.models, lengths, scored, self.config.max_epochs)
        if observer is not None:
            observer.finish()
        if maker.remote is not None:
            maker.remote.complete(step)
        return work

    def observe_step(self, batch: PolicyBatch, step: Step) -> Observer:
        """Return an observer of the step; collective."""
        from lightrft.stages.observer import ObservedStep, open_observer

        prompts = self.data.prompts
        return open_observer(
            ObservedStep(
                "policy",
                step.number,
                step.num_planned,
                replace(self.config, loss_agg_mode=self.algorithm.asked_aggregation),
                self.strategy.backend,
                self.strategy.inference_engine,
                self.models,
                batch.experience,
                self.maker.kl_coef(self.memory),
                self.memory.moments,
                [each.id for each in prompts.items] if isinstance(prompts, SampledRows) else (),
            ),
        )

    def finish(self, batch: PolicyBatch, metrics: dict[str, float]) -> dict[str, float]:
        """Update the memory and complete the metrics."""
        if self.maker.encoder.reads_media:
            self.maker.encoder.forget()
        if self.maker.remote is not None:
            in_flight, num_tokens = self.maker.remote.completed(int(metrics["global_step"]))
            batch = replace(batch, in_flight=in_flight, num_sampled_tokens=num_tokens)
        self.advise(metrics, batch.experience.table)
        self.memory = self.memory.after_step(batch, kl=metrics.get("kl_per_response"))
        return metrics | experience_metrics(
            batch.experience,
            metrics,
            num_epochs=self.config.max_epochs,
            has_rewards=self.has_rewards,
            num_sampled_tokens=batch.num_sampled_tokens,
        )

    def advise(self, metrics: Mapping[str, float], table: RowTable) -> None:
        """Advise streaming once, from the third step on, if ranks wait for long responses."""
        idle, thin = (
            metrics[f"{each}_seconds"] / metrics["step_seconds"] for each in ("idle", "thin")
        )
        if self._is_advised or metrics["global_step"] < 3 or idle + thin <= MAX_WAITING_SHARE:
            return
        self._is_advised = True
        if self.config.has_episodes and self.maker.encoder.reads_media:
            return  # its environments may show media that no checkpoint holds
        chunk = -(-int(table.sampled_lengths.mean()) // CHUNK_MULTIPLE) * CHUNK_MULTIPLE
        try:
            self.config.replaced({"stream_chunk": self.config.stream_chunk or chunk})
        except ConfigError:
            return  # other options exclude it
        if self.config.stream_chunk is None:
            self.strategy.print(
                f"advice: engines were idle for {idle:.0%} of the step and sampled few responses "
                f"for {thin:.0%}: --stream_chunk {chunk} waits for no long ones (docs/scaling.md)"
            )

    def evaluate(self) -> dict[str, float]:
        """Evaluate the held-out prompts; see `evaluate_prompts`."""
        sampler = self.maker.remote or self.maker.sampler
        metrics = evaluate_prompts(self.data.eval_prompts, sampler, self.config)
        return (
            metrics
            if self.has_rewards
            else {n: v for n, v in metrics.items() if n != "eval/reward"}
        )

    def alarms(self, metrics: Mapping[str, float]) -> list[str]:
        """Return one sentence for each thing that is wrong with the metrics of a step."""
        compares_groups = self.algorithm.estimator_traits.needs_groups
        return alarms(self.config, metrics, compares_groups=compares_groups)

    def close(self) -> None:
        """Close the logs of samples."""
        self.maker.logs.close()


def prompt_encoder(parts: RolloutParts, actor: nn.Module) -> Encoder:
    """Return the encoder of prompts; the text encoder for models that read no media.

    The environments' encoder is used if it reads media, so that each image is encoded once.
    """
    if parts.processor is None or not isinstance(actor, SequenceModel):
        return TEXT_ENCODER
    family = family_of(actor.config)
    if family is None or not family.reads:
        return TEXT_ENCODER
    shared = parts.environments.encoder
    if shared.reads_media:
        return shared
    return encoder_of(cast("ProcessorMixin", parts.processor), family)


def evaluate_prompts(
    prompts: Sequence[Prompt], sampler: RolloutSampler | RemoteRollouts, config: RolloutOptions
) -> dict[str, float]:
    """Return the mean reward and components of one completion per prompt; collective.

    Every prompt counts once, whatever the number of ranks. Evaluation does not change the random
    numbers of training. Prompts with an undecided reward, or with a failed one under
    `reward_failure=mask`, are counted but left out of the means.

    Args:
        prompts: All prompts, the same list on every rank.
        sampler: Generates and scores; the engine stays awake.
        config: Options of sampling.

    Returns:
        `eval/reward`, `eval/<component>`, `eval/response_length`, `eval/truncated_share`,
        `eval/num_prompts`, of questions in both orders `position_metrics`; the same on every rank.
        Empty without prompts.
    """
    if not prompts:
        return {}
    _, table = sampler.sample_all(prompts, greedy_params(config))
    kept = table.take(np.flatnonzero(~table.is_masked).astype(np.int64))
    if not len(kept) and not table.is_undecided.any():
        raise RewardError("the reward failed for every prompt of the evaluation")
    metrics = {
        "eval/num_prompts": float(len(table)),
        # If nothing could be decided, the model's outputs must not end the run.
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
    from lightrft.records.answer_order import position_metrics

    positions = position_metrics(table, prompts)
    return metrics | {f"eval/{name}": value for name, value in positions.items()}
