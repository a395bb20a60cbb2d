"""Options of one part of a run: what scores responses."""

from __future__ import annotations

from dataclasses import dataclass

from lightrft.config.options import (
    DATA_AND_EVAL,
    EVAL,
    Arguments,
    reward_option,
)


@dataclass(kw_only=True)
class RewardOptions:
    """What scores responses."""

    reward_fn: tuple[str, ...] = reward_option(
        (),
        "Rewards, summed: boxed_math, gsm8k, unit_tests, judge, verdict, reasoning_gym:NAME or "
        "FILE.py:FUNCTION.",
        common=True,
        path="file",
        commands=DATA_AND_EVAL,
    )
    reward_args: Arguments = reward_option(
        None,
        "Keyword-only arguments of own reward functions.",
        commands=DATA_AND_EVAL,
    )
    reward_timeout_seconds: float = reward_option(
        120.0,
        "Deadline of one call of a reward function.",
        above=0,
        at_most=1e7,
        may_change=True,
        commands=DATA_AND_EVAL,
    )
    reward_weights: tuple[float, ...] = reward_option(
        (),
        "Factor of each reward_fn, then remote_rm_url, then reward_pretrain; unset is 1 each.",
        commands=EVAL,
    )
    reward_pretrain: tuple[str, ...] = reward_option(
        (),
        "Reward models of lightrft reward, or sequence classifiers with one label; their scores "
        "are added.",
    )
    reward_recipe: str | None = reward_option(
        None,
        "TOML file: a table per value of reward_recipe_column with weights of rewards.",
    )
    reward_recipe_column: str = reward_option(
        "task",
        "Column that names the recipe of a row.",
        acts_with="reward_recipe",
    )
    reward_failure: str = reward_option(
        "raise",
        "A failed reward ends the run, or excludes (masks) its sample.",
        choices=("raise", "mask"),
    )
    reward_memory_gb: float | None = reward_option(
        16.0,
        "Memory in GB that the process of an own reward function and its children may hold; "
        "none sets no limit.",
        above=0,
        may_change=True,
        commands=DATA_AND_EVAL,
    )
    reward_env: tuple[str, ...] = reward_option(
        (),
        "Environment variables with secrets that own reward functions may read; others, such "
        "as WANDB_API_KEY, are kept from them.",
        may_change=True,
        commands=DATA_AND_EVAL,
    )
    reward_workers: int = reward_option(
        1,
        "Groups of responses that an own reward function (each in a process of its own), "
        "reasoning_gym or a service scores at once, beside the generation.",
        at_least=1,
        at_most=256,
        may_change=True,
        commands=DATA_AND_EVAL,
    )
    sandbox: str = reward_option(
        "bubblewrap",
        "Where unit_tests and agent_command run programs; unsafe has limits of resources only.",
        choices=("bubblewrap", "unsafe"),
        commands=DATA_AND_EVAL,
    )
    test_timeout_seconds: float = reward_option(
        5.0,
        "Processor time of a process of a program of the reward unit_tests; all of them may take "
        "three times as much, and do nothing for as long.",
        above=0,
        at_most=1e7,
        commands=DATA_AND_EVAL,
    )
    judge_url: str | None = reward_option(
        None,
        "OpenAI-compatible server of the reward judge, http://HOST:PORT/v1; the environment "
        "variable LIGHTRFT_JUDGE_KEY is its key.",
        may_change=True,
        commands=DATA_AND_EVAL,
    )
    judge_model: str | None = reward_option(
        None,
        "Name of the judge's model on judge_url; without that the folder of one, which every rank "
        "loads on the CPU in a process of its own, or policy: the one that is trained, asked "
        "through the engine.",
        commands=DATA_AND_EVAL,
    )
    judge_template: str | None = reward_option(
        None,
        "Text file with the question to the judge: {response} between marks with {mark}, "
        "{prompt} and {label}; with a rubric {question}; for pairs {first} and {second}, for "
        "rankings {responses} instead.",
        acts_with="judge_model",
        path="file",
        commands=DATA_AND_EVAL,
    )
    judge_rubric: str | None = reward_option(
        None,
        "TOML file with a table a part, each with question and weight: every response gets a grade "
        "by each of them, and their weighted mean.",
        acts_with="judge_model",
        path="file",
        commands=DATA_AND_EVAL,
    )
    judge_compare: str = reward_option(
        "none",
        "What the judge compares: none grades each response alone; pairs asks about every two "
        "responses to a prompt, in both orders; ranking ranks them all, in two orders; verdicts is "
        "pairs for a judge that was trained on both_orders:FILE, with the questions of that.",
        choices=("none", "pairs", "ranking", "verdicts"),
        acts_with="judge_model",
    )
    judge_prices: Arguments = reward_option(
        None,
        "Prices of a million tokens of the judge, input=0.5 output=1.5, for the metric judge/cost.",
        acts_with="judge_model",
        may_change=True,
    )
    judge_args: Arguments = reward_option(
        None,
        "Fields of the request to the judge, such as max_tokens=2048.",
        acts_with="judge_model",
        commands=DATA_AND_EVAL,
    )
    remote_rm_token: str | None = reward_option(
        None,
        "Token of the reward services, sent as Authorization: Bearer; unset takes "
        "LIGHTRFT_REWARD_TOKEN of the environment.",
        may_change=True,
        secret=True,
        acts_with="remote_rm_url",
        commands=DATA_AND_EVAL,
    )
