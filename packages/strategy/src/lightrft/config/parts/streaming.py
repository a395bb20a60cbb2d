"""Options of one part of a run: how sampling and training overlap."""

from __future__ import annotations

from dataclasses import dataclass

from lightrft.config.options import (
    EVAL,
    rollout_option,
)


@dataclass(kw_only=True)
class StreamingOptions:
    """How sampling and training overlap."""

    rollout_lag: int = rollout_option(
        0,
        "Updates between the weights that sample a step and those that it trains: with 1 the next "
        "step is sampled before this one is trained on.",
        at_least=0,
    )
    rollout_ranks: int = rollout_option(
        0,
        "Processes that only generate, the last ones of the launch: they sample the steps to come "
        "while the others train. 0 lets every process do both.",
        at_least=0,
    )
    stream_chunk: int | None = rollout_option(
        None,
        "Tokens that an open response samples between two updates: steps train on the groups that "
        "are complete, the others go on. Unset waits for all responses of a step.",
        at_least=1,
    )
    stream_prompts: int | None = rollout_option(
        None,
        "Prompts in flight with stream_chunk; unset is 1.5 rollout_batch_size, and with tool_lag "
        "tool_lag * (max_turns - 1) more of them, up to max_staleness + 1.",
        at_least=1,
        acts_with="stream_chunk",
    )
    max_staleness: int = rollout_option(
        4,
        "Updates between the first token of a response and the step that trains on it, at most, "
        "with stream_chunk.",
        at_least=1,
        acts_with="stream_chunk",
    )
    tool_lag: int = rollout_option(
        0,
        "Rounds of stream_chunk that pass between a turn of an episode and the next one, while its "
        "tools, or its reward, take their time; 0 waits for them within the round.",
        at_least=0,
    )
    late_join: bool = rollout_option(
        False,
        "Let an episode whose tool is busy join a later round, once half of the others are "
        "ready or all that took no part in the last one; off, a round waits for all, and timing "
        "changes no bit.",
        acts_with="environment or tools or agent or agent_command",
        commands=EVAL,
    )
    use_rollout_logprobs: bool = rollout_option(
        False,
        "Take the old logprobs from the engine instead of a forward pass of the actor.",
    )
