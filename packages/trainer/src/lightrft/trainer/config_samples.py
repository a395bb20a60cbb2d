"""Options of prompts, rollouts and rewards: what the samples of a run are made of."""

from __future__ import annotations

from dataclasses import dataclass

from lightrft.strategy.config import StrategyConfig, option

REWARD_FAILURES = ("raise", "mask")


@dataclass(kw_only=True)
class SampleOptions(StrategyConfig):
    """Where prompts come from, how responses are drawn, and what rewards them."""

    # Data
    prompt_data: str | None = option(
        None, "Training prompts: a JSONL, JSON or Parquet file, a folder, or the name of a data "
        "set (owner/name[:configuration]); several separated by commas.", group="data",
    )  # fmt: skip
    prompt_data_probs: tuple[float, ...] = option(
        (), "Shares of several sources of prompt_data; unset follows their sizes.", group="data"
    )
    prompt_split: str = option("train", "Part of a folder or data set to train on.", group="data")
    eval_data: str | None = option(None, "Evaluation prompts, in the same formats.", group="data")
    eval_split: str = option("test", "Part of a folder or data set of eval_data.", group="data")
    input_key: str = option("input", "Column that holds the prompt.", group="data")
    label_key: str = option("label", "Column that holds the reference answer.", group="data")
    apply_chat_template: bool = option(
        False, "Render prompts by the model's chat template.", group="data"
    )
    system_prompt: str | None = option(
        None, "System message put before every prompt.", group="data"
    )
    input_template: str | None = option(
        None, "Text around the prompt, which replaces {}.", group="data"
    )
    prompt_max_len: int = option(1024, "Longest prompt, in tokens.", group="data", at_least=1)
    max_samples: int = option(
        1_000_000, "Use at most this many training prompts.", group="data", at_least=1
    )
    max_eval_samples: int = option(
        500, "Use at most this many evaluation prompts.", group="data", at_least=1
    )

    # Rewards
    reward_fn: tuple[str, ...] = option(
        (), "Rewards, summed: boxed_math, gsm8k or FILE.py:FUNCTION.", group="reward"
    )
    reward_timeout_seconds: float = option(
        120.0, "Deadline of one call of a reward function.", group="reward", above=0
    )
    reward_weights: tuple[float, ...] = option(
        (), "Factor of each reward_fn, then remote_rm_url, then reward_pretrain; unset is 1 each.",
        group="reward",
    )  # fmt: skip
    reward_pretrain: tuple[str, ...] = option(
        (), "Reward models: sequence classifiers with one label; their scores are added.",
        group="reward",
    )  # fmt: skip
    reward_recipe: str | None = option(
        None, "TOML file: a table per value of reward_recipe_column with weights of rewards.",
        group="reward",
    )  # fmt: skip
    reward_recipe_column: str = option(
        "task", "Column that names the recipe of a row.", group="reward"
    )
    reward_failure: str = option(
        "raise", "A failed reward ends the run, or excludes (masks) its sample.", group="reward",
        choices=REWARD_FAILURES,
    )  # fmt: skip

    # Rollout
    rollout_batch_size: int = option(
        512, "Prompts per step, over all ranks.", group="rollout", at_least=1
    )
    generate_max_len: int = option(
        1024, "Longest response, in tokens.", group="rollout", at_least=1
    )
    temperature: float = option(1.0, "Sampling temperature.", group="rollout", above=0)
    top_p: float = option(
        1.0, "Sample from the smallest set of tokens with this probability; 1 keeps all.",
        group="rollout", above=0, at_most=1,
    )  # fmt: skip
    top_k: int = option(
        -1, "Sample from the k most likely tokens; -1 keeps all.", group="rollout", at_least=-1
    )
    use_fire: bool = option(
        False, "Draw the first token at first_token_temperature (FIRE).", group="rollout"
    )
    first_token_temperature: float = option(
        10.0, "Temperature of the first token with use_fire.", group="rollout", above=0
    )
    max_num_gen_batches: int = option(
        10, "Rollout batches of one step with dynamic_sampling, at most.", group="rollout",
        at_least=1,
    )  # fmt: skip

    partial_rollout: bool = option(
        False, "Carry responses that are not finished over to the next step.", group="rollout"
    )
    partial_rollout_prompts: int | None = option(
        None, "Prompts in flight with partial_rollout; unset is 1.5 rollout_batch_size.",
        group="rollout", at_least=1,
    )  # fmt: skip
    partial_rollout_tokens: int | None = option(
        None, "Tokens of each response between two looks at what is finished, with "
        "partial_rollout; unset is a quarter of generate_max_len.", group="rollout", at_least=1,
    )  # fmt: skip
    max_staleness: int = option(
        4, "Updates between a token and the step that trains on it, at most, with "
        "partial_rollout.", group="rollout", at_least=1,
    )  # fmt: skip
    use_rollout_logprobs: bool = option(
        False, "Take the old logprobs from the engine instead of a forward pass of the actor.",
        group="rollout",
    )  # fmt: skip
