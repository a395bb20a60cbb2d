"""Journal of a step's episodes: one line per event, written before the event is used.

begin        facts that must match for a later run to replay the file
reset        prompt of an episode, with the message that `reset` returned
turn         what the engine sampled, and a hash of the ids before it
round        samples that had a turn together; it completes their `turn` lines
answer       a call of the last turn and its answer
observation  ids appended after a turn
failed       the environment failed; the episode is left out
again        a repeated answer differed: the episode starts over
end          the reward
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from hashlib import sha256
from itertools import chain
from pathlib import Path
from typing import Self, cast, get_args

from lightrft.config.files import lines_of, make_folder, named_errors, typed
from lightrft.config.options import type_hints
from lightrft.datasets.chat_ids import Rendered
from lightrft.datasets.types import Prompt
from lightrft.engines.ledger import LedgerEntry, hash_context
from lightrft.engines.media.sources import ImageSource
from lightrft.engines.types import Completion, FinishReason, LogprobsMode, SamplingParams
from lightrft.records.rollout import AnsweredCall
from lightrft.rewards.types import RewardResult
from lightrft.rollout.environments.episode import Episode
from lightrft.rollout.environments.journal_lines import (
    FORMAT,
    Event,
    event_line,
    read_count,
    read_event,
    read_ids,
    read_text,
)
from lightrft.rollout.source import SampleRequests, SourceParts

JOURNAL_FOLDER = "journal"
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
        turn: Index of the turn in its episode.
        context_hash: Hash of the ids before it.
        sampled: Completion without prompt ids and version of the weights.
    """

    turn: int
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
        rounds: Turns by sample id, for each complete round.
        prompts, messages: Prompt and message of `reset` by sample id.
        answers: Calls by sample id and turn, in order.
        observations: Ids after a turn, by sample id and turn.
        failures: Messages by sample id and number of turns before.
    """

    header: Event = field(default_factory=dict)
    rounds: list[dict[int, RecordedTurn]] = field(default_factory=list)
    prompts: dict[int, tuple[int, ...]] = field(default_factory=dict)
    messages: dict[int, str | None] = field(default_factory=dict)
    answers: dict[tuple[int, int], list[AnsweredCall]] = field(default_factory=dict)
    observations: dict[tuple[int, int], Rendered] = field(default_factory=dict)
    failures: dict[tuple[int, int], str] = field(default_factory=dict)

    def keep(self, num_rounds: int) -> None:
        """Keep the first `num_rounds` rounds, with their answers and observations."""
        del self.rounds[num_rounds:]
        kept = {(sample, turn.turn) for turns in self.rounds for sample, turn in turns.items()}
        self.answers = {key: value for key, value in self.answers.items() if key in kept}
        self.observations = {k: value for k, value in self.observations.items() if k in kept}

    def forget(self, sample_id: int) -> None:
        """Forget an episode except for its prompt."""
        for turns in self.rounds:
            turns.pop(sample_id, None)
        for by_turn in (self.answers, self.observations, self.failures):
            for key in [key for key in by_turn if key[0] == sample_id]:
                del by_turn[key]


def read_journal(path: Path) -> Recorded:
    """Read a journal; drop a last line that was not written completely.

    Raises:
        JournalError: It is damaged, or is no journal.
    """
    recorded, damage = _read(path)
    if damage is not None:
        raise damage
    return recorded


def _read(path: Path, vocab_size: int | None = None) -> tuple[Recorded, JournalError | None]:
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
    except _FAULTS as error:
        return recorded, JournalError(path, max(number, 1), error)
    return recorded, None if recorded.header else JournalError(path, 1, "it is empty")


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
        recorded.rounds.append({sample: open_turns.pop(sample) for sample in samples})
    elif kind == "reset":
        sample = read_count(event, "sample_id")
        recorded.prompts[sample] = _read_prompt(recorded, event)
        recorded.messages[sample] = None if event["told"] is None else read_text(event, "told")
    elif kind == "turn":
        open_turns[read_count(event, "sample_id")] = _read_turn(event, vocab_size)
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
    turn = next(turns[parent] for turns in recorded.rounds if parent in turns)
    return (*recorded.prompts[parent], *turn.sampled.output_token_ids, *ids)


def _read_turn(event: Event, vocab_size: int | None) -> RecordedTurn:
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
    place, context = read_count(event, "turn"), read_text(event, "context_hash")
    return RecordedTurn(place, context, completion)


def journal_path(folder: Path, step: int, batch: int, rank: int) -> Path:
    """Return the path of one rank's file; later batches of dynamic sampling have other files."""
    part = f".batch-{batch}" if batch else ""
    return folder / f"step-{step:06d}{part}.rank-{rank}.jsonl"


def sampling_facts(params: SamplingParams) -> list[float]:
    """Return seed and distribution as headers have them; min_p only if it cuts."""
    facts = params.distribution
    return [params.seed, *(facts if params.min_p else facts[:-1])]


def images_fact(images: Iterable[ImageSource]) -> dict[str, str]:
    """Return a hash of images, whose ids are equal whatever they show; {} without any."""
    digests = "".join(image.digest for image in images)
    return {"images": sha256(digests.encode()).hexdigest()} if digests else {}


def remove_further_ranks(folder: Path, step: int, batch: int, world_size: int) -> None:
    """Remove a batch's journals of ranks that this run does not have."""
    kept = [journal_path(folder, step, batch, rank) for rank in range(world_size)]
    for path in folder.glob(kept[0].name.replace("rank-0", "rank-*")):
        if path not in kept:
            path.unlink()


class Journal:
    """File of one rank and one step; nothing is written without a path.

    The file of a killed process is replayed if its header matches, up to the first damage.
    It stays until everything replayed has been written again.

    Args:
        path: Path of the file, or None.
        header: Facts that must match for a file to be replayed.
        vocab_size: Size of the model's vocabulary; None accepts any token.

    Attributes:
        recorded: Events to replay.
        damage: Damage of the existing file.
        num_rounds: Number of rounds written.
    """

    def __init__(
        self, path: Path | None, header: Mapping[str, object], *, vocab_size: int | None = None
    ) -> None:
        self._lock = threading.Lock()
        self._path, self._file, self._check = path, None, 0
        self.recorded, self.num_rounds = Recorded(), 0
        self.damage: JournalError | None = None
        if path is None:
            return
        make_folder(path.parent)
        begin: Event = {"event": "begin", "format": FORMAT, **header}
        self._partial = path.with_name(f".{path.name}.partial")
        for place in (path, self._partial):
            if place.exists() and not place.is_file():
                self.damage = JournalError(path, 1, f"{place.name} is no file")
                place.rename(place.with_name(f"{place.name}.{time.time_ns()}"))
        if path.is_file():
            old, self.damage = _read(path, vocab_size)
            # Without a hash we cannot know whether the same weights sampled it.
            if header.get("weights") and old.header == json.loads(json.dumps(begin)):
                self.recorded = old
        self._file = self._partial.open("wb")
        self._append(begin)

    @classmethod
    def of_requests(
        cls,
        folder: Path | None,
        requests: SampleRequests,
        parts: SourceParts,
        *,
        prompts: Sequence[tuple[int, Prompt]],
        environment: Event,
    ) -> Self:
        """Open the journal of this rank; one without a file if nothing is to be written.

        Args:
            folder: Folder of journals; None writes none.
            requests: Requests whose episodes it records.
            parts: Parts of the run.
            prompts: Request id and prompt of each episode.
            environment: Facts about the tools.
        """
        step, batch, context = requests.step, requests.batch, parts.context
        if folder is None or step is None:
            return cls(None, {})
        engine, sync = parts.session.engine, parts.session.last_weight_sync
        if context.rank == 0:
            remove_further_ranks(folder, step, batch, context.world_size)
        return cls(
            journal_path(folder, step, batch, context.rank),
            {
                "step": step,
                "batch": batch,
                "rank": context.rank,
                "world_size": context.world_size,
                "weights": 0 if sync is None else sync.engine_hash,
                "prompts": hash_context([i for n, p in prompts for i in (n, *p.token_ids)]),
                "sampling": sampling_facts(requests.params),
                "environment": environment,
                **images_fact(chain.from_iterable(p.images for _, p in prompts)),
            },
            vocab_size=None if engine is None else engine.vocab_size,
        )

    @property
    def is_written(self) -> bool:
        """True if events are written to a file."""
        return self._file is not None

    def follow(self, num_rounds: int) -> None:
        """Replay `num_rounds` rounds."""
        self.recorded.keep(num_rounds)
        self.leave()

    def leave(self) -> None:
        """Replace the replayed file once all its rounds are written again."""
        if self._file is None or self._path is None or self.num_rounds < len(self.recorded.rounds):
            return
        self._file.flush()
        if self._partial.exists():
            os.replace(self._partial, self._path)

    def reset(self, episode: Episode) -> None:
        """Write the prompt of an episode, with the message of `reset`."""
        prompt = episode.prompt
        self._write(
            episode.sample_id,
            "reset",
            told=episode.reset_message,
            prompt_id=prompt.id,
            request_id=episode.request_id,
            prompt_token_ids=prompt.token_ids,
        )

    def round(self, episodes: Sequence[Episode]) -> None:
        """Write the last turns of episodes that were sampled together."""
        for episode in episodes:
            last = episode.last
            if last is not None:
                place = episode.sample_id, episode.num_turns - 1
                self._turn(place, episode.turn_texts[-1], last.prompt_token_ids, last)
        self._round([e.sample_id for e in episodes])

    def _turn(
        self, place: tuple[int, int], text: str, context: Sequence[int], turn: Completion
    ) -> None:
        """Write what was sampled after `context`, as the turn of a sample."""
        self._write(
            place[0],
            "turn",
            turn=place[1],
            request_id=turn.request_id,
            text=text,
            context_hash=hash_context(context),
            token_ids=turn.output_token_ids,
            logprobs=turn.output_logprobs,
            logprobs_mode=turn.logprobs_mode,
            finish_reason=turn.finish_reason,
            weights_version=turn.weights_version,
            **({"facts": turn.facts} if turn.facts else {}),
        )

    def _round(self, sample_ids: Sequence[int]) -> None:
        """Write which samples had their last turns together."""
        self._append({"event": "round", "round": self.num_rounds, "sample_ids": sample_ids})
        self.num_rounds += 1

    def answer(self, episode: Episode, call: AnsweredCall) -> None:
        """Write a call of the last turn and its answer."""
        fields = asdict(replace(call, content=()))  # the text names its images
        del fields["content"]
        self._write(episode.sample_id, "answer", turn=episode.num_turns - 1, call=fields)

    def observation(self, episode: Episode) -> None:
        """Write what was appended after the last turn."""
        segment = episode.segments[-1]
        self._write(
            episode.sample_id,
            "observation",
            turn=episode.num_turns - 1,
            token_ids=segment.observation,
            text_spans=segment.text_spans,
        )

    def failed(self, episode: Episode, failure: str) -> None:
        """Write that the environment failed, so the episode is left out."""
        self._write(episode.sample_id, "failed", turn=episode.num_turns, failure=failure)

    def again(self, episode: Episode, reason: str) -> None:
        """Write that the episode starts over, and forget what was to be replayed of it."""
        self._write(episode.sample_id, "again", reason=reason)
        self.recorded.forget(episode.sample_id)

    def end(self, sample_id: int, result: RewardResult | None, failure: object) -> None:
        """Write the reward of an episode, or why it failed."""
        reward = None if result is None else [result.reward, dict(result.components)]
        self._write(sample_id, "end", reward=reward, failure=failure and str(failure))

    def close(self) -> None:
        """Close the file; keep the replayed file if its end was not reached."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _write(self, sample_id: int, event: str, **details: object) -> None:
        self._append({"event": event, "sample_id": sample_id, **details})

    def _append(self, line: Event) -> None:
        if self._file is not None:
            with self._lock, named_errors(self._partial):
                text, self._check = event_line(line, self._check)
                self._file.write(text)
                self._file.flush()
