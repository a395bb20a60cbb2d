"""Every sample of a run with its token ids: the JSON lines file of `save_rollouts`."""

from __future__ import annotations

import hashlib
import json
import math
import pickle
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from lightrft.config.files import FileError, parse_json, typed
from lightrft.engines.media.media import Media
from lightrft.engines.media.sources import ImageSource
from lightrft.records.rollout import ScoredRollout
from lightrft.reporting.loggers import JsonLinesFile
from lightrft.reporting.trajectories import spans

if TYPE_CHECKING:
    from lightrft.strategy.distributed.context import DistributedContext

LARGEST_ID = 2**31 - 1
# Folder below a run's; files are named by their SHA-256.
MEDIA_FOLDER = "media"


@dataclass(frozen=True, slots=True)
class RecordedMedium:
    """A medium of a sample, by reference.

    Args:
        kind: Name in `MEDIA_KINDS`.
        sha256: SHA-256 of an image's bytes; for other kinds also of the part that is used.
        path: File of an image of the prompt: the data's, or the one below the run's folder to which
            bytes of the data are written. "" for other media.
        is_prompt: Whether it is part of the prompt; else a turn of the response showed it.
    """

    kind: str
    sha256: str
    path: str = ""
    is_prompt: bool = True


@dataclass(frozen=True, slots=True)
class RecordedRollout:
    """One sample as it was sampled and scored, on a line of the file.

    Args:
        step, sample_id, group_id: Place in the run; the samples of a prompt share a group.
        prompt_ids, response_ids: Token ids, a sampled end of turn included.
        sampled_spans: [start, stop) of the tokens of the response that were sampled; the others
            are observations.
        reward: Reward before length shaping; None where the run measured none.
        accuracy: The reward's component `accuracy`, or the reward; None where `reward` is None.
        truncated: Whether the token budget ended it.
        masked: Whether the reward failed or could not be decided.
        held_out: Whether its prompt is one of `eval_data`.
        has_media: Whether its prompt or its response has images or videos.
        weights_version: Version of the weights that sampled its end.
        prompt_text: Text of a prompt with media, with one placeholder for each; "" for others.
        media: Media of prompt and response, in order; () also where an older version recorded them.
        row: Row of the prompt in its data; -1 where an older version recorded it.
        draw_probability: Mean share of the row among all draws; None is not known.
        text: Response without special tokens; "" without `save_rollout_texts`, like the next two.
        label: Reference answer, or None.
        columns: Further columns of the row.
    """

    step: int
    sample_id: int
    group_id: int
    prompt_ids: tuple[int, ...]
    response_ids: tuple[int, ...]
    sampled_spans: tuple[tuple[int, ...], ...]
    reward: float | None
    accuracy: float | None
    truncated: bool
    masked: bool
    held_out: bool
    has_media: bool
    weights_version: int
    prompt_text: str = ""
    media: tuple[RecordedMedium, ...] = ()
    row: int = -1
    draw_probability: float | None = None
    text: str = ""
    label: str | None = None
    columns: Mapping[str, object] = field(default_factory=dict)

    @property
    def prompt_hash(self) -> bytes:
        """Hash that is equal for samples of one prompt: of its tokens and media."""
        digest = hashlib.sha256(np.asarray(self.prompt_ids, dtype="<u4").tobytes())
        for each in self.media:
            digest.update(each.sha256.encode() if each.is_prompt else b"")
        return digest.digest()

    @property
    def is_sampled(self) -> list[bool]:
        """[response] whether each token was sampled."""
        flags = [False] * len(self.response_ids)
        for start, stop in self.sampled_spans:
            flags[start:stop] = [True] * (stop - start)
        return flags


def read_rollout(line: bytes, place: object) -> RecordedRollout:
    """Return the sample of a line.

    Raises:
        FileError: The line holds no sample; the message begins with the place.
    """
    rollout = typed(RecordedRollout, parse_json(line, place), place)
    edges = [0, *(edge for span in rollout.sampled_spans for edge in span)]
    if any(len(span) != 2 for span in rollout.sampled_spans) or edges != sorted(edges):
        raise FileError(f"{place}: sampled_spans must be ascending pairs")
    if not rollout.prompt_ids or edges[-1] > len(rollout.response_ids):
        raise FileError(f"{place}: the prompt is empty, or sampled_spans end behind the response")
    if not all(0 <= each <= LARGEST_ID for each in (*rollout.prompt_ids, *rollout.response_ids)):
        raise FileError(f"{place}: token ids must be 0 to {LARGEST_ID}")
    numbers = [each for each in (rollout.reward, rollout.accuracy) if each is not None]
    if not rollout.masked and not all(map(math.isfinite, numbers)):
        raise FileError(f"{place}: reward and accuracy must be finite")
    return rollout


class RolloutLog(JsonLinesFile):
    """Log of all samples of each step, of all ranks, in a file of the first rank.

    Args:
        path: Path of the file.
        held_out: Keys of the prompts of the evaluation.
        has_rewards: Whether something scores the responses.
        has_texts: Whether to write text, label and columns, too.
    """

    def __init__(
        self,
        path: Path,
        *,
        held_out: Iterable[tuple[object, ...]] = (),
        has_rewards: bool = True,
        has_texts: bool = False,
    ) -> None:
        super().__init__(path)
        self._has_texts = has_texts
        self._held_out, self._has_rewards = frozenset(held_out), has_rewards
        self._folder, self._sent = path.parent, set[str]()

    def log(self, step: int, scored: Sequence[ScoredRollout], context: DistributedContext) -> None:
        """Write the samples of a step in the order of their ids; collective.

        Args:
            step: Number of the step.
            scored: Samples of this rank.
            context: Context that brings them to the first rank.
        """
        local_records = [self._recorded(step, item) for item in scored]
        # Only the first rank writes.
        sent = pickle.dumps((local_records, self._unsaved_images(scored)))
        gathered = context.exchange_bytes([sent, *([b""] * (context.world_size - 1))])
        if context.rank != 0:
            return
        all_records: list[RecordedRollout] = []
        for data in gathered:
            records, images = pickle.loads(data)
            all_records += records
            for digest, content in images.items():
                self._save_image(digest, content)
        for each in sorted(all_records, key=lambda each: each.sample_id):
            self.append(asdict(each))

    def _recorded(self, step: int, item: ScoredRollout) -> RecordedRollout:
        rollout, completion = item.rollout, item.rollout.completion
        recorded = RecordedRollout(
            step=step,
            sample_id=rollout.sample_id,
            group_id=rollout.group_id,
            prompt_ids=completion.prompt_token_ids,
            response_ids=completion.output_token_ids,
            sampled_spans=tuple(spans(completion.is_sampled)),
            reward=item.unshaped if self._has_rewards else None,
            accuracy=item.accuracy if self._has_rewards else None,
            truncated=completion.finish_reason == "length",
            masked=item.is_masked,
            held_out=rollout.prompt.key in self._held_out,
            has_media=bool(rollout.media),
            weights_version=completion.weights_version,
            prompt_text=rollout.prompt.text if rollout.prompt.media else "",
            media=(
                *_recorded(rollout.prompt.media, is_prompt=True),
                *(m for later in rollout.later for m in _recorded(later.media, is_prompt=False)),
            ),
            row=rollout.prompt.id,
            draw_probability=rollout.prompt.draw_probability,
        )
        if not self._has_texts:
            return recorded
        return replace(
            recorded,
            prompt_text=rollout.prompt.text,
            text=rollout.response_text,
            label=rollout.prompt.label,
            columns=json.loads(json.dumps(dict(rollout.prompt.columns), default=str)),
        )

    def _unsaved_images(self, scored: Sequence[ScoredRollout]) -> dict[str, bytes]:
        """Return images of prompts that are no files, by digest, each once."""
        images = {
            image.digest: image.read()
            for item in scored
            for image in item.rollout.prompt.images
            if image.path is None and image.digest not in self._sent
        }
        self._sent |= {*images}
        return images

    def _save_image(self, digest: str, content: bytes) -> None:
        path = self._folder / MEDIA_FOLDER / digest
        if path.is_file() and path.stat().st_size == len(content):
            return
        path.parent.mkdir(exist_ok=True)
        partial = path.with_name(f"{digest}.partial")
        partial.write_bytes(content)
        partial.replace(path)


def _recorded(media: Media, *, is_prompt: bool) -> Iterator[RecordedMedium]:
    for kind in media.kinds:
        for medium in media[kind]:
            path = ""
            if is_prompt and isinstance(medium, ImageSource):
                saved = f"{MEDIA_FOLDER}/{medium.digest}"
                path = saved if medium.path is None else str(medium.path.resolve())
            yield RecordedMedium(kind, medium.digest, path, is_prompt)
