"""Policy optimisation where every rank trains and generates (SPMD)."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lightrft.config import ConfigError, StrategyConfig, TrainConfig
from lightrft.config.options import options_of
from lightrft.datasets.prompt_stream import (
    PromptBatches,
    PromptStream,
    check_lengths,
    planned_steps,
)
from lightrft.datasets.types import Prompt
from lightrft.experience.assemble import AdvantageSettings
from lightrft.experience.forward import ForwardModels, score_actor
from lightrft.experience.maker import StepExperience, make_experience
from lightrft.records.batch import ExperienceBatch
from lightrft.reporting.loggers import ConsoleLogger, LoggerGroup, MetricsLogger
from lightrft.reporting.trajectories import SampleLog, TrajectoryLog
from lightrft.rewards.types import RewardFunction
from lightrft.rollout.environments.environments import Environments
from lightrft.rollout.model_rewards import ModelRewards
from lightrft.rollout.sampler import RolloutSampler, single_turns
from lightrft.rollout.source import SourceParts
from lightrft.run.alarms import alarms
from lightrft.run.checkpointing import load_trainer, save_trainer
from lightrft.run.state import BestModel, initial_state
from lightrft.run.threads import use_threads
from lightrft.run.throughput import (
    TrainingFlops,
    peak_tflops,
    training_flops,
    utilisation,
)
from lightrft.stages.algorithm import check_algorithm, decide, unused_algorithm_options
from lightrft.stages.construction import (
    build_trainer_rewards,
    check_environments,
    check_parts,
    configure_models,
    decide_by_machine,
    is_deterministic,
    load_actor_tokenizer,
    prompt_encoder,
    trained_model,
)
from lightrft.stages.evaluation import evaluate
from lightrft.stages.metrics import StepMetrics
from lightrft.stages.objective import why_loss_outside
from lightrft.stages.parity import ParityReport, check_parity
from lightrft.stages.pretrain_mix import PretrainMix
from lightrft.stages.step_metrics import (
    finished_metrics,
    record_experience,
    record_stages,
)
from lightrft.stages.updates import TrainedModels, Update
from lightrft.strategy.prepared import Arguments, PreparedModel
from lightrft.strategy.strategy_base import StrategyBase
from lightrft.tools.audit_recorder import NoRecord, StepRecorder

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    Model = nn.Module | PreparedModel
    RewardSource = RewardFunction | nn.Module | Sequence[RewardFunction | nn.Module]

BEST_FOLDER = "best"


@dataclass(frozen=True, slots=True)
class LoopResult:
    """What a run ended with.

    Args:
        num_steps: Completed steps, those before a resume included.
        first_eval: Metrics of the evaluation before the first step of this process; empty
            without evaluation prompts, or after a resume.
        last_eval: Metrics of the last evaluation.
        last_metrics: Metrics of the last step; empty if there was none.
        was_stopped: The run was asked to stop before its last step.
        alarms: What ended the run (`stop_on_alarm`); empty if nothing did.
    """

    num_steps: int
    first_eval: dict[str, float]
    last_eval: dict[str, float]
    last_metrics: dict[str, float]
    was_stopped: bool = False
    alarms: tuple[str, ...] = ()


class SPMDPPOTrainerBase:
    """Rolls out, scores and trains; the engine's weights follow the actor's.

    Args:
        strategy: Trains over ranks and hosts the rollout engine.
        actor: The policy (`lightrft.models.Actor`), prepared by the strategy; or its
            PreparedModel, which brings optimizer and scheduler along.
        critic: The value model likewise, or None.
        reward_model: Scores responses: an object with `score()`
            (`lightrft.rewards.RewardFunction`), a prepared `nn.Module`, or a list of them.
        initial_model, ema_model: Reference of the KL term, moving average of the actor; or None.
        actor_optim, critic_optim, actor_scheduler, critic_scheduler: As prepared.
        loss_agg_mode: How the losses of tokens become one number; None is the policy loss's own
            way, unless the configuration says otherwise.
        use_gspo: Use the policy loss "gspo".
        VLM: The models take images; needs `processor`.
        tokenizer: Of the actor; None takes the one in `pretrain` of the configuration.
        processor: Of images; needed by vision-language models.
        reward_fn: Takes the place of `reward_model`.
        model_rewards: Reward models whose scores are added to the reward, or None.
        prompts_dataloader: What `make_experience` takes prompts from.
        eval_prompts: Held-out prompts, all of them on every rank.
        loggers: Receive metrics on the first rank; None prints a line a step.
        sample_log: Receives samples of every step on the first rank.
        pretrain: Texts whose language-modelling loss is mixed in, or None.
        trajectory_log: Receives tokens with their logprobs and advantages on the first rank.
        environments: Answer the calls of responses of several turns, or None.
        **keywords: Options, see `TrainConfig`. What is not given comes from the strategy's
            configuration.

    Raises:
        AssertionError: `engine_tp_size` is not positive, or `processor` is missing with `VLM`.
        TypeError: A keyword is unknown; the message names the nearest.
        ValueError: An unknown name, sizes that do not divide, or a missing model.
    """

    # Whether the models take images, whatever `VLM` says.
    is_vision = False
    _stream: PromptStream | None = None
    _experience: StepExperience | None = None
    _stop_request: Callable[[], bool] | None = None
    _is_first_step = True
    # Of the whole run; 0 is unknown, since `fit` was not called.
    _num_planned_steps = 0

    def __init__(
        self,
        strategy: StrategyBase,
        actor: Model,
        critic: Model | None = None,
        reward_model: RewardSource | None = None,
        initial_model: nn.Module | None = None,
        ema_model: nn.Module | None = None,
        actor_optim: Optimizer | None = None,
        critic_optim: Optimizer | None = None,
        actor_scheduler: LRScheduler | None = None,
        critic_scheduler: LRScheduler | None = None,
        *,
        loss_agg_mode: str | None = None,
        use_gspo: bool = False,
        VLM: bool = False,
        tokenizer: PreTrainedTokenizerBase | None = None,
        processor: object | None = None,
        reward_fn: RewardFunction | None = None,
        model_rewards: ModelRewards | None = None,
        prompts_dataloader: PromptBatches | None = None,
        eval_prompts: Sequence[Prompt] = (),
        loggers: Sequence[MetricsLogger] | None = None,
        sample_log: SampleLog | None = None,
        pretrain: PretrainMix | None = None,
        trajectory_log: TrajectoryLog | None = None,
        environments: Environments | None = None,
        **keywords: object,
    ) -> None:
        check_parts(strategy, processor, needs_processor=VLM or self.is_vision)
        config = TrainConfig.from_args(strategy.config).replaced(keywords)
        loss_agg_mode = loss_agg_mode or config.loss_agg_mode
        config = replace(config, loss_agg_mode=loss_agg_mode, use_gspo=use_gspo or config.use_gspo)
        self.config, self._algorithm = decide(decide_by_machine(config, strategy))
        use_threads(self.config)
        self.strategy = strategy
        trained = trained_model("actor", actor, actor_optim, actor_scheduler)
        self._models = TrainedModels(trained, None, ema_model)
        if critic is not None:
            trained = trained_model("critic", critic, critic_optim, critic_scheduler)
            self._models = replace(self._models, critic=trained)
        self.initial_model = initial_model if self.config.init_kl_coef > 0 else None
        self._check_options()
        check_environments(self.config, has_environments=environments is not None)
        self.tokenizer = tokenizer or load_actor_tokenizer(strategy.config.pretrain)
        self.processor = processor
        self._encoder = prompt_encoder(
            processor, strategy.unwrap_model(self.actor), self.config, environments
        )
        self._sampler = RolloutSampler(
            SourceParts(
                strategy.session,
                self.config,
                self.tokenizer,
                *build_trainer_rewards(
                    reward_fn or reward_model, model_rewards, strategy, self.config
                ),
                encoder=self._encoder,
            ),
            single_turns if environments is None else environments.source,
            needs_greedy=self._algorithm.estimator_traits.needs_greedy_rewards,
        )
        self.eval_prompts, self._prompts_dataloader = eval_prompts, prompts_dataloader
        self.state = initial_state(self.config)
        self._pretrain = pretrain
        self._costs: dict[str, TrainingFlops | None] = {}
        self._sample_log, self._trajectory_log = sample_log, trajectory_log
        if loggers is None:
            loggers = [ConsoleLogger(strategy.print, every=self.config.logging_steps)]
        self._loggers = LoggerGroup(loggers if strategy.is_rank_0() else ())

    def _computes_loss_inside(self) -> bool:
        """Whether the actor computes the loss in its output projection; says why it does not."""
        reason = why_loss_outside(
            self.config, self._algorithm.loss_traits, self.strategy.unwrap_model(self.actor)
        )
        if self.config.fused_linear_logprob:
            place = "inside the output projection" if reason is None else f"after it: {reason}"
            self.strategy.print(f"the policy loss is computed {place}")
        return reason is None

    def _check_options(self) -> None:
        """Checks and configures the models, and warns about options without effect."""
        has_reference = self.initial_model is not None
        self.config.check_world_size(self.strategy.world_size)
        check_algorithm(
            self.config,
            self._algorithm,
            has_critic=self.critic is not None,
            has_reference=has_reference,
            engine_type=self.strategy.inference_engine_type,
        )
        models = (self.actor, self.critic, self.initial_model)
        configure_models(self.config, self.strategy, models)
        self._loss_inside = self._computes_loss_inside()
        for text in unused_algorithm_options(
            self.config, self._algorithm, has_reference=has_reference
        ):
            self.strategy.print(f"warning: option without effect: {text}")
        if self._algorithm.loss_traits.couples_rows:
            self.strategy.print(
                f"warning: policy_loss {self.config.policy_loss} couples rows of a micro-batch: "
                "the step depends on micro_train_batch_size"
            )

    @property
    def actor(self) -> nn.Module:
        """The policy as the strategy wrapped it."""
        return self._models.actor.model

    @property
    def critic(self) -> nn.Module | None:
        """The value model as the strategy wrapped it, or None."""
        return None if self._models.critic is None else self._models.critic.model

    @property
    def ema_model(self) -> nn.Module | None:
        """The actor's moving average, or None."""
        return self._models.ema_model

    @property
    def actor_optim(self) -> Optimizer:
        """The actor's optimizer."""
        return self._models.actor.optimizer

    @property
    def actor_scheduler(self) -> LRScheduler | None:
        """The actor's learning rate schedule."""
        return self._models.actor.scheduler

    @property
    def _kl_coef(self) -> float:
        return 0.0 if self.initial_model is None else self.state.kl.coef

    def make_experience(self, prompts: Sequence[Prompt] | None = None) -> ExperienceBatch:
        """Rolls out one batch of prompts and keeps the result for `ppo_train`.

        Collective: every rank calls it with equally many prompts.

        Args:
            prompts: This rank's share of the step's prompts; None takes the next batch of the
                data loader given at construction or to `fit`.

        Returns:
            The rows that this rank trains on.

        Raises:
            ValueError: There is no data loader, or the number of samples is not a multiple of
                train_batch_size.
        """
        if prompts is None:
            prompts = self._prompt_stream().next_batch()
        check_lengths(prompts, self.config.prompt_max_len)
        self._restore_engine_weights()
        for trained in self._models.trained:
            trained.model.eval()
        samples = self._sampler.collect(
            prompts,
            first_request_id=self.state.num_requests,
            next_prompts=self._next_prompts(),
            carry=self.state.carry,
            step=self.state.num_steps + 1,
        )
        self._release_engine()
        self._experience = make_experience(
            samples,
            ForwardModels(self.actor, self.initial_model, self.critic),
            strategy=self.strategy,
            settings=AdvantageSettings(
                self.config,
                self._algorithm.estimator,
                kl_coef=0.0 if self.config.use_kl_loss else self._kl_coef,
            ),
            step=self.state.num_steps,
            moments=self.state.reward_moments,
            reuses_policy_logprobs=self._reuses_policy_logprobs(),
            encoder=self._encoder,
        )
        if self._parity_is_due():
            self.check_parity()
        self._is_first_step = False
        if self._sample_log is not None and self.strategy.is_rank_0():
            self._sample_log.log(self.state.num_steps + 1, samples.scored)
        if self._trajectory_log is not None and self.strategy.is_rank_0():
            self._trajectory_log.log(self.state.num_steps + 1, self._experience, self.tokenizer)
        return self._experience.batch

    def _parity_is_due(self) -> bool:
        every = self.config.parity_check_steps
        is_nth = every > 0 and (self.state.num_steps + 1) % every == 0
        return every >= 0 and (self._is_first_step or is_nth)

    def _release_engine(self) -> None:
        """Lets the engine sleep; its next use is the weight sync after the update."""
        if self._parity_is_due():
            # A difference is explained by looking into the engine's layers.
            self.strategy.maybe_sleep_inference_engine()
        else:
            self.strategy.sleep_until_weight_sync()

    def check_parity(self) -> ParityReport | None:
        """Compares the engine's logprobs of the experience with the trainer's; collective.

        To be called between `make_experience` and `ppo_train`.

        Returns:
            What was found; None if the engine does not compute the trainer's model.

        Raises:
            RuntimeError: There is no experience.
            ParityError: They differ by more than rounding explains.
        """
        step, engine = self._experience, self.strategy.inference_engine
        if step is None:
            raise RuntimeError("check_parity compares samples: call make_experience() before it")
        if engine is None or not engine.computes_model:
            return None
        rollouts = step.batch.rollouts
        logprobs = step.batch.outputs.sampling_logprobs
        if logprobs is None or self.config.use_rollout_logprobs:
            rows = step.plan.forward_slices(
                step.table.lengths, rank=self.strategy.data_rank, config=self.config
            )
            with step.samples.meter.stage("forward"):
                logprobs = score_actor(rollouts, self.actor, slices=rows)
        report = check_parity(
            rollouts,
            logprobs,
            self.actor,
            strategy=self.strategy,
            mean_limit=self.config.parity_limit,
        )
        self.strategy.print_detail(report.summary())
        return report

    def _reuses_policy_logprobs(self) -> bool:
        """Whether nobody needs the old logprobs before the one update that computes them too."""
        is_logged = self._trajectory_log is not None and self._trajectory_log.is_due(
            self.state.num_steps + 1
        )
        has_kl_reward = self.initial_model is not None and not self.config.use_kl_loss
        return (
            self.config.max_epochs == 1
            and not self.config.high_entropy_token_ratio
            and not self._algorithm.corrections
            and is_deterministic(self.strategy.unwrap_model(self.actor))
            and self._trains_actor
            and not has_kl_reward
            and not is_logged
        )

    @property
    def _engine_hash(self) -> int:
        """Of the weights that the engine holds; 0 if they are not known."""
        report = self.strategy.last_weight_sync
        return 0 if report is None else report.engine_hash

    @property
    def _trains_actor(self) -> bool:
        return self.state.num_steps >= self.config.freezing_actor_steps

    def ppo_train(self, global_steps: int = 0) -> dict[str, float]:
        """Trains on the experience, then sends the actor's weights to the engine.

        Args:
            global_steps: Number of the step, for the log.

        Returns:
            Metrics of the step, exact over all ranks: `policy_loss`, with a critic `critic_loss`,
            rewards, lengths, ratios, gradient norms, logprob differences and durations.

        Raises:
            RuntimeError: There is no experience; call `make_experience` first.
        """
        step = self._experience
        if step is None:
            raise RuntimeError(
                "ppo_train has nothing to train on: call make_experience() before each ppo_train()"
            )
        metrics = StepMetrics()
        record_experience(step, metrics, self.config)
        if self.initial_model is not None:
            metrics.add_max("kl_coef", self._kl_coef)
        with step.samples.meter.stage("train"):
            for trained in self._models.trained:
                self.strategy.maybe_load_optimizer(trained.optimizer)
                trained.model.train()
            recorder = self._recorder(step)
            self._update(step, metrics, recorder)
            recorder.finish()
            for trained in self._models.trained:
                self.strategy.maybe_offload_optimizer(trained.optimizer)
        before = self._engine_hash
        with step.samples.meter.stage("weight_sync"):
            self.strategy.update_engine_weights(self.actor)
        if before and self._engine_hash and self._trains_actor:
            metrics.add_max("weights_changed", float(before != self._engine_hash))
        record_stages(step.samples.meter, metrics)
        reduced = metrics.reduce(self.strategy)
        reduced |= self._utilisation(step, reduced["train_seconds"])
        self._experience = None
        self._encoder.forget()
        self.state = self.state.after_step(
            step, stream=self._stream, kl=reduced.get("kl_per_response")
        )
        reduced["global_step"] = global_steps
        return finished_metrics(
            step, reduced, self.strategy.last_weight_sync, num_epochs=self.config.max_epochs
        )

    def _utilisation(self, step: StepExperience, seconds: float) -> dict[str, float]:
        """Speed of the update, which took so long; {} where nothing was trained."""
        selection, strategy = step.samples.selection, self.strategy
        if selection is not None and selection.is_empty:
            return {}
        for trained in self._models.trained:
            if trained.name not in self._costs:
                self._costs[trained.name] = training_flops(trained.model, strategy)
        names = [name for name in self._costs if self._trains_actor or name != "actor"]
        return utilisation(
            [cost for name in names if (cost := self._costs[name]) is not None],
            step.table,
            num_epochs=self.config.max_epochs,
            seconds=seconds,
            num_devices=strategy.world_size,
            peak=peak_tflops(self.config),
        )

    def _recorder(self, step: StepExperience) -> NoRecord:
        """What receives the numbers of the step for an audit; collective where one is due."""
        if not _is_due(self.state.num_steps + 1, self.config.audit_every):
            return NoRecord()
        num_updates = self._num_planned_steps * self.config.steps_per_rollout
        models = {
            each.name: PreparedModel(each.model, each.optimizer, each.scheduler)
            for each in self._models.trained
        }
        # As it was asked for: the audit knows by itself how a paper aggregates its loss.
        config = replace(self.config, loss_agg_mode=self._algorithm.asked_aggregation)
        recorder = StepRecorder(self.strategy, config, models, step)
        recorder.begin(
            self.state, has_reference=self.initial_model is not None, num_updates=num_updates
        )
        return recorder

    def _update(self, step: StepExperience, metrics: StepMetrics, recorder: NoRecord) -> None:
        """All optimizer steps; none where dynamic sampling found nothing to learn from."""
        selection = step.samples.selection
        if selection is not None and selection.is_empty:
            self.strategy.print(
                f"warning: no update in step {self.state.num_steps + 1}: in all "
                f"{selection.num_groups} groups the responses are equally accurate; the "
                "prompts are solved or out of reach"
            )
            return
        update = Update(
            self.config,
            self._algorithm.policy_loss,
            self.strategy,
            metrics,
            self._algorithm.corrections,
            kl_coef=self._kl_coef if self.config.use_kl_loss else 0.0,
            recorder=recorder,
            loss_inside=self._loss_inside,
        )
        number = self.state.num_steps
        update.train(step, self._models, step_number=number, pretrain=self._pretrain)

    def evaluate(self) -> dict[str, float]:
        """Mean reward of one greedy completion per held-out prompt; {} without such prompts."""
        self._restore_engine_weights()
        begin = time.perf_counter()
        metrics = evaluate(self.eval_prompts, self._sampler, self.config)
        if metrics:
            if self.config.enable_engine_sleep:
                self.strategy.maybe_sleep_inference_engine()
            metrics["eval/seconds"] = time.perf_counter() - begin
        return metrics

    def _restore_engine_weights(self) -> None:
        """Sends the weights again if the engine dropped them and no update brought new ones."""
        engine = self.strategy.inference_engine
        if engine is not None and engine.weights_version >= 0 and engine.weights_were_dropped:
            self.strategy.update_engine_weights(self.actor)

    def _next_prompts(self) -> Callable[[], Sequence[Prompt]] | None:
        has_loader = self._prompts_dataloader is not None
        draws_more = self.config.dynamic_sampling or self.config.partial_rollout
        if not draws_more or not has_loader:
            return None

        def draw() -> Sequence[Prompt]:
            prompts = self._prompt_stream().next_batch()
            check_lengths(prompts, self.config.prompt_max_len)
            return prompts

        return draw

    def fit(
        self,
        args: Arguments | None = None,
        prompts_dataloader: PromptBatches | None = None,
        *,
        eval_prompts: Sequence[Prompt] | None = None,
        consumed_samples: int = 0,
        num_update_steps_per_episodes: int | None = None,
        stop_request: Callable[[], bool] | None = None,
    ) -> LoopResult:
        """Trains over the prompts: rolls out, updates, evaluates, logs and saves.

        Args:
            args: Settings of the run (num_episodes, max_steps, eval_steps, save_steps, ckpt_path)
                that replace those of construction.
            prompts_dataloader: This rank's batches, as `strategy.setup_dataloader` makes them.
            eval_prompts: Held-out prompts, all of them on every rank.
            consumed_samples: Prompts of the first pass already used, over all ranks; a loaded
                checkpoint knows this itself.
            num_update_steps_per_episodes: Optimizer steps of one pass; None uses all prompts.
            stop_request: Asked on every rank at least once a step; if one rank says yes, all
                write a checkpoint and return. Either all ranks pass one or none.

        Raises:
            ValueError: There are no prompts, or too few for one batch.
        """
        self.config = _with_run_options(self.config, args)
        self._stop_request = stop_request
        if eval_prompts is not None:
            self.eval_prompts = eval_prompts
        if prompts_dataloader is not None:
            self._prompts_dataloader, self._stream = prompts_dataloader, None
        if consumed_samples:
            self.state = replace(
                self.state, num_episode_prompts=consumed_samples, num_requests=consumed_samples
            )
        num_steps = planned_steps(
            self._prompts_dataloader,
            self.config,
            self.strategy.world_size,
            num_updates_per_episode=num_update_steps_per_episodes,
        )
        return self._run(num_steps)

    def _run(self, num_steps: int) -> LoopResult:
        """Trains until `num_steps` steps are complete, an alarm stops, or a request to stop.

        A request is answered before each step and between its rollout and its update; the rollout
        is then dropped, and a resumed run samples it again.
        """
        first_eval: dict[str, float] = {}
        last_eval: dict[str, float] = {}
        metrics: dict[str, float] = {}
        if self.state.num_steps == 0:
            first_eval = last_eval = self.evaluate()
            self.keep_best(0, first_eval)
            if first_eval:
                self.log_metrics(0, first_eval)
        num_saved, was_stopped = -1, False
        ended_by: tuple[str, ...] = ()
        self._num_planned_steps = num_steps
        while self.state.num_steps < num_steps:
            if was_stopped := self.is_asked_to_stop():
                break
            step = self.state.num_steps + 1
            self.make_experience()
            if was_stopped := self.is_asked_to_stop():
                break
            metrics = self.ppo_train(step)
            found = self.check_alarms(metrics)
            is_alarmed = bool(found) and self.config.stop_on_alarm
            is_last = is_alarmed or step == num_steps
            is_evaluated = is_last or _is_due(step, self.config.eval_steps)
            if is_evaluated:
                last_eval = self.evaluate()
                self.keep_best(step, last_eval)
            self.log_metrics(step, {**metrics, **last_eval} if is_evaluated else metrics)
            if is_last or _is_due(step, self.config.save_steps):
                self.save_checkpoint()
                num_saved = step
            if is_alarmed:
                ended_by = found
                break
        if was_stopped and num_saved != self.state.num_steps:
            self.save_checkpoint()
        return LoopResult(
            self.state.num_steps, first_eval, last_eval, metrics, was_stopped, ended_by
        )

    def check_alarms(self, metrics: Mapping[str, float]) -> tuple[str, ...]:
        """Warns about numbers out of bounds, a line each, and returns the sentences."""
        compares_groups = self._algorithm.estimator_traits.needs_groups
        found = alarms(self.config, metrics, compares_groups=compares_groups)
        for text in found:
            self.strategy.print(f"warning: alarm after step {self.state.num_steps}: {text}")
        return tuple(found)

    def is_asked_to_stop(self) -> bool:
        """Whether any rank was asked to stop; the same answer on all of them."""
        if self._stop_request is None:
            return False
        return self.strategy.all_reduce(int(self._stop_request()), op="max") > 0

    def keep_best(self, step: int, metrics: Mapping[str, float]) -> None:
        """Saves the actor in `ckpt_path`/best if `best_metric` was never better; collective.

        Raises:
            ConfigError: The evaluation has no such metric; the message lists those it has.
        """
        metric, best = self.config.best_metric, self.state.best
        if metric is None or self.config.ckpt_path is None or not metrics:
            return
        if metric not in metrics:
            raise ConfigError(
                f"best_metric: the evaluation has no {metric!r}, it has "
                f"{', '.join(sorted(metrics))}"
            )
        value = metrics[metric]
        if best is not None and not value > best.value:
            return
        folder = Path(self.config.ckpt_path) / BEST_FOLDER
        partial, former = (folder.with_name(f"best.{kind}") for kind in ("partial", "former"))
        self.strategy.save_model(self.actor, self.tokenizer, str(partial))
        if self.strategy.is_rank_0():
            # The former best stays in place until the new one is complete.
            shutil.rmtree(former, ignore_errors=True)
            if folder.exists():
                folder.rename(former)
            partial.rename(folder)
            shutil.rmtree(former, ignore_errors=True)
        self.strategy.barrier()
        self.strategy.print(
            f"best {metric} so far: {value:.6g} after step {step}, saved in {folder}"
        )
        self.state = replace(self.state, best=BestModel(value, step))

    def log_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        """Hands metrics to the loggers, on the first rank."""
        self._loggers.log(step, metrics)

    def save_checkpoint(self) -> None:
        """Writes all that a run needs to continue; does nothing without `ckpt_path`."""
        if self.config.ckpt_path is not None:
            save_trainer(self.strategy, self.config, self.state, self._models)

    def load_checkpoint(self) -> bool:
        """Continues from the newest complete checkpoint under `ckpt_path`, if there is one.

        The engine gets the loaded weights.

        Returns:
            Whether there was a checkpoint.
        """
        if self.config.ckpt_path is None:
            return False
        restored = load_trainer(self.strategy, self.config, self.state, self._models)
        if restored is None:
            return False
        self.state, self._stream = restored, None
        self.strategy.update_engine_weights(self.actor)
        engine = self.strategy.inference_engine
        if engine is not None:
            carry = self.state.carry.rebased(engine.weights_version)
            self.state = replace(self.state, carry=carry)
        return True

    def close(self) -> None:
        """Closes the loggers and the sample log."""
        self._loggers.close()
        for log in (self._sample_log, self._trajectory_log):
            if log is not None:
                log.close()

    def _prompt_stream(self) -> PromptStream:
        if self._stream is None:
            if self._prompts_dataloader is None:
                raise ValueError(
                    "make_experience needs prompts: pass them, give prompts_dataloader= at "
                    "construction, or call fit(prompts_dataloader=...)"
                )
            self._stream = PromptStream(
                self._prompts_dataloader,
                world_size=self.strategy.world_size,
                episode=self.state.episode,
                num_consumed=self.state.num_episode_prompts,
            )
        return self._stream


def _with_run_options(config: TrainConfig, args: Arguments | None) -> TrainConfig:
    """The configuration with those options of the group "run" that `args` gives."""
    if args is None:
        return config
    given = (
        TrainConfig.from_args(args).__dict__
        if isinstance(args, StrategyConfig)
        else (args if isinstance(args, Mapping) else vars(args))
    )
    run = {
        name: given[name]
        for name, (_, info) in options_of(TrainConfig).items()
        if info.group == "run" and given.get(name) is not None
    }
    return config.replaced(run)


def _is_due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


class SPMDPPOTrainer(SPMDPPOTrainerBase):
    """The trainer of language models; see `SPMDPPOTrainerBase` for all arguments."""


class SPMDPPOTrainerVL(SPMDPPOTrainerBase):
    """The trainer of vision-language models: `processor` is needed.

    Raises:
        AssertionError: `processor` is missing or None.
    """

    is_vision = True
