"""Media of prompts, from the rank that sampled them to the ranks that train their rows."""

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

from lightrft.config import ConfigError, TrainConfig
from lightrft.datasets.types import Prompt
from lightrft.engines.media.encoder import PromptEncoder
from lightrft.engines.media.prompts import EncodedPrompt, LaterImages, MediumKind, RowMedia
from lightrft.engines.media.sources import ImageSource, VideoSource
from lightrft.engines.types import GenerationRequest, MultiModalInputs
from lightrft.records.rollout import Rollout, ScoredRollout
from lightrft.records.table import RowTable
from lightrft.strategy.strategy_base import StrategyBase

_KINDS: tuple[MediumKind, ...] = ("image", "video")


def media_request(
    prompt: Prompt, request_id: int, encoder: PromptEncoder | None
) -> GenerationRequest:
    """A request with the prompt's media, if it has any.

    Args:
        prompt: What to complete.
        request_id: Fixes its random numbers.
        encoder: Of the model; None for models of text.

    Raises:
        ConfigError: There are media and no encoder.
    """
    request = GenerationRequest(prompt.token_ids, request_id, prompt_text=prompt.text)
    if not prompt.images and not prompt.videos:
        return request
    encoded = encode_prompt(prompt, encoder)
    return GenerationRequest(
        prompt.token_ids,
        request_id,
        prompt_text=prompt.text,
        multi_modal=MultiModalInputs(prompt.images, prompt.videos),
        encoded=encoded,
    )


def encode_prompt(prompt: Prompt, encoder: PromptEncoder | None) -> EncodedPrompt:
    """A prompt as the processor gives it; the same object until the encoder forgets it."""
    if encoder is None:
        raise ConfigError(
            f"prompt {prompt.id} has images or videos: the trainer needs the model's processor "
            "(processor=) and a vision-language model"
        )
    return encoder.kept(prompt.text, images=prompt.images, videos=prompt.videos)


def encode_row(rollout: Rollout, encoder: PromptEncoder | None) -> EncodedPrompt | None:
    """A row as far as it has media, those of its observations included; None without media.

    Raises:
        ConfigError: There are media and no encoder.
    """
    prompt = rollout.prompt
    start = encode_prompt(prompt, encoder) if prompt.images or prompt.videos else None
    if encoder is None or not rollout.later:
        return start
    return encoder.row(rollout.token_ids, start, rollout.later)


def check_media(prompts: Sequence[Prompt], config: TrainConfig) -> None:
    """Raises a ConfigError if prompts have media and an option cannot be used with them."""
    has_media = [prompt.id for prompt in prompts if prompt.images or prompt.videos]
    if not has_media:
        return
    used = [name for name in ("use_fire", "partial_rollout") if getattr(config, name)]
    if used:
        raise ConfigError(
            f"{used[0]} continues responses, which prompts with images or videos do not allow: "
            f"got rows {has_media[:10]}; leave it out, or the media with text_only"
        )


@dataclass(frozen=True, slots=True)
class _Sources:
    """What a row is encoded from; the rows of a prompt share it if none has images of its own.

    Args:
        text, images, videos: Of the prompt.
        later: Images behind it.
        token_ids: Of the row, as far as `later` goes.
    """

    text: str
    images: tuple[ImageSource, ...]
    videos: tuple[VideoSource, ...]
    later: tuple[LaterImages, ...] = ()
    token_ids: tuple[int, ...] = ()

    @classmethod
    def of(cls, rollout: Rollout) -> Self | None:
        """Of a row; None without media."""
        prompt = rollout.prompt
        if not (prompt.images or prompt.videos or rollout.later):
            return None
        ids = rollout.token_ids if rollout.later else ()
        return cls(prompt.text, prompt.images, prompt.videos, rollout.later, ids)

    def encode(self, encoder: PromptEncoder) -> EncodedPrompt | None:
        """The row up to its last medium."""
        start = None
        if self.images or self.videos:
            start = encoder.kept(self.text, images=self.images, videos=self.videos)
        return encoder.row(self.token_ids, start, self.later)


def deliver_media(
    table: RowTable,
    scored: Sequence[ScoredRollout],
    wanted: Sequence[NDArray[np.int64]],
    strategy: StrategyBase,
    encoder: PromptEncoder,
) -> RowMedia:
    """The media of the rows that this rank wants; collective.

    Original bytes travel, once for each prompt and rank, and pixels are made where rows are
    trained; the rows of a prompt share them. Rows of environments travel each for itself, since
    each may show its own images.

    Args:
        table: The rows of all ranks.
        scored: The samples of this rank.
        wanted: Which rows of `table` each rank wants, the same on every rank.
        strategy: Brings bytes from rank to rank.
        encoder: Of the model.
    """
    rank, own = strategy.get_rank(), dict[int, _Sources]()
    keys: dict[int, int] = {}
    for rollout in (item.rollout for item in scored):
        sources = _Sources.of(rollout)
        if sources is not None:
            is_alone = rollout.conversation is not None
            key = _key_of_row(rollout.sample_id) if is_alone else rollout.group_id
            keys[rollout.sample_id], own[key] = key, sources
    parts = [
        b"" if receiver == rank else _pack(own, _held(table, rows, rank, keys))
        for receiver, rows in enumerate(wanted)
    ]
    found = {key: own[key].encode(encoder) for key in _held(table, wanted[rank], rank, keys)}
    for data in strategy.exchange_bytes(parts):
        found |= {key: sources.encode(encoder) for key, sources in _unpack(data)}
    rows = wanted[rank]
    pairs = zip(table.sample_ids[rows].tolist(), table.group_ids[rows].tolist(), strict=True)
    prompts = tuple(found.get(_key_of_row(sample), found.get(group)) for sample, group in pairs)
    return RowMedia(prompts, agree_on_kinds(strategy, RowMedia(prompts).kinds))


def _key_of_row(sample_id: int) -> int:
    """Of a row that shares nothing; groups have their own ids as keys."""
    return -1 - sample_id


def agree_on_kinds(strategy: StrategyBase, kinds: Collection[MediumKind]) -> frozenset[MediumKind]:
    """Kinds of media that some rank has, from those of this rank; collective."""
    counts = strategy.all_reduce({kind: int(kind in kinds) for kind in _KINDS}, op="max")
    return frozenset(kind for kind in _KINDS if counts[kind])


def _held(
    table: RowTable, rows: NDArray[np.int64], holder: int, keys: Mapping[int, int]
) -> list[int]:
    """Keys of those rows with media that a rank holds, each once."""
    held = table.sample_ids[rows[table.holders[rows] == holder]].tolist()
    return list(dict.fromkeys(keys[sample] for sample in held if sample in keys))


def _pack(own: Mapping[int, _Sources], keys: Sequence[int]) -> bytes:
    """A line of JSON with all lengths, then the bytes of all media, each once, and of all ids."""
    blobs: dict[str, bytes] = {}

    def stored(source: ImageSource) -> list[object]:
        blobs.setdefault(source.digest, source.read())
        return [source.name, source.digest]

    header = [
        {
            "key": key,
            "text": own[key].text,
            "images": [stored(image) for image in own[key].images],
            "videos": [
                [video.name, video.fps, [stored(frame) for frame in video.frames]]
                for video in own[key].videos
            ],
            "later": [
                [each.start, each.num_skipped, each.text, [stored(image) for image in each.images]]
                for each in own[key].later
            ],
            "num_ids": len(own[key].token_ids),
        }
        for key in keys
    ]
    sizes = [[digest, len(blob)] for digest, blob in blobs.items()]
    ids = [np.array(own[key].token_ids, dtype=np.int32).tobytes() for key in keys]
    head = json.dumps({"rows": header, "blobs": sizes}).encode()
    return b"".join((head, b"\n", *blobs.values(), *ids)) if header else b""


def _unpack(data: bytes) -> Iterable[tuple[int, _Sources]]:
    if not data:
        return
    line, _, rest = data.partition(b"\n")
    header, place = json.loads(line), 0
    blobs: dict[str, bytes] = {}
    for digest, length in header["blobs"]:
        blobs[digest] = rest[place : place + length]
        place += length

    def images(listed: Iterable[tuple[str, str]]) -> tuple[ImageSource, ...]:
        return tuple(ImageSource(name, content=blobs[digest]) for name, digest in listed)

    for item in header["rows"]:
        ids = np.frombuffer(rest, np.int32, item["num_ids"], place)
        place += ids.nbytes
        yield (
            int(item["key"]),
            _Sources(
                str(item["text"]),
                images(item["images"]),
                tuple(VideoSource(name, images(own), fps) for name, fps, own in item["videos"]),
                tuple(LaterImages(a, b, text, images(own)) for a, b, text, own in item["later"]),
                tuple(ids.tolist()),
            ),
        )
