"""What happened in the episodes of a step, one JSON line an event, written before it is used."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from lightrft.experience.environments.episode import Episode

JOURNAL_FOLDER = "journal"


class Journal:
    """The file of one rank and one step; nothing is written without a folder.

    Args:
        folder: Of the run's journals, or None.
        step, rank: In the name of the file.
    """

    def __init__(self, folder: Path | None, *, step: int | None, rank: int) -> None:
        self._file = None
        if folder is not None and step is not None:
            folder.mkdir(parents=True, exist_ok=True)
            path = folder / f"step-{step:06d}.rank-{rank}.jsonl"
            # A step that is sampled again is written again.
            self._file = path.open("w", encoding="utf-8")

    def reset(self, episode: Episode) -> None:
        """The prompt of an episode, with what `reset` added."""
        self._write(
            episode, "reset", told=episode.told, prompt_id=episode.prompt.id,
            request_id=episode.request_id, prompt_token_ids=episode.prompt.token_ids,
        )  # fmt: skip

    def turn(self, episode: Episode) -> None:
        """The last turn of an episode, and the calls in it with their answers."""
        last, segment, number = episode.last, episode.segments[-1], len(episode.segments) - 1
        calls = episode.answers[number] if number < len(episode.answers) else []
        if last is None:
            return
        self._write(
            episode, "turn", turn=number, text=episode.turn_texts[-1],
            token_ids=last.output_token_ids, logprobs=last.output_logprobs,
            finish_reason=last.finish_reason, weights_version=last.weights_version,
            calls=[asdict(call) for call in calls], observation=segment.observation,
            text_spans=segment.text_spans, is_open=episode.is_open,
        )  # fmt: skip

    def end(self, episode: Episode, reward: object) -> None:
        """The reward of an episode, or why it failed."""
        failure = None if episode.failure is None else str(episode.failure)
        self._write(episode, "end", reward=reward, failure=failure)

    def close(self) -> None:
        """Closes the file."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _write(self, episode: Episode, event: str, **details: object) -> None:
        if self._file is not None:
            line = {"event": event, "sample_id": episode.sample_id, **details}
            self._file.write(json.dumps(line, ensure_ascii=False) + "\n")
            self._file.flush()
