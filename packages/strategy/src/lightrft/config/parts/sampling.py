"""Options of one part of a run: how many prompts a step takes, and how tokens are drawn."""

from __future__ import annotations

from dataclasses import dataclass

from lightrft.config.options import (
    DATA_AND_EVAL,
    EVAL,
    rollout_option,
)
from lightrft.engines.types import MIN_TEMPERATURE


@dataclass(kw_only=True)
class SamplingOptions:
    """How many prompts a step takes, and how tokens are drawn."""

    rollout_batch_size: int = rollout_option(
        512,
        "Prompts per step, over all ranks.",
        at_least=1,
        common=True,
    )
    generate_max_len: int = rollout_option(
        1024,
        "Longest response, in tokens.",
        at_least=1,
        common=True,
        commands=DATA_AND_EVAL,
    )
    temperature: float = rollout_option(
        1.0,
        "Sampling temperature.",
        at_least=MIN_TEMPERATURE,
        common=True,
        commands=EVAL,
    )
    top_p: float = rollout_option(
        1.0,
        "Sample from the smallest set of tokens with this probability; 1 keeps all.",
        above=0,
        at_most=1,
        commands=EVAL,
    )
    top_k: int = rollout_option(
        -1,
        "Sample from the k most likely tokens; -1 keeps all.",
        at_least=-1,
        commands=EVAL,
    )
    min_p: float = rollout_option(
        0.0,
        "Sample from the tokens with at least this share of the probability of the most likely "
        "one; 0 keeps all.",
        at_least=0,
        at_most=1,
        commands=EVAL,
    )
    stop: tuple[str, ...] = rollout_option(
        (),
        "Texts that end a response, beside the model's own end; they stay in it.",
        commands=EVAL,
    )
    use_fire: bool = rollout_option(
        False,
        "Draw the first token at first_token_temperature (FIRE).",
    )
    first_token_temperature: float = rollout_option(
        10.0,
        "Temperature of the first token with use_fire.",
        at_least=MIN_TEMPERATURE,
        acts_with="use_fire",
    )
    max_num_gen_batches: int = rollout_option(
        10,
        "Rollout batches of one step with dynamic_sampling, at most.",
        at_least=1,
        acts_with="dynamic_sampling",
    )
