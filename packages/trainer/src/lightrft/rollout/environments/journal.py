"""Journal of a step's episodes: one line per event, written before the event is used.

begin        facts that must match for a later run to replay the file
reset        prompt of an episode, with the message that `reset` returned
turn         what the engine sampled, and a hash of the ids before it
round        samples that had a turn together; it completes their `turn` lines
answer       a call of the last turn and its answer; may precede the `round`
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
from dataclasses import asdict, replace
from hashlib import sha256
from itertools import chain
from pathlib import Path
from typing import Self

from lightrft.config.files import make_folder, named_errors
from lightrft.datasets.types import Prompt
from lightrft.engines.ledger import hash_context
from lightrft.engines.media.sources import ImageSource
from lightrft.engines.types import Completion, SamplingParams
from lightrft.records.rollout import AnsweredCall
from lightrft.rewards.types import RewardResult
from lightrft.rollout.environments.episode import Episode
from lightrft.rollout.environments.journal_reading import (
    FORMAT,
    Event,
    JournalError,
    Recorded,
    event_line,
    read_to_damage,
)
from lightrft.rollout.source import SampleRequests, SourceParts, agree

JOURNAL_FOLDER = "journal"


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
    It stays until all its turns have been written again.

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
            old, self.damage = read_to_damage(path, vocab_size)
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
        """Open the journal of this rank; without a file if nothing is to be written; collective.

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
        journal = cls(
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
        notes = (
            () if journal.damage is None else (f"{journal.damage}: what follows is sampled again",)
        )
        num_rounds = agree(context, None, journal.recorded.num_rounds, notes)
        if parts.session.shares_engine:  # it samples a round of all ranks at once
            journal.recorded.keep(min(num_rounds))
        return journal

    def leave(self, *, is_over: bool = False) -> None:
        """Replace the replayed file once all its turns are written again, or the step is over."""
        if self._file is None or self._path is None or (self.recorded.turns and not is_over):
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

    def turn(self, episode: Episode) -> None:
        """Write the last turn of an episode."""
        last = episode.last
        if last is not None:
            place = episode.sample_id, episode.num_turns - 1
            self._turn(place, episode.turn_texts[-1], last.prompt_token_ids, last)

    def _turn(
        self, place: tuple[int, int], text: str, context: Sequence[int], turn: Completion
    ) -> None:
        """Write what was sampled after `context`, as the turn of a sample."""
        self.recorded.turns.pop(place, None)
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

    def round(self, sample_ids: Sequence[int]) -> None:
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
