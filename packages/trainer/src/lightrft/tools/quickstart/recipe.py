"""Choices of a quick start, and the options of its run of reinforcement."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from lightrft.config import TrainConfig
from lightrft.tools.quickstart.addition import ADDITION
from lightrft.tools.quickstart.task import Task

SAMPLES_PER_STEP = 128
WARMUP_STEPS = 5
EVAL_STEPS = 10
ESTIMATORS = {"grpo": "group_norm", "ppo": "gae", "reinforce++": "reinforce++"}
STRATEGIES = ("fsdp", "deepspeed")


@dataclass(frozen=True, slots=True)
class Recipe:
    """Choices of a quick start.

    Args:
        task: What is taught.
        algorithm: A key of `ESTIMATORS`.
        strategy: One of `STRATEGIES`.
        seed: Of the model, the demonstrations, the prompts and the samples.
        num_steps: Steps of reinforcement; each samples `SAMPLES_PER_STEP` responses.
        num_warm_start_steps: Steps of imitation.
        num_eval_prompts: Held-out prompts.
        num_threads: CPU threads; None is what the size of the model's operations is worth.
        is_pipeline: Whether all stages are run.
    """

    task: Task = ADDITION
    algorithm: str = "grpo"
    strategy: str = "fsdp"
    seed: int = 0
    num_steps: int = 30
    num_warm_start_steps: int = 300
    num_eval_prompts: int = 512
    num_threads: int | None = None
    is_pipeline: bool = False

    @property
    def group_size(self) -> int:
        """Samples per prompt: only GRPO compares several."""
        return 8 if self.algorithm == "grpo" else 1

    @property
    def num_prompts(self) -> int:
        """Training prompts, each used once."""
        return self.num_steps * SAMPLES_PER_STEP // self.group_size


def training_config(recipe: Recipe, directory: Path) -> TrainConfig:
    """The configuration of the run in `directory`, whose model and data have been written."""
    usual = TrainConfig(
        pretrain=str(directory / "warm_start"),
        prompt_data=str(directory / "data" / "train.jsonl"),
        eval_data=str(directory / "data" / "eval.jsonl"),
        input_key="prompt",
        label_key="answer",
        apply_chat_template=True,
        prompt_max_len=32,
        generate_max_len=48,
        max_eval_samples=recipe.num_eval_prompts,
        reward_fn=(f"{directory / 'reward.py'}:score",),
        fsdp=recipe.strategy == "fsdp",
        bf16=False,
        engine_type="hf",
        advantage_estimator=ESTIMATORS[recipe.algorithm],
        loss_agg_mode="token-mean",
        init_kl_coef=0.0,
        lambd=1.0 if recipe.algorithm == "ppo" else 0.95,
        value_clip=0.0 if recipe.algorithm == "ppo" else 0.2,
        rollout_batch_size=SAMPLES_PER_STEP // recipe.group_size,
        n_samples_per_prompt=recipe.group_size,
        train_batch_size=SAMPLES_PER_STEP,
        micro_train_batch_size=SAMPLES_PER_STEP,
        micro_rollout_batch_size=SAMPLES_PER_STEP,
        actor_learning_rate=4e-4,
        critic_learning_rate=1e-3 if recipe.algorithm == "ppo" else 9e-6,
        lr_scheduler="linear",
        lr_warmup_ratio=min(1.0, WARMUP_STEPS / recipe.num_steps),
        eval_steps=EVAL_STEPS,
        num_threads=recipe.num_threads,
        save_trajectories=True,
        num_trajectories_to_save=4,
        trajectory_steps=EVAL_STEPS,
        seed=recipe.seed,
        output_dir=str(directory),
    )
    return recipe.task.adjust(usual, directory)
