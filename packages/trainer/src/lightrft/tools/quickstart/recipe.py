"""Choices of a quick start, and the options of its run of reinforcement."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from lightrft.config import TrainConfig
from lightrft.tools.quickstart.arithmetic import ADDITION
from lightrft.tools.quickstart.task import HERE, Task, in_folder

SAMPLES_PER_STEP = 128
WARMUP_STEPS = 5
ESTIMATORS = {"grpo": "group_norm", "ppo": "gae", "reinforce++": "reinforce++"}
STRATEGIES = ("fsdp", "deepspeed")


@dataclass(frozen=True, slots=True)
class Recipe:
    """Choices of a quick start.

    Args:
        task: Task that is taught.
        algorithm: Key of `ESTIMATORS`.
        strategy: Name in `STRATEGIES`.
        seed: Seed of the model, the demonstrations, the prompts and the samples.
        num_steps: Steps of reinforcement; each samples `SAMPLES_PER_STEP` responses.
        num_warm_start_steps: Steps of imitation.
        num_eval_prompts: Held-out prompts.
        num_threads: CPU threads; None chooses them by the size of the model's operations.
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
    """Return the configuration of the run in `directory`, whose model and data are written."""
    usual = TrainConfig.load(HERE / "recipe.toml")
    usual = replace(
        usual,
        pretrain=str(directory / "warm_start"),
        prompt_data=str(directory / "data" / "train.jsonl"),
        eval_data=str(directory / "data" / "eval.jsonl"),
        max_eval_samples=recipe.num_eval_prompts,
        reward_fn=(f"{directory / 'reward.py'}:score",),
        fsdp=recipe.strategy == "fsdp",
        advantage_estimator=ESTIMATORS[recipe.algorithm],
        rollout_batch_size=usual.train_batch_size // recipe.group_size,
        n_samples_per_prompt=recipe.group_size,
        lr_warmup_ratio=min(1.0, WARMUP_STEPS / recipe.num_steps),
        num_threads=recipe.num_threads,
        seed=recipe.seed,
        output_dir=str(directory),
    )
    if recipe.algorithm == "ppo":
        usual = replace(usual, lambd=1.0, value_clip=0.0, critic_learning_rate=1e-3)
    return usual.replaced(in_folder(recipe.task.options, directory))


@contextlib.contextmanager
def quietly(directory: Path) -> Iterator[None]:
    """Send what runs print to `run.log` of a folder."""
    with (
        (directory / "run.log").open("a", encoding="utf-8") as log,
        contextlib.redirect_stdout(log),
    ):
        yield
