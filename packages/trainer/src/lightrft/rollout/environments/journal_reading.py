"""Content of a journal, read back; each line is an event of JSON and ends in a checksum.

The checksum covers everything up to it.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import cast, get_args

from lightrft.config.files import finite_float, lines_of, refuse_constant, typed
from lightrft.config.options import type_hints
from lightrft.datasets.chat_ids import Rendered
from lightrft.engines.ledger import LedgerEntry
from lightrft.engines.media.sources import ImageSource
from lightrft.engines.types import Completion, FinishReason, LogprobsMode
from lightrft.records.rollout import AnsweredCall

FORMAT = 2
Event = dict[str, object]
_MARK = b', "check": "'
# Errors that a damaged line may raise.
_FAULTS = (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError)


class JournalError(ValueError):
    """A damaged journal; the message, one line, names the first damaged line."""

    def __init__(self, path: Path, line: int, reason: object) -> None:
        super().__init__(f"journal {path} is damaged from line {line} on ({reason})")


@dataclass(frozen=True, slots=True)
class RecordedTurn:
    """One recorded completion of the engine.

    Args:
        sample_id: Sample of the episode.
        turn: Index of the turn in its episode.
        round_number: Round that sampled it.
        context_hash: Hash of the ids before it.
        sampled: Completion without prompt ids and version of the weights.
    """

    sample_id: int
    turn: int
    round_number: int
    context_hash: str
    sampled: Completion

    def completion(self, context: tuple[int, ...], version: int) -> Completion:
        """Return the completion with `version`, which counts from the engine's start."""
        return replace(self.sampled, prompt_token_ids=context, weights_version=version)

    def entry(self, version: int, sampling: tuple[float, ...] = ()) -> LedgerEntry:
        """Return the entry of the engine's ledger."""
        turn = self.sampled
        return LedgerEntry(
            turn.request_id,
            0,
            self.context_hash,
            turn.output_token_ids,
            turn.output_logprobs,
            version,
            turn.facts,
            sampling,
            turn.finish_reason,
        )


@dataclass(slots=True)
class Recorded:
    """Content of a journal.

    Args:
        header: Event that began it.
        turns: Turns of complete rounds by sample id and turn, in order.
        num_rounds: Number of complete rounds.
        prompts, messages: Prompt and message of `reset` by sample id.
        answers: Calls by sample id and turn, in order.
        observations: Ids after a turn, by sample id and turn.
        failures: Messages by sample id and number of turns before.
    """

    header: Event = field(default_factory=dict)
    turns: dict[tuple[int, int], RecordedTurn] = field(default_factory=dict)
    num_rounds: int = 0
    prompts: dict[int, tuple[int, ...]] = field(default_factory=dict)
    messages: dict[int, str | None] = field(default_factory=dict)
    answers: dict[tuple[int, int], list[AnsweredCall]] = field(default_factory=dict)
    observations: dict[tuple[int, int], Rendered] = field(default_factory=dict)
    failures: dict[tuple[int, int], str] = field(default_factory=dict)

    def keep(self, num_rounds: int) -> None:
        """Keep the turns of the first `num_rounds` rounds, with what answered them."""
        self.turns = {k: turn for k, turn in self.turns.items() if turn.round_number < num_rounds}
        for after_turn in (self.answers, self.observations):
            for place in after_turn.keys() - self.turns.keys():
                del after_turn[place]
        for sample, number in list(self.failures):
            if number and (sample, number - 1) not in self.turns:
                del self.failures[sample, number]

    def forget(self, sample_id: int) -> None:
        """Forget an episode except for its prompt."""
        for by_turn in (self.turns, self.answers, self.observations, self.failures):
            for key in [key for key in by_turn if key[0] == sample_id]:
                del by_turn[key]


def read_journal(path: Path) -> Recorded:
    """Read a journal; drop a last line that was not written completely.

    Raises:
        JournalError: It is damaged, or is no journal.
    """
    recorded, damage = read_to_damage(path)
    if damage is not None:
        raise damage
    return recorded


def read_to_damage(
    path: Path, vocab_size: int | None = None
) -> tuple[Recorded, JournalError | None]:
    """Return the events before the first damage, and the damage."""
    recorded, open_turns = Recorded(), cast("dict[int, RecordedTurn]", {})
    type_hints(AnsweredCall, ImageSource=ImageSource)  # for `typed`
    check = number = 0
    try:
        for number, line in enumerate(lines_of(path), 1):
            if not line.endswith(b"\n"):  # not written to its end
                break
            event, check = read_event(line[:-1], check)
            if (event["event"] == "begin") != (number == 1):
                raise ValueError("a journal begins once")
            _take(recorded, open_turns, event, vocab_size)
        damage = None if recorded.header else JournalError(path, 1, "it is empty")
    except _FAULTS as error:
        damage = JournalError(path, max(number, 1), error)
    recorded.keep(recorded.num_rounds)
    return recorded, damage


def _take(
    recorded: Recorded,
    open_turns: dict[int, RecordedTurn],
    event: Event,
    vocab_size: int | None,
) -> None:
    """Add one event."""
    kind = event["event"]
    if kind == "begin":
        _check_header(event)
        recorded.header = event
    elif kind == "round":
        samples = read_ids(event, "sample_ids", below=2**63)
        for sample in samples:
            turn = open_turns.pop(sample)
            recorded.turns[sample, turn.turn] = turn
        recorded.num_rounds += 1
    elif kind == "reset":
        sample = read_count(event, "sample_id")
        recorded.prompts[sample] = _read_prompt(recorded, event)
        recorded.messages[sample] = None if event["told"] is None else read_text(event, "told")
    elif kind == "turn":
        turn = _read_turn(event, vocab_size, recorded.num_rounds)
        open_turns[turn.sample_id] = turn
    elif kind == "again":
        recorded.forget(read_count(event, "sample_id"))
    elif kind == "end":
        read_count(event, "sample_id")
    else:
        _take_answer(recorded, event)


def _take_answer(recorded: Recorded, event: Event) -> None:
    """Add an event behind a turn: an answer, what the model was shown of it, or a failure."""
    kind, place = event["event"], (read_count(event, "sample_id"), read_count(event, "turn"))
    if kind == "answer":
        call = typed(AnsweredCall, event["call"], "call")
        recorded.answers.setdefault(place, []).append(call)
    elif kind == "observation":
        spans = typed(tuple[tuple[int, int], ...], event["text_spans"], "text_spans")
        if any(len(span) != 2 or min(span) < 0 for span in spans):
            raise ValueError("text_spans are no spans")
        recorded.observations[place] = Rendered(read_ids(event, "token_ids"), spans)
    elif kind == "failed":
        recorded.failures[place] = read_text(event, "failure")
    else:
        raise ValueError("it is no event")


def _check_header(event: Event) -> None:
    """Raise a ValueError unless a journal of this format began with an event."""
    if event.get("format") != FORMAT or type(event["weights"]) is not int:
        raise ValueError(f"its format is {repr(event.get('format'))[:60]}, expected {FORMAT}")
    environment = cast("Mapping[str, object]", event["environment"])
    typed(list[dict[str, object]], environment["schemas"], "schemas")
    typed(bool, environment["answers_turns"], "answers_turns")


def _read_prompt(recorded: Recorded, event: Event) -> tuple[int, ...]:
    """Return the prompt of an episode; an agent's call continues that of its parent."""
    ids = read_ids(event, "prompt_token_ids")
    if event.get("parent") is None:
        return ids
    parent = read_count(event, "parent")
    turn = recorded.turns[parent, 0].sampled
    return (*recorded.prompts[parent], *turn.output_token_ids, *ids)


def _read_turn(event: Event, vocab_size: int | None, round_number: int) -> RecordedTurn:
    token_ids = read_ids(event, "token_ids")
    largest = max(token_ids)
    if vocab_size is not None and largest >= vocab_size:
        raise ValueError(f"token {largest} is none of {vocab_size}")
    facts = cast("dict[str, list[float]]", event.get("facts", {}))
    completion = Completion(
        read_count(event, "request_id"),
        0,
        (),
        token_ids,
        typed(tuple[float, ...], event["logprobs"], "logprobs"),
        cast("LogprobsMode", read_text(event, "logprobs_mode", *get_args(LogprobsMode))),
        cast("FinishReason", read_text(event, "finish_reason", *get_args(FinishReason))),
        facts={name: tuple(values) for name, values in facts.items()},
    )
    place = read_count(event, "sample_id"), read_count(event, "turn")
    return RecordedTurn(*place, round_number, read_text(event, "context_hash"), completion)


def event_line(event: Event, before: int) -> tuple[bytes, int]:
    """Return the line of an event, and its checksum.

    Args:
        event: JSON without `check`.
        before: Checksum of the previous line, 0 for the first one.
    """
    text = json.dumps(event, ensure_ascii=False)[:-1].encode()
    check = zlib.crc32(text, before)
    return text + _MARK + b'%08x"}\n' % check, check


def read_event(line: bytes, before: int) -> tuple[Event, int]:
    """Parse a line without its newline; return its event and checksum.

    Raises:
        ValueError, OverflowError, RecursionError: It is damaged, or an earlier line is lost or
            moved.
    """
    text, _, end = line.rpartition(_MARK)
    check = zlib.crc32(text, before)
    if end != b'%08x"}' % check:
        raise ValueError("its checksum is another")
    event = json.loads(text + b"}", parse_constant=refuse_constant, parse_float=finite_float)
    if type(event) is not dict or "event" not in event:
        raise ValueError("it is no event")
    return event, check


def read_count(event: Event, name: str) -> int:
    """Return a number, id or place of an event; a ValueError for anything else."""
    value = event.get(name)
    if type(value) is not int or not 0 <= value < 2**63:
        raise _wrong(event, name)
    return value


def read_ids(event: Event, name: str, *, below: int = 2**31) -> tuple[int, ...]:
    """Return the ids in a list of an event; a ValueError for anything else."""
    values = event.get(name)
    if not isinstance(values, list) or not all(
        type(value) is int and 0 <= value < below for value in values
    ):
        raise _wrong(event, name)
    return tuple(values)


def read_text(event: Event, name: str, *choices: str) -> str:
    """Return a text of an event, one of the choices if there are any; else a ValueError."""
    value = event.get(name)
    if not isinstance(value, str) or (choices and value not in choices):
        raise _wrong(event, name)
    return value


def _wrong(event: Event, name: str) -> ValueError:
    return ValueError(f"{name} is {repr(event.get(name))[:60]}")
