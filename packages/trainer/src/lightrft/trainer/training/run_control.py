"""What a trainer does between its steps: runs, evaluations, checkpoints, further prompts."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from lightrft.experience.sampling import greedy_params
from lightrft.trainer.ppo_config import with_arguments
from lightrft.trainer.runs.prompts import PromptStream, check_lengths, planned_steps
from lightrft.trainer.training import algorithm
from lightrft.trainer.training.best_model import keep_best
from lightrft.trainer.training.checkpointing import CheckpointStore
from lightrft.trainer.training.evaluation import evaluate
from lightrft.trainer.training.loop import LoopSchedule, run_loop

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import nn
    from transformers import PreTrainedTokenizerBase

    from lightrft.datasets.types import Prompt
    from lightrft.experience.model_rewards import ModelRewards
    from lightrft.experience.types import ExperienceBatch
    from lightrft.rewards.types import RewardFunction
    from lightrft.strategy.prepared import Arguments
    from lightrft.strategy.strategy_base import StrategyBase
    from lightrft.trainer.ppo_config import PPOConfig
    from lightrft.trainer.reporting.loggers import LoggerGroup
    from lightrft.trainer.reporting.samples import SampleLog
    from lightrft.trainer.reporting.trajectories import TrajectoryLog
    from lightrft.trainer.runs.prompts import PromptBatches
    from lightrft.trainer.training.loop import LoopResult
    from lightrft.trainer.training.state import TrainerState
    from lightrft.trainer.training.updates import TrainedModel

BEST_FOLDER = "best"


class RunControl:
    """What a trainer does between its steps; the steps themselves are those of a subclass."""

    strategy: StrategyBase
    config: PPOConfig
    state: TrainerState
    tokenizer: PreTrainedTokenizerBase
    reward_function: RewardFunction
    eval_prompts: Sequence[Prompt]
    ema_model: nn.Module | None
    _actor: TrainedModel
    _critic: TrainedModel | None
    _prompts_dataloader: PromptBatches | None
    _stream: PromptStream | None
    _loggers: LoggerGroup
    _sample_log: SampleLog | None
    _model_rewards: ModelRewards | None
    _trajectory_log: TrajectoryLog | None
    _stop_request: Callable[[], bool] | None = None

    def make_experience(self, prompts: Sequence[Prompt] | None = None) -> ExperienceBatch:
        """Rolls out one batch of prompts."""
        raise NotImplementedError

    def ppo_train(self, global_steps: int = 0) -> dict[str, float]:
        """Trains on the experience."""
        raise NotImplementedError

    def evaluate(self) -> dict[str, float]:
        """Mean reward of one greedy completion per held-out prompt; {} without such prompts."""
        self._restore_engine_weights()
        begin = time.perf_counter()
        metrics = evaluate(
            self.eval_prompts,
            strategy=self.strategy,
            reward_function=self.reward_function,
            decoder=self.tokenizer,
            sampling_params=greedy_params(algorithm.sampling_params(self.config)),
            sleep_engine=self.config.enable_engine_sleep,
            masks_failures=self.config.reward_failure == "mask",
            model_rewards=self._model_rewards,
        )
        if metrics:
            metrics["eval/seconds"] = time.perf_counter() - begin
        return metrics

    def _restore_engine_weights(self) -> None:
        """Sends the weights again if the engine dropped them and no update brought new ones."""
        engine = self.strategy.inference_engine
        if engine is not None and engine.weights_version >= 0 and engine.weights_were_dropped:
            self.strategy.update_engine_weights(self._actor.model)

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
        self.config = with_arguments(self.config, args)
        self._stop_request = stop_request
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
        return run_loop(
            self, LoopSchedule(num_steps, self.config.eval_steps, self.config.save_steps)
        )

    def check_alarms(self, metrics: Mapping[str, float]) -> bool:
        """Warns about metrics out of bounds; returns whether the run is to stop."""
        alarms = algorithm.alarms_of(self.config)
        found = alarms.check(metrics)
        for text in found:
            self.strategy.print(f"warning: alarm after step {self.state.num_steps}: {text}")
        return bool(found) and alarms.stops

    def is_asked_to_stop(self) -> bool:
        """Whether any rank was asked to stop; the same answer on all of them."""
        if self._stop_request is None:
            return False
        return self.strategy.all_reduce(int(self._stop_request()), op="max") > 0

    def keep_best(self, step: int, metrics: Mapping[str, float]) -> None:
        """Saves the actor in `ckpt_path`/best if `best_metric` was never better; collective."""
        metric, folder = self.config.best_metric, self.config.ckpt_path
        if metric is None or folder is None:
            return
        best = keep_best(
            self.state.best,
            metrics,
            metric=metric,
            step=step,
            actor=self._actor.model,
            tokenizer=self.tokenizer,
            folder=Path(folder) / BEST_FOLDER,
            strategy=self.strategy,
        )
        self.state = replace(self.state, best=best)

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
        self.strategy.update_engine_weights(self._actor.model)
        engine = self.strategy.inference_engine
        if engine is not None:
            self.state = self.state.with_engine_version(engine.weights_version)
        return True

    def close(self) -> None:
        """Closes the loggers and the sample log."""
        self._loggers.close()
        for log in (self._sample_log, self._trajectory_log):
            if log is not None:
                log.close()

    def _checkpoints(self) -> CheckpointStore | None:
        if self.config.ckpt_path is None:
            return None
        return CheckpointStore(
            self.strategy,
            Path(self.config.ckpt_path),
            max_num=self.config.max_ckpt_num,
            max_mem=self.config.max_ckpt_mem,
            average=self.ema_model,
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
