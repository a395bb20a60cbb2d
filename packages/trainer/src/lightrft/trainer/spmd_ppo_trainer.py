"""Policy optimisation where every rank trains and generates (SPMD)."""

from __future__ import annotations

import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Unpack

from lightrft.experience.forward import ForwardModels
from lightrft.experience.maker import ExperienceMaker, StepExperience, greedy_params
from lightrft.trainer import algorithm
from lightrft.trainer.checkpointing import CheckpointStore
from lightrft.trainer.construction import (
    check_engine_group,
    check_processor,
    idle_options,
    reward_of,
    trained_model,
)
from lightrft.trainer.evaluation import evaluate
from lightrft.trainer.loggers import ConsoleLogger, LoggerGroup
from lightrft.trainer.loop import Cadence, run_loop
from lightrft.trainer.metrics import StepMetrics
from lightrft.trainer.ppo_config import PPOKeywords, resolve_ppo_config, with_arguments
from lightrft.trainer.prompts import PromptStream, check_lengths, planned_steps
from lightrft.trainer.state import initial_state
from lightrft.trainer.step_metrics import finished_metrics, record_experience
from lightrft.trainer.updates import Schedule, UpdateModels, update_models

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from torch import nn
    from torch.optim import Optimizer
    from torch.optim.lr_scheduler import LRScheduler
    from transformers import PreTrainedTokenizerBase

    from lightrft.datasets.types import Prompt
    from lightrft.experience.types import ExperienceBatch
    from lightrft.rewards.types import RewardFunction
    from lightrft.strategy.prepared import Arguments, PreparedModel
    from lightrft.strategy.strategy_base import StrategyBase
    from lightrft.trainer.loggers import MetricsLogger
    from lightrft.trainer.loop import LoopResult
    from lightrft.trainer.prompts import PromptBatches
    from lightrft.trainer.samples import SampleLog

    Model = nn.Module | PreparedModel


class SPMDPPOTrainerBase:
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
        tokenizer: Of the actor.
        processor: Of images; needed by vision-language models.
        reward_fn: Takes the place of `reward_model`.
        prompts_dataloader: What `make_experience` takes prompts from.
        eval_prompts: Held-out prompts, all of them on every rank.
        loggers: Receive metrics on the first rank; None prints a line a step.
        sample_log: Receives samples of every step on the first rank.
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
        prompts_dataloader: PromptBatches | None = None,
        eval_prompts: Sequence[Prompt] = (),
        loggers: Sequence[MetricsLogger] | None = None,
        sample_log: SampleLog | None = None,
        **keywords: Unpack[PPOKeywords],
    ) -> None:
        check_processor(processor, is_needed=VLM or self.is_vision)
        check_engine_group(strategy)
        if use_gspo:
            keywords["policy_loss"] = "gspo"
        self.strategy = strategy
        self.config = resolve_ppo_config(keywords, strategy.config, loss_agg_mode=loss_agg_mode)
        self.config.check_batches(strategy.world_size)
        self._actor = trained_model("actor", actor, actor_optim, actor_scheduler)
        self._critic = None
        if critic is not None:
            self._critic = trained_model("critic", critic, critic_optim, critic_scheduler)
        uses_reference = initial_model is not None and self.config.init_kl_coef > 0
        algorithm.check_algorithm(
            self.config, has_critic=self._critic is not None, has_reference=uses_reference
        )
        if tokenizer is None:
            raise ValueError("the trainer needs the actor's tokenizer: pass tokenizer=")
        self.initial_model = initial_model if uses_reference else None
        self.ema_model, self.processor = ema_model, processor
        self.tokenizer = tokenizer
        self.reward_function = reward_of(reward_model, reward_fn)
        self.eval_prompts = eval_prompts
        self.state = initial_state(self.config)
        self._prompts_dataloader = prompts_dataloader
        self._stream: PromptStream | None = None
        self._experience: StepExperience | None = None
        self._sample_log = sample_log
        if loggers is None:
            loggers = [ConsoleLogger(strategy.print, every=self.config.logging_steps)]
        self._loggers = LoggerGroup(loggers if strategy.is_rank_0() else ())
        self._maker = self._build_maker()
        for text in idle_options(self.config, has_reference=uses_reference):
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
        for model in self._models():
            model.eval()
        self._experience = self._maker.make(
            prompts,
            step=self.state.num_steps,
            first_request_id=self.state.num_requests,
            advantage=algorithm.advantage_settings(self.config, kl_coef=self._kl_coef),
            shaping=self.state.shaping,
        )
        if self._sample_log is not None and self.strategy.is_rank_0():
            self._sample_log.log(self.state.num_steps + 1, self._experience.scored)
        return self._experience.batch

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
        with _stopwatch(metrics, "train_seconds"):
            self._move_optimizers(self.strategy.maybe_load_optimizer)
            for model in self._models():
                model.train()
            settings = algorithm.loss_settings(self.config, kl_coef=self._kl_coef)
            update_models(
                step,
                UpdateModels(self._actor, self._critic, self.ema_model, self.config.ema_beta),
                strategy=self.strategy,
                settings=settings,
                schedule=Schedule(self.config.max_epochs, self.config.seed, self.state.num_steps),
                metrics=metrics,
            )
            self._move_optimizers(self.strategy.maybe_offload_optimizer)
        with _stopwatch(metrics, "weight_sync_seconds"):
            self.strategy.update_engine_weights(self.actor)
        reduced = metrics.reduce(self.strategy)
        self._experience = None
        self.state = self.state.after_step(
            step,
            num_prompts=len(step.table) // self.config.n_samples_per_prompt,
            stream=self._stream,
            kl=reduced.get("kl_per_response"),
        )
        reduced["global_step"] = global_steps
        return finished_metrics(step, reduced, self.strategy.last_weight_sync)

    def _move_optimizers(self, move: Callable[[Optimizer], Optimizer]) -> None:
        for trained in (self._actor, self._critic):
            if trained is not None:
                move(trained.optimizer)

    def evaluate(self) -> dict[str, float]:
        """Mean reward of one greedy completion per held-out prompt; {} without such prompts."""
        begin = time.perf_counter()
        metrics = evaluate(
            self.eval_prompts,
            strategy=self.strategy,
            reward_function=self.reward_function,
            decoder=self.tokenizer,
            sampling_params=greedy_params(algorithm.sampling_params(self.config)),
            sleep_engine=self.config.enable_engine_sleep,
        )
        if metrics:
            metrics["eval/seconds"] = time.perf_counter() - begin
        return metrics

    # ------------------------------------------------------------------ a run

    def fit(
        self,
        args: Arguments | None = None,
        prompts_dataloader: PromptBatches | None = None,
        *,
        eval_prompts: Sequence[Prompt] | None = None,
        consumed_samples: int = 0,
        num_update_steps_per_episodes: int | None = None,
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

        Raises:
            ValueError: There are no prompts, or too few for one batch.
        """
        self.config = with_arguments(self.config, args)
        if eval_prompts is not None:
            self.eval_prompts = eval_prompts
        if prompts_dataloader is not None:
            self._prompts_dataloader, self._stream = prompts_dataloader, None
        if consumed_samples:
            self.state = self.state.after_prompts(consumed_samples)
        num_steps = planned_steps(
            self._prompts_dataloader,
            self.config,
            self.strategy.world_size,
            num_updates_per_episode=num_update_steps_per_episodes,
        )
        return run_loop(self, Cadence(num_steps, self.config.eval_steps, self.config.save_steps))

    def log_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        """Hands metrics to the loggers, on the first rank."""
        self._loggers.log(step, metrics)

    def save_checkpoint(self) -> None:
        """Writes all that a run needs to continue; does nothing without `ckpt_path`."""
        store = self._checkpoints()
        if store is not None:
            store.save(self.state, self._actor, self._critic)

    def load_checkpoint(self) -> bool:
        """Continues from the newest complete checkpoint under `ckpt_path`, if there is one.

        The engine gets the loaded weights.

        Returns:
            Whether there was a checkpoint.
        """
        store = self._checkpoints()
        restored = None if store is None else store.load(self.state, self._actor, self._critic)
        if restored is None:
            return False
        self.state, self._stream = restored, None
        self.strategy.update_engine_weights(self.actor)
        return True

    def close(self) -> None:
        """Closes the loggers and the sample log."""
        self._loggers.close()
        if self._sample_log is not None:
            self._sample_log.close()

    def _checkpoints(self) -> CheckpointStore | None:
        if self.config.ckpt_path is None:
            return None
        return CheckpointStore(
            self.strategy,
            Path(self.config.ckpt_path),
            max_num=self.config.max_ckpt_num,
            max_mem=self.config.max_ckpt_mem,
        )

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


class SPMDPPOTrainer(SPMDPPOTrainerBase):
    """The trainer of language models; see `SPMDPPOTrainerBase` for all arguments."""


class SPMDPPOTrainerVL(SPMDPPOTrainerBase):
    """The trainer of vision-language models: `processor` is needed.

    Raises:
        AssertionError: `processor` is missing or None.
    """

    is_vision = True


@contextmanager
def _stopwatch(metrics: StepMetrics, name: str) -> Iterator[None]:
    start = time.perf_counter()
    yield
    metrics.add_max(name, time.perf_counter() - start)
