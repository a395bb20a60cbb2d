"""Media of prompts on their way from the sampling ranks to the training ranks."""

import pickle
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Self

import numpy as np
from numpy.typing import NDArray

from lightrft.config import ConfigError
from lightrft.datasets.types import Prompt
from lightrft.engines.media.media import (
    MEDIA_KINDS,
    EncodedPrompt,
    LaterImages,
    Media,
    MediumKind,
)
from lightrft.engines.media.text_encoder import Encoder
from lightrft.engines.types import GenerationRequest, MultiModalInputs
from lightrft.records.rollout import Rollout, ScoredRollout
from lightrft.records.table import RowTable
from lightrft.strategy.distributed.context import DistributedContext, RowExchange

if TYPE_CHECKING:
    from lightrft.engines.media.sources import FileSource


def media_request(prompt: Prompt, request_id: int, encoder: Encoder) -> GenerationRequest:
    """Return a request with the prompt's media, if it has any.

    Args:
        prompt: Prompt to complete.
        request_id: Id that fixes its random numbers.
        encoder: Encoder of the model's prompts.

    Raises:
        ConfigError: There are media, but the model reads text only.
        ValueError: The prompt was read with other media.
    """
    request = GenerationRequest(prompt.token_ids, request_id, prompt_text=prompt.text)
    if not prompt.media:
        return request
    encoded, by_kind = encode_prompt(prompt, encoder), prompt.media.by_kind
    if encoded.token_ids != prompt.token_ids:
        raise ValueError(
            f"prompt {prompt.id} has {len(prompt.token_ids)} tokens, and {len(encoded.token_ids)} "
            "once its media are encoded: a file has changed since the data were read; start again"
        )
    published = MultiModalInputs(
        prompt.media["image"],
        prompt.media["video"],
        {kind: tuple(media) for kind, media in by_kind.items() if kind not in ("image", "video")},
    )
    return replace(request, multi_modal=published, encoded=encoded)


def encode_prompt(prompt: Prompt, encoder: Encoder) -> EncodedPrompt:
    """Return a prompt as the processor encodes it; the same object until the encoder forgets it."""
    if not encoder.reads_media:
        raise ConfigError(
            f"prompt {prompt.id} has {prompt.media.counts}: the trainer needs the model's "
            "processor (processor=) and a vision-language model"
        )
    return encoder.kept(prompt.text, prompt.media)


def encode_row(rollout: Rollout, encoder: Encoder) -> EncodedPrompt | None:
    """Return a row up to its last medium, including observations; None without media.

    Raises:
        ConfigError: There are media, but the model reads text only.
    """
    return _encoded(rollout.token_ids, rollout.prompt, rollout.later, encoder)


def encode_context(
    token_ids: Sequence[int],
    prompt: Prompt | None,
    later: Sequence[LaterImages],
    encoder: Encoder,
) -> EncodedPrompt | None:
    """Return all ids that a turn continues, with their media; None without media.

    Args:
        token_ids: Ids of the context.
        prompt: Prompt at its beginning; None where all its images are later ones.
        later: Images behind the prompt.
        encoder: Encoder of the model's prompts.

    Raises:
        ValueError: The ids do not fit the media.
    """
    media = _encoded(token_ids, prompt, later, encoder)
    return None if media is None else media.continued(token_ids[len(media.token_ids) :])


def _encoded(
    token_ids: Sequence[int],
    prompt: Prompt | None,
    later: Sequence[LaterImages],
    encoder: Encoder,
) -> EncodedPrompt | None:
    start = encode_prompt(prompt, encoder) if prompt is not None and prompt.media else None
    return encoder.row(token_ids, start, later)


def require_text(prompts: Sequence[Prompt], option: str) -> None:
    """Raise a ConfigError if prompts have media, for an option that continues responses."""
    has_media = [prompt.id for prompt in prompts if prompt.media]
    if has_media:
        raise ConfigError(
            f"{option} continues responses, which prompts with images or videos do not allow: "
            f"got rows {has_media[:10]}; leave it out, or the media with text_only"
        )


@dataclass(frozen=True, slots=True)
class MediaSources:
    """Sources of a row's media, shared by a prompt's rows unless a row has further images.

    Args:
        text, media: Text and media of the prompt.
        later: Images behind the prompt.
        token_ids: Ids of the row, as far as `later` goes.
    """

    text: str
    media: Media
    later: tuple[LaterImages, ...] = ()
    token_ids: tuple[int, ...] = ()

    @classmethod
    def of(cls, rollout: Rollout) -> Self | None:
        """Collect the sources of a row; None without media."""
        prompt = rollout.prompt
        if not (prompt.media or rollout.later):
            return None
        ids = rollout.token_ids if rollout.later else ()
        return cls(prompt.text, prompt.media, rollout.later, ids)

    def encode(self, encoder: Encoder) -> EncodedPrompt | None:
        """Return the row up to its last medium."""
        start = encoder.kept(self.text, self.media) if self.media else None
        return encoder.row(self.token_ids, start, self.later)


def media_of(prompts: Iterable[Prompt]) -> dict[int, Media]:
    """Return the media of each prompt that has some, by its id."""
    return {prompt.id: prompt.media for prompt in prompts if prompt.media}


def exchange_media(
    table: RowTable,
    scored: Sequence[ScoredRollout],
    wanted: Sequence[NDArray[np.int64]],
    ranks: RowExchange,
    encoder: Encoder,
) -> tuple[EncodedPrompt | None, ...]:
    """Return the media of each row that this rank wants; () if the model reads none; collective.

    Original bytes travel once for each prompt and rank, and the training ranks make pixels of
    them; the rows of a prompt share them. Rows of environments travel one by one, since each may
    show different images.

    Args:
        table: Rows of all ranks.
        scored: Samples of this rank.
        wanted: Rows of `table` that each rank wants, equal on all ranks.
        ranks: Exchange of bytes between ranks.
        encoder: Encoder of the model's prompts.
    """
    if not encoder.reads_media:
        return ()
    rank, local_sources = ranks.rank, dict[int, MediaSources]()
    keys: dict[int, int] = {}
    for rollout in (item.rollout for item in scored):
        sources = MediaSources.of(rollout)
        if sources is not None:
            is_alone = rollout.conversation is not None
            key = _key_of_row(rollout.sample_id) if is_alone else rollout.group_id
            keys[rollout.sample_id], local_sources[key] = key, sources
    parts = [
        b"" if receiver == rank else pack_sources(local_sources, _held(table, rows, rank, keys))
        for receiver, rows in enumerate(wanted)
    ]
    features = {
        key: local_sources[key].encode(encoder) for key in _held(table, wanted[rank], rank, keys)
    }
    for data in ranks.exchange_bytes(parts):
        features |= {key: sources.encode(encoder) for key, sources in unpack_sources(data)}
    rows = wanted[rank]
    pairs = zip(table.sample_ids[rows].tolist(), table.group_ids[rows].tolist(), strict=True)
    return tuple(features.get(_key_of_row(sample), features.get(group)) for sample, group in pairs)


def _key_of_row(sample_id: int) -> int:
    """Return the key of a row that shares no media; groups use their ids, from 0 up."""
    return -1 - sample_id


def agree_on_kinds(
    context: DistributedContext, kinds: Collection[MediumKind]
) -> frozenset[MediumKind]:
    """Return the kinds of media that some rank has, from those of this rank; collective."""
    counts = context.all_reduce({kind: int(kind in kinds) for kind in MEDIA_KINDS}, op="max")
    return frozenset(kind for kind in MEDIA_KINDS if counts[kind])


def _held(
    table: RowTable, rows: NDArray[np.int64], holder: int, keys: Mapping[int, int]
) -> list[int]:
    """Return the keys of those rows with media that a rank holds, each once."""
    held = table.sample_ids[rows[table.holders[rows] == holder]].tolist()
    return list(dict.fromkeys(keys[sample] for sample in held if sample in keys))


def pack_sources(own: Mapping[int, MediaSources], keys: Sequence[int]) -> bytes:
    """Return the sources of some rows with the bytes of their media, each medium once."""
    if not keys:
        return b""
    blobs: dict[str, bytes] = {}

    def read(file: "FileSource") -> bytes:
        return blobs.setdefault(file.digest, file.read())

    def with_bytes(sources: MediaSources) -> MediaSources:
        later = (
            replace(each, images=tuple(image.in_memory(read) for image in each.images))
            for each in sources.later
        )
        return replace(sources, media=sources.media.in_memory(read), later=tuple(later))

    return pickle.dumps([(key, with_bytes(own[key])) for key in keys])


def unpack_sources(data: bytes) -> list[tuple[int, MediaSources]]:
    """Return the sources that `pack_sources` packed."""
    return pickle.loads(data) if data else []
