"""The published interface to reinforcement where every rank trains and generates (SPMD).

`PolicyStage` says what a step learns, `Loop` runs it; the classes here have the published names and
signatures.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lightrft.config import StrategyConfig, TrainConfig
from lightrft.config.options import options_of
from lightrft.datasets.batch_stream import Batches, planned_steps
from lightrft.datasets.types import Prompt
from lightrft.models import load_tokenizer
from lightrft.records.batch import ExperienceBatch
from lightrft.reporting.loggers import ConsoleLogger, MetricsLogger
from lightrft.rewards.types import RewardFunction
from lightrft.rollout.sampler import SingleTurns
from lightrft.run.loop import Loop, LoopResult, LoopState
from lightrft.run.threads import use_threads
from lightrft.stages.machine_choices import decide_by_machine
from lightrft.stages.models import FrozenModels, trained_model
from lightrft.stages.policy.maker import ExperienceMaker, PolicyBatch, SampleLogs
from lightrft.stages.policy.policy_stage import PolicyData, PolicyStage, RolloutParts
from lightrft.stages.policy.rewards import build_trainer_rewards
from lightrft.stages.stage import Step, TrainedModels
from lightrft.strategy.backend import Arguments, PreparedModel

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from lightrft.reporting.trajectories import SampleLog, TrajectoryLog
    from lightrft.rollout.environments.environments import Environments
    from lightrft.rollout.model_rewards import ModelRewards
    from lightrft.stages.policy.parity import ParityReport
    from lightrft.stages.policy.pretrain_mix import PretrainMix
    from lightrft.stages.policy.rewards import RewardSource
    from lightrft.strategy.strategy_base import StrategyBase

Model = nn.Module | PreparedModel
FastExperienceMaker = ExperienceMaker


class PPOTrainer:
    """A policy stage and its loop; the engine's weights follow the actor's.

    Args:
        strategy: Strategy that trains over ranks and hosts the rollout engine.
        actor: Policy (`lightrft.models.Actor`), prepared by the strategy; or its PreparedModel,
            which includes optimizer and scheduler.
        critic: Value model likewise, or None.
        reward_model: Scorer of responses: an object with `score()`
            (`lightrft.rewards.RewardFunction`), a prepared `nn.Module`, or a list of them.
        initial_model, ema_model: Reference of the KL term, moving average of the actor; or None.
        actor_optim, critic_optim, actor_scheduler, critic_scheduler: Prepared optimizers,
            schedules.
        loss_agg_mode: How the losses of tokens become one number; None is the configuration's, or
            else the policy loss's usual way.
        use_gspo: Use the policy loss "gspo".
        VLM: The models take images; needs `processor`.
        tokenizer: Tokenizer of the actor; None takes the one in `pretrain` of the configuration.
        processor: Processor of images; needed by vision-language models.
        reward_fn: Replacement of `reward_model`.
        model_rewards: Reward models whose scores are added to the reward, or None.
        prompts_dataloader: Source of prompts for `make_experience`.
        eval_prompts: Held-out prompts, all of them on every rank.
        loggers: Receivers of metrics on the first rank; None prints a line a step.
        sample_log: Receiver of samples of every step on the first rank.
        pretrain: Texts whose language-modelling loss is mixed in, or None.
        trajectory_log: Receiver of tokens with logprobs and advantages on the first rank.
        environments: Environments for responses of several turns, or None.
        teacher_model: Prepared model of the folder `teacher`, with the actor's tokens; or None.
        **keywords: Options, see `TrainConfig`; the strategy's configuration supplies the others.

    Raises:
        AssertionError: `engine_tp_size` is not positive, or `processor` is missing with `VLM`.
        TypeError: A keyword is unknown; the message names the nearest.
        ValueError: An unknown name, sizes that do not divide, or a missing model.
    """

    # Whether the models take images, whatever `VLM` says.
    is_vision = False

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
        prompts_dataloader: Batches[Prompt] | None = None,
        eval_prompts: Sequence[Prompt] = (),
        loggers: Sequence[MetricsLogger] | None = None,
        sample_log: SampleLog | None = None,
        pretrain: PretrainMix | None = None,
        trajectory_log: TrajectoryLog | None = None,
        environments: Environments | None = None,
        teacher_model: nn.Module | None = None,
        **keywords: object,
    ) -> None:
        _require_processor(processor, is_needed=VLM or self.is_vision)
        _require_size(strategy.config.engine_tp_size)
        config = TrainConfig.from_args(strategy.config).replaced({**keywords, "use_gspo": use_gspo})
        config = replace(config, loss_agg_mode=loss_agg_mode or config.loss_agg_mode)
        config = decide_by_machine(config, strategy.context)
        use_threads(config)
        trained = [trained_model("actor", actor, actor_optim, actor_scheduler)]
        if critic is not None:
            trained.append(trained_model("critic", critic, critic_optim, critic_scheduler))
        tokenizer = tokenizer or _actor_tokenizer(strategy.config.pretrain)
        source = reward_fn or reward_model
        reward, models = build_trainer_rewards(source, model_rewards, strategy.backend, config)
        episodes = environments or _single_turns(tokenizer)
        if initial_model is not None and config.init_kl_coef == 0:
            strategy.print("warning: initial_model is not used: init_kl_coef is 0; give 0.01, say")
            initial_model = None
        self.stage = PolicyStage(
            config,
            strategy,
            TrainedModels(tuple(trained), ema_model),
            FrozenModels(initial_model, {} if teacher_model is None else {"": teacher_model}),
            parts=RolloutParts(reward, tokenizer, models, episodes, processor),
            data=PolicyData(prompts_dataloader, eval_prompts, pretrain),
            logs=SampleLogs(sample_log, trajectory_log),
        )
        if loggers is None:
            loggers = [ConsoleLogger(strategy.print, every=config.logging_steps)]
        self.loop = Loop(self.stage, loggers)
        self.strategy, self.tokenizer, self.processor = strategy, tokenizer, processor

    @property
    def config(self) -> TrainConfig:
        """Options of the run, all of them decided."""
        return self.stage.config

    @property
    def state(self) -> LoopState:
        """Progress of the run."""
        return self.loop.state

    @property
    def actor(self) -> nn.Module:
        """The policy as the strategy wrapped it."""
        return self.stage.models.main.model

    @property
    def critic(self) -> nn.Module | None:
        """The value model as the strategy wrapped it, or None."""
        critic = self.stage.models.named("critic")
        return None if critic is None else critic.model

    @property
    def actor_optim(self) -> Optimizer:
        """The actor's optimizer."""
        return self.stage.models.main.optimizer

    def fit(
        self,
        args: Arguments | None = None,
        prompts_dataloader: Batches[Prompt] | None = None,
        *,
        eval_prompts: Sequence[Prompt] | None = None,
        consumed_samples: int = 0,
        num_update_steps_per_episodes: int | None = None,
        stop_request: Callable[[], bool] | None = None,
    ) -> LoopResult:
        """Train over the prompts: roll out, update, evaluate, log and save.

        Args:
            args: Settings of the run (num_episodes, max_steps, eval_steps, save_steps, ckpt_path)
                that replace those of construction.
            prompts_dataloader: Batches of this rank, as `strategy.setup_dataloader` makes them.
            eval_prompts: Held-out prompts, all of them on every rank.
            consumed_samples: Prompts of the first pass already used, over all ranks; a loaded
                checkpoint knows this itself.
            num_update_steps_per_episodes: Optimizer steps of one pass; None uses all prompts.
            stop_request: See `Loop.run`.

        Raises:
            ValueError: There are no prompts, or too few for one batch.
        """
        stage = self.stage
        stage.config = _with_run_options(stage.config, args)
        if eval_prompts is not None:
            stage.data = replace(stage.data, eval_prompts=eval_prompts)
        if prompts_dataloader is not None:
            self.loop.take_data(prompts_dataloader)
        if consumed_samples:
            self.loop.state = replace(self.loop.state, num_consumed=consumed_samples)
            flight = replace(stage.memory.in_flight, num_requests=consumed_samples)
            stage.memory = replace(stage.memory, in_flight=flight)
        num_steps = planned_steps(
            stage.loader,
            stage.config,
            self.strategy.world_size,
            num_updates_per_episode=num_update_steps_per_episodes,
        )
        return self.loop.run(num_steps, stop_request=stop_request)

    def evaluate(self) -> dict[str, float]:
        """Return the mean reward of one greedy completion per held-out prompt; {} without any."""
        return self.loop.evaluate()

    def save_checkpoint(self) -> None:
        """Write a checkpoint; see `Loop.save_checkpoint`."""
        self.loop.save_checkpoint()

    def load_checkpoint(self) -> bool:
        """Continue from a checkpoint; see `Loop.load_checkpoint`."""
        return self.loop.load_checkpoint()

    def close(self) -> None:
        """Close the loggers and the logs of samples."""
        self.loop.close()


class PPOTrainerVL(PPOTrainer):
    """PPO trainer for vision-language models: `processor` is needed."""

    is_vision = True


class SPMDPPOTrainerBase(PPOTrainer):
    """PPO trainer with single steps in two halves; see `PPOTrainer` for all arguments."""

    # The experience between the two halves of a step.
    pending: tuple[Step, PolicyBatch] | None = None

    def make_experience(self, prompts: Sequence[Prompt] | None = None) -> ExperienceBatch:
        """Roll out one batch of prompts and keep the result for `ppo_train`.

        Collective: every rank calls it with equally many prompts.

        Args:
            prompts: This rank's part of the step's prompts; None takes the next batch of the data
                loader from construction or `fit`.

        Returns:
            Rows that this rank trains on.

        Raises:
            ValueError: There is no data loader, or the number of samples is not a multiple of
                train_batch_size.
        """
        step = self.loop.next_step()
        if prompts is None:
            batch = self.loop.draw(step)
        else:
            self.loop.prepare_to_draw()
            batch = self.stage.roll_out(prompts, step)
        self.pending = step, batch
        return batch.experience.batch

    def check_parity(self) -> ParityReport | None:
        """Compare engine and trainer between the two halves; see `ExperienceMaker.check_parity`.

        Raises:
            RuntimeError: There is no experience.
            ParityError: They differ by more than rounding explains.
        """
        if self.pending is None:
            raise RuntimeError("check_parity compares samples: call make_experience() before it")
        step, batch = self.pending
        return self.stage.maker.check_parity(batch.experience, step.timer)

    def ppo_train(self, global_steps: int = 0) -> dict[str, float]:
        """Train on the experience, then send the actor's weights to the engine.

        Args:
            global_steps: Number of the step, for the log.

        Returns:
            Metrics of the step, exact over all ranks: `policy_loss`, with a critic `critic_loss`,
            rewards, lengths, ratios, gradient norms, logprob differences and durations.

        Raises:
            RuntimeError: There is no experience; call `make_experience` first.
        """
        if self.pending is None:
            raise RuntimeError(
                "ppo_train has nothing to train on: call make_experience() before each ppo_train()"
            )
        step, batch = self.pending
        metrics = self.loop.update(batch, step)
        self.pending = None
        return {**metrics, "global_step": global_steps}


class SPMDPPOTrainer(SPMDPPOTrainerBase, PPOTrainer):
    """The trainer of language models; see `PPOTrainer` for all arguments."""


class SPMDPPOTrainerVL(SPMDPPOTrainerBase, PPOTrainerVL):
    """The trainer of vision-language models: `processor` is needed.

    Raises:
        AssertionError: `processor` is missing or None.
    """


def _require_processor(processor: object | None, *, is_needed: bool) -> None:
    if is_needed and processor is None:
        raise AssertionError(
            "a vision-language trainer needs processor=: got None; pass the model's processor "
            "(transformers.AutoProcessor)"
        )


def _require_size(engine_tp_size: int) -> None:
    if engine_tp_size <= 0:
        raise AssertionError(
            f"engine_tp_size must be positive: got {engine_tp_size}; set --engine_tp_size 1 or more"
        )


def _actor_tokenizer(pretrain: str | None) -> PreTrainedTokenizerBase:
    """Return the tokenizer of the actor's checkpoint.

    Raises:
        ValueError: No checkpoint is known.
        ModelLoadError: It has no tokenizer.
    """
    if pretrain is None:
        raise ValueError("the trainer needs the actor's tokenizer: pass tokenizer=")
    return load_tokenizer(pretrain)


def _single_turns(tokenizer: PreTrainedTokenizerBase) -> SingleTurns:
    from lightrft.datasets.media import TextModality

    return SingleTurns(TextModality(tokenizer))


def _with_run_options(config: TrainConfig, args: Arguments | None) -> TrainConfig:
    """Return the configuration with the options of the group "run" that `args` sets."""
    if args is None:
        return config
    values = (
        TrainConfig.from_args(args).__dict__
        if isinstance(args, StrategyConfig)
        else (args if isinstance(args, Mapping) else vars(args))
    )
    run = {
        name: values[name]
        for name, (_, info) in options_of(TrainConfig).items()
        if info.group == "run" and values.get(name) is not None
    }
    return config.replaced(run)
