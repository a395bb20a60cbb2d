"""Policy optimisation where every rank trains and generates (SPMD)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Unpack

from lightrft.experience.collate import micro_slices
from lightrft.experience.forward import ForwardModels, score_actor
from lightrft.experience.maker import ExperienceMaker, StepExperience
from lightrft.trainer.ppo_config import PPOKeywords, resolve_ppo_config
from lightrft.trainer.reporting.loggers import ConsoleLogger, LoggerGroup
from lightrft.trainer.runs.prompts import check_lengths
from lightrft.trainer.training import algorithm
from lightrft.trainer.training.construction import (
    build_trainer_reward,
    check_engine_group,
    check_processor,
    configure_packing,
    is_deterministic,
    load_actor_tokenizer,
    trained_model,
    unused_options,
)
from lightrft.trainer.training.metrics import StepMetrics
from lightrft.trainer.training.parity import check_parity
from lightrft.trainer.training.run_control import RunControl
from lightrft.trainer.training.state import initial_state
from lightrft.trainer.training.step_metrics import (
    finished_metrics,
    record_experience,
    record_stages,
)
from lightrft.trainer.training.throughput import UtilisationMeter
from lightrft.trainer.training.updates import MinibatchOrder, UpdateModels, update_models

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import nn
    from torch.optim import Optimizer
    from torch.optim.lr_scheduler import LRScheduler
    from transformers import PreTrainedTokenizerBase

    from lightrft.datasets.types import Prompt
    from lightrft.experience.model_rewards import ModelRewards
    from lightrft.experience.types import ExperienceBatch
    from lightrft.rewards.types import RewardFunction
    from lightrft.strategy.prepared import PreparedModel
    from lightrft.strategy.strategy_base import StrategyBase
    from lightrft.trainer.reporting.loggers import MetricsLogger
    from lightrft.trainer.reporting.samples import SampleLog
    from lightrft.trainer.reporting.trajectories import TrajectoryLog
    from lightrft.trainer.runs.prompts import PromptBatches, PromptStream
    from lightrft.trainer.training.parity import ParityReport
    from lightrft.trainer.training.pretrain_mix import PretrainMix

    Model = nn.Module | PreparedModel


class SPMDPPOTrainerBase(RunControl):
    """Rolls out, scores, rates and trains; the engine's weights follow the actor's.

    Args:
        strategy: Trains over ranks and hosts the rollout engine.
        actor: The policy (`lightrft.models.Actor`), prepared by the strategy; or its
            PreparedModel, which brings optimizer and scheduler along.
        critic: The value model likewise, or None.
        reward_model: Scores responses (`lightrft.rewards.RewardFunction`).
        initial_model, ema_model: Reference of the KL term, moving average of the actor; or None.
        actor_optim, critic_optim, actor_scheduler, critic_scheduler: As prepared.
        loss_agg_mode: How the losses of tokens become one number.
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
        **keywords: Options, see `PPOConfig`. What is not given comes from the strategy's
            configuration.

    Raises:
        AssertionError: `engine_tp_size` is not positive, or `processor` is missing with `VLM`.
        TypeError: A keyword is unknown; the message names the nearest.
        ValueError: An unknown name, sizes that do not divide, or a missing model.
    """

    is_vision = False
    """Whether the models take images, whatever `VLM` says."""

    def __init__(
        self,
        strategy: StrategyBase,
        actor: Model,
        critic: Model | None = None,
        reward_model: RewardFunction | None = None,
        initial_model: nn.Module | None = None,
        ema_model: nn.Module | None = None,
        actor_optim: Optimizer | None = None,
        critic_optim: Optimizer | None = None,
        actor_scheduler: LRScheduler | None = None,
        critic_scheduler: LRScheduler | None = None,
        *,
        loss_agg_mode: str = "seq-mean-token-mean",
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
        **keywords: Unpack[PPOKeywords],
    ) -> None:
        check_processor(processor, is_needed=VLM or self.is_vision)
        check_engine_group(strategy)
        self.strategy = strategy
        self.config = resolve_ppo_config(
            keywords, strategy.config, loss_agg_mode=loss_agg_mode, use_gspo=use_gspo
        )
        self.config.check_batches(strategy.world_size)
        self._actor = trained_model("actor", actor, actor_optim, actor_scheduler)
        self._critic = None
        if critic is not None:
            self._critic = trained_model("critic", critic, critic_optim, critic_scheduler)
        uses_reference = initial_model is not None and self.config.init_kl_coef > 0
        algorithm.check_algorithm(
            self.config, has_critic=self._critic is not None, has_reference=uses_reference
        )
        algorithm.check_replay(self.config, strategy.inference_engine_type)
        self.initial_model = initial_model if uses_reference else None
        configure_packing(self.config, strategy, (self.actor, self.critic, self.initial_model))
        self.ema_model, self.processor = ema_model, processor
        self.tokenizer = tokenizer or load_actor_tokenizer(strategy.config.pretrain)
        self.reward_function = build_trainer_reward(reward_model, reward_fn)
        self.eval_prompts = eval_prompts
        self.state = initial_state(self.config)
        self._prompts_dataloader = prompts_dataloader
        self._stream: PromptStream | None = None
        self._experience: StepExperience | None = None
        self._is_first_step = True
        self._sample_log, self._trajectory_log = sample_log, trajectory_log
        self._pretrain, self._model_rewards = pretrain, model_rewards
        self._utilisation = UtilisationMeter(strategy, self.config.peak_tflops)
        self._is_deterministic = is_deterministic(strategy.unwrap_model(self._actor.model))
        if loggers is None:
            loggers = [ConsoleLogger(strategy.print, every=self.config.logging_steps)]
        self._loggers = LoggerGroup(loggers if strategy.is_rank_0() else ())
        self._maker = self._build_maker()
        for text in unused_options(self.config, has_reference=uses_reference):
            strategy.print(f"warning: option without effect: {text}")

    # ------------------------------------------------------------------ parts

    @property
    def actor(self) -> nn.Module:
        """The policy as the strategy wrapped it."""
        return self._actor.model

    @property
    def critic(self) -> nn.Module | None:
        """The value model as the strategy wrapped it, or None."""
        return None if self._critic is None else self._critic.model

    @property
    def actor_optim(self) -> Optimizer:
        """The actor's optimizer."""
        return self._actor.optimizer

    def _build_maker(self) -> ExperienceMaker:
        pad_token_id = self.tokenizer.pad_token_id
        return ExperienceMaker(
            self.strategy,
            ForwardModels(self.actor, self.initial_model, self.critic),
            self.reward_function,
            decoder=self.tokenizer,
            settings=algorithm.maker_settings(
                self.config, pad_token_id=0 if pad_token_id is None else int(pad_token_id)
            ),
            device=self.strategy.device,
            model_rewards=self._model_rewards,
            release_engine=self._release_engine,
        )

    @property
    def _kl_coef(self) -> float:
        return 0.0 if self.initial_model is None else self.state.kl.coef

    def _models(self) -> list[nn.Module]:
        return [self.actor] if self.critic is None else [self.actor, self.critic]

    # ------------------------------------------------------------------ one step

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
        for model in self._models():
            model.eval()
        self._experience = self._maker.make(
            prompts,
            step=self.state.num_steps,
            first_request_id=self.state.num_requests,
            advantage=algorithm.advantage_settings(self.config, kl_coef=self._kl_coef),
            shaping=self.state.shaping,
            next_prompts=self._next_prompts(),
            reuses_policy_logprobs=self._reuses_policy_logprobs(),
            carry=self.state.carry,
        )
        if self._parity_is_due():
            self.check_parity()
        self._is_first_step = False
        if self._sample_log is not None and self.strategy.is_rank_0():
            self._sample_log.log(self.state.num_steps + 1, self._experience.scored)
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
        if logprobs is None or step.use_rollout_logprobs:
            rows = micro_slices(0, len(rollouts.rewards), self.config.micro_rollout_batch_size)
            with step.meter.stage("forward"):
                logprobs = score_actor(rollouts, self.actor, slices=rows)
        report = check_parity(
            rollouts,
            logprobs,
            self.actor,
            strategy=self.strategy,
            mean_limit=self.config.parity_limit,
        )
        self.strategy.print(report.summary())
        return report

    def _reuses_policy_logprobs(self) -> bool:
        """Whether nobody needs the old logprobs before the one update that computes them too."""
        is_logged = self._trajectory_log is not None and self._trajectory_log.is_due(
            self.state.num_steps + 1
        )
        has_kl_reward = self.initial_model is not None and not self.config.use_kl_loss
        return (
            self.config.max_epochs == 1
            and algorithm.build_token_weighting(self.config) is None
            and self._is_deterministic
            and self._trains_actor
            and not has_kl_reward
            and not is_logged
        )

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
        record_experience(step, metrics, kl_estimator=self.config.kl_estimator)
        if self.initial_model is not None:
            metrics.add_max("kl_coef", self._kl_coef)
        with step.meter.stage("train"):
            self._move_optimizers(self.strategy.maybe_load_optimizer)
            for model in self._models():
                model.train()
            self._update(step, metrics)
            self._move_optimizers(self.strategy.maybe_offload_optimizer)
        with step.meter.stage("weight_sync"):
            self.strategy.update_engine_weights(self.actor)
        record_stages(step.meter, metrics)
        models = [m for m in self._models() if self._trains_actor or m is not self.actor]
        reduced = metrics.reduce(self.strategy)
        self._experience = None
        self.state = self.state.after_step(
            step,
            num_prompts=step.num_prompts,
            stream=self._stream,
            kl=reduced.get("kl_per_response"),
        )
        reduced["global_step"] = global_steps
        return finished_metrics(
            step,
            reduced,
            self.strategy.last_weight_sync,
            num_epochs=self.config.max_epochs,
            utilisation=self._utilisation.of(models),
        )

    def _update(self, step: StepExperience, metrics: StepMetrics) -> None:
        """All optimizer steps; none where dynamic sampling found nothing to learn from."""
        if step.selection is not None and step.selection.is_empty:
            self.strategy.print(
                f"warning: no update in step {self.state.num_steps + 1}: in all "
                f"{step.selection.num_groups} groups the responses are equally accurate; the "
                "prompts are solved or out of reach"
            )
            return
        settings = algorithm.loss_settings(self.config, kl_coef=self._kl_coef)
        update_models(
            step,
            UpdateModels(
                self._actor,
                self._critic,
                self.ema_model,
                self.config.ema_beta,
                trains_actor=self._trains_actor,
            ),
            strategy=self.strategy,
            settings=settings,
            schedule=MinibatchOrder(self.config.max_epochs, self.config.seed, self.state.num_steps),
            metrics=metrics,
            pretrain=self._pretrain,
        )

    def _move_optimizers(self, move: Callable[[Optimizer], Optimizer]) -> None:
        for trained in (self._actor, self._critic):
            if trained is not None:
                move(trained.optimizer)


class SPMDPPOTrainer(SPMDPPOTrainerBase):
    """The trainer of language models; see `SPMDPPOTrainerBase` for all arguments."""


class SPMDPPOTrainerVL(SPMDPPOTrainerBase):
    """The trainer of vision-language models: `processor` is needed.

    Raises:
        AssertionError: `processor` is missing or None.
    """

    is_vision = True
