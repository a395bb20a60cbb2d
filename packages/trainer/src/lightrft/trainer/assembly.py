"""A whole run from one configuration: data, rewards, strategy, models, engine, trainer."""

from __future__ import annotations

import json
import os
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from lightrft.datasets import collate_prompts, load_prompts
from lightrft.models import Actor, Critic, LoraActor, LoraSettings, load_tokenizer
from lightrft.rewards import RewardSettings, build_reward
from lightrft.strategy import get_strategy
from lightrft.strategy.config import ConfigError
from lightrft.trainer.algorithm import check_algorithm
from lightrft.trainer.loggers import ConsoleLogger, JsonLinesLogger, drop_steps_after
from lightrft.trainer.ppo_config import PPOConfig, resolve_ppo_config
from lightrft.trainer.prompts import planned_steps
from lightrft.trainer.run_files import (
    CONFIG_FILE,
    METRICS_FILE,
    SAMPLES_FILE,
    START_FILE,
    SUMMARY_FILE,
    TRAJECTORIES_FILE,
    write_start,
)
from lightrft.trainer.samples import SampleLog
from lightrft.trainer.spmd_ppo_trainer import SPMDPPOTrainer
from lightrft.trainer.trajectories import TrajectoryLog

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import nn
    from torch.utils.data import DataLoader
    from transformers import PreTrainedTokenizerBase

    from lightrft.datasets import Prompt, PromptDataset
    from lightrft.rewards import CombinedReward
    from lightrft.strategy.prepared import PreparedModel
    from lightrft.strategy.strategy_base import StrategyBase
    from lightrft.trainer.config import TrainConfig
    from lightrft.trainer.loggers import MetricsLogger
    from lightrft.trainer.loop import LoopResult

EMA_FOLDER = "model_ema"


@dataclass(frozen=True, slots=True)
class RunSummary:
    """What a run ended with; written to `summary.json`.

    Args:
        output_dir, model_dir: Where the results are.
        num_steps: Completed steps, those before a resume included.
        num_resumed_steps: Steps that a checkpoint brought along.
        world_size: Processes.
        strategy, engine: Names of the backend and of the rollout engine.
        seconds: Duration of this process's part, evaluations included.
        first_eval, last_eval: Metrics of the first and the last evaluation; {} without eval_data.
        last_metrics: Metrics of the last step.
    """

    output_dir: str
    model_dir: str
    num_steps: int
    num_resumed_steps: int
    world_size: int
    strategy: str
    engine: str
    seconds: float
    first_eval: dict[str, float]
    last_eval: dict[str, float]
    last_metrics: dict[str, float]


@dataclass(frozen=True, slots=True)
class RunInputs:
    """What is read and checked before any process group or model exists."""

    tokenizer: PreTrainedTokenizerBase
    prompts: PromptDataset
    eval_prompts: tuple[Prompt, ...]
    reward: CombinedReward
    options: PPOConfig


@dataclass(frozen=True, slots=True)
class RunModels:
    """The prepared models of a run."""

    actor: PreparedModel
    critic: PreparedModel | None
    reference: nn.Module | None
    average: nn.Module | None = None


def run_training(config: TrainConfig, *, loggers: Sequence[MetricsLogger] = ()) -> RunSummary:
    """Trains as one process of a run, whose rank is in the environment.

    Everything a user can get wrong is checked first. The folder `config.output_dir` gets
    config.toml, run.json, metrics.jsonl, samples.jsonl, checkpoints/, model/ and summary.json.

    Args:
        config: What to do.
        loggers: Further receivers of metrics on the first rank.

    Raises:
        ConfigError: Options that cannot be run.
        DataError: Prompts that cannot be read.
        RewardError: A reward function that cannot be loaded, or that fails.
        ModelLoadError: A model or tokenizer that cannot be read.
    """
    started = time.perf_counter()
    with ExitStack() as stack:
        inputs = read_inputs(config)
        stack.callback(inputs.reward.close)
        strategy = stack.enter_context(get_strategy(config))
        trainer, loader = build_trainer(config, inputs, strategy, loggers=loggers)
        stack.callback(trainer.close)
        num_resumed = _start(config, trainer, strategy)
        result = trainer.fit(prompts_dataloader=loader)
        strategy.save_model(trainer.actor, inputs.tokenizer, str(config.model_dir))
        if trainer.ema_model is not None:
            folder = Path(config.output_dir) / EMA_FOLDER
            strategy.save_model(trainer.ema_model, inputs.tokenizer, str(folder))
        summary = _summarise(config, strategy, result, num_resumed, started)
        if strategy.is_rank_0():
            path = Path(config.output_dir) / SUMMARY_FILE
            path.write_text(json.dumps(asdict(summary), indent=2) + "\n", encoding="utf-8")
        strategy.barrier()
        return summary


def read_inputs(config: TrainConfig) -> RunInputs:
    """Checks the options, then reads tokenizer, data and rewards."""
    _check_options(config)
    options = run_options(config)
    check_algorithm(options, has_critic=config.has_critic, has_reference=config.init_kl_coef > 0)
    tokenizer = load_tokenizer(str(config.pretrain))
    prompts = _load(str(config.prompt_data), tokenizer, config, max_samples=config.max_samples)
    if len(prompts) < config.rollout_batch_size:
        raise ConfigError(
            f"{config.prompt_data} has {len(prompts)} usable prompts, less than one step takes: "
            f"lower rollout_batch_size (got {config.rollout_batch_size}) or give more prompts"
        )
    eval_prompts: tuple[Prompt, ...] = ()
    if config.eval_data is not None:
        eval_prompts = _load(
            config.eval_data, tokenizer, config, max_samples=config.max_eval_samples
        ).prompts
    reward = build_reward(
        config.reward_fn,
        urls=reward_urls(config),
        weights=config.reward_weights or None,
        settings=RewardSettings(timeout_seconds=config.reward_timeout_seconds),
    )
    return RunInputs(tokenizer, prompts, eval_prompts, reward, options)


def reward_urls(config: TrainConfig) -> tuple[str, ...]:
    """Addresses of reward services."""
    urls = config.remote_rm_url
    return () if urls is None else (urls,) if isinstance(urls, str) else tuple(urls)


def run_options(config: TrainConfig) -> PPOConfig:
    """The trainer's options, with the folder of the run's checkpoints."""
    return resolve_ppo_config(
        {"ckpt_path": str(config.checkpoint_dir)}, config, loss_agg_mode=config.loss_agg_mode
    )


def build_trainer(
    config: TrainConfig,
    inputs: RunInputs,
    strategy: StrategyBase,
    *,
    loggers: Sequence[MetricsLogger] = (),
) -> tuple[SPMDPPOTrainer, DataLoader[Prompt]]:
    """Models, engine, trainer and the loader of this rank's prompts."""
    loader = strategy.setup_dataloader(
        inputs.prompts,
        config.rollout_batch_size // strategy.world_size,
        collate_fn=collate_prompts,
    )
    num_steps = planned_steps(loader, inputs.options, strategy.world_size)
    strategy.print(inputs.prompts.report.summary())
    strategy.print(f"{num_steps} steps of {config.rollout_batch_size} prompts")
    models = build_models(config, strategy, num_steps * inputs.options.steps_per_rollout)
    strategy.setup_inference_engine(config, config.engine_type, actor=models.actor)
    folder = Path(config.output_dir)
    trainer = SPMDPPOTrainer(
        strategy,
        models.actor,
        models.critic,
        inputs.reward,
        models.reference,
        models.average,
        loss_agg_mode=config.loss_agg_mode,
        tokenizer=inputs.tokenizer,
        eval_prompts=inputs.eval_prompts,
        loggers=(
            ConsoleLogger(strategy.print, every=config.logging_steps),
            JsonLinesLogger(folder / METRICS_FILE),
            *loggers,
        ),
        sample_log=SampleLog(folder / SAMPLES_FILE),
        trajectory_log=trajectory_log(config),
        ckpt_path=str(config.checkpoint_dir),
    )
    return trainer, loader


def trajectory_log(config: TrainConfig) -> TrajectoryLog | None:
    """The log of single tokens: every save_steps steps, or every step without save_steps."""
    if not config.save_trajectories:
        return None
    return TrajectoryLog(
        Path(config.output_dir) / TRAJECTORIES_FILE,
        num_samples=config.num_trajectories_to_save,
        every=max(1, config.save_steps),
    )


def build_models(config: TrainConfig, strategy: StrategyBase, max_steps: int) -> RunModels:
    """Loads and prepares actor, critic and reference model.

    Args:
        config: Paths and options of the models.
        strategy: Prepares them.
        max_steps: Optimizer steps of the run, for the learning rate schedule.
    """
    path = str(config.pretrain)
    critic: Critic | None = None
    reference: Actor | None = None
    with strategy.init_model_context():
        actor = _load_policy(path, config)
        if config.has_critic:
            critic_path = config.critic_pretrain
            critic = Critic.from_pretrained(critic_path if isinstance(critic_path, str) else path)
        if config.init_kl_coef > 0:
            reference = _load_actor(path, config)
        average = _load_policy(path, config) if config.enable_ema else None
    if config.gradient_checkpointing:
        actor.gradient_checkpointing_enable()
        if critic is not None:
            critic.gradient_checkpointing_enable()
    ready_actor, ready_critic, _, ready_reference = strategy.prepare_models_and_optimizers(
        actor, critic, None, reference, config, max_steps
    )
    return RunModels(
        actor=ready_actor,
        critic=None if critic is None else ready_critic,
        reference=ready_reference,
        average=None if average is None else strategy.prepare_model(average),
    )


def _load_policy(path: str, config: TrainConfig) -> Actor:
    """The trained actor: with adapters where they are what is trained."""
    if config.lora_rank == 0:
        return _load_actor(path, config)
    return LoraActor.from_pretrained(
        path,
        lora=LoraSettings(
            rank=config.lora_rank,
            alpha=config.lora_alpha,
            dropout=config.lora_dropout,
            target_modules=config.target_modules,
            seed=config.seed,
        ),
        fused_linear_logprob=config.fused_linear_logprob,
        chunk_size=config.chunk_size,
    )


def _load_actor(path: str, config: TrainConfig) -> Actor:
    return Actor.from_pretrained(
        path, fused_linear_logprob=config.fused_linear_logprob, chunk_size=config.chunk_size
    )


def _load(
    path: str, tokenizer: PreTrainedTokenizerBase, config: TrainConfig, *, max_samples: int
) -> PromptDataset:
    return load_prompts(
        path,
        tokenizer,
        input_key=config.input_key,
        label_key=config.label_key,
        apply_chat_template=config.apply_chat_template,
        system_prompt=config.system_prompt,
        input_template=config.input_template,
        prompt_max_len=config.prompt_max_len,
        max_samples=max_samples,
    )


def _check_options(config: TrainConfig) -> None:
    """Raises a ConfigError that lists all that is missing or does not fit."""
    missing = [
        f"--{name} is missing"
        for name, value in (("pretrain", config.pretrain), ("prompt_data", config.prompt_data))
        if value is None
    ]
    if missing:
        raise ConfigError("\n".join(missing))
    config.check_world_size(int(os.environ.get("WORLD_SIZE", "1")))
    metrics = Path(config.output_dir) / METRICS_FILE
    is_first = os.environ.get("RANK", "0") == "0"
    is_used = metrics.exists() and metrics.stat().st_size > 0
    if is_first and is_used and not config.load_checkpoint:
        raise ConfigError(
            f"{config.output_dir} holds the metrics of another run: give a new --output_dir, or "
            "--load_checkpoint to continue that run"
        )


def _start(config: TrainConfig, trainer: SPMDPPOTrainer, strategy: StrategyBase) -> int:
    """Writes config.toml and continues from a checkpoint; returns the steps it had."""
    folder = Path(config.output_dir)
    resumed = config.load_checkpoint and trainer.load_checkpoint()
    num_steps = trainer.state.num_steps
    if config.load_checkpoint:
        strategy.print(
            f"continuing after step {num_steps}"
            if resumed
            else f"no complete checkpoint under {config.checkpoint_dir}: starting anew"
        )
    if strategy.is_rank_0():
        folder.mkdir(parents=True, exist_ok=True)
        config.save(folder / CONFIG_FILE)
        write_start(folder / START_FILE, world_size=strategy.world_size)
        for name in (METRICS_FILE, SAMPLES_FILE, TRAJECTORIES_FILE):
            drop_steps_after(folder / name, num_steps if resumed else -1)
    strategy.barrier()
    return num_steps


def _summarise(
    config: TrainConfig,
    strategy: StrategyBase,
    result: LoopResult,
    num_resumed: int,
    started: float,
) -> RunSummary:
    return RunSummary(
        output_dir=config.output_dir,
        model_dir=str(config.model_dir),
        num_steps=result.num_steps,
        num_resumed_steps=num_resumed,
        world_size=strategy.world_size,
        strategy=type(strategy).__name__,
        engine=strategy.inference_engine_type or "",
        seconds=time.perf_counter() - started,
        first_eval=result.first_eval,
        last_eval=result.last_eval,
        last_metrics=result.last_metrics,
    )
