"""Replay of a step's episodes from its journal and the weights, without any environment.

Every turn is sampled again after the ids before it in the journal, and every answer is rendered
again. One difference therefore does not hide another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import TYPE_CHECKING, cast

from lightrft.config import ComputeOptions, RolloutOptions
from lightrft.datasets.chat_ids import ChatIds
from lightrft.datasets.suffix import TurnSuffix
from lightrft.engines.ledger import hash_context
from lightrft.engines.types import Completion, GenerationRequest, SamplingParams
from lightrft.rollout.environments.calls import calls_in_turns, choose_parser, whole_turn
from lightrft.rollout.environments.journal_reading import Recorded, RecordedTurn
from lightrft.rollout.environments.turns import Observations

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Limits of a recomputed logprob's difference: in float32, and with 16-bit weights or engine.
LOGPROB_LIMITS = (2e-5, 5e-2)
Generate = Callable[[SamplingParams, list[GenerationRequest]], list[Completion]]


@dataclass(slots=True)
class Replay:
    """Numbers of replayed turns, and their differences.

    Args:
        num_episodes, num_turns, num_tokens, num_answers: Numbers of compared items.
        max_difference: Largest difference of a logprob.
        differences: One line per difference, in the order of the rounds.
    """

    num_episodes: int = 0
    num_turns: int = 0
    num_tokens: int = 0
    num_answers: int = 0
    max_difference: float = 0.0
    differences: list[str] = field(default_factory=list)


def replay_journal(
    recorded: Recorded,
    params: SamplingParams,
    *,
    config: RolloutOptions,
    tokenizer: PreTrainedTokenizerBase,
    generate: Generate,
    into: Replay,
) -> None:
    """Compare the journal of one rank with a replay.

    Args:
        recorded: Journal of the rank.
        params: Sampling parameters of one turn.
        config: Options of the run.
        tokenizer: Tokenizer of the model, with the run's chat template.
        generate: Function that samples turns with the weights of the step.
        into: Replay that receives counts and differences.
    """
    environment = cast("dict[str, list[dict[str, object]]]", recorded.header["environment"])
    chat, is_conversation = ChatIds(tokenizer), bool(environment["answers_turns"])
    parse = (
        whole_turn
        if is_conversation
        else choose_parser(config.tool_parser, tokenizer, environment["schemas"])
    )
    suffix = TurnSuffix(
        chat,
        tools=environment["schemas"],
        has_system=config.system_prompt is not None,
        is_conversation=is_conversation,
        read_calls=calls_in_turns(chat, parse),
    )
    observations = Observations(config, suffix)
    params = suffix.chat.with_end_of_turn(params)
    contexts = {sample: list(prompt) for sample, prompt in recorded.prompts.items()}
    into.num_episodes += len(contexts)
    for _, items in groupby(recorded.turns.values(), lambda turn: turn.round_number):
        turns = [(turn, contexts[turn.sample_id]) for turn in items]
        requests = [
            GenerationRequest(
                tuple(context),
                turn.sampled.request_id,
                observations.turn_tokens(len(context), params.max_tokens),
            )
            for turn, context in turns
        ]
        completions = generate(params, requests)
        for (turn, context), again in zip(turns, completions, strict=True):
            into.differences += _of_turn(turn, again, config, into)
            context += turn.sampled.output_token_ids
            into.differences += _of_answers(turn, recorded, observations, context, into)


def _of_turn(
    turn: RecordedTurn, again: Completion, config: ComputeOptions, into: Replay
) -> Iterator[str]:
    """Yield the differences between the replayed turn and the recorded one."""
    into.num_turns += 1
    into.num_tokens += len(turn.sampled.output_token_ids)
    where = f"sample {turn.sample_id}, turn {turn.turn}"
    if hash_context(again.prompt_token_ids) != turn.context_hash:
        yield f"{where}: the ids before it are not those the engine saw; an answer was changed"
    place = _first_difference(turn.sampled.output_token_ids, again.output_token_ids)
    if place is not None:
        one = [
            ids[place : place + 1]
            for ids in (turn.sampled.output_token_ids, again.output_token_ids)
        ]
        yield f"{where}, token {place}: id {_shown(one[0])} was sampled, and now {_shown(one[1])}"
        return
    if turn.sampled.finish_reason != again.finish_reason:
        yield f"{where}: it ended by {turn.sampled.finish_reason}, and now by {again.finish_reason}"
    pairs = zip(turn.sampled.output_logprobs, again.output_logprobs, strict=True)
    largest = max((abs(a - b) for a, b in pairs), default=0.0)
    into.max_difference = max(into.max_difference, largest)
    limit = LOGPROB_LIMITS[bool(config.bf16)]
    if not largest <= limit:
        yield f"{where}: a logprob differs by {largest:.2e}, allowed {limit:.0e}"


def _of_answers(
    turn: RecordedTurn,
    recorded: Recorded,
    observations: Observations,
    context: list[int],
    into: Replay,
) -> Iterator[str]:
    """Yield the answers that differ from what the model saw."""
    key = turn.sample_id, turn.turn
    shown, answers = recorded.observations.get(key), recorded.answers.get(key, [])
    if shown is None:
        return
    seen = shown.token_ids
    into.num_answers += len(answers)
    made = observations.after(
        turn.sampled.output_token_ids, len(context), [call.text for call in answers]
    )
    assert made is not None  # only None with images
    if made.token_ids != seen:
        changed = [
            call.name or "a malformed call"
            for call, (start, stop), (first, last) in zip(
                answers, shown.text_spans, made.text_spans, strict=False
            )
            if seen[start:stop] != made.token_ids[first:last]
        ]
        names = ", ".join(changed) or "the frame around the answers"
        yield f"sample {key[0]}, turn {key[1]}: what the model saw of {names} is not the answer"
    context += seen


def _first_difference(first: Sequence[int], second: Sequence[int]) -> int | None:
    for place, (one, other) in enumerate(zip(first, second, strict=False)):
        if one != other:
            return place
    return None if len(first) == len(second) else min(len(first), len(second))


def _shown(ids: Sequence[int]) -> str:
    return str(ids[0]) if ids else "none"
