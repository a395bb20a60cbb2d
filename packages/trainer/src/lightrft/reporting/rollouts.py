"""Every sample of a run with its token ids: the file of `save_rollouts`, a JSON object a line."""

from __future__ import annotations

import hashlib
import math
import pickle
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from lightrft.config.files import FileError, parse_json, typed
from lightrft.engines.media.media import Media
from lightrft.engines.media.sources import ImageSource
from lightrft.records.rollout import ScoredRollout
from lightrft.reporting.files import JsonLinesFile
from lightrft.reporting.trajectories import spans

if TYPE_CHECKING:
    from lightrft.strategy.distributed.context import DistributedContext

LARGEST_ID = 2**31 - 1
# Below a run's folder; files are named by their SHA-256.
MEDIA_FOLDER = "media"


@dataclass(frozen=True, slots=True)
class RecordedMedium:
    """A medium of a sample, by reference.

    Args:
        kind: A name in `MEDIA_KINDS`.
        sha256: Of an image's bytes; of another kind also of what is taken of it.
        path: Of an image of the prompt: its file, or, where the data held its bytes, that below
            the run's folder to which they are written. "" of others.
        is_prompt: It is part of the prompt; else a turn of the response showed it.
    """

    kind: str
    sha256: str
    path: str = ""
    is_prompt: bool = True


@dataclass(frozen=True, slots=True)
class RecordedRollout:
    """A line: one sample as it was sampled and scored.

    Args:
        step, sample_id, group_id: Its place in the run; the samples of a prompt share a group.
        prompt_ids, response_ids: Token ids, a sampled end of turn included.
        sampled_spans: [start, stop) of the tokens of the response that were sampled; the others
            are observations.
        reward: Before length shaping; None where the run measured none.
        accuracy: The reward's component of that name, or the reward; None like it.
        truncated: The token budget ended it.
        masked: The reward failed or could not be decided.
        held_out: Its prompt is one of `eval_data`.
        has_media: Its prompt or its response has images or videos.
        weights_version: Of the weights that sampled its end.
        prompt_text: Of a prompt with media, with one placeholder for each; "" of others.
        media: Of prompt and response, in order; () also where an older version recorded them.
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

    @property
    def prompt_hash(self) -> bytes:
        """Equal for samples of one prompt: its tokens, and its media."""
        digest = hashlib.sha256(np.asarray(self.prompt_ids, dtype="<u4").tobytes())
        for each in self.media:
            digest.update(each.sha256.encode() if each.is_prompt else b"")
        return digest.digest()

    @property
    def is_sampled(self) -> list[bool]:
        """[response] whether a token was sampled."""
        found = [False] * len(self.response_ids)
        for start, stop in self.sampled_spans:
            found[start:stop] = [True] * (stop - start)
        return found


def read_rollout(line: bytes, place: object) -> RecordedRollout:
    """The sample of a line.

    Raises:
        FileError: It is none; the message begins with the place.
    """
    found = typed(RecordedRollout, parse_json(line, place), place)
    edges = [0, *(edge for span in found.sampled_spans for edge in span)]
    if any(len(span) != 2 for span in found.sampled_spans) or edges != sorted(edges):
        raise FileError(f"{place}: sampled_spans must be ascending pairs")
    if not found.prompt_ids or edges[-1] > len(found.response_ids):
        raise FileError(f"{place}: the prompt is empty, or sampled_spans end behind the response")
    if not all(0 <= each <= LARGEST_ID for each in (*found.prompt_ids, *found.response_ids)):
        raise FileError(f"{place}: token ids must be 0 to {LARGEST_ID}")
    numbers = [each for each in (found.reward, found.accuracy) if each is not None]
    if not found.masked and not all(map(math.isfinite, numbers)):
        raise FileError(f"{place}: reward and accuracy must be finite")
    return found


class RolloutLog(JsonLinesFile):
    """Appends all samples of each step, those of all ranks, to a file of the first rank.

    Args:
        path: The file.
        held_out: Keys of the prompts of the evaluation.
        has_rewards: Something scores the responses.
    """

    def __init__(
        self,
        path: Path,
        *,
        held_out: Iterable[tuple[object, ...]] = (),
        has_rewards: bool = True,
    ) -> None:
        super().__init__(path)
        self._held_out, self._has_rewards = frozenset(held_out), has_rewards
        self._folder, self._sent = path.parent, set[str]()

    def log(self, step: int, scored: Sequence[ScoredRollout], context: DistributedContext) -> None:
        """Writes the samples of a step in the order of their ids; collective.

        Args:
            step: Its number.
            scored: This rank's samples.
            context: Brings them to the first rank.
        """
        own = [self._recorded(step, item) for item in scored]
        # Only the first rank writes.
        sent = pickle.dumps((own, self._unsaved_images(scored)))
        gathered = context.exchange_bytes([sent, *([b""] * (context.world_size - 1))])
        if context.rank != 0:
            return
        found: list[RecordedRollout] = []
        for data in gathered:
            records, images = pickle.loads(data)
            found += records
            for digest, content in images.items():
                self._save_image(digest, content)
        for each in sorted(found, key=lambda each: each.sample_id):
            self.append(asdict(each))

    def _recorded(self, step: int, item: ScoredRollout) -> RecordedRollout:
        rollout, completion = item.rollout, item.rollout.completion
        return RecordedRollout(
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
        )

    def _unsaved_images(self, scored: Sequence[ScoredRollout]) -> dict[str, bytes]:
        """Images of prompts that are no files, by digest, each once."""
        found = {
            image.digest: image.read()
            for item in scored
            for image in item.rollout.prompt.images
            if image.path is None and image.digest not in self._sent
        }
        self._sent |= {*found}
        return found

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
